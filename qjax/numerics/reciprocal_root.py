"""Square roots and their reciprocals in integers, in a fixed number of steps, exact or with a proven error.

They are written for numpy and `jax.numpy` alike; numbers are int64 below 2^62.
"""

from types import ModuleType
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

from qjax.numerics._namespace import like_inputs, wide
from qjax.numerics.calls import named
from qjax.numerics.division import divide_to_even

RECIPROCAL_BITS = 61
"""`reciprocal_root`'s unit: 2^61 over a root in [2^30, 2^31)."""

_I = np.int64
_LIMIT = 1 << 62


def integer_sqrt(x: ArrayLike) -> Any:
    """floor(sqrt(x)), exact.

    Args:
      x: int64 in [0, 2^62): a numpy array, or a JAX array where 64-bit types are enabled.

    Raises:
      TypeError: another dtype. ValueError: a number out of range, on the host.

    Examples:
      >>> import numpy as np
      >>> from qjax import numerics
      >>> print(numerics.integer_sqrt(np.int64([15, 16, 17])))
      [3 4 4]
    """
    xp = _checked("integer_sqrt", x, 0)
    with wide(xp):
        lifted, half = lift(xp, xp.maximum(xp.asarray(x), _I(1)))
        # floor(sqrt(4^h x)) = floor(2^h sqrt(x)), whose floor over 2^h is that of sqrt(x)
        return xp.where(xp.asarray(x) == _I(0), _I(0), lifted_root(xp, lifted) >> half)


def integer_rsqrt(x: ArrayLike) -> tuple[Any, Any]:
    """(r, h) with 1 / sqrt(x) = r 2^(h - 61) (1 + e): r = rint(2^61 / floor(sqrt(4^h x))) in [2^30, 2^31].

    h is the greatest for which 4^h x is below 2^62, so the root has 31 bits; its floor and the rounding of the
    quotient leave e within (-2^-31, 2^-30 + 2^-31].

    Args:
      x: int64 in [1, 2^62): a numpy array, or a JAX array where 64-bit types are enabled.

    Raises:
      TypeError: another dtype. ValueError: a number out of range, on the host.

    Examples:
      >>> import numpy as np
      >>> from qjax import numerics
      >>> r, h = numerics.integer_rsqrt(np.int64(16))
      >>> float(r) * 2.0 ** (int(h) - 61)
      0.25
    """
    xp = _checked("integer_rsqrt", x, 1)
    with wide(xp):
        return reciprocal_root(xp, xp.asarray(x))


def reciprocal_root(xp: ModuleType, x: ArrayLike) -> tuple[Any, Any]:
    """`integer_rsqrt` for kernels: takes an array of namespace xp and checks nothing."""
    lifted, half = lift(xp, x)
    root = lifted_root(xp, lifted)
    return divide_to_even(xp, xp.full_like(root, _I(1 << RECIPROCAL_BITS)), root), half


@named(0)
def lift(xp: ModuleType, x: Any) -> tuple[Any, Any]:
    """(4^h x, h): into [2^60, 2^62), for x in [1, 2^62)."""
    half = xp.zeros_like(x)
    for step in (16, 8, 4, 2, 1):
        small = x < _I(_LIMIT >> (2 * step))
        x = xp.where(small, x << _I(2 * step), x)
        half = xp.where(small, half + _I(step), half)
    return x, half


@named(0)
def lifted_root(xp: ModuleType, x: Any) -> Any:
    """floor(sqrt(x)) for x in [2^60, 2^62).

    With s = x / 2^62 in [1/4, 1): the tangent (s + 1/2) / sqrt(2) is at least sqrt(s), and at most 6.07% above it. A
    step y' = (y + x / y) / 2 turns a relative error of e into e^2 / (2 + 2 e): 1.8e-3, 1.6e-6, 1.2e-12, which is below
    0.003 of a step; with floors, y' stays at least floor(sqrt(x)). Finally 1 is subtracted where y^2 > x.
    """
    y = ((((x >> _I(31)) + _I((1 << 30) + 1)) * _I(46341)) >> _I(16)) + _I(1)
    for _ in range(3):
        y = (y + _quotient(xp, x, y)) >> _I(1)
    return xp.where(y * y > x, y - _I(1), y)


def _quotient(xp: ModuleType, a: Any, b: Any) -> Any:
    # of positive numbers
    return a // b if xp is np else jax.lax.div(a, b)


def _checked(name: str, x: ArrayLike, least: int) -> Any:
    dtype = str(getattr(x, "dtype", type(x).__name__))
    if dtype != "int64":
        raise TypeError(f"{name}: expected an array of int64. Got {dtype}.")
    xp = like_inputs(x)
    if xp is np and np.size(x) and not (np.min(x) >= least and np.max(x) < _LIMIT):
        raise ValueError(f"{name}: expected numbers within [{least}, 2^62). Got {np.min(x)} to {np.max(x)}.")
    return xp
