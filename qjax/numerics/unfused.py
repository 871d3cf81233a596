"""Keeping a product a product."""

import jax
import jax.numpy as jnp
import numpy as np

_LOWEST = np.float32(np.finfo(np.float32).min)


def unfused(product: jax.Array) -> jax.Array:
    """A float32 product that is rounded before anything else is done with it, in eager and under jit alike.

    Under jit, XLA turns `a * b + c` into a fused multiply-add, which rounds once where eager and numpy round
    twice, and merges the constants of `x * c1 * c2` into one. `optimization_barrier` and `reduce_precision`
    prevent neither. A maximum with the lowest finite number does: it commutes with no multiplication, and a
    compiler may not drop it, because it changes one value, -inf, into that number. Everything else, NaN
    included, passes through.
    """
    return jnp.maximum(product, _LOWEST)
