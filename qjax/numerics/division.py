"""Division of integers with one rounding, written for numpy and `jax.numpy` alike."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qjax.numerics._namespace import like_inputs, wide


def divide_to_even(xp: Any, numerator: Any, divisor: Any) -> Any:
    """rint(numerator / divisor), ties to even: for kernels, nothing is checked.

    Arrays of namespace xp, of one signed dtype and shape; the divisor is positive and |numerator| below the type's
    greatest number. With q the floor and r = numerator - q divisor in [0, divisor), rounding up is right where
    `r > divisor - r`, or where they are equal and q is odd: neither side can overflow.
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


def truncated(xp: Any, numerator: Any, divisor: Any) -> Any:
    """C's integer division: towards zero."""
    if xp is jnp:
        return jax.lax.div(numerator, divisor)
    magnitude = np.abs(numerator) // np.abs(divisor)
    return np.where((numerator < 0) != (divisor < 0), -magnitude, magnitude)


def rounding_divide(numerator: Any, divisor: Any) -> Any:
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
