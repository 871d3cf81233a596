/* A patch holds the codes of each position as they are. */
#define QJAX_VECTORS "none"
#define QJAX_PATCH(positions, size) ((positions) * (((size) + 3) / 4))
#define QJAX_PLACE(patch, own, p, at, size) ((int8_t *)(void *)(patch) + (p) * (((size) + 3) / 4 * 4) + (at))
#define QJAX_LINE(kind, name, patch, own, p, size) kind *const name = (kind *)(void *)QJAX_PLACE(patch, own, p, 0, size)
#define QJAX_SPREAD_i8(patch, own, p, size, line) (void)0
#define QJAX_SPREAD_u8(patch, own, p, size, line) (void)0
#define qjax_fill_i8(to, own, x, n) memcpy(to, x, (size_t)(n))
#define qjax_fill_u8(to, own, x, n) memcpy(to, x, (size_t)(n))

#define QJAX_SUMS(NAME, CODE) \
    QJAX_KERNEL void qjax_sums1_##NAME( \
        const int32_t *patch, const int8_t *w, int32_t size, const uint8_t *start, int32_t features, int32_t *acc) \
    { \
        const CODE *const x = (const CODE *)(const void *)patch; \
        int32_t left, k; \
        for (left = features; left > 0; left -= 4) { \
            const int32_t again = left < 4 ? 4 - left : 0; \
            const int8_t *const w0 = w - again * size, *const w1 = w0 + size, *const w2 = w1 + size, *const w3 = w2 + size; \
            int32_t a, b, c, d; \
            start -= again, acc -= again; \
            a = start[0], b = start[1], c = start[2], d = start[3]; \
            for (k = 0; k < size; k++) { \
                const int32_t code = x[k]; \
                a += code * w0[k]; \
                b += code * w1[k]; \
                c += code * w2[k]; \
                d += code * w3[k]; \
            } \
            acc[0] = a, acc[1] = b, acc[2] = c, acc[3] = d; \
            w = w3 + size, start += 4, acc += 4; \
        } \
    } \
    QJAX_KERNEL void qjax_sums2_##NAME( \
        const int32_t *patch, const int8_t *w, int32_t size, const uint8_t *start, int32_t features, int32_t *acc) \
    { \
        const CODE *const x0 = (const CODE *)(const void *)patch, *const x1 = x0 + (size + 3) / 4 * 4; \
        int32_t left, k; \
        for (left = features; left > 0; left -= 2) { \
            const int32_t again = left == 1; \
            const int8_t *const w0 = w - again * size, *const w1 = w0 + size; \
            int32_t a, b, c, d; \
            start -= again, acc -= again; \
            a = c = start[0], b = d = start[1]; \
            for (k = 0; k < size; k++) { \
                a += (int32_t)x0[k] * w0[k]; \
                b += (int32_t)x0[k] * w1[k]; \
                c += (int32_t)x1[k] * w0[k]; \
                d += (int32_t)x1[k] * w1[k]; \
            } \
            acc[0] = a, acc[1] = b, acc[features] = c, acc[features + 1] = d; \
            w = w1 + size, start += 2, acc += 2; \
        } \
    } \
    QJAX_KERNEL void qjax_channels_##NAME( \
        const CODE *const *rows, int32_t taps, int32_t first, const int8_t *w, int32_t stride, const uint8_t *start, \
        int32_t channels, int32_t *acc) \
    { \
        int32_t i, t; \
        for (i = 0; i < channels; i++) { \
            int32_t a = start[i]; \
            for (t = 0; t < taps; t++) { \
                a += (int32_t)rows[t][first + i] * w[t * stride + i]; \
            } \
            acc[i] = a; \
        } \
    }

QJAX_SUMS(i8, int8_t)
QJAX_SUMS(u8, uint8_t)
