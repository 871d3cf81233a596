"""Codes minus their zero point."""

import jax
import jax.numpy as jnp

from qjax.ops.base import Constants


def centered(codes: jax.Array, constants: Constants, index: int) -> jax.Array:
    """int32 `codes - zero_point` of data input `index`."""
    return codes.astype(jnp.int32) - jnp.broadcast_to(jnp.asarray(constants[f"zero_point{index}"]), codes.shape)
