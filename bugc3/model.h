/* A quantized network in integers, written by qjax for the target 'nearest_even'.
 *
 * model_run reads codes and writes codes, batch 1, arrays stored row by row. Inputs, outputs and arena must not
 * overlap. The arena needs MODEL_ARENA_SIZE bytes, aligned to MODEL_ARENA_ALIGN; its content before and after a call
 * does not matter (a null pointer will do where the size is 0). The function keeps no state: calls with different
 * arenas may run at the same time.
 *
 * A code q stands for (q - ZERO_POINT) * SCALE, SCALE being SCALE_MANTISSA * 2^SCALE_EXPONENT exactly.
 *
 * Memory: constants take 128 bytes, of these weights 64 (where all codes of a kernel fit 4 bits they are stored two to
 * a byte, in 2 bits four). Local arrays take at most MODEL_STACK_SIZE bytes of the stack at once; compilers keep some
 * hundred more there. */
#ifndef MODEL_H
#define MODEL_H

#include <stdint.h>

#define MODEL_BATCH 1
#define MODEL_ARENA_SIZE 8
#define MODEL_ARENA_ALIGN 1
#define MODEL_STACK_SIZE 32

/* For `static model_arena arena[MODEL_ARENA_LENGTH];`. Memory from an allocator serves as well. No byte of the arena is
 * ever used as more than one type wider than a character (int8_t, uint8_t), even where layers take turns, so C's rules
 * of aliasing hold at every level of optimization. */
typedef union {
    int8_t as_int8[1];
} model_arena;

#define MODEL_ARENA_LENGTH 8

/* x0: input/0, int8, 1x8, scale 0.016214434057474136 = 0x1.09a8440000000p-6, codes -128 to 127 */
#define MODEL_X0_SIZE 8
#define MODEL_X0_ZERO_POINT (-7)
#define MODEL_X0_SCALE_MANTISSA 4352529
#define MODEL_X0_SCALE_EXPONENT (-28)
#define MODEL_X0_MIN (-128)
#define MODEL_X0_MAX (127)

/* x1: input/1, int8, 1x8, scale 1.0 = 0x1.0000000000000p+0, codes -128 to 127 */
#define MODEL_X1_SIZE 8
#define MODEL_X1_ZERO_POINT (-128)
#define MODEL_X1_SCALE_MANTISSA 1
#define MODEL_X1_SCALE_EXPONENT (0)
#define MODEL_X1_MIN (-128)
#define MODEL_X1_MAX (127)

/* x2: input/2, bool, 1x8 */
#define MODEL_X2_SIZE 8

/* y0: select_n, int8, 1x8, scale 0.016454895958304405 = 0x1.0d98d60000000p-6, codes -128 to 127 */
#define MODEL_Y0_SIZE 8
#define MODEL_Y0_ZERO_POINT (-5)
#define MODEL_Y0_SCALE_MANTISSA 8834155
#define MODEL_Y0_SCALE_EXPONENT (-29)
#define MODEL_Y0_MIN (-128)
#define MODEL_Y0_MAX (127)

/* y1: add, int8, 1x8, scale 0.016454895958304405 = 0x1.0d98d60000000p-6, codes -128 to 127 */
#define MODEL_Y1_SIZE 8
#define MODEL_Y1_ZERO_POINT (-5)
#define MODEL_Y1_SCALE_MANTISSA 8834155
#define MODEL_Y1_SCALE_EXPONENT (-29)
#define MODEL_Y1_MIN (-128)
#define MODEL_Y1_MAX (127)

#ifdef __cplusplus
extern "C" {
#endif

void model_run(const int8_t *x0, const int8_t *x1, const uint8_t *x2, int8_t *y0, int8_t *y1, void *arena);

#ifdef __cplusplus
}
#endif

#endif /* MODEL_H */
