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

/* x1: input/1, bool, 1x8 */
#define MODEL_X1_SIZE 8

/* y: l, int8, 1x8, scale 0.01706412248313427 = 0x1.17941e0000000p-6, codes -128 to 127 */
#define MODEL_Y_SIZE 8
#define MODEL_Y_ZERO_POINT (17)
#define MODEL_Y_SCALE_MANTISSA 9161231
#define MODEL_Y_SCALE_EXPONENT (-29)
#define MODEL_Y_MIN (-128)
#define MODEL_Y_MAX (127)

#ifdef __cplusplus
extern "C" {
#endif

void model_run(const int8_t *x0, const uint8_t *x1, int8_t *y, void *arena);

#ifdef __cplusplus
}
#endif

#endif /* MODEL_H */
