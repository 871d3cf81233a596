/* A word of a patch holds two codes of 16 bits: those with an even or those with an odd number, of four in a row. */
#define QJAX_VECTORS "DSP extension"
#define QJAX_PATCH(positions, size) ((positions) * (((size) + 3) / 4 * 2))
#define QJAX_PLACE(patch, own, p, at, size) ((patch) + (at) / 2 * (own) + (p))
#if defined(__GNUC__) && defined(__OPTIMIZE__) && defined(__ARM_FEATURE_UNALIGNED)
#define QJAX_ASSEMBLY /* compilers run out of registers */
#endif
#include <arm_acle.h>

#define QJAX_LINE(kind, name, patch, own, p, size) kind name[((size) + 3) / 4 * 4]
#define QJAX_SPREAD_i8(patch, own, p, size, line) \
    qjax_fill_i8(QJAX_PLACE(patch, own, p, 0, size), own, line, ((size) + 3) / 4 * 4)
#define QJAX_SPREAD_u8(patch, own, p, size, line) \
    qjax_fill_u8(QJAX_PLACE(patch, own, p, 0, size), own, line, ((size) + 3) / 4 * 4)

static inline int32_t four(const void *x)
{
    int32_t codes;
    memcpy(&codes, x, 4);
    return codes;
}

#if defined(__GNUC__)
#define QJAX_HALVES(NAME, EXTEND, PLAIN) \
    static inline int32_t NAME##_even(int32_t codes) \
    { \
        int32_t found; \
        __asm__(EXTEND " %0, %1" : "=r"(found) : "r"(codes)); \
        return found; \
    } \
    static inline int32_t NAME##_odd(int32_t codes) \
    { \
        int32_t found; \
        __asm__(EXTEND " %0, %1, ror #8" : "=r"(found) : "r"(codes)); \
        return found; \
    }
#else
#define QJAX_HALVES(NAME, EXTEND, PLAIN) \
    static inline int32_t NAME##_even(int32_t codes) \
    { \
        return (int32_t)PLAIN(codes); \
    } \
    static inline int32_t NAME##_odd(int32_t codes) \
    { \
        return (int32_t)PLAIN((int32_t)__ror((uint32_t)codes, 8)); \
    }
#endif

QJAX_HALVES(i8, "sxtb16", __sxtb16)
QJAX_HALVES(u8, "uxtb16", __uxtb16)

#define QJAX_FILL(NAME, CODE) \
    QJAX_KERNEL void qjax_fill_##NAME(int32_t *to, int32_t own, const CODE *x, int32_t n) \
    { \
        const CODE *const end = x + n; \
        while (x != end) { \
            const int32_t codes = four(x); \
            to[0] = NAME##_even(codes); \
            to[own] = NAME##_odd(codes); \
            to += 2 * own; \
            x += 4; \
        } \
    }

QJAX_FILL(i8, int8_t)
QJAX_FILL(u8, uint8_t)

/* size: of a row of w. sums: of two features, of two positions. */
static inline void sums2x2(const int32_t *x, const int8_t *w, int32_t size, int32_t sums[4])
{
    int32_t a = sums[0], b = sums[1], c = a, d = b, turns = (size + 3) / 4;
    const int8_t *v = w + size;
#if defined(QJAX_ASSEMBLY)
    int32_t x0, x1, w0, w1, half;
    __asm__ volatile("1: ldr %[w0], [%[w]], #4\n"
                     "ldr %[w1], [%[v]], #4\n"
                     "ldrd %[x0], %[x1], [%[x]], #8\n"
                     "sxtb16 %[half], %[w0]\n"
                     "smlad %[a], %[x0], %[half], %[a]\n"
                     "smlad %[c], %[x1], %[half], %[c]\n"
                     "sxtb16 %[half], %[w1]\n"
                     "smlad %[b], %[x0], %[half], %[b]\n"
                     "smlad %[d], %[x1], %[half], %[d]\n"
                     "ldrd %[x0], %[x1], [%[x]], #8\n"
                     "sxtb16 %[half], %[w0], ror #8\n"
                     "smlad %[a], %[x0], %[half], %[a]\n"
                     "smlad %[c], %[x1], %[half], %[c]\n"
                     "sxtb16 %[half], %[w1], ror #8\n"
                     "smlad %[b], %[x0], %[half], %[b]\n"
                     "smlad %[d], %[x1], %[half], %[d]\n"
                     "subs %[turns], %[turns], #1\n"
                     "bne 1b"
                     : [a] "+r"(a), [b] "+r"(b), [c] "+r"(c), [d] "+r"(d), [x] "+r"(x), [w] "+r"(w), [v] "+r"(v),
                       [turns] "+r"(turns), [x0] "=&r"(x0), [x1] "=&r"(x1), [w0] "=&r"(w0), [w1] "=&r"(w1),
                       [half] "=&r"(half)
                     :
                     : "cc", "memory");
#else
    for (; turns > 0; turns--, x += 4, w += 4, v += 4) {
        const int32_t w0 = four(w), w1 = four(v);
        a = __smlad(x[2], i8_odd(w0), __smlad(x[0], i8_even(w0), a));
        b = __smlad(x[2], i8_odd(w1), __smlad(x[0], i8_even(w1), b));
        c = __smlad(x[3], i8_odd(w0), __smlad(x[1], i8_even(w0), c));
        d = __smlad(x[3], i8_odd(w1), __smlad(x[1], i8_even(w1), d));
    }
#endif
    sums[0] = a;
    sums[1] = b;
    sums[2] = c;
    sums[3] = d;
}

/* sums: of four features, of one position */
static inline void sums1x4(const int32_t *x, const int8_t *w, int32_t size, int32_t sums[4])
{
    int32_t a = sums[0], b = sums[1], c = sums[2], d = sums[3], turns = (size + 3) / 4;
#if defined(QJAX_ASSEMBLY)
    int32_t x0, x1, codes, half;
    __asm__ volatile("1: ldrd %[x0], %[x1], [%[x]], #8\n"
                     "ldr %[codes], [%[w], %[size]]\n"
                     "sxtb16 %[half], %[codes]\n"
                     "smlad %[b], %[x0], %[half], %[b]\n"
                     "sxtb16 %[half], %[codes], ror #8\n"
                     "smlad %[b], %[x1], %[half], %[b]\n"
                     "ldr %[codes], [%[w], %[size], lsl #1]\n"
                     "sxtb16 %[half], %[codes]\n"
                     "smlad %[c], %[x0], %[half], %[c]\n"
                     "sxtb16 %[half], %[codes], ror #8\n"
                     "smlad %[c], %[x1], %[half], %[c]\n"
                     "ldr %[codes], [%[w], %[last]]\n"
                     "sxtb16 %[half], %[codes]\n"
                     "smlad %[d], %[x0], %[half], %[d]\n"
                     "sxtb16 %[half], %[codes], ror #8\n"
                     "smlad %[d], %[x1], %[half], %[d]\n"
                     "ldr %[codes], [%[w]], #4\n"
                     "sxtb16 %[half], %[codes]\n"
                     "smlad %[a], %[x0], %[half], %[a]\n"
                     "sxtb16 %[half], %[codes], ror #8\n"
                     "smlad %[a], %[x1], %[half], %[a]\n"
                     "subs %[turns], %[turns], #1\n"
                     "bne 1b"
                     : [a] "+r"(a), [b] "+r"(b), [c] "+r"(c), [d] "+r"(d), [x] "+r"(x), [w] "+r"(w),
                       [turns] "+r"(turns), [x0] "=&r"(x0), [x1] "=&r"(x1), [codes] "=&r"(codes), [half] "=&r"(half)
                     : [size] "r"(size), [last] "r"(3 * size)
                     : "cc", "memory");
#else
    for (; turns > 0; turns--, x += 2, w += 4) {
        const int32_t w0 = four(w), w1 = four(w + size), w2 = four(w + 2 * size), w3 = four(w + 3 * size);
        a = __smlad(x[1], i8_odd(w0), __smlad(x[0], i8_even(w0), a));
        b = __smlad(x[1], i8_odd(w1), __smlad(x[0], i8_even(w1), b));
        c = __smlad(x[1], i8_odd(w2), __smlad(x[0], i8_even(w2), c));
        d = __smlad(x[1], i8_odd(w3), __smlad(x[0], i8_even(w3), d));
    }
#endif
    sums[0] = a;
    sums[1] = b;
    sums[2] = c;
    sums[3] = d;
}

/* the patch holds codes of 16 bits, whichever they were */
#define qjax_sums1_u8 qjax_sums1_i8
#define qjax_sums2_u8 qjax_sums2_i8

QJAX_KERNEL void qjax_sums1_i8(
    const int32_t *patch, const int8_t *w, int32_t size, const uint8_t *start, int32_t features, int32_t *acc)
{
    int32_t left;
    for (left = features; left > 0; left -= 4) {
        const int32_t again = left < 4 ? 4 - left : 0;
        w -= again * size, start -= again, acc -= again;
        acc[0] = start[0], acc[1] = start[1], acc[2] = start[2], acc[3] = start[3];
        sums1x4(patch, w, size, acc);
        w += 4 * size, start += 4, acc += 4;
    }
}

QJAX_KERNEL void qjax_sums2_i8(
    const int32_t *patch, const int8_t *w, int32_t size, const uint8_t *start, int32_t features, int32_t *acc)
{
    int32_t left;
    for (left = features; left > 0; left -= 2) {
        const int32_t again = left == 1;
        int32_t sums[4];
        w -= again * size, start -= again, acc -= again;
        sums[0] = start[0], sums[1] = start[1];
        sums2x2(patch, w, size, sums);
        acc[0] = sums[0], acc[1] = sums[1], acc[features] = sums[2], acc[features + 1] = sums[3];
        w += 2 * size, start += 2, acc += 2;
    }
}

#define QJAX_TAP(NAME) \
    { \
        const int32_t x0 = four(*row++ + first), w0 = four(v); \
        const int32_t x_even = NAME##_even(x0), x_odd = NAME##_odd(x0); \
        const int32_t w_even = i8_even(w0), w_odd = i8_odd(w0); \
        a = __smlabb(x_even, w_even, a); \
        b = __smlabb(x_odd, w_odd, b); \
        c = __smlatt(x_even, w_even, c); \
        d = __smlatt(x_odd, w_odd, d); \
        v += stride; \
    }

#define QJAX_CHANNELS(NAME, CODE) \
    QJAX_KERNEL void qjax_channels_##NAME( \
        const CODE *const *rows, int32_t taps, int32_t first, const int8_t *w, int32_t stride, const uint8_t *start, \
        int32_t channels, int32_t *acc) \
    { \
        int32_t left, t; \
        for (left = channels; left > 0; left -= 4) { \
            const int32_t again = left < 4 ? 4 - left : 0; \
            const CODE *const *row = rows; \
            const int8_t *v = w - again; \
            int32_t a, b, c, d; \
            first -= again, start -= again, acc -= again; \
            a = start[0], b = start[1], c = start[2], d = start[3]; \
            for (t = taps; t >= 3; t -= 3) { \
                QJAX_TAP(NAME) \
                QJAX_TAP(NAME) \
                QJAX_TAP(NAME) \
            } \
            for (; t > 0; t--) { \
                QJAX_TAP(NAME) \
            } \
            acc[0] = a, acc[1] = b, acc[2] = c, acc[3] = d; \
            first += 4, start += 4, acc += 4; \
            w += 4 - again; \
        } \
    }

QJAX_CHANNELS(i8, int8_t)
QJAX_CHANNELS(u8, uint8_t)
