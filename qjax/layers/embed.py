"""`nnx.Embed` as one marked operation."""

from typing import Any

import jax
import jax.numpy as jnp

from qjax.tracing import Layer, bind


def call(module: Any, base: type, inputs: jax.Array, *args: Any, **kwargs: Any) -> Any:
    """The lookup in one equation."""
    if args or any(v is not None for v in kwargs.values()) or module.num_embeddings == 1:
        return base.__call__(module, inputs, *args, **kwargs)
    if not jnp.issubdtype(inputs.dtype, jnp.integer):
        raise ValueError(f"Embed: expected integer indices, got {inputs.dtype}.")
    (table,) = module.promote_dtype((module.embedding[...],), dtype=module.dtype, inexact=False)
    return looked_up(inputs, table)


def looked_up(inputs: jax.Array, table: jax.Array) -> jax.Array:
    """Rows of the table."""

    def function(indices: jax.Array, table: jax.Array) -> list[jax.Array]:
        return [jnp.take(table, indices, axis=0)]

    (y,) = bind(Layer("embed", ("indices", "table"), (), function), inputs, table)
    return y
