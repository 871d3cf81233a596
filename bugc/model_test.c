/* Runs model_run on golden vectors. Prints what differs; exits with 0 where nothing does. */
#include <stdint.h>
#include <stdio.h>

#include "model.h"

static const int8_t x0_0[8] = {
    -128, -128, -128, -128, -128, -128, -128, -128
};

static const uint8_t x1_0[8] = {
    0, 0, 0, 0, 0, 0, 0, 0
};

static const int8_t y_0[8] = {
    -128, 64, 16, -59, 125, -11, -83, 17
};

static const int8_t x0_1[8] = {
    127, 127, 127, 127, 127, 127, 127, 127
};

static const uint8_t x1_1[8] = {
    1, 1, 1, 1, 1, 1, 1, 1
};

static const int8_t y_1[8] = {
    127, -85, 19, 127, -128, 78, 127, 16
};

static const int8_t x0_2[8] = {
    -128, -80, -10, 64, -61, 127, 67, -25
};

static const uint8_t x1_2[8] = {
    1, 0, 0, 1, 0, 1, 1, 1
};

static const int8_t y_2[8] = {
    33, 80, 14, 127, 86, 59, 99, -75
};

static const int8_t x0_3[8] = {
    -96, 74, -128, 23, 35, 126, 76, -13
};

static const uint8_t x1_3[8] = {
    1, 0, 1, 1, 0, 0, 1, 0
};

static const int8_t y_3[8] = {
    -95, 78, -54, 87, 124, 100, 32, -74
};

static model_arena arena[MODEL_ARENA_LENGTH];

static int8_t y[8];

int main(void)
{
    long wrong = 0;
    long i;
    model_run(x0_0, x1_0, y, arena);
    for (i = 0; i < 8; i++) {
        if (y[i] != y_0[i]) {
            wrong++;
            printf("vector 0, y[%ld]: expected %ld, got %ld\n", i, (long)y_0[i], (long)y[i]);
        }
    }
    model_run(x0_1, x1_1, y, arena);
    for (i = 0; i < 8; i++) {
        if (y[i] != y_1[i]) {
            wrong++;
            printf("vector 1, y[%ld]: expected %ld, got %ld\n", i, (long)y_1[i], (long)y[i]);
        }
    }
    model_run(x0_2, x1_2, y, arena);
    for (i = 0; i < 8; i++) {
        if (y[i] != y_2[i]) {
            wrong++;
            printf("vector 2, y[%ld]: expected %ld, got %ld\n", i, (long)y_2[i], (long)y[i]);
        }
    }
    model_run(x0_3, x1_3, y, arena);
    for (i = 0; i < 8; i++) {
        if (y[i] != y_3[i]) {
            wrong++;
            printf("vector 3, y[%ld]: expected %ld, got %ld\n", i, (long)y_3[i], (long)y[i]);
        }
    }
    printf("model: %ld of 32 codes differ, arena of %ld bytes\n", wrong, (long)MODEL_ARENA_SIZE);
    return wrong == 0 ? 0 : 1;
}
