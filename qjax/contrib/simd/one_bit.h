/* Sums of codes of which there are two or three, with weights of which there are two or three: bit by bit.
 *
 * A plane of codes has the bit 1 where a code is at least a number, and so has a plane of weights. Bit i of word k is code
 * 64 k + i. Bits behind the last code are 0.
 *
 * qjax_ones         how many bits are 1.
 * qjax_plane_i8/u8  a plane of n codes; returns how many bits are 1.
 * qjax_common       counts[f]: how many bits are 1 both in `bits` and in those of the weights of feature f. Weights lie in
 *                   blocks of eight features, word by word.
 */
#if defined(__GNUC__)
#define QJAX_BITS __attribute__((noinline, unused)) static
#else
#define QJAX_BITS static inline
#endif
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VPOPCNTDQ__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__ARM_NEON) && defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__ARM_FEATURE_MVE) && !defined(__ARM_BIG_ENDIAN)
#include <arm_mve.h>
#endif

#if defined(__POPCNT__) || (defined(__GNUC__) && defined(__aarch64__))
static inline int32_t qjax_ones(uint64_t x)
{
    return __builtin_popcountll(x);
}
#else
/* four counts, one a byte, each of at most 16 bits; in words of 32 bits, which every processor has */
static inline uint32_t qjax_bytes(uint64_t x)
{
    uint32_t a = (uint32_t)x, b = (uint32_t)(x >> 32);
    a -= (a >> 1) & 0x55555555u;
    b -= (b >> 1) & 0x55555555u;
    a = (a & 0x33333333u) + ((a >> 2) & 0x33333333u);
    a += (b & 0x33333333u) + ((b >> 2) & 0x33333333u);
    return (a & 0x0f0f0f0fu) + ((a >> 4) & 0x0f0f0f0fu);
}

/* the sum of four bytes */
static inline int32_t qjax_sum(uint32_t bytes)
{
    const uint32_t pairs = (bytes & 0x00ff00ffu) + ((bytes >> 8) & 0x00ff00ffu);
    return (int32_t)((pairs + (pairs >> 16)) & 0xffffu);
}

static inline int32_t qjax_ones(uint64_t x)
{
    return qjax_sum(qjax_bytes(x));
}
#endif

/* bits of 64 codes, from their lowest 8 bits as signed numbers; flip: 0x80 for codes that are unsigned */
static inline uint64_t qjax_word(const void *from, int32_t least, uint8_t flip)
{
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VPOPCNTDQ__)
    const __m512i codes = _mm512_xor_si512(_mm512_loadu_si512(from), _mm512_set1_epi8((char)flip));
    return _mm512_cmpge_epi8_mask(codes, _mm512_set1_epi8((char)least));
#elif defined(__SSE2__)
    uint64_t word = 0;
    for (int32_t i = 0; i < 4; i++) {
        const __m128i x = _mm_loadu_si128((const __m128i *)from + i);
        const __m128i codes = _mm_xor_si128(x, _mm_set1_epi8((char)flip));
        const int32_t below = _mm_movemask_epi8(_mm_cmpgt_epi8(_mm_set1_epi8((char)least), codes));
        word |= (uint64_t)(uint16_t)~below << (16 * i);
    }
    return word;
#else
    const uint8_t *const codes = (const uint8_t *)from;
    uint32_t half[2] = {0, 0};
    for (int32_t i = 0; i < 32; i++) {
        const int32_t low = (codes[i] ^ flip ^ 0x80) - 128, high = (codes[32 + i] ^ flip ^ 0x80) - 128;
        half[0] |= (uint32_t)(low >= least) << i;
        half[1] |= (uint32_t)(high >= least) << i;
    }
    return half[0] | (uint64_t)half[1] << 32;
#endif
}

static inline int32_t qjax_plane(const uint8_t *codes, int32_t n, int32_t least, uint8_t flip, uint64_t *bits)
{
    int32_t ones = 0;
    int32_t k = 0;
    for (; n >= 64; n -= 64, codes += 64, k++) {
        bits[k] = qjax_word(codes, least, flip);
        ones += qjax_ones(bits[k]);
    }
    if (n > 0) {
        uint8_t rest[64];
        memset(rest, 0, sizeof rest);
        memcpy(rest, codes, (size_t)n);
        bits[k] = qjax_word(rest, least, flip) & (UINT64_MAX >> (64 - n));
        ones += qjax_ones(bits[k]);
    }
    return ones;
}

QJAX_BITS int32_t qjax_plane_i8(const int8_t *codes, int32_t n, int32_t least, uint64_t *bits)
{
    return qjax_plane((const uint8_t *)codes, n, least, 0, bits);
}

QJAX_BITS int32_t qjax_plane_u8(const uint8_t *codes, int32_t n, int32_t least, uint64_t *bits)
{
    return qjax_plane(codes, n, least - 128, 0x80, bits);
}

QJAX_BITS void qjax_common(const uint64_t *bits, int32_t words, const uint64_t *weights, int32_t blocks, int32_t *counts)
{
    for (int32_t block = 0; block < blocks; block++, weights += 8 * words, counts += 8) {
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VPOPCNTDQ__)
        __m512i sums = _mm512_setzero_si512();
        for (int32_t k = 0; k < words; k++) {
            const __m512i both = _mm512_and_si512(_mm512_set1_epi64((long long)bits[k]), _mm512_loadu_si512(weights + 8 * k));
            sums = _mm512_add_epi64(sums, _mm512_popcnt_epi64(both));
        }
        _mm256_storeu_si256((__m256i *)counts, _mm512_cvtepi64_epi32(sums));
#elif defined(__ARM_NEON) && defined(__aarch64__)
        uint32x4_t low = vdupq_n_u32(0), high = vdupq_n_u32(0);
        for (int32_t k = 0; k < words; k++) {
            const uint64x2_t x = vdupq_n_u64(bits[k]);
            uint16x8_t ones[4];
            for (int32_t i = 0; i < 4; i++) {
                const uint64x2_t both = vandq_u64(x, vld1q_u64(weights + 8 * k + 2 * i));
                ones[i] = vpaddlq_u8(vcntq_u8(vreinterpretq_u8_u64(both)));
            }
            low = vaddq_u32(low, vpaddlq_u16(vpaddq_u16(ones[0], ones[1])));
            high = vaddq_u32(high, vpaddlq_u16(vpaddq_u16(ones[2], ones[3])));
        }
        vst1q_s32(counts, vreinterpretq_s32_u32(low));
        vst1q_s32(counts + 4, vreinterpretq_s32_u32(high));
#elif defined(__ARM_FEATURE_MVE) && !defined(__ARM_BIG_ENDIAN)
        for (int32_t i = 0; i < 8; i += 2) {
            int32_t sums[2] = {0, 0};
            for (int32_t k = 0; k < words;) {
                /* 31 counts of 8 fit a byte */
                const int32_t end = words - k > 31 ? k + 31 : words;
                uint8x16_t bytes = vdupq_n_u8(0);
                uint32_t of_bytes[4];
                for (; k < end; k++) {
                    const uint32x4_t own = vld1q_u32((const uint32_t *)(const void *)(weights + 8 * k + i));
                    const uint64x2_t both = vcreateq_u64(bits[k], bits[k]);
                    uint8x16_t x = vreinterpretq_u8_u32(vandq_u32(own, vreinterpretq_u32_u64(both)));
                    x = vsubq_u8(x, vandq_u8(vshrq_n_u8(x, 1), vdupq_n_u8(0x55)));
                    x = vaddq_u8(vandq_u8(x, vdupq_n_u8(0x33)), vandq_u8(vshrq_n_u8(x, 2), vdupq_n_u8(0x33)));
                    bytes = vaddq_u8(bytes, vandq_u8(vaddq_u8(x, vshrq_n_u8(x, 4)), vdupq_n_u8(0x0f)));
                }
                vst1q_u32(of_bytes, vreinterpretq_u32_u8(bytes));
                sums[0] += qjax_sum(of_bytes[0]) + qjax_sum(of_bytes[1]);
                sums[1] += qjax_sum(of_bytes[2]) + qjax_sum(of_bytes[3]);
            }
            counts[i] = sums[0];
            counts[i + 1] = sums[1];
        }
#elif defined(__POPCNT__)
        int32_t sums[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        for (int32_t k = 0; k < words; k++) {
            const uint64_t x = bits[k];
            for (int32_t i = 0; i < 8; i++) {
                sums[i] += qjax_ones(x & weights[8 * k + i]);
            }
        }
        memcpy(counts, sums, sizeof sums);
#else
        for (int32_t i = 0; i < 8; i++) {
            const uint64_t *const own = weights + i;
            int32_t sum = 0;
            for (int32_t k = 0; k < words;) {
                /* 15 counts of 16 fit a byte */
                const int32_t end = words - k > 15 ? k + 15 : words;
                uint32_t bytes = 0;
                for (; k < end; k++) {
                    bytes += qjax_bytes(bits[k] & own[8 * k]);
                }
                sum += qjax_sum(bytes);
            }
            counts[i] = sum;
        }
#endif
    }
}
