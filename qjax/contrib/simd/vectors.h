/* Sixteen sums of 32 bits at a time, with the vectors of the processor for which the compiler builds.
 *
 * Every form computes the same integers. Weights lie in blocks of 16 features times 4 codes, 64 bytes. QJAX_SUMS: how
 * many sums16 stay in registers.
 *
 * sums16_start_i8/u8   the sums before the first code, of inputs that are int8 or uint8. `start` is -128 times (int8) or
 *                      128 times (uint8) the sum of the weights: what a form that flips the sign of the codes has to add.
 * sums16_add_i8/u8     adds four codes, which all features share, times their weights.
 * sums16_rows_i8/u8    adds four rows of 16 channels times their weights, channel by channel.
 * sums16_numbers       the sums, one number each.
 * sums64_...           the same of four sums16. Number 16 j + 4 l + i is of channel 16 l + 4 j + i.
 * numbers64_i8/u8      writes four numbers16 in that order as the codes of 64 channels.
 * numbers16_plus       adds a number of each feature, and one that all have in common.
 * numbers16_raised     takes one number of each feature for the next one.
 * numbers16_quotients  floor((number * factor + offset) / 2^shift) - lift, clamped; the quotient is not negative.
 * numbers16_sides      the same with another offset below `kink`.
 * numbers16_scaled     float(number + bias) * scale to the nearest integer, ties to even, plus zero, clamped. It needs the
 *                      rounding mode in which every program starts.
 * numbers16_i8/u8      writes numbers as codes; numbers16_store: as they are.
 */
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#define QJAX_VECTORS "AVX-512 VNNI"
#define QJAX_SUMS 24
#include <immintrin.h>

typedef __m512i numbers16;

#if defined(__GNUC__)
/* the type of the products: of a sum in a loop that changes its type in between, gcc keeps and moves two copies */
typedef int32_t sums16 __attribute__((vector_size(64)));
#define QJAX_SUMS16(VECTOR) ((sums16)(VECTOR))
#define QJAX_VECTOR(SUMS) ((__m512i)(SUMS))
#else
typedef __m512i sums16;
#define QJAX_SUMS16(VECTOR) (VECTOR)
#define QJAX_VECTOR(SUMS) (SUMS)
#endif

static inline sums16 sums16_start_i8(const int32_t *start)
{
    return QJAX_SUMS16(_mm512_loadu_si512(start));
}

static inline sums16 sums16_start_u8(const int32_t *start)
{
    (void)start;
    return QJAX_SUMS16(_mm512_setzero_si512());
}

static inline __m512i four16(const void *x)
{
    int32_t codes;
    memcpy(&codes, x, 4);
    return _mm512_set1_epi32(codes);
}

static inline sums16 sums16_add_u8(sums16 sums, const uint8_t *x, const int8_t *w)
{
    return QJAX_SUMS16(_mm512_dpbusd_epi32(QJAX_VECTOR(sums), four16(x), _mm512_loadu_si512(w)));
}

static inline sums16 sums16_add_i8(sums16 sums, const int8_t *x, const int8_t *w)
{
    const __m512i flipped = _mm512_xor_si512(four16(x), _mm512_set1_epi32(-2139062144));
    return QJAX_SUMS16(_mm512_dpbusd_epi32(QJAX_VECTOR(sums), flipped, _mm512_loadu_si512(w)));
}

static inline __m512i rows16(const void *a, const void *b, const void *c, const void *d)
{
    const __m128i x0 = _mm_loadu_si128((const __m128i *)a), x1 = _mm_loadu_si128((const __m128i *)b);
    const __m128i x2 = _mm_loadu_si128((const __m128i *)c), x3 = _mm_loadu_si128((const __m128i *)d);
    const __m128i low01 = _mm_unpacklo_epi8(x0, x1), high01 = _mm_unpackhi_epi8(x0, x1);
    const __m128i low23 = _mm_unpacklo_epi8(x2, x3), high23 = _mm_unpackhi_epi8(x2, x3);
    __m512i rows = _mm512_castsi128_si512(_mm_unpacklo_epi16(low01, low23));
    rows = _mm512_inserti32x4(rows, _mm_unpackhi_epi16(low01, low23), 1);
    rows = _mm512_inserti32x4(rows, _mm_unpacklo_epi16(high01, high23), 2);
    return _mm512_inserti32x4(rows, _mm_unpackhi_epi16(high01, high23), 3);
}

static inline sums16 sums16_rows_u8(
    sums16 sums, const uint8_t *a, const uint8_t *b, const uint8_t *c, const uint8_t *d, const int8_t *w)
{
    return QJAX_SUMS16(_mm512_dpbusd_epi32(QJAX_VECTOR(sums), rows16(a, b, c, d), _mm512_loadu_si512(w)));
}

static inline sums16 sums16_rows_i8(
    sums16 sums, const int8_t *a, const int8_t *b, const int8_t *c, const int8_t *d, const int8_t *w)
{
    const __m512i flipped = _mm512_xor_si512(rows16(a, b, c, d), _mm512_set1_epi32(-2139062144));
    return QJAX_SUMS16(_mm512_dpbusd_epi32(QJAX_VECTOR(sums), flipped, _mm512_loadu_si512(w)));
}

typedef struct {
    sums16 of[4];
} sums64;

static inline sums16 sums16_products(sums16 sums, __m512i codes, const int8_t *w)
{
    return QJAX_SUMS16(_mm512_dpbusd_epi32(QJAX_VECTOR(sums), codes, _mm512_loadu_si512(w)));
}

static inline sums64 sums64_of_rows(
    sums64 sums, const void *a, const void *b, const void *c, const void *d, int32_t flip, const int8_t *w)
{
    const __m512i flips = _mm512_set1_epi32(flip);
    const __m512i x0 = _mm512_xor_si512(_mm512_loadu_si512(a), flips), x1 = _mm512_xor_si512(_mm512_loadu_si512(b), flips);
    const __m512i x2 = _mm512_xor_si512(_mm512_loadu_si512(c), flips), x3 = _mm512_xor_si512(_mm512_loadu_si512(d), flips);
    const __m512i low01 = _mm512_unpacklo_epi8(x0, x1), high01 = _mm512_unpackhi_epi8(x0, x1);
    const __m512i low23 = _mm512_unpacklo_epi8(x2, x3), high23 = _mm512_unpackhi_epi8(x2, x3);
    sums.of[0] = sums16_products(sums.of[0], _mm512_unpacklo_epi16(low01, low23), w);
    sums.of[1] = sums16_products(sums.of[1], _mm512_unpackhi_epi16(low01, low23), w + 64);
    sums.of[2] = sums16_products(sums.of[2], _mm512_unpacklo_epi16(high01, high23), w + 128);
    sums.of[3] = sums16_products(sums.of[3], _mm512_unpackhi_epi16(high01, high23), w + 192);
    return sums;
}

static inline sums64 sums64_rows_u8(
    sums64 sums, const uint8_t *a, const uint8_t *b, const uint8_t *c, const uint8_t *d, const int8_t *w)
{
    return sums64_of_rows(sums, a, b, c, d, 0, w);
}

static inline sums64 sums64_rows_i8(
    sums64 sums, const int8_t *a, const int8_t *b, const int8_t *c, const int8_t *d, const int8_t *w)
{
    return sums64_of_rows(sums, a, b, c, d, -2139062144, w);
}

static inline numbers16 sums16_numbers(sums16 sums)
{
    return QJAX_VECTOR(sums);
}

static inline void numbers16_store(numbers16 numbers, int32_t *out)
{
    _mm512_storeu_si512(out, numbers);
}

static inline numbers16 numbers16_plus(numbers16 numbers, const int32_t *more, int32_t same)
{
    return _mm512_add_epi32(numbers, _mm512_add_epi32(_mm512_loadu_si512(more), _mm512_set1_epi32(same)));
}

static inline numbers16 numbers16_raised(numbers16 numbers, const int32_t *raised)
{
    const __mmask16 late = _mm512_cmpeq_epi32_mask(numbers, _mm512_loadu_si512(raised));
    return _mm512_mask_add_epi32(numbers, late, numbers, _mm512_set1_epi32(1));
}

static inline __m256i quotients8(__m256i sums, __m256i factor, __m512i offset, int32_t shift)
{
    const __m512i product = _mm512_mul_epi32(_mm512_cvtepi32_epi64(sums), _mm512_cvtepi32_epi64(factor));
    return _mm512_cvtepi64_epi32(_mm512_srl_epi64(_mm512_add_epi64(product, offset), _mm_cvtsi32_si128(shift)));
}

static inline numbers16 line16(
    numbers16 numbers, const int32_t *factor, __m512i offset0, __m512i offset1, int32_t shift, int32_t lift, int32_t least,
    int32_t most)
{
    const __m512i factors = _mm512_loadu_si512(factor);
    const __m256i low = quotients8(_mm512_castsi512_si256(numbers), _mm512_castsi512_si256(factors), offset0, shift);
    const __m256i high =
        quotients8(_mm512_extracti64x4_epi64(numbers, 1), _mm512_extracti64x4_epi64(factors, 1), offset1, shift);
    const __m512i all = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    const __m512i lowered = _mm512_sub_epi32(all, _mm512_set1_epi32(lift));
    return _mm512_min_epi32(_mm512_max_epi32(lowered, _mm512_set1_epi32(least)), _mm512_set1_epi32(most));
}

static inline numbers16 numbers16_quotients(
    numbers16 numbers, const int32_t *factor, const int64_t *offset, int32_t shift, int32_t lift, int32_t least, int32_t most)
{
    return line16(
        numbers, factor, _mm512_loadu_si512(offset), _mm512_loadu_si512(offset + 8), shift, lift, least, most);
}

static inline numbers16 numbers16_sides(
    numbers16 numbers, const int32_t *factor, const int64_t *offset, const int32_t *kink, const int64_t *below, int32_t shift,
    int32_t lift, int32_t least, int32_t most)
{
    const __mmask16 under = _mm512_cmplt_epi32_mask(numbers, _mm512_loadu_si512(kink));
    const __m512i offset0 = _mm512_mask_loadu_epi64(_mm512_loadu_si512(offset), (__mmask8)under, below);
    const __m512i offset1 = _mm512_mask_loadu_epi64(_mm512_loadu_si512(offset + 8), (__mmask8)(under >> 8), below + 8);
    return line16(numbers, factor, offset0, offset1, shift, lift, least, most);
}

static inline numbers16 numbers16_scaled(
    numbers16 numbers, const int32_t *bias, const float *scale, int32_t zero, int32_t least, int32_t most)
{
    const __m512 sums = _mm512_cvtepi32_ps(_mm512_add_epi32(numbers, _mm512_loadu_si512(bias)));
    const __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(sums, _mm512_loadu_ps(scale)));
    const __m512i codes = _mm512_add_epi32(rounded, _mm512_set1_epi32(zero));
    return _mm512_min_epi32(_mm512_max_epi32(codes, _mm512_set1_epi32(least)), _mm512_set1_epi32(most));
}

static inline void numbers16_i8(numbers16 codes, int8_t *out)
{
    _mm_storeu_si128((__m128i *)(void *)out, _mm512_cvtepi32_epi8(codes));
}

static inline void numbers16_u8(numbers16 codes, uint8_t *out)
{
    _mm_storeu_si128((__m128i *)(void *)out, _mm512_cvtepi32_epi8(codes));
}

static inline void numbers64_i8(numbers16 a, numbers16 b, numbers16 c, numbers16 d, int8_t *out)
{
    _mm512_storeu_si512(out, _mm512_packs_epi16(_mm512_packs_epi32(a, b), _mm512_packs_epi32(c, d)));
}

static inline void numbers64_u8(numbers16 a, numbers16 b, numbers16 c, numbers16 d, uint8_t *out)
{
    _mm512_storeu_si512(out, _mm512_packus_epi16(_mm512_packs_epi32(a, b), _mm512_packs_epi32(c, d)));
}

#elif defined(__AVX2__)
#define QJAX_SUMS 4
#include <immintrin.h>

typedef struct {
    __m256i low, high;
} numbers16;

#if defined(__GNUC__)
#define QJAX_VECTOR(SUMS) ((__m256i)(SUMS))
#else
#define QJAX_VECTOR(SUMS) (SUMS)
#endif

#if defined(__AVXVNNI__) || (defined(__AVX512VNNI__) && defined(__AVX512VL__))
#define QJAX_VECTORS "AVX-VNNI"

#if defined(__GNUC__)
typedef int32_t sums8 __attribute__((vector_size(32)));
#define QJAX_SUMS8(VECTOR) ((sums8)(VECTOR))
#else
typedef __m256i sums8;
#define QJAX_SUMS8(VECTOR) (VECTOR)
#endif

typedef struct {
    sums8 low, high;
} sums16;

#if defined(__AVXVNNI__)
#define QJAX_DPBUSD _mm256_dpbusd_avx_epi32
#else
#define QJAX_DPBUSD _mm256_dpbusd_epi32
#endif

static inline sums16 sums16_start_i8(const int32_t *start)
{
    const sums16 sums = {
        QJAX_SUMS8(_mm256_loadu_si256((const __m256i *)(const void *)start)),
        QJAX_SUMS8(_mm256_loadu_si256((const __m256i *)(const void *)(start + 8))),
    };
    return sums;
}

static inline sums16 sums16_start_u8(const int32_t *start)
{
    const sums16 sums = {QJAX_SUMS8(_mm256_setzero_si256()), QJAX_SUMS8(_mm256_setzero_si256())};
    (void)start;
    return sums;
}

static inline sums16 sums16_products(sums16 sums, __m256i low, __m256i high, const int8_t *w)
{
    const __m256i w0 = _mm256_loadu_si256((const __m256i *)(const void *)w);
    const __m256i w1 = _mm256_loadu_si256((const __m256i *)(const void *)(w + 32));
    sums.low = QJAX_SUMS8(QJAX_DPBUSD(QJAX_VECTOR(sums.low), low, w0));
    sums.high = QJAX_SUMS8(QJAX_DPBUSD(QJAX_VECTOR(sums.high), high, w1));
    return sums;
}

static inline __m256i four8(const void *x)
{
    int32_t codes;
    memcpy(&codes, x, 4);
    return _mm256_set1_epi32(codes);
}

static inline sums16 sums16_add_u8(sums16 sums, const uint8_t *x, const int8_t *w)
{
    const __m256i codes = four8(x);
    return sums16_products(sums, codes, codes, w);
}

static inline sums16 sums16_add_i8(sums16 sums, const int8_t *x, const int8_t *w)
{
    const __m256i codes = _mm256_xor_si256(four8(x), _mm256_set1_epi32(-2139062144));
    return sums16_products(sums, codes, codes, w);
}

static inline sums16 sums16_of_rows(
    sums16 sums, const void *a, const void *b, const void *c, const void *d, int32_t flip, const int8_t *w)
{
    const __m128i x0 = _mm_loadu_si128((const __m128i *)a), x1 = _mm_loadu_si128((const __m128i *)b);
    const __m128i x2 = _mm_loadu_si128((const __m128i *)c), x3 = _mm_loadu_si128((const __m128i *)d);
    const __m128i low01 = _mm_unpacklo_epi8(x0, x1), high01 = _mm_unpackhi_epi8(x0, x1);
    const __m128i low23 = _mm_unpacklo_epi8(x2, x3), high23 = _mm_unpackhi_epi8(x2, x3);
    const __m256i low = _mm256_set_m128i(_mm_unpackhi_epi16(low01, low23), _mm_unpacklo_epi16(low01, low23));
    const __m256i high = _mm256_set_m128i(_mm_unpackhi_epi16(high01, high23), _mm_unpacklo_epi16(high01, high23));
    const __m256i flips = _mm256_set1_epi32(flip);
    return sums16_products(sums, _mm256_xor_si256(low, flips), _mm256_xor_si256(high, flips), w);
}

static inline sums16 sums16_rows_u8(
    sums16 sums, const uint8_t *a, const uint8_t *b, const uint8_t *c, const uint8_t *d, const int8_t *w)
{
    return sums16_of_rows(sums, a, b, c, d, 0, w);
}

static inline sums16 sums16_rows_i8(
    sums16 sums, const int8_t *a, const int8_t *b, const int8_t *c, const int8_t *d, const int8_t *w)
{
    return sums16_of_rows(sums, a, b, c, d, -2139062144, w);
}

typedef struct {
    sums16 of[4];
} sums64;

static inline __m256i row8(const void *x, int half, __m256i flips)
{
    return _mm256_xor_si256(_mm256_loadu_si256((const __m256i *)x + half), flips);
}

static inline sums8 sums8_products(sums8 sums, __m256i codes, const int8_t *w)
{
    return QJAX_SUMS8(QJAX_DPBUSD(QJAX_VECTOR(sums), codes, _mm256_loadu_si256((const __m256i *)(const void *)w)));
}

#define QJAX_HALF(HALF, PART) \
    do { \
        const __m256i x0 = row8(a, HALF, flips), x1 = row8(b, HALF, flips); \
        const __m256i x2 = row8(c, HALF, flips), x3 = row8(d, HALF, flips); \
        const __m256i low01 = _mm256_unpacklo_epi8(x0, x1), high01 = _mm256_unpackhi_epi8(x0, x1); \
        const __m256i low23 = _mm256_unpacklo_epi8(x2, x3), high23 = _mm256_unpackhi_epi8(x2, x3); \
        const int8_t *const v = w + 32 * HALF; \
        sums.of[0].PART = sums8_products(sums.of[0].PART, _mm256_unpacklo_epi16(low01, low23), v); \
        sums.of[1].PART = sums8_products(sums.of[1].PART, _mm256_unpackhi_epi16(low01, low23), v + 64); \
        sums.of[2].PART = sums8_products(sums.of[2].PART, _mm256_unpacklo_epi16(high01, high23), v + 128); \
        sums.of[3].PART = sums8_products(sums.of[3].PART, _mm256_unpackhi_epi16(high01, high23), v + 192); \
    } while (0)

static inline sums64 sums64_of_rows(
    sums64 sums, const void *a, const void *b, const void *c, const void *d, int32_t flip, const int8_t *w)
{
    const __m256i flips = _mm256_set1_epi32(flip);
    QJAX_HALF(0, low);
    QJAX_HALF(1, high);
    return sums;
}

static inline sums64 sums64_rows_u8(
    sums64 sums, const uint8_t *a, const uint8_t *b, const uint8_t *c, const uint8_t *d, const int8_t *w)
{
    return sums64_of_rows(sums, a, b, c, d, 0, w);
}

static inline sums64 sums64_rows_i8(
    sums64 sums, const int8_t *a, const int8_t *b, const int8_t *c, const int8_t *d, const int8_t *w)
{
    return sums64_of_rows(sums, a, b, c, d, -2139062144, w);
}

static inline numbers16 sums16_numbers(sums16 sums)
{
    const numbers16 numbers = {QJAX_VECTOR(sums.low), QJAX_VECTOR(sums.high)};
    return numbers;
}

#else
#define QJAX_VECTORS "AVX2"

#if defined(__GNUC__)
typedef uint32_t sums8 __attribute__((vector_size(32)));
#define QJAX_SUMS8(VECTOR) ((sums8)(VECTOR))
#else
typedef __m256i sums8;
#define QJAX_SUMS8(VECTOR) (VECTOR)
#endif

/* each feature has two sums, of the even and of the odd pairs of codes, side by side */
typedef struct {
    sums8 of4[4];
} sums16;

static inline sums16 sums16_zero(void)
{
    const sums8 zero = QJAX_SUMS8(_mm256_setzero_si256());
    const sums16 sums = {{zero, zero, zero, zero}};
    return sums;
}

static inline sums16 sums16_start_i8(const int32_t *start)
{
    (void)start;
    return sums16_zero();
}

static inline sums16 sums16_start_u8(const int32_t *start)
{
    (void)start;
    return sums16_zero();
}

static inline sums8 products4(sums8 sums, __m256i codes, const int8_t *w)
{
    const __m256i weights = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(const void *)w));
    return QJAX_SUMS8(_mm256_add_epi32(QJAX_VECTOR(sums), _mm256_madd_epi16(codes, weights)));
}

static inline __m128i four4(const void *x)
{
    int32_t codes;
    memcpy(&codes, x, 4);
    return _mm_set1_epi32(codes);
}

static inline sums16 sums16_products(sums16 sums, __m256i codes, const int8_t *w)
{
    sums.of4[0] = products4(sums.of4[0], codes, w);
    sums.of4[1] = products4(sums.of4[1], codes, w + 16);
    sums.of4[2] = products4(sums.of4[2], codes, w + 32);
    sums.of4[3] = products4(sums.of4[3], codes, w + 48);
    return sums;
}

static inline sums16 sums16_add_u8(sums16 sums, const uint8_t *x, const int8_t *w)
{
    return sums16_products(sums, _mm256_cvtepu8_epi16(four4(x)), w);
}

static inline sums16 sums16_add_i8(sums16 sums, const int8_t *x, const int8_t *w)
{
    return sums16_products(sums, _mm256_cvtepi8_epi16(four4(x)), w);
}

#define QJAX_ROWS(WIDEN) \
    const __m128i x0 = _mm_loadu_si128((const __m128i *)(const void *)a); \
    const __m128i x1 = _mm_loadu_si128((const __m128i *)(const void *)b); \
    const __m128i x2 = _mm_loadu_si128((const __m128i *)(const void *)c); \
    const __m128i x3 = _mm_loadu_si128((const __m128i *)(const void *)d); \
    const __m128i low01 = _mm_unpacklo_epi8(x0, x1), high01 = _mm_unpackhi_epi8(x0, x1); \
    const __m128i low23 = _mm_unpacklo_epi8(x2, x3), high23 = _mm_unpackhi_epi8(x2, x3); \
    sums.of4[0] = products4(sums.of4[0], WIDEN(_mm_unpacklo_epi16(low01, low23)), w); \
    sums.of4[1] = products4(sums.of4[1], WIDEN(_mm_unpackhi_epi16(low01, low23)), w + 16); \
    sums.of4[2] = products4(sums.of4[2], WIDEN(_mm_unpacklo_epi16(high01, high23)), w + 32); \
    sums.of4[3] = products4(sums.of4[3], WIDEN(_mm_unpackhi_epi16(high01, high23)), w + 48); \
    return sums

static inline sums16 sums16_rows_u8(
    sums16 sums, const uint8_t *a, const uint8_t *b, const uint8_t *c, const uint8_t *d, const int8_t *w)
{
    QJAX_ROWS(_mm256_cvtepu8_epi16);
}

static inline sums16 sums16_rows_i8(
    sums16 sums, const int8_t *a, const int8_t *b, const int8_t *c, const int8_t *d, const int8_t *w)
{
    QJAX_ROWS(_mm256_cvtepi8_epi16);
}

typedef struct {
    sums16 of[4];
} sums64;

#define QJAX_ROWS64(WIDEN) \
    int l; \
    for (l = 0; l < 4; l++, a += 16, b += 16, c += 16, d += 16, w += 16) { \
        const __m128i x0 = _mm_loadu_si128((const __m128i *)(const void *)a); \
        const __m128i x1 = _mm_loadu_si128((const __m128i *)(const void *)b); \
        const __m128i x2 = _mm_loadu_si128((const __m128i *)(const void *)c); \
        const __m128i x3 = _mm_loadu_si128((const __m128i *)(const void *)d); \
        const __m128i low01 = _mm_unpacklo_epi8(x0, x1), high01 = _mm_unpackhi_epi8(x0, x1); \
        const __m128i low23 = _mm_unpacklo_epi8(x2, x3), high23 = _mm_unpackhi_epi8(x2, x3); \
        sums.of[0].of4[l] = products4(sums.of[0].of4[l], WIDEN(_mm_unpacklo_epi16(low01, low23)), w); \
        sums.of[1].of4[l] = products4(sums.of[1].of4[l], WIDEN(_mm_unpackhi_epi16(low01, low23)), w + 64); \
        sums.of[2].of4[l] = products4(sums.of[2].of4[l], WIDEN(_mm_unpacklo_epi16(high01, high23)), w + 128); \
        sums.of[3].of4[l] = products4(sums.of[3].of4[l], WIDEN(_mm_unpackhi_epi16(high01, high23)), w + 192); \
    } \
    return sums

static inline sums64 sums64_rows_u8(
    sums64 sums, const uint8_t *a, const uint8_t *b, const uint8_t *c, const uint8_t *d, const int8_t *w)
{
    QJAX_ROWS64(_mm256_cvtepu8_epi16);
}

static inline sums64 sums64_rows_i8(
    sums64 sums, const int8_t *a, const int8_t *b, const int8_t *c, const int8_t *d, const int8_t *w)
{
    QJAX_ROWS64(_mm256_cvtepi8_epi16);
}

static inline numbers16 sums16_numbers(sums16 sums)
{
    const __m256i low = _mm256_hadd_epi32(QJAX_VECTOR(sums.of4[0]), QJAX_VECTOR(sums.of4[1]));
    const __m256i high = _mm256_hadd_epi32(QJAX_VECTOR(sums.of4[2]), QJAX_VECTOR(sums.of4[3]));
    const numbers16 natural = {_mm256_permute4x64_epi64(low, 0xD8), _mm256_permute4x64_epi64(high, 0xD8)};
    return natural;
}
#endif

static inline void numbers16_store(numbers16 numbers, int32_t *out)
{
    _mm256_storeu_si256((__m256i *)(void *)out, numbers.low);
    _mm256_storeu_si256((__m256i *)(void *)(out + 8), numbers.high);
}

static inline __m256i raised8(__m256i numbers, const int32_t *raised)
{
    const __m256i late = _mm256_cmpeq_epi32(numbers, _mm256_loadu_si256((const __m256i *)(const void *)raised));
    return _mm256_sub_epi32(numbers, late);
}

static inline numbers16 numbers16_plus(numbers16 numbers, const int32_t *more, int32_t same)
{
    const __m256i all = _mm256_set1_epi32(same);
    const __m256i low = _mm256_loadu_si256((const __m256i *)(const void *)more);
    const __m256i high = _mm256_loadu_si256((const __m256i *)(const void *)(more + 8));
    numbers.low = _mm256_add_epi32(numbers.low, _mm256_add_epi32(low, all));
    numbers.high = _mm256_add_epi32(numbers.high, _mm256_add_epi32(high, all));
    return numbers;
}

static inline numbers16 numbers16_raised(numbers16 numbers, const int32_t *raised)
{
    const numbers16 found = {raised8(numbers.low, raised), raised8(numbers.high, raised + 8)};
    return found;
}

static inline __m256i offset4(const int64_t *offset)
{
    return _mm256_loadu_si256((const __m256i *)(const void *)offset);
}

static inline __m256i quotients8(
    __m256i sums, const int32_t *factor, __m256i offset0, __m256i offset1, int32_t shift, int32_t lift, int32_t least,
    int32_t most)
{
    const __m128i places = _mm_cvtsi32_si128(shift);
    const __m256i factor0 = _mm256_cvtepi32_epi64(_mm_loadu_si128((const __m128i *)(const void *)factor));
    const __m256i factor1 = _mm256_cvtepi32_epi64(_mm_loadu_si128((const __m128i *)(const void *)(factor + 4)));
    const __m256i sums0 = _mm256_cvtepi32_epi64(_mm256_castsi256_si128(sums));
    const __m256i sums1 = _mm256_cvtepi32_epi64(_mm256_extracti128_si256(sums, 1));
    const __m256i wide0 = _mm256_srl_epi64(_mm256_add_epi64(_mm256_mul_epi32(sums0, factor0), offset0), places);
    const __m256i wide1 = _mm256_srl_epi64(_mm256_add_epi64(_mm256_mul_epi32(sums1, factor1), offset1), places);
    const __m256i mixed = _mm256_castps_si256(_mm256_shuffle_ps(
        _mm256_castsi256_ps(wide0), _mm256_castsi256_ps(wide1), _MM_SHUFFLE(2, 0, 2, 0)));
    const __m256i lowered = _mm256_sub_epi32(_mm256_permute4x64_epi64(mixed, 0xD8), _mm256_set1_epi32(lift));
    return _mm256_min_epi32(_mm256_max_epi32(lowered, _mm256_set1_epi32(least)), _mm256_set1_epi32(most));
}

static inline numbers16 numbers16_quotients(
    numbers16 numbers, const int32_t *factor, const int64_t *offset, int32_t shift, int32_t lift, int32_t least, int32_t most)
{
    const numbers16 codes = {
        quotients8(numbers.low, factor, offset4(offset), offset4(offset + 4), shift, lift, least, most),
        quotients8(numbers.high, factor + 8, offset4(offset + 8), offset4(offset + 12), shift, lift, least, most),
    };
    return codes;
}

static inline __m256i side4(__m128i under, const int64_t *offset, const int64_t *below)
{
    return _mm256_blendv_epi8(offset4(offset), offset4(below), _mm256_cvtepi32_epi64(under));
}

static inline __m256i sides8(
    __m256i sums, const int32_t *factor, const int64_t *offset, const int32_t *kink, const int64_t *below, int32_t shift,
    int32_t lift, int32_t least, int32_t most)
{
    const __m256i under = _mm256_cmpgt_epi32(_mm256_loadu_si256((const __m256i *)(const void *)kink), sums);
    const __m256i offset0 = side4(_mm256_castsi256_si128(under), offset, below);
    const __m256i offset1 = side4(_mm256_extracti128_si256(under, 1), offset + 4, below + 4);
    return quotients8(sums, factor, offset0, offset1, shift, lift, least, most);
}

static inline numbers16 numbers16_sides(
    numbers16 numbers, const int32_t *factor, const int64_t *offset, const int32_t *kink, const int64_t *below, int32_t shift,
    int32_t lift, int32_t least, int32_t most)
{
    const numbers16 codes = {
        sides8(numbers.low, factor, offset, kink, below, shift, lift, least, most),
        sides8(numbers.high, factor + 8, offset + 8, kink + 8, below + 8, shift, lift, least, most),
    };
    return codes;
}

static inline __m256i scaled8(
    __m256i numbers, const int32_t *bias, const float *scale, int32_t zero, int32_t least, int32_t most)
{
    const __m256i biases = _mm256_loadu_si256((const __m256i *)(const void *)bias);
    const __m256 sums = _mm256_cvtepi32_ps(_mm256_add_epi32(numbers, biases));
    const __m256i rounded = _mm256_cvtps_epi32(_mm256_mul_ps(sums, _mm256_loadu_ps(scale)));
    const __m256i codes = _mm256_add_epi32(rounded, _mm256_set1_epi32(zero));
    return _mm256_min_epi32(_mm256_max_epi32(codes, _mm256_set1_epi32(least)), _mm256_set1_epi32(most));
}

static inline numbers16 numbers16_scaled(
    numbers16 numbers, const int32_t *bias, const float *scale, int32_t zero, int32_t least, int32_t most)
{
    const numbers16 codes = {
        scaled8(numbers.low, bias, scale, zero, least, most),
        scaled8(numbers.high, bias + 8, scale + 8, zero, least, most),
    };
    return codes;
}

static inline __m256i packed16(numbers16 codes)
{
    return _mm256_permute4x64_epi64(_mm256_packs_epi32(codes.low, codes.high), 0xD8);
}

static inline void numbers16_i8(numbers16 codes, int8_t *out)
{
    const __m256i words = packed16(codes);
    _mm_storeu_si128(
        (__m128i *)(void *)out, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

static inline void numbers16_u8(numbers16 codes, uint8_t *out)
{
    const __m256i words = packed16(codes);
    _mm_storeu_si128(
        (__m128i *)(void *)out, _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

#define QJAX_STORE64(PACK) \
    const __m256i low01 = _mm256_packs_epi32(a.low, b.low), low23 = _mm256_packs_epi32(c.low, d.low); \
    const __m256i high01 = _mm256_packs_epi32(a.high, b.high), high23 = _mm256_packs_epi32(c.high, d.high); \
    _mm256_storeu_si256((__m256i *)(void *)out, PACK(low01, low23)); \
    _mm256_storeu_si256((__m256i *)(void *)(out + 32), PACK(high01, high23))

static inline void numbers64_i8(numbers16 a, numbers16 b, numbers16 c, numbers16 d, int8_t *out)
{
    QJAX_STORE64(_mm256_packs_epi16);
}

static inline void numbers64_u8(numbers16 a, numbers16 b, numbers16 c, numbers16 d, uint8_t *out)
{
    QJAX_STORE64(_mm256_packus_epi16);
}

#elif defined(__aarch64__) && defined(__ARM_NEON)
#define QJAX_SUMS 4
#include <arm_neon.h>

typedef struct {
    int32x4_t of4[4];
} numbers16;

static inline int8x16_t four16(const void *x)
{
    int32_t codes;
    memcpy(&codes, x, 4);
    return vreinterpretq_s8_s32(vdupq_n_s32(codes));
}

static inline numbers16 start16(const int32_t *start)
{
    const numbers16 sums = {{vld1q_s32(start), vld1q_s32(start + 4), vld1q_s32(start + 8), vld1q_s32(start + 12)}};
    return sums;
}

static inline numbers16 zero16(void)
{
    const int32x4_t zero = vdupq_n_s32(0);
    const numbers16 sums = {{zero, zero, zero, zero}};
    return sums;
}

#if defined(__ARM_FEATURE_DOTPROD)
#define QJAX_VECTORS "NEON with dot products"
typedef numbers16 sums16;

static inline sums16 sums16_start_i8(const int32_t *start)
{
    (void)start;
    return zero16();
}

static inline sums16 sums16_start_u8(const int32_t *start)
{
    return start16(start);
}

static inline int32x4_t products4(int32x4_t sums, int8x16_t codes, const int8_t *w)
{
    return vdotq_s32(sums, vld1q_s8(w), codes);
}

static inline numbers16 sums16_numbers(sums16 sums)
{
    return sums;
}
#else
#define QJAX_VECTORS "NEON"

/* each feature has two sums, of the first and of the second pair of codes */
typedef struct {
    int32x4_t of4[4], more4[4];
} sums16;

static inline sums16 sums16_of(numbers16 start)
{
    const int32x4_t zero = vdupq_n_s32(0);
    const sums16 sums = {
        {vzip1q_s32(start.of4[0], zero), vzip1q_s32(start.of4[1], zero), vzip1q_s32(start.of4[2], zero),
         vzip1q_s32(start.of4[3], zero)},
        {vzip2q_s32(start.of4[0], zero), vzip2q_s32(start.of4[1], zero), vzip2q_s32(start.of4[2], zero),
         vzip2q_s32(start.of4[3], zero)},
    };
    return sums;
}

static inline sums16 sums16_start_i8(const int32_t *start)
{
    (void)start;
    return sums16_of(zero16());
}

static inline sums16 sums16_start_u8(const int32_t *start)
{
    return sums16_of(start16(start));
}

static inline numbers16 sums16_numbers(sums16 sums)
{
    const numbers16 natural = {
        {vpaddq_s32(sums.of4[0], sums.more4[0]), vpaddq_s32(sums.of4[1], sums.more4[1]),
         vpaddq_s32(sums.of4[2], sums.more4[2]), vpaddq_s32(sums.of4[3], sums.more4[3])},
    };
    return natural;
}
#endif

static inline sums16 sums16_product(sums16 sums, int8x16_t codes, const int8_t *w, int part)
{
#if defined(__ARM_FEATURE_DOTPROD)
    sums.of4[part] = products4(sums.of4[part], codes, w);
#else
    const int8x16_t weights = vld1q_s8(w);
    sums.of4[part] = vpadalq_s16(sums.of4[part], vmull_s8(vget_low_s8(codes), vget_low_s8(weights)));
    sums.more4[part] = vpadalq_s16(sums.more4[part], vmull_high_s8(codes, weights));
#endif
    return sums;
}

static inline sums16 sums16_products(sums16 sums, int8x16_t codes, const int8_t *w)
{
    sums = sums16_product(sums, codes, w, 0);
    sums = sums16_product(sums, codes, w + 16, 1);
    sums = sums16_product(sums, codes, w + 32, 2);
    return sums16_product(sums, codes, w + 48, 3);
}

static inline int8x16_t flipped16(int8x16_t codes)
{
    return veorq_s8(codes, vdupq_n_s8(-128));
}

static inline sums16 sums16_add_i8(sums16 sums, const int8_t *x, const int8_t *w)
{
    return sums16_products(sums, four16(x), w);
}

static inline sums16 sums16_add_u8(sums16 sums, const uint8_t *x, const int8_t *w)
{
    return sums16_products(sums, flipped16(four16(x)), w);
}

static inline sums16 sums16_of_rows(sums16 sums, int8x16_t a, int8x16_t b, int8x16_t c, int8x16_t d, const int8_t *w)
{
    const int16x8_t low01 = vreinterpretq_s16_s8(vzip1q_s8(a, b)), high01 = vreinterpretq_s16_s8(vzip2q_s8(a, b));
    const int16x8_t low23 = vreinterpretq_s16_s8(vzip1q_s8(c, d)), high23 = vreinterpretq_s16_s8(vzip2q_s8(c, d));
    sums = sums16_product(sums, vreinterpretq_s8_s16(vzip1q_s16(low01, low23)), w, 0);
    sums = sums16_product(sums, vreinterpretq_s8_s16(vzip2q_s16(low01, low23)), w + 16, 1);
    sums = sums16_product(sums, vreinterpretq_s8_s16(vzip1q_s16(high01, high23)), w + 32, 2);
    return sums16_product(sums, vreinterpretq_s8_s16(vzip2q_s16(high01, high23)), w + 48, 3);
}

typedef struct {
    sums16 of[4];
} sums64;

static inline sums64 sums64_of_rows(
    sums64 sums, int8x16_t a, int8x16_t b, int8x16_t c, int8x16_t d, const int8_t *w, int part)
{
    const int16x8_t low01 = vreinterpretq_s16_s8(vzip1q_s8(a, b)), high01 = vreinterpretq_s16_s8(vzip2q_s8(a, b));
    const int16x8_t low23 = vreinterpretq_s16_s8(vzip1q_s8(c, d)), high23 = vreinterpretq_s16_s8(vzip2q_s8(c, d));
    const int8_t *const v = w + 16 * part;
    sums.of[0] = sums16_product(sums.of[0], vreinterpretq_s8_s16(vzip1q_s16(low01, low23)), v, part);
    sums.of[1] = sums16_product(sums.of[1], vreinterpretq_s8_s16(vzip2q_s16(low01, low23)), v + 64, part);
    sums.of[2] = sums16_product(sums.of[2], vreinterpretq_s8_s16(vzip1q_s16(high01, high23)), v + 128, part);
    sums.of[3] = sums16_product(sums.of[3], vreinterpretq_s8_s16(vzip2q_s16(high01, high23)), v + 192, part);
    return sums;
}

static inline sums16 sums16_rows_i8(
    sums16 sums, const int8_t *a, const int8_t *b, const int8_t *c, const int8_t *d, const int8_t *w)
{
    return sums16_of_rows(sums, vld1q_s8(a), vld1q_s8(b), vld1q_s8(c), vld1q_s8(d), w);
}

static inline int8x16_t loaded16(const uint8_t *x)
{
    return flipped16(vreinterpretq_s8_u8(vld1q_u8(x)));
}

static inline sums16 sums16_rows_u8(
    sums16 sums, const uint8_t *a, const uint8_t *b, const uint8_t *c, const uint8_t *d, const int8_t *w)
{
    return sums16_of_rows(sums, loaded16(a), loaded16(b), loaded16(c), loaded16(d), w);
}

static inline sums64 sums64_rows_i8(
    sums64 sums, const int8_t *a, const int8_t *b, const int8_t *c, const int8_t *d, const int8_t *w)
{
    int l;
    for (l = 0; l < 4; l++, a += 16, b += 16, c += 16, d += 16) {
        sums = sums64_of_rows(sums, vld1q_s8(a), vld1q_s8(b), vld1q_s8(c), vld1q_s8(d), w, l);
    }
    return sums;
}

static inline sums64 sums64_rows_u8(
    sums64 sums, const uint8_t *a, const uint8_t *b, const uint8_t *c, const uint8_t *d, const int8_t *w)
{
    int l;
    for (l = 0; l < 4; l++, a += 16, b += 16, c += 16, d += 16) {
        sums = sums64_of_rows(sums, loaded16(a), loaded16(b), loaded16(c), loaded16(d), w, l);
    }
    return sums;
}

static inline void numbers16_store(numbers16 numbers, int32_t *out)
{
    int i;
    for (i = 0; i < 4; i++) {
        vst1q_s32(out + 4 * i, numbers.of4[i]);
    }
}

static inline numbers16 numbers16_plus(numbers16 numbers, const int32_t *more, int32_t same)
{
    const int32x4_t all = vdupq_n_s32(same);
    int i;
    for (i = 0; i < 4; i++) {
        numbers.of4[i] = vaddq_s32(numbers.of4[i], vaddq_s32(vld1q_s32(more + 4 * i), all));
    }
    return numbers;
}

static inline numbers16 numbers16_raised(numbers16 numbers, const int32_t *raised)
{
    int i;
    for (i = 0; i < 4; i++) {
        const uint32x4_t late = vceqq_s32(numbers.of4[i], vld1q_s32(raised + 4 * i));
        numbers.of4[i] = vsubq_s32(numbers.of4[i], vreinterpretq_s32_u32(late));
    }
    return numbers;
}

static inline int32x4_t quotients4(
    int32x4_t sums, const int32_t *factor, int64x2_t offset0, int64x2_t offset1, int32_t shift, int32_t lift,
    int32_t least, int32_t most)
{
    const int32x4_t factors = vld1q_s32(factor);
    const int64x2_t places = vdupq_n_s64(-shift);
    const int64x2_t low = vshlq_s64(vmlal_s32(offset0, vget_low_s32(sums), vget_low_s32(factors)), places);
    const int64x2_t high = vshlq_s64(vmlal_high_s32(offset1, sums, factors), places);
    const int32x4_t lowered = vsubq_s32(vcombine_s32(vmovn_s64(low), vmovn_s64(high)), vdupq_n_s32(lift));
    return vminq_s32(vmaxq_s32(lowered, vdupq_n_s32(least)), vdupq_n_s32(most));
}

static inline numbers16 numbers16_quotients(
    numbers16 numbers, const int32_t *factor, const int64_t *offset, int32_t shift, int32_t lift, int32_t least, int32_t most)
{
    int i;
    for (i = 0; i < 4; i++) {
        const int64x2_t offset0 = vld1q_s64(offset + 4 * i), offset1 = vld1q_s64(offset + 4 * i + 2);
        numbers.of4[i] = quotients4(numbers.of4[i], factor + 4 * i, offset0, offset1, shift, lift, least, most);
    }
    return numbers;
}

static inline numbers16 numbers16_sides(
    numbers16 numbers, const int32_t *factor, const int64_t *offset, const int32_t *kink, const int64_t *below, int32_t shift,
    int32_t lift, int32_t least, int32_t most)
{
    int i;
    for (i = 0; i < 4; i++) {
        const int32x4_t under = vreinterpretq_s32_u32(vcltq_s32(numbers.of4[i], vld1q_s32(kink + 4 * i)));
        const uint64x2_t under0 = vreinterpretq_u64_s64(vmovl_s32(vget_low_s32(under)));
        const uint64x2_t under1 = vreinterpretq_u64_s64(vmovl_high_s32(under));
        const int64x2_t offset0 = vbslq_s64(under0, vld1q_s64(below + 4 * i), vld1q_s64(offset + 4 * i));
        const int64x2_t offset1 = vbslq_s64(under1, vld1q_s64(below + 4 * i + 2), vld1q_s64(offset + 4 * i + 2));
        numbers.of4[i] = quotients4(numbers.of4[i], factor + 4 * i, offset0, offset1, shift, lift, least, most);
    }
    return numbers;
}

static inline numbers16 numbers16_scaled(
    numbers16 numbers, const int32_t *bias, const float *scale, int32_t zero, int32_t least, int32_t most)
{
    int i;
    for (i = 0; i < 4; i++) {
        const float32x4_t sums = vcvtq_f32_s32(vaddq_s32(numbers.of4[i], vld1q_s32(bias + 4 * i)));
        const int32x4_t rounded = vcvtnq_s32_f32(vmulq_f32(sums, vld1q_f32(scale + 4 * i)));
        const int32x4_t codes = vaddq_s32(rounded, vdupq_n_s32(zero));
        numbers.of4[i] = vminq_s32(vmaxq_s32(codes, vdupq_n_s32(least)), vdupq_n_s32(most));
    }
    return numbers;
}

static inline int8x16_t codes16(int32x4_t a, int32x4_t b, int32x4_t c, int32x4_t d)
{
    const int16x8_t low = vcombine_s16(vmovn_s32(a), vmovn_s32(b)), high = vcombine_s16(vmovn_s32(c), vmovn_s32(d));
    return vcombine_s8(vmovn_s16(low), vmovn_s16(high));
}

static inline void numbers16_i8(numbers16 codes, int8_t *out)
{
    vst1q_s8(out, codes16(codes.of4[0], codes.of4[1], codes.of4[2], codes.of4[3]));
}

static inline void numbers16_u8(numbers16 codes, uint8_t *out)
{
    vst1q_u8(out, vreinterpretq_u8_s8(codes16(codes.of4[0], codes.of4[1], codes.of4[2], codes.of4[3])));
}

static inline void numbers64_i8(numbers16 a, numbers16 b, numbers16 c, numbers16 d, int8_t *out)
{
    int l;
    for (l = 0; l < 4; l++) {
        vst1q_s8(out + 16 * l, codes16(a.of4[l], b.of4[l], c.of4[l], d.of4[l]));
    }
}

static inline void numbers64_u8(numbers16 a, numbers16 b, numbers16 c, numbers16 d, uint8_t *out)
{
    int l;
    for (l = 0; l < 4; l++) {
        vst1q_u8(out + 16 * l, vreinterpretq_u8_s8(codes16(a.of4[l], b.of4[l], c.of4[l], d.of4[l])));
    }
}

#else
#define QJAX_VECTORS "none"
#define QJAX_SUMS 4

typedef struct {
    int32_t of[16];
} sums16;
typedef sums16 numbers16;

static inline sums16 sums16_start_i8(const int32_t *start)
{
    sums16 sums;
    int i;
    (void)start;
    for (i = 0; i < 16; i++) {
        sums.of[i] = 0;
    }
    return sums;
}

static inline sums16 sums16_start_u8(const int32_t *start)
{
    return sums16_start_i8(start);
}

#define QJAX_ADD(ROW0, ROW1, ROW2, ROW3) \
    int i; \
    for (i = 0; i < 16; i++) { \
        sums.of[i] += (int32_t)ROW0 * w[4 * i] + (int32_t)ROW1 * w[4 * i + 1] + (int32_t)ROW2 * w[4 * i + 2] \
            + (int32_t)ROW3 * w[4 * i + 3]; \
    } \
    return sums

static inline sums16 sums16_add_i8(sums16 sums, const int8_t *x, const int8_t *w)
{
    QJAX_ADD(x[0], x[1], x[2], x[3]);
}

static inline sums16 sums16_add_u8(sums16 sums, const uint8_t *x, const int8_t *w)
{
    QJAX_ADD(x[0], x[1], x[2], x[3]);
}

static inline sums16 sums16_rows_i8(
    sums16 sums, const int8_t *a, const int8_t *b, const int8_t *c, const int8_t *d, const int8_t *w)
{
    QJAX_ADD(a[i], b[i], c[i], d[i]);
}

static inline sums16 sums16_rows_u8(
    sums16 sums, const uint8_t *a, const uint8_t *b, const uint8_t *c, const uint8_t *d, const int8_t *w)
{
    QJAX_ADD(a[i], b[i], c[i], d[i]);
}

typedef struct {
    sums16 of[4];
} sums64;

#define QJAX_ADD64 \
    int n; \
    for (n = 0; n < 64; n++) { \
        const int j = n / 16, channel = n % 16 / 4 * 16 + j * 4 + n % 4; \
        sums.of[j].of[n % 16] += (int32_t)a[channel] * w[4 * n] + (int32_t)b[channel] * w[4 * n + 1] \
            + (int32_t)c[channel] * w[4 * n + 2] + (int32_t)d[channel] * w[4 * n + 3]; \
    } \
    return sums

static inline sums64 sums64_rows_i8(
    sums64 sums, const int8_t *a, const int8_t *b, const int8_t *c, const int8_t *d, const int8_t *w)
{
    QJAX_ADD64;
}

static inline sums64 sums64_rows_u8(
    sums64 sums, const uint8_t *a, const uint8_t *b, const uint8_t *c, const uint8_t *d, const int8_t *w)
{
    QJAX_ADD64;
}

static inline numbers16 sums16_numbers(sums16 sums)
{
    return sums;
}

static inline void numbers16_store(numbers16 numbers, int32_t *out)
{
    memcpy(out, numbers.of, sizeof numbers.of);
}

static inline numbers16 numbers16_plus(numbers16 numbers, const int32_t *more, int32_t same)
{
    int i;
    for (i = 0; i < 16; i++) {
        numbers.of[i] += more[i] + same;
    }
    return numbers;
}

static inline numbers16 numbers16_raised(numbers16 numbers, const int32_t *raised)
{
    int i;
    for (i = 0; i < 16; i++) {
        numbers.of[i] += numbers.of[i] == raised[i];
    }
    return numbers;
}

static inline int32_t quotient(
    int32_t sum, int32_t factor, int64_t offset, int32_t shift, int32_t lift, int32_t least, int32_t most)
{
    const int32_t wide = (int32_t)(((int64_t)sum * factor + offset) >> shift) - lift;
    return wide < least ? least : wide > most ? most : wide;
}

static inline numbers16 numbers16_quotients(
    numbers16 numbers, const int32_t *factor, const int64_t *offset, int32_t shift, int32_t lift, int32_t least, int32_t most)
{
    int i;
    for (i = 0; i < 16; i++) {
        numbers.of[i] = quotient(numbers.of[i], factor[i], offset[i], shift, lift, least, most);
    }
    return numbers;
}

static inline numbers16 numbers16_sides(
    numbers16 numbers, const int32_t *factor, const int64_t *offset, const int32_t *kink, const int64_t *below, int32_t shift,
    int32_t lift, int32_t least, int32_t most)
{
    int i;
    for (i = 0; i < 16; i++) {
        const int64_t own = numbers.of[i] < kink[i] ? below[i] : offset[i];
        numbers.of[i] = quotient(numbers.of[i], factor[i], own, shift, lift, least, most);
    }
    return numbers;
}

static inline numbers16 numbers16_scaled(
    numbers16 numbers, const int32_t *bias, const float *scale, int32_t zero, int32_t least, int32_t most)
{
    int i;
    for (i = 0; i < 16; i++) {
        const float product = (float)(numbers.of[i] + bias[i]) * scale[i];
        const int32_t whole = (int32_t)product;
        const float rest = product - (float)whole;
        const int32_t up = rest > 0.5f || (rest >= 0.5f && (whole & 1) != 0);
        const int32_t down = rest < -0.5f || (rest <= -0.5f && (whole & 1) != 0);
        const int32_t code = whole + up - down + zero;
        numbers.of[i] = code < least ? least : code > most ? most : code;
    }
    return numbers;
}

static inline void numbers16_i8(numbers16 codes, int8_t *out)
{
    int i;
    for (i = 0; i < 16; i++) {
        out[i] = (int8_t)codes.of[i];
    }
}

static inline void numbers16_u8(numbers16 codes, uint8_t *out)
{
    int i;
    for (i = 0; i < 16; i++) {
        out[i] = (uint8_t)codes.of[i];
    }
}

static inline void numbers64_i8(numbers16 a, numbers16 b, numbers16 c, numbers16 d, int8_t *out)
{
    int n;
    for (n = 0; n < 16; n++) {
        int8_t *const of4 = out + n / 4 * 16 + n % 4;
        of4[0] = (int8_t)a.of[n];
        of4[4] = (int8_t)b.of[n];
        of4[8] = (int8_t)c.of[n];
        of4[12] = (int8_t)d.of[n];
    }
}

static inline void numbers64_u8(numbers16 a, numbers16 b, numbers16 c, numbers16 d, uint8_t *out)
{
    int n;
    for (n = 0; n < 16; n++) {
        uint8_t *const of4 = out + n / 4 * 16 + n % 4;
        of4[0] = (uint8_t)a.of[n];
        of4[4] = (uint8_t)b.of[n];
        of4[8] = (uint8_t)c.of[n];
        of4[12] = (uint8_t)d.of[n];
    }
}
#endif

static inline sums64 sums64_start_i8(const int32_t *start)
{
    const sums64 sums = {
        {sums16_start_i8(start), sums16_start_i8(start + 16), sums16_start_i8(start + 32), sums16_start_i8(start + 48)},
    };
    return sums;
}

static inline sums64 sums64_start_u8(const int32_t *start)
{
    const sums64 sums = {
        {sums16_start_u8(start), sums16_start_u8(start + 16), sums16_start_u8(start + 32), sums16_start_u8(start + 48)},
    };
    return sums;
}
