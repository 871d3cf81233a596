"""Division of integers with one rounding, written for numpy and `jax.numpy` alike.

The quotient of two tensors of codes, rounded once, is

    y = rint(c0 m / (c1 2^t)),  m 2^-t = s0 / (s1 s_y) with m below 2^30, t in [-14, 44]

exact for these m and t, ties to even. m is the ratio's 30 leading bits; a ratio below 2^-14 has fewer, and is exact to
2^-45. Numerator and divisor are below 2^62 for centered codes of 17 bits.
"""

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from qjax.numerics._namespace import host_or_trace, like_inputs, wide
from qjax.numerics.calls import named
from qjax.numerics.softfloat import Real

_BITS = 30
_LEAST, _MOST = -14, 44
_END = np.int64(1 << 20)
"""Beyond every code of 16 bits, even with a zero point added."""


@named(0)
def divide_to_even(xp: ModuleType, numerator: Any, divisor: Any) -> Any:
    """rint(numerator / divisor), ties to even, for kernels: nothing is checked.

    Arrays of namespace xp, of one signed dtype and shape; the divisor is positive and |numerator| below the type's
    greatest number. With q the floor and r = numerator - q divisor in [0, divisor), rounding up is right if `r >
    divisor - r`, or if they are equal and q is odd: neither side can overflow.
    """
    zero, one = numerator.dtype.type(0), numerator.dtype.type(1)
    quotient = truncated(xp, numerator, divisor)
    rest = numerator - quotient * divisor
    low = rest < zero
    quotient = xp.where(low, quotient - one, quotient)
    rest = xp.where(low, rest + divisor, rest)
    other = divisor - rest
    up = (rest > other) | ((rest == other) & ((quotient & one) == one))
    return xp.where(up, quotient + one, quotient)


def truncated(xp: ModuleType, numerator: Any, divisor: Any) -> Any:
    """C's integer division: towards zero."""
    if xp is jnp:
        return jax.lax.div(numerator, divisor)
    magnitude = np.abs(numerator) // np.abs(divisor)
    return np.where((numerator < 0) != (divisor < 0), -magnitude, magnitude)


def rounding_divide(numerator: ArrayLike, divisor: ArrayLike) -> Any:
    """rint(numerator / divisor), ties to even, exact.

    Args:
      numerator: int32 or int64 (JAX arrays of int64 only where 64-bit types are enabled), above the type's least
        number. divisor: of the same dtype, greater than 0; the two broadcast.

    Returns:
      Integers of that dtype: a numpy array for host inputs, a JAX array otherwise.

    Raises:
      TypeError: another dtype. ValueError: a divisor on the host that is not positive.
    """
    dtypes = {str(getattr(x, "dtype", type(x).__name__)) for x in (numerator, divisor)}
    if dtypes not in ({"int32"}, {"int64"}):
        raise TypeError(f"rounding_divide: expected two arrays of int32, or two of int64. Got {sorted(dtypes)}.")
    xp = like_inputs(numerator, divisor)
    if xp is np and np.any(np.asarray(divisor) <= 0):
        raise ValueError(f"rounding_divide: expected divisors greater than 0. Got {np.min(divisor)}.")
    with wide(xp):
        shape = np.broadcast_shapes(np.shape(numerator), np.shape(divisor))
        return divide_to_even(xp, *(xp.broadcast_to(xp.asarray(x), shape) for x in (numerator, divisor)))


def fold_quotient(x_scale: ArrayLike, divisor_scale: Any, y_scale: ArrayLike) -> dict[str, Any]:
    """The constants of `quotient`, int32 scalars: factor (m) and shift (t). Scales are float32, also traced."""
    ratio = Real.of(x_scale) / (Real.of(divisor_scale) * Real.of(y_scale))
    xp = host_or_trace(ratio.mantissa)
    with wide(xp):
        # ratio = mantissa * 2^exponent, with a mantissa of 53 bits.
        shift = xp.clip(np.int32(_BITS - 53) - ratio.exponent, np.int32(_LEAST), np.int32(_MOST)).astype(np.int32)
        factor = ratio.scale_by_power_of_two(shift).minimum(Real.of(np.float32(2.0**_BITS - 64)))
    return {"factor": factor.to_int32(), "shift": shift}


def quotient(dividend: ArrayLike, divisor: ArrayLike, constants: Any) -> Any:
    """int32 of one shape -> int32 in steps of y; a quotient beyond +-2^20 becomes +-2^20.

    A divisor of 0 results in +-2^20 by the sign of the dividend, and 0 / 0 in 0.
    """
    xp = like_inputs(dividend, divisor)
    with wide(xp):
        a, b = (xp.asarray(x).astype(np.int64) for x in (dividend, divisor))
        factor, shift = (
            xp.broadcast_to(xp.asarray(constants[name]).astype(np.int64), a.shape) for name in ("factor", "shift")
        )
        zero = np.int64(0)
        numerator = (abs(a) * factor) << xp.maximum(-shift, zero)
        below = xp.maximum(abs(b), np.int64(1)) << xp.maximum(shift, zero)
        found = xp.minimum(divide_to_even(xp, numerator, below), _END)
        found = xp.where(b == zero, xp.where(a == zero, zero, _END), found)
        return xp.where((a < zero) != (b < zero), -found, found).astype(np.int32)
