"""Keeps XLA from fusing a float32 product with the operation that reads it."""

import jax
import jax.numpy as jnp
import numpy as np

_LOWEST = np.float32(np.finfo(np.float32).min)


def unfused(product: jax.Array) -> jax.Array:
    """The product, rounded to float32 before it is used, in eager mode and under jit alike.

    Under jit, XLA turns `a * b + c` into a fused multiply-add, which rounds once where eager and numpy round twice. It
    also merges the constants of `x * c1 * c2`. `optimization_barrier` and `reduce_precision` prevent neither. A maximum
    with the lowest finite number does: it commutes with no multiplication, and the compiler must keep it, because it
    changes -inf to that number. All other values, NaN included, pass through.
    """
    return jnp.maximum(product, _LOWEST)
