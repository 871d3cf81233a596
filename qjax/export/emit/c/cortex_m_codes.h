#if defined(__ARM_FEATURE_SAT)
#include <arm_acle.h>
#endif

/* `x >> places`, also where x is negative, which C leaves open */
static inline int32_t down(int32_t x, int32_t places)
{
    return x < 0 ? ~(~x >> places) : x >> places;
}

static inline int32_t high_word(int32_t a, int32_t b)
{
    const int64_t product = (int64_t)a * b;
    return product < 0 ? (int32_t)~(~product >> 32) : (int32_t)(product >> 32);
}

static inline uint8_t clamped(int32_t x, int32_t least, int32_t most)
{
#if defined(__ARM_FEATURE_SAT)
    if (most - least == 255) {
        return (uint8_t)(__usat(x - least, 8) + (uint32_t)least);
    }
#endif
    return (uint8_t)(x < least ? least : x > most ? most : x);
}

QJAX_KERNEL void qjax_codes(
    const int32_t *sums, int32_t n, const int32_t *factor, const int32_t *offset, int32_t up, int32_t shift, int32_t least,
    int32_t most, void *out)
{
    const int32_t scale = (int32_t)1 << up;
    uint8_t *codes = out;
#if defined(__ARM_FEATURE_MVE) && !defined(__ARM_BIG_ENDIAN)
    for (; n >= 4; n -= 4, sums += 4, factor += 4, offset += 4, codes += 4) {
        int32x4_t x = vmulhq_s32(vshlq_r_s32(vldrwq_s32(sums), up), vldrwq_s32(factor));
        x = vshlq_r_s32(vaddq_s32(x, vldrwq_s32(offset)), -shift);
        x = vminq_s32(vmaxq_s32(x, vdupq_n_s32(least)), vdupq_n_s32(most));
        vstrbq_u32(codes, vreinterpretq_u32_s32(x));
    }
#endif
    for (; n > 0; n--) {
        *codes++ = clamped(down(high_word(*sums++ * scale, *factor++) + *offset++, shift), least, most);
    }
}

QJAX_KERNEL void qjax_sides(
    const int32_t *sums, int32_t n, const int32_t *factor, const int32_t *offset, const int32_t *kink, const int32_t *below,
    int32_t up, int32_t shift, int32_t least, int32_t most, void *out)
{
    const int32_t scale = (int32_t)1 << up;
    uint8_t *codes = out;
    int32_t i;
    for (i = 0; i < n; i++) {
        const int32_t own = sums[i] < kink[i] ? below[i] : offset[i];
        codes[i] = clamped(down(high_word(sums[i] * scale, factor[i]) + own, shift), least, most);
    }
}
