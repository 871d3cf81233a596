"""Fixed-point multipliers and the two gemmlowp primitives that multiply with them.

Everything here runs on numpy arrays on the host and on JAX arrays, with the same bits.
"""

from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from qjax.numerics._namespace import host_or_trace, like_inputs, wide
from qjax.numerics.rounding import Rounding, right_shift_with_headroom, rounding_right_shift
from qjax.numerics.softfloat import Real

MIN_SHIFT, MAX_SHIFT = -31, 30
_INT32_MIN, _INT32_MAX = -(2**31), 2**31 - 1


class Multiplier(NamedTuple):
    """A nonnegative real as multiplier * 2^(shift - 31).

    Attributes:
      multiplier: int32, in [2^30, 2^31), or 0.
      shift: int32 of the same shape, in [-31, 30]; 0 where the multiplier is 0.

    Examples:
      >>> from qjax import numerics
      >>> multiplier, shift = numerics.quantize_multiplier(0.3)
      >>> float(multiplier) * 2.0 ** (int(shift) - 31)
      0.30000000004656613
    """

    multiplier: Any
    shift: Any


def effective_scale(s_x: ArrayLike, s_w: ArrayLike, s_y: ArrayLike, *, form: Literal["f64", "f32"] = "f64") -> Real:
    """The factor from accumulator to output codes, s_x * s_w / s_y, as C computes it in doubles.

    "f64": double(s_x) * double(s_w) / double(s_y), as TFLite's PopulateConvolutionQuantizationParams does for
    per-channel scales. "f32": double(float32(s_x * s_w)) / double(s_y), as its
    GetQuantizedConvolutionMultipler does for per-tensor scales: the product is rounded to float32 first. The
    two differ in the last bits of the multiplier, and the codes show it.

    Rounded to float32, as the float32 rules do, "f32" is also float32(float32(s_x * s_w) / s_y), the scale of
    runtimes that compute in float32 throughout (ONNX Runtime, XNNPACK, QNNPACK): a quotient of two float32 is
    never so near to the middle between two others that rounding it to a double first matters, as 53 >= 2 * 24 + 2.

    Args:
      s_x: the scale of the input: a `Real` or float32 (a Python float or float64 is taken as it is, a
        double).
      s_w: the scale of the weights, alike; the three broadcast by numpy's rules.
      s_y: the scale of the output, alike.
      form: which of the two.

    Returns:
      A `Real` of the broadcast shape.

    Raises:
      ValueError: another form, or NaN or infinity on the host.
      ZeroDivisionError: s_y contains 0, on the host.

    Examples:
      >>> from qjax import numerics
      >>> float(numerics.effective_scale(0.5, 0.25, 0.125).to_float32())
      1.0
    """
    product = Real.of(s_x) * Real.of(s_w)
    if form == "f32":
        product = Real.of(product.to_float32())
    elif form != "f64":
        raise ValueError(f"form must be 'f64' or 'f32'. Got {form!r}.")
    return product / Real.of(s_y)


def quantize_multiplier(effective_scale: Any) -> Multiplier:
    """The `Multiplier` nearest to a nonnegative real: TFLite's QuantizeMultiplier.

    In real numbers: e = q * 2^shift with q in [1/2, 1) (frexp), and multiplier = round(q * 2^31), ties away from
    zero. A q that rounds up to 1 becomes 2^30 with the next shift. A shift below -31 results in (0, 0): such a
    product rounds to 0 for every int32 operand. With a mantissa m in [2^52, 2^53) and q = m / 2^53, round(q *
    2^31) is (m + 2^21) >> 22.

    Args:
      effective_scale: a `Real`, or a float or float array (float32 is exact), any shape.

    Returns:
      int32 numpy arrays for host inputs, JAX arrays inside a trace.

    Raises:
      ValueError: on the host, a negative number, or 2^30 and more (a shift above 30, which no rule supports).
        Inside a trace, where values cannot be checked, a negative number results in (0, 0) and a number too great
        saturates to (2^31 - 1, 30), as TFLite's single-rounding build does.

    Examples:
      >>> from qjax import numerics
      >>> multiplier, shift = numerics.quantize_multiplier(0.75)
      >>> int(multiplier) == 3 * 2**29, int(shift)
      (True, 0)
    """
    e = Real.of(effective_scale)
    xp = host_or_trace(e.sign, e.mantissa, e.exponent)

    def compute(e: Real) -> Multiplier:
        rounded = (e.mantissa + np.uint64(1 << 21)) >> np.uint64(22)
        carry = rounded == np.uint64(1 << 31)
        multiplier = xp.where(carry, np.uint64(1 << 30), rounded).astype(np.int32)
        shift = e.exponent + np.int32(53) + carry.astype(np.int32)
        if xp is np:
            _check(e, shift)
        nothing = (e.sign <= 0) | (shift < MIN_SHIFT)
        huge = shift > MAX_SHIFT
        multiplier = xp.where(huge, np.int32(_INT32_MAX), multiplier)
        shift = xp.minimum(shift, np.int32(MAX_SHIFT))
        zero = np.int32(0)
        return Multiplier(xp.where(nothing, zero, multiplier), xp.where(nothing, zero, shift))

    return e.read(compute)


def saturating_rounding_doubling_high_mul(a: Any, b: Any) -> Any:
    """The high 32 bits of 2 * a * b, rounded: gemmlowp's SaturatingRoundingDoublingHighMul, NEON's SQRDMULH.

    In real numbers, with a and b as Q31 fractions: (a 2^-31) (b 2^-31) = result 2^-31, so result = a b / 2^31,
    rounded to nearest with ties up, floor((a b + 2^30) / 2^31). gemmlowp writes it as a truncating division
    with the nudge 2^30 for a b >= 0 and 1 - 2^30 below: for a negative product the division rounds up, and
    -(2^30) + 1 turns that into the same floor. The one product out of range, MIN * MIN = 2^62, saturates to
    2^31 - 1.

    Args:
      a: int32.
      b: int32, broadcasting with a by numpy's rules.

    Returns:
      int32: numpy for host inputs, a JAX array where one of the inputs is.

    Raises:
      TypeError: an operand is not int32.

    Examples:
      >>> import numpy as np
      >>> from qjax import numerics
      >>> half = np.int32(2**30)  # 0.5 in Q31
      >>> int(numerics.saturating_rounding_doubling_high_mul(half, half)) == 2**29
      True
    """
    xp, a, b = _int32_pair(a, b)
    with wide(xp):
        product = a.astype(np.int64) * b.astype(np.int64)
        high = right_shift_with_headroom(xp, product, np.int64(31), Rounding.NEAREST_UP)
        return xp.minimum(high, np.int64(_INT32_MAX)).astype(np.int32)


def rounding_divide_by_power_of_two(x: ArrayLike, exponent: ArrayLike) -> Any:
    """Divide x by 2^exponent, ties away from zero: gemmlowp's RoundingDivideByPOT.

    gemmlowp adds 1 to the floor where the remainder exceeds (2^exponent - 1) >> 1, plus 1 for a negative x:
    the tie moves away from zero on both sides. An arithmetic shift with rounding, SRSHL, differs: its ties go
    up.

    Args:
      x: int32.
      exponent: integers in [0, 31], broadcasting with x.

    Returns:
      int32: numpy for host inputs, a JAX array where one of the inputs is.

    Examples:
      >>> import numpy as np
      >>> from qjax import numerics
      >>> print(numerics.rounding_divide_by_power_of_two(np.int32([5, 6, -6]), np.int32(2)))
      [ 1  2 -2]
    """
    return rounding_right_shift(x, exponent, Rounding.NEAREST_AWAY)


def _check(e: Real, shift: Any) -> None:
    if np.any(e.sign < 0):
        worst = np.min(e.to_float64())
        raise ValueError(f"an effective scale must be at least 0. Got {worst}; scales are positive.")
    too_great = (shift > MAX_SHIFT) & (e.sign > 0)
    if np.any(too_great):
        worst = np.max(e.to_float64())
        raise ValueError(
            f"an effective scale must be below 2^30. Got {worst}; check s_x * s_w / s_y: "
            "the output's scale is far too small for its input."
        )


def _int32_pair(a: Any, b: Any) -> tuple[Any, Any, Any]:
    xp = like_inputs(a, b)
    pair: list[Any] = []
    for v in (a, b):
        v = np.int32(v) if isinstance(v, int) and not isinstance(v, bool) else v
        dtype = str(getattr(v, "dtype", type(v).__name__))
        if dtype != "int32":
            raise TypeError(f"operands must be int32. Got {dtype}.")
        pair.append(xp.asarray(v))
    shape = jnp.broadcast_shapes(pair[0].shape, pair[1].shape)
    return xp, *(xp.broadcast_to(v, shape) for v in pair)
