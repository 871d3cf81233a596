/* A patch holds the codes of each position as they are. */
#define QJAX_VECTORS "none"
#define QJAX_PATCH(positions, size) ((positions) * (((size) + 3) / 4))
#define QJAX_PLACE(patch, own, p, at, size) ((int8_t *)(void *)(patch) + (p) * (((size) + 3) / 4 * 4) + (at))
#define qjax_fill_i8(to, own, x, n) memcpy(to, x, (size_t)(n))
#define qjax_fill_u8(to, own, x, n) memcpy(to, x, (size_t)(n))

#define QJAX_SUMS(NAME, CODE) \
    QJAX_KERNEL void qjax_sums1_##NAME( \
        const int32_t *patch, const int8_t *w, int32_t size, const int32_t *start, int32_t features, int32_t *acc) \
    { \
        const CODE *const x = (const CODE *)(const void *)patch; \
        int32_t f, k; \
        for (f = 0; f < features; f++, w += size) { \
            int32_t a = start[f]; \
            for (k = 0; k < size; k++) { \
                a += (int32_t)x[k] * w[k]; \
            } \
            acc[f] = a; \
        } \
    } \
    QJAX_KERNEL void qjax_sums2_##NAME( \
        const int32_t *patch, const int8_t *w, int32_t size, const int32_t *start, int32_t features, int32_t *acc) \
    { \
        int32_t f, k; \
        for (f = 0; f < features; f += 2) { \
            const int32_t i = at_most(f, features - 2); \
            const CODE *const x0 = (const CODE *)(const void *)patch, *const x1 = x0 + (size + 3) / 4 * 4; \
            const int8_t *const w0 = w + i * size, *const w1 = w0 + size; \
            int32_t a = start[i], b = start[i + 1], c = a, d = b; \
            for (k = 0; k < size; k++) { \
                a += (int32_t)x0[k] * w0[k]; \
                b += (int32_t)x0[k] * w1[k]; \
                c += (int32_t)x1[k] * w0[k]; \
                d += (int32_t)x1[k] * w1[k]; \
            } \
            acc[i] = a; \
            acc[i + 1] = b; \
            acc[features + i] = c; \
            acc[features + i + 1] = d; \
        } \
    } \
    QJAX_KERNEL void qjax_channels_##NAME( \
        const CODE *const *rows, int32_t taps, int32_t first, const int8_t *w, int32_t stride, const int32_t *start, \
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
