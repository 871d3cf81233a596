"""The fused multiply-add of processors: `a * b + c`, rounded once to float32.

XLA has no such operation, and decides itself whether it fuses. So the exact product and the exact sums are computed as
pairs of floats (Dekker, Veltkamp, Knuth), and rounded once.
"""

import jax
import jax.numpy as jnp
import numpy as np

from qjax.numerics.unfused import unfused

_SPLIT = np.float32(2**12 + 1)


def fused_multiply_add(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    """`a * b + c` of float32, rounded once, ties to even.

    It is exact if products are zero, or between 2**-100 and 2**100, and a and b are below 2**100. Outside of that the
    parts of a product may vanish or overflow.

    Args:
      a, b, c: float32, of one shape.
    """
    product = unfused(a * b)
    # what the rounding removed from the product
    lost = _lost(a, b, product)
    total, rest = _two_sum(product, c)
    small, smaller = _two_sum(rest, lost)
    result = total + small
    # Exactly between two floats, `smaller` decides, which is too small to change `small`.
    left = small - (result - total)
    other = result + (left + left)
    tie = (left != 0) & (other - result == left + left)
    away = tie & (smaller != 0) & ((smaller > 0) == (left > 0))
    return jnp.where(away, other, result)


def _lost(a: jax.Array, b: jax.Array, product: jax.Array) -> jax.Array:
    (a_high, a_low), (b_high, b_low) = _halves(a), _halves(b)
    # Every product of halves is exact, so it does not matter whether a compiler fuses it with the sum.
    high = unfused(a_high * b_high) - product
    return unfused(a_low * b_low) + (unfused(a_low * b_high) + (unfused(a_high * b_low) + high))


def _halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x as a sum of two floats with 12 bits each."""
    wide = unfused(x * _SPLIT)
    high = wide - (wide - x)
    return high, x - high


def _two_sum(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The rounded sum, and what the rounding removed from it."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)
