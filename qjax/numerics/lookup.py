"""Tables of 8-bit functions: every output code, correctly rounded from the real numbers.

A table has one entry per input code, computed on the host with 60 decimal digits, so no float function's last bit
decides one. TFLite's and ONNX Runtime's int8 sigmoid and tanh have the same entries.
"""

from collections.abc import Callable, Mapping
from decimal import ROUND_HALF_EVEN, Decimal, localcontext

import numpy as np

_DIGITS = 60
_FLAT = Decimal(300)
"""Beyond |x| = 300 both functions are within 10^-130 of their limits, so exp need not be computed there."""


def _logistic(x: Decimal) -> Decimal:
    bounded = min(max(x, -_FLAT), _FLAT)
    return 1 / (1 + (-bounded).exp())


def _tanh(x: Decimal) -> Decimal:
    power = (2 * min(max(x, -_FLAT), _FLAT)).exp()
    return (power - 1) / (power + 1)


FUNCTIONS: Mapping[str, Callable[[Decimal], Decimal]] = {"logistic": _logistic, "tanh": _tanh}


def lookup_table(
    function: str,
    x_scale: float | np.floating,
    x_zero_point: int,
    y_scale: float | np.floating,
    y_zero_point: int,
    *,
    x_range: tuple[int, int] = (-128, 127),
    y_range: tuple[int, int] = (-128, 127),
) -> np.ndarray:
    """int32 output codes for the input codes x_range[0], ..., x_range[1].

    Entry of code q: clamp(rint(f((q - x_zero_point) * x_scale) / y_scale) + y_zero_point), ties to even; scales are
    taken exactly as the floats that they are.

    Raises:
      ValueError: an unknown function, a scale that is not finite and positive, an empty range.
    """
    if function not in FUNCTIONS:
        raise ValueError(f"lookup_table: expected a function among {', '.join(FUNCTIONS)}, got {function!r}.")
    scales = float(x_scale), float(y_scale)
    if not all(np.isfinite(s) and s > 0 for s in scales):
        raise ValueError(f"lookup_table: scales must be finite and positive. Got {scales[0]} and {scales[1]}.")
    if x_range[0] > x_range[1] or y_range[0] > y_range[1]:
        raise ValueError(f"lookup_table: ranges must not be empty. Got {x_range} and {y_range}.")
    with localcontext() as context:
        context.prec = _DIGITS
        step, out = Decimal(scales[0]), Decimal(scales[1])
        codes = [
            int((FUNCTIONS[function]((q - x_zero_point) * step) / out).to_integral_value(ROUND_HALF_EVEN))
            for q in range(x_range[0], x_range[1] + 1)
        ]
    return np.clip(np.array(codes, np.int64) + y_zero_point, *y_range).astype(np.int32)
