/* Runs model_run on golden vectors. Prints what differs; exits with 0 where nothing does. */
#include <stdint.h>
#include <stdio.h>

#include "model.h"

static const int8_t x0_0[8] = {
    -128, -128, -128, -128, -128, -128, -128, -128
};

static const int8_t x1_0[8] = {
    -128, -128, -128, -128, -128, -128, -128, -128
};

static const uint8_t x2_0[8] = {
    0, 0, 0, 0, 0, 0, 0, 0
};

static const int8_t y0_0[8] = {
    -5, -5, -5, -5, -5, -5, -5, -5
};

static const int8_t y1_0[8] = {
    -128, 91, -7, -128, 127, -62, -128, -4
};

static const int8_t x0_1[8] = {
    127, 127, 127, 127, 127, 127, 127, 127
};

static const int8_t x1_1[8] = {
    127, 127, 127, 127, 127, 127, 127, 127
};

static const uint8_t x2_1[8] = {
    1, 1, 1, 1, 1, 1, 1, 1
};

static const int8_t y0_1[8] = {
    127, 127, 127, 127, 127, 127, 127, 127
};

static const int8_t y1_1[8] = {
    127, 127, 127, 127, 127, 127, 127, 127
};

static const int8_t x0_2[8] = {
    -128, -80, -10, 64, -61, 127, 67, -25
};

static const int8_t x1_2[8] = {
    -13, 81, 115, 70, 127, -48, 48, 65
};

static const uint8_t x2_2[8] = {
    1, 0, 0, 0, 0, 0, 1, 1
};

static const int8_t y0_2[8] = {
    127, -5, -5, -5, -5, -5, 127, 127
};

static const int8_t y1_2[8] = {
    127, 127, 127, 127, 127, 127, 127, 127
};

static const int8_t x0_3[8] = {
    -93, -25, -128, -117, 47, -46, -37, 1
};

static const int8_t x1_3[8] = {
    -104, -128, 13, -10, -42, -80, -128, -58
};

static const uint8_t x2_3[8] = {
    0, 1, 0, 1, 1, 1, 0, 1
};

static const int8_t y0_3[8] = {
    -5, 105, -5, 127, 127, 127, -5, 127
};

static const int8_t y1_3[8] = {
    127, 105, 127, 127, 127, 127, -128, 127
};

static model_arena arena[MODEL_ARENA_LENGTH];

static int8_t y0[8];
static int8_t y1[8];

int main(void)
{
    long wrong = 0;
    long i;
    model_run(x0_0, x1_0, x2_0, y0, y1, arena);
    for (i = 0; i < 8; i++) {
        if (y0[i] != y0_0[i]) {
            wrong++;
            printf("vector 0, y0[%ld]: expected %ld, got %ld\n", i, (long)y0_0[i], (long)y0[i]);
        }
    }
    for (i = 0; i < 8; i++) {
        if (y1[i] != y1_0[i]) {
            wrong++;
            printf("vector 0, y1[%ld]: expected %ld, got %ld\n", i, (long)y1_0[i], (long)y1[i]);
        }
    }
    model_run(x0_1, x1_1, x2_1, y0, y1, arena);
    for (i = 0; i < 8; i++) {
        if (y0[i] != y0_1[i]) {
            wrong++;
            printf("vector 1, y0[%ld]: expected %ld, got %ld\n", i, (long)y0_1[i], (long)y0[i]);
        }
    }
    for (i = 0; i < 8; i++) {
        if (y1[i] != y1_1[i]) {
            wrong++;
            printf("vector 1, y1[%ld]: expected %ld, got %ld\n", i, (long)y1_1[i], (long)y1[i]);
        }
    }
    model_run(x0_2, x1_2, x2_2, y0, y1, arena);
    for (i = 0; i < 8; i++) {
        if (y0[i] != y0_2[i]) {
            wrong++;
            printf("vector 2, y0[%ld]: expected %ld, got %ld\n", i, (long)y0_2[i], (long)y0[i]);
        }
    }
    for (i = 0; i < 8; i++) {
        if (y1[i] != y1_2[i]) {
            wrong++;
            printf("vector 2, y1[%ld]: expected %ld, got %ld\n", i, (long)y1_2[i], (long)y1[i]);
        }
    }
    model_run(x0_3, x1_3, x2_3, y0, y1, arena);
    for (i = 0; i < 8; i++) {
        if (y0[i] != y0_3[i]) {
            wrong++;
            printf("vector 3, y0[%ld]: expected %ld, got %ld\n", i, (long)y0_3[i], (long)y0[i]);
        }
    }
    for (i = 0; i < 8; i++) {
        if (y1[i] != y1_3[i]) {
            wrong++;
            printf("vector 3, y1[%ld]: expected %ld, got %ld\n", i, (long)y1_3[i], (long)y1[i]);
        }
    }
    printf("model: %ld of 64 codes differ, arena of %ld bytes\n", wrong, (long)MODEL_ARENA_SIZE);
    return wrong == 0 ? 0 : 1;
}
