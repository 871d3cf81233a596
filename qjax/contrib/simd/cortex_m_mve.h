/* A patch holds the codes of each position as they are, up to a multiple of 16. */
#define QJAX_VECTORS "Helium"
#define QJAX_PATCH(positions, size) ((positions) * (((size) + 15) / 16 * 4))
#define QJAX_PLACE(patch, own, p, at, size) ((int8_t *)(void *)(patch) + (p) * (((size) + 15) / 16 * 16) + (at))
#define QJAX_HELIUM
#include <arm_mve.h>

/* codes of which no four lie together are gathered in the patch itself */
#define QJAX_LINE(kind, name, patch, own, p, size) kind *const name = (kind *)(void *)QJAX_PLACE(patch, own, p, 0, size)
#define QJAX_SPREAD_i8(patch, own, p, size, line) (void)0
#define QJAX_SPREAD_u8(patch, own, p, size, line) (void)0

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
        const int32_t *patch, const int8_t *w, int32_t size, const uint8_t *start, int32_t features, int32_t *acc) \
    { \
        const int32_t turns = (size + STEP - 1) / STEP; \
        int32_t left, k; \
        for (left = features; left > 0; left -= 4) { \
            const int32_t again = left < 4 ? 4 - left : 0; \
            const CODE *x = (const CODE *)(const void *)patch; \
            const int8_t *w0 = w - again * size, *w1 = w0 + size, *w2 = w1 + size, *w3 = w2 + size; \
            int32_t a, b, c, d; \
            start -= again, acc -= again; \
            a = start[0], b = start[1], c = start[2], d = start[3]; \
            w = w3 + size, start += 4; \
            for (k = turns; k > 0; k--) { \
                const VECTOR codes = CODES(x); \
                a = ADD(a, codes, WEIGHTS(w0)); \
                b = ADD(b, codes, WEIGHTS(w1)); \
                c = ADD(c, codes, WEIGHTS(w2)); \
                d = ADD(d, codes, WEIGHTS(w3)); \
                x += STEP, w0 += STEP, w1 += STEP, w2 += STEP, w3 += STEP; \
            } \
            acc[0] = a, acc[1] = b, acc[2] = c, acc[3] = d; \
            acc += 4; \
        } \
    } \
    QJAX_KERNEL void qjax_sums2_##NAME( \
        const int32_t *patch, const int8_t *w, int32_t size, const uint8_t *start, int32_t features, int32_t *acc) \
    { \
        const int32_t more = (size + 15) / 16 * 16; \
        const int32_t turns = (size + STEP - 1) / STEP; \
        int32_t left, k; \
        for (left = features; left > 0; left -= 2) { \
            const int32_t again = left == 1; \
            const CODE *x0 = (const CODE *)(const void *)patch, *x1 = x0 + more; \
            const int8_t *w0 = w - again * size, *w1 = w0 + size; \
            int32_t a, b, c, d; \
            start -= again, acc -= again; \
            a = c = start[0], b = d = start[1]; \
            w = w1 + size, start += 2; \
            for (k = turns; k > 0; k--) { \
                const VECTOR codes0 = CODES(x0), codes1 = CODES(x1), weights0 = WEIGHTS(w0), weights1 = WEIGHTS(w1); \
                a = ADD(a, codes0, weights0); \
                b = ADD(b, codes0, weights1); \
                c = ADD(c, codes1, weights0); \
                d = ADD(d, codes1, weights1); \
                x0 += STEP, x1 += STEP, w0 += STEP, w1 += STEP; \
            } \
            acc[0] = a, acc[1] = b, acc[features] = c, acc[features + 1] = d; \
            acc += 2; \
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

/* products of eight channels; the sums of those with an even and of those with an odd number lie side by side */
#define QJAX_CHANNELS(NAME, CODE, TAPS) \
    QJAX_KERNEL void qjax_channels_##NAME( \
        const CODE *const *rows, int32_t taps, int32_t first, const int8_t *w, int32_t stride, const uint8_t *start, \
        int32_t channels, int32_t *acc) \
    { \
        int32_t left; \
        for (left = channels; left > 0; left -= 8) { \
            const int32_t again = left < 8 ? 8 - left : 0; \
            const CODE *const *row = rows; \
            const int8_t *v = w - again; \
            int32x4x2_t sums; \
            int32_t t; \
            first -= again, start -= again, acc -= again; \
            sums.val[0] = vmovlbq_s16(wide_u8(start)); \
            sums.val[1] = vmovltq_s16(wide_u8(start)); \
            TAPS \
            vst2q_s32(acc, sums); \
            first += 8, start += 8, acc += 8; \
            w += 8 - again; \
        } \
    }

/* no weight of a depthwise convolution is -128, so that two products of signed codes fit 16 bits */
#define QJAX_TAPS_i8 \
    for (t = taps / 2; t > 0; t--, row += 2, v += 2 * stride) { \
        const int16x8_t one = vmulq_s16(wide_i8(row[0] + first), wide_i8(v)); \
        const int16x8_t both = vaddq_s16(one, vmulq_s16(wide_i8(row[1] + first), wide_i8(v + stride))); \
        sums.val[0] = vaddq_s32(sums.val[0], vmovlbq_s16(both)); \
        sums.val[1] = vaddq_s32(sums.val[1], vmovltq_s16(both)); \
    } \
    if (taps % 2 != 0) { \
        const int16x8_t one = vmulq_s16(wide_i8(row[0] + first), wide_i8(v)); \
        sums.val[0] = vaddq_s32(sums.val[0], vmovlbq_s16(one)); \
        sums.val[1] = vaddq_s32(sums.val[1], vmovltq_s16(one)); \
    }

#define QJAX_TAPS_u8 \
    for (t = taps; t > 0; t--, row++, v += stride) { \
        const int16x8_t x = wide_u8(row[0] + first), weights = wide_i8(v); \
        sums.val[0] = vaddq_s32(sums.val[0], vmullbq_int_s16(x, weights)); \
        sums.val[1] = vaddq_s32(sums.val[1], vmulltq_int_s16(x, weights)); \
    }

QJAX_CHANNELS(i8, int8_t, QJAX_TAPS_i8)
QJAX_CHANNELS(u8, uint8_t, QJAX_TAPS_u8)
