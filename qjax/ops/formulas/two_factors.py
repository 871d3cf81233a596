"""A sum of two codes with integer factors and one shift, in 64 bits, as several runtimes compute additions."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from qjax.numerics._namespace import wide
from qjax.numerics.rounding import Rounding, right_shift_with_headroom


def shifted_sum(operands: Sequence[jax.Array], constants: Mapping[str, Any], ties: Rounding) -> jax.Array:
    """round((factor0 * a + factor1 * b) / 2^shift), int64.

    Args:
      operands: a and b, centred codes, which broadcast. constants: factor0, factor1, shift. ties: how ties round.
    """
    shape = jnp.broadcast_shapes(*(codes.shape for codes in operands))
    with wide(jnp):
        total = jnp.zeros(shape, jnp.int64)
        for i, codes in enumerate(operands):
            factor = jnp.asarray(constants[f"factor{i}"]).astype(jnp.int64)
            total = total + jnp.broadcast_to(codes.astype(jnp.int64), shape) * jnp.broadcast_to(factor, shape)
        shift = jnp.broadcast_to(jnp.asarray(constants["shift"]).astype(jnp.int64), shape)
        return right_shift_with_headroom(jnp, total, shift, ties)
