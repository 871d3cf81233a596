/* Written by qjax for the target 'nearest_even'; see model.h. */

#include "model.h"

static inline int8_t to_i8(uint8_t x)
{
    return x <= INT8_MAX ? (int8_t)x : (int8_t)((int32_t)x - 256);
}

static inline int32_t max_i32(int32_t a, int32_t b)
{
    return a > b ? a : b;
}

static inline int32_t min_i32(int32_t a, int32_t b)
{
    return a < b ? a : b;
}

static inline int64_t sar_i64(int64_t x, int32_t places)
{
    return x < 0 ? ~(~x >> places) : x >> places;
}

/* The rule nearest_even.
 * One rounding of the exact product, ties to even; unbiased, and qjax's default.
 *
 * Reals: rint(acc * M / 2^(31-s)). It is what IEEE arithmetic does once, without an intermediate result. */
static inline int8_t requantize_nearest_even_int8(int32_t carry, int32_t bias, int32_t multiplier, int32_t shift, int32_t y_zero_point)
{
    const int64_t product = (int64_t)(carry + bias) * (int64_t)multiplier;
    const int32_t rest = 31 - shift;
    const int64_t wide = (int64_t)rest;
    const int64_t total = (int64_t)((int64_t)((int64_t)1 << (int64_t)(rest - 1)) - 1) + (int64_t)((int32_t)sar_i64(product, (int32_t)wide) & 1);
    const int32_t low = min_i32(max_i32((int32_t)sar_i64(product + total, (int32_t)wide), (-128) - y_zero_point), 127 - y_zero_point);
    return to_i8((uint8_t)(low + y_zero_point));
}

/* One exact sum of 64 bits, one rounding: nearest_even. */
static inline int8_t add_exact_int8(int8_t x, int8_t x_2)
{
    const int64_t total = (INT64_C(130526115229) + ((int64_t)x * INT32_C(1019662191))) + (int64_t)((int32_t)x_2 * INT32_C(16776970));
    return (int8_t)min_i32((int32_t)sar_i64(total, (int32_t)24), 127);
}

static inline int8_t select_int8(int x, int32_t off, int8_t x_2)
{
    return (int8_t)(x ? x_2 : (int8_t)off);
}

static const int8_t model_l_kernel[64] = {
    81, -61, -57, -85, -55, 47, 47, -87, 127, -117, -95, 10, -72, 19, 105, 43, 48, -32, 69, 27, -40, -69, 49, 90, 73,
    -33, 67, 114, -127, 36, 109, -99, -48, 127, 61, -15, -103, -65, -127, 127, 110, 24, 5, 83, -14, -27, 45, -29, 40,
    14, -127, 127, 53, 127, 101, -66, 96, -65, 80, -13, 54, 33, -40, 20
};

static const int32_t model_l_bias[8] = {
    3689, -1001, 21, 1736, -2128, 707, 2023, -7
};

static const int32_t model_l_multiplier[8] = {
    INT32_C(1272511801), INT32_C(1521850118), INT32_C(1361568930), INT32_C(1400418830), INT32_C(1632677196),
    INT32_C(1288579689), INT32_C(1594864837), INT32_C(1202967156)
};

/* l: dot, cases/boolean_input_in_c.py:13
 * in input/0: int8 1x8, scale 0.016214434057474136, zero point -7
 * out l: int8 1x8, scale 0.016454895958304405, zero point -5 */
static void model_l(const int8_t *restrict in, int8_t *restrict out)
{
    {
        int32_t acc[8];
        for (int32_t c = 0; c < 8; c++) {
            acc[c] = 0;
        }
        {
            for (int32_t ic = 0; ic < 8; ic++) {
                for (int32_t c = 0; c < 8; c++) {
                    acc[c] += (int32_t)in[ic] * (int32_t)model_l_kernel[ic * 8 + c];
                }
            }
        }
        for (int32_t c = 0; c < 8; c++) {
            out[c] = requantize_nearest_even_int8(acc[c], model_l_bias[c], model_l_multiplier[c], -7, -5);
        }
    }
}

/* add: add, cases/boolean_input_in_c.py:13
 * in input/1: int8 1x8, scale 1.0, zero point -128
 * in l: int8 1x8, scale 0.016454895958304405, zero point -5
 * out add: int8 1x8, scale 0.016454895958304405, zero point -5 */
static void model_add(const int8_t *restrict in0, const int8_t *restrict in1, int8_t *restrict out)
{
    for (int32_t i = 0; i < 8; i++) {
        out[i] = add_exact_int8(in0[i], in1[i]);
    }
}

/* select_n: select, cases/boolean_input_in_c.py:13
 * in input/2: bool 1x8
 * in add: int8 1x8, scale 0.016454895958304405, zero point -5
 * out select_n: int8 1x8, scale 0.016454895958304405, zero point -5 */
static void model_select_n(const uint8_t *restrict in0, const int8_t *restrict in1, int8_t *restrict out)
{
    for (int32_t c = 0; c < 8; c++) {
        out[c] = select_int8(in0[c], -5, in1[c]);
    }
}

void model_run(const int8_t *x0, const int8_t *x1, const uint8_t *x2, int8_t *y0, int8_t *y1, void *arena)
{
    unsigned char *const base = arena;
    model_l(x0, (int8_t *)(void *)(base + 0));
    model_add(x1, (const int8_t *)(void *)(base + 0), y1);
    model_select_n(x2, y1, y0);
}
