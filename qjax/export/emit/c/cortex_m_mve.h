/* A patch holds the codes of each position as they are, up to a multiple of 16. */
#define QJAX_VECTORS "Helium"
#define QJAX_PATCH(positions, size) ((positions) * (((size) + 15) / 16 * 4))
#define QJAX_PLACE(patch, own, p, at, size) ((int8_t *)(void *)(patch) + (p) * (((size) + 15) / 16 * 16) + (at))
#include <arm_mve.h>

#define qjax_fill_i8(to, own, x, n) qjax_fill(to, x, n)
#define qjax_fill_u8(to, own, x, n) qjax_fill(to, (const int8_t *)(x), n)

QJAX_KERNEL void qjax_fill(int8_t *to, const int8_t *x, int32_t n)
{
    for (; n >= 16; n -= 16, to += 16, x += 16) {
        vstrbq_s8(to, vldrbq_s8(x));
    }
    if (n > 0) {
        const mve_pred16_t some = vctp8q((uint32_t)n);
        vstrbq_p_s8(to, vldrbq_z_s8(x, some), some);
    }
}

/* STEP: how many codes a vector holds. There is no product of signed weights with unsigned codes of 8 bits. */
#define QJAX_SUMS(NAME, CODE, VECTOR, STEP, CODES, WEIGHTS, ADD) \
    QJAX_KERNEL void qjax_sums1_##NAME( \
        const int32_t *patch, const int8_t *w, int32_t size, const int32_t *start, int32_t features, int32_t *acc) \
    { \
        int32_t f, k; \
        for (f = 0; f < features; f += 4) { \
            const int32_t i = at_most(f, features - 4); \
            const CODE *x = (const CODE *)(const void *)patch; \
            const int8_t *w0 = w + i * size, *w1 = w0 + size, *w2 = w1 + size, *w3 = w2 + size; \
            int32_t a = start[i], b = start[i + 1], c = start[i + 2], d = start[i + 3]; \
            for (k = 0; k < size; k += STEP) { \
                const VECTOR codes = CODES(x); \
                a = ADD(a, codes, WEIGHTS(w0)); \
                b = ADD(b, codes, WEIGHTS(w1)); \
                c = ADD(c, codes, WEIGHTS(w2)); \
                d = ADD(d, codes, WEIGHTS(w3)); \
                x += STEP, w0 += STEP, w1 += STEP, w2 += STEP, w3 += STEP; \
            } \
            acc[i] = a; \
            acc[i + 1] = b; \
            acc[i + 2] = c; \
            acc[i + 3] = d; \
        } \
    } \
    QJAX_KERNEL void qjax_sums2_##NAME( \
        const int32_t *patch, const int8_t *w, int32_t size, const int32_t *start, int32_t features, int32_t *acc) \
    { \
        int32_t f, k; \
        for (f = 0; f < features; f += 2) { \
            const int32_t i = at_most(f, features - 2); \
            const CODE *x0 = (const CODE *)(const void *)patch, *x1 = x0 + (size + 15) / 16 * 16; \
            const int8_t *w0 = w + i * size, *w1 = w0 + size; \
            int32_t a = start[i], b = start[i + 1], c = a, d = b; \
            for (k = 0; k < size; k += STEP) { \
                const VECTOR codes0 = CODES(x0), codes1 = CODES(x1), weights0 = WEIGHTS(w0), weights1 = WEIGHTS(w1); \
                a = ADD(a, codes0, weights0); \
                b = ADD(b, codes0, weights1); \
                c = ADD(c, codes1, weights0); \
                d = ADD(d, codes1, weights1); \
                x0 += STEP, x1 += STEP, w0 += STEP, w1 += STEP; \
            } \
            acc[i] = a; \
            acc[i + 1] = b; \
            acc[features + i] = c; \
            acc[features + i + 1] = d; \
        } \
    }

static inline int16x8_t wide_i8(const int8_t *x)
{
    return vldrbq_s16(x);
}

static inline int16x8_t wide_u8(const uint8_t *x)
{
    return vreinterpretq_s16_u16(vldrbq_u16(x));
}

QJAX_SUMS(i8, int8_t, int8x16_t, 16, vldrbq_s8, vldrbq_s8, vmladavaq_s8)
QJAX_SUMS(u8, uint8_t, int16x8_t, 8, wide_u8, wide_i8, vmladavaq_s16)

/* products of eight channels: those with an even and those with an odd number side by side */
#define QJAX_CHANNELS(NAME, CODE) \
    QJAX_KERNEL void qjax_channels_##NAME( \
        const CODE *const *rows, int32_t taps, int32_t first, const int8_t *w, int32_t stride, const int32_t *start, \
        int32_t channels, int32_t *acc) \
    { \
        int32_t f, t; \
        for (f = 0; f < channels; f += 8) { \
            const int32_t i = at_most(f, channels - 8); \
            const int8_t *weights = w + i; \
            int32x4x2_t sums = vld2q_s32(start + i); \
            for (t = 0; t < taps; t++, weights += stride) { \
                const int16x8_t x = wide_##NAME(rows[t] + first + i), v = wide_i8(weights); \
                sums.val[0] = vaddq_s32(sums.val[0], vmullbq_int_s16(x, v)); \
                sums.val[1] = vaddq_s32(sums.val[1], vmulltq_int_s16(x, v)); \
            } \
            vst2q_s32(acc + i, sums); \
        } \
    }

QJAX_CHANNELS(i8, int8_t)
QJAX_CHANNELS(u8, uint8_t)
