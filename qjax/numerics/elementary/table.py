"""Tables of an elementwise function: one output code per input code, correctly rounded from the real numbers.

Float64 intervals decide nearly all entries; those that they cannot decide (a tie, a jump, a domain's edge) are computed
with fractions and 60 digits, so no float function's last bit decides a code.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from jax.typing import ArrayLike

from qjax.numerics.elementary import reals
from qjax.numerics.elementary.bounds import point
from qjax.numerics.elementary.expression import Expression
from qjax.numerics.elementary.intervals import Steps

_MOST_CODES = 1 << 16


def table(
    expression: Expression,
    parameters: Sequence[Any],
    x_scale: ArrayLike,
    x_zero_point: Any,
    x_range: tuple[int, int],
    y_scale: ArrayLike,
    y_zero_point: Any,
    y_range: tuple[int, int],
) -> np.ndarray:
    """int32 output codes for the input codes x_range[0], ..., x_range[1].

    Entry of code q: clamp(rint(f((q - x_zero_point) * x_scale) / y_scale) + y_zero_point), ties to even, of the real
    function: scales, parameters and literals are the exact numbers that they hold. Infinite values are clamped.

    Args:
      parameters: those of the expression: floats, numpy scalars or arrays of one element; truth values as bool.
      x_scale, y_scale: finite and positive, scalars or arrays of one element. x_zero_point, y_zero_point: integers.

    Raises:
      ValueError: a scale or a parameter that is not finite, a range that is empty or holds more than 65,536 codes, an
        input for which the function has no value (the logarithm of -1): the message names it.
    """
    s_x, s_y = _scale("x_scale", x_scale), _scale("y_scale", y_scale)
    z_x, z_y = int(np.asarray(x_zero_point).reshape(())), int(np.asarray(y_zero_point).reshape(()))
    for name, (low, high) in (("x_range", x_range), ("y_range", y_range)):
        if not 0 <= high - low < _MOST_CODES:
            raise ValueError(f"table: {name} must hold 1 to {_MOST_CODES} codes. Got {low} to {high}.")
    known = _parameters(expression, parameters)
    # At most 17 + 24 bits, so exact in float64.
    x = (np.arange(x_range[0], x_range[1] + 1) - z_x).astype(np.float64) * s_x
    low, high = y_range[0] - z_y, y_range[1] - z_y

    steps = Steps(x.shape)
    with np.errstate(all="ignore"):
        value = steps.run(expression, x, known)
        ends = steps.quotient(value, point(s_y))
        bottom, top = (np.broadcast_to(np.clip(np.rint(end), low, high), x.shape) for end in ends)
    unsure = steps.unsure | ~(bottom == top)
    centred = np.where(unsure, 0, bottom).astype(np.int64)
    for index in np.flatnonzero(unsure).tolist():
        exact = reals.evaluate(expression, Fraction(float(x[index])), known)
        if isinstance(exact, float) and np.isnan(exact):
            raise ValueError(
                f"table: the function has no value at {float(x[index]):.9g}, the input's code {x_range[0] + index} "
                f"(scale {s_x:.9g}, zero point {z_x}). Every code of the input needs a value, even codes that never "
                "occur in the data: bound the input (relu, clip, abs), guard the function (jnp.where), or give an "
                "input that is never negative an asymmetric quantizer."
            )
        centred[index] = reals.code(exact, Fraction(s_y), low, high)
    return (centred + z_y).astype(np.int32)


def evaluate(expression: Expression, x: Any, parameters: Sequence[Any] = ()) -> float:
    """The function of one real number, rounded once to float64; nan and infinities are returned unchanged."""
    value = reals.evaluate(expression, Fraction(x), _parameters(expression, parameters))
    return float(value)


def _scale(name: str, value: ArrayLike) -> float:
    scale = float(np.asarray(value).astype(np.float64).reshape(()))
    if not (np.isfinite(scale) and scale > 0):
        raise ValueError(f"table: {name} must be finite and positive. Got {scale}.")
    return scale


def _parameters(expression: Expression, parameters: Sequence[Any]) -> list[Any]:
    if len(parameters) != expression.parameters:
        raise ValueError(f"table: expected {expression.parameters} parameters, got {len(parameters)}.")
    known: list[Any] = []
    for index, parameter in enumerate(parameters):
        array = np.asarray(parameter).reshape(())
        value = bool(array) if array.dtype == np.bool_ else float(array.astype(np.float64))
        if not np.isfinite(value):
            raise ValueError(f"table: parameter {index} must be finite. Got {value}.")
        known.append(value)
    return known
