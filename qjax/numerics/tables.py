"""Tables of 8-bit functions as runtimes compute them: one output code for each input code.

| method | who | code of q, before clamping |
| --- | --- | --- |
| `exact` | ONNX Runtime, PyTorch | rint(f((q - z_x) s_x) / s_y) + z_y over real numbers, see `lookup` |
| `gemmlowp` | TFLite Micro, CMSIS-NN | 32-bit fixed point: see `gemmlowp` |
| `tflite` | LiteRT, reference and optimised | round(f(v) * (1/s_y)) + z_y, ties away from zero |
| `xnnpack` | LiteRT's default, XNNPACK | rint(f(v) * (1/s_y) + z_y), ties to even |

with v = s_x * (q - z_x), and every step of the last two in float32. Their tanh is the C library's tanhf; sigmoid is 1 /
(1 + expf(-v)) with each step rounded to float32 in `tflite`, and correctly rounded to float32 in `xnnpack`. The last
three seldom differ from `exact`: on random int8 grids of the input, `gemmlowp` differs in 1 of 79,616 codes of the
sigmoid and in 2 of 79,616 of tanh, each by one (311 grids of scales between 2^-12 and 4), and none of the three in any
of 61,696 codes of each function (241 grids of scales between 2^-9 and 2^-2, outputs on the grids of TFLite's kernels).
"""

from decimal import Decimal, localcontext
from typing import Literal, get_args

import numpy as np

from qjax.numerics import libm
from qjax.numerics.gemmlowp import gemmlowp_table
from qjax.numerics.lookup import FUNCTIONS, lookup_table

TableMethod = Literal["exact", "gemmlowp", "tflite", "xnnpack"]

TABLE_METHODS: tuple[TableMethod, ...] = get_args(TableMethod)

GEMMLOWP_GRIDS = {"logistic": (2.0**-8, -128), "tanh": (2.0**-7, 0)}
"""(scale, zero point) of the output: the only ones for which TFLite has int8 kernels of these functions."""


def function_table(
    method: TableMethod,
    function: str,
    x_scale: float | np.floating,
    x_zero_point: int,
    y_scale: float | np.floating,
    y_zero_point: int,
    *,
    x_range: tuple[int, int] = (-128, 127),
    y_range: tuple[int, int] = (-128, 127),
) -> np.ndarray:
    """int32 output codes for the input codes x_range[0], ..., x_range[1] of "logistic" or "tanh".

    method: one of the table above. Scales are float32 numbers.

    Raises:
      ValueError: an unknown method or function, a scale that is not finite and positive, an empty range, or for
        `gemmlowp` other codes than int8, or another output grid than the one that TFLite fixes.
    """
    if method not in TABLE_METHODS:
        raise ValueError(f"function_table: expected a method among {', '.join(TABLE_METHODS)}. Got {method!r}.")
    if method == "gemmlowp":
        table = gemmlowp_table(function, x_scale, x_zero_point)
        given = (float(y_scale), int(y_zero_point)), x_range, y_range
        wanted = GEMMLOWP_GRIDS[function], (-128, 127), (-128, 127)
        if given != wanted:
            raise ValueError(
                f"function_table: gemmlowp's {function} takes and returns int8 codes, those of the output with scale "
                f"{wanted[0][0]} and zero point {wanted[0][1]}. Got scale {y_scale} and zero point {y_zero_point}, "
                f"codes {x_range} and {y_range}."
            )
        return table
    if method == "exact":
        return lookup_table(function, x_scale, x_zero_point, y_scale, y_zero_point, x_range=x_range, y_range=y_range)
    return _float32_table(method, function, x_scale, x_zero_point, y_scale, y_zero_point, x_range, y_range)


def _float32_table(
    method: TableMethod,
    function: str,
    x_scale: float | np.floating,
    x_zero_point: int,
    y_scale: float | np.floating,
    y_zero_point: int,
    x_range: tuple[int, int],
    y_range: tuple[int, int],
) -> np.ndarray:
    """LUTPopulate of TFLite's lut.h and XNNPACK's reference kernels, LiteRT 2.3.0: see the module's table."""
    if function not in FUNCTIONS:
        raise ValueError(f"function_table: expected a function among {', '.join(FUNCTIONS)}. Got {function!r}.")
    scales = np.float32(x_scale), np.float32(y_scale)
    if not all(np.isfinite(s) and s > 0 for s in scales):
        raise ValueError(f"function_table: scales must be finite and positive. Got {scales[0]} and {scales[1]}.")
    if x_range[0] > x_range[1] or y_range[0] > y_range[1]:
        raise ValueError(f"function_table: ranges must not be empty. Got {x_range} and {y_range}.")
    centred = np.arange(x_range[0], x_range[1] + 1) - x_zero_point
    v = scales[0] * centred.astype(np.float32)
    if function == "tanh":
        y = libm.tanhf(v)
    elif method == "tflite":
        one = np.float32(1)
        y = one / (one + libm.expf(-v))
    else:
        y = _nearest_logistic(v)
    steps = y * (np.float32(1) / scales[1])
    if method == "tflite":
        # exact in doubles
        doubles = steps.astype(np.float64)
        codes = np.copysign(np.floor(np.abs(doubles) + 0.5), doubles) + y_zero_point
    else:
        codes = np.rint(steps + np.float32(y_zero_point))
    return np.clip(codes, *y_range).astype(np.int32)


def _nearest_logistic(v: np.ndarray) -> np.ndarray:
    """The float32 nearest to the sigmoid: XNNPACK computes it in doubles."""
    with localcontext() as context:
        context.prec = 60
        return np.array([float(FUNCTIONS["logistic"](Decimal(float(x)))) for x in v]).astype(np.float32)
