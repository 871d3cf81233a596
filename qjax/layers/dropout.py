"""`nnx.Dropout` as one marked operation; in evaluation mode it is absent."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from qjax.tracing import Layer, bind


def call(module: Any, base: type, x: jax.Array, *, deterministic: bool | None = None, rngs: Any = None) -> Any:
    """Drops the same elements as flax does from the same stream."""
    off = module.deterministic if deterministic is None else deterministic
    source = module.rngs if rngs is None else rngs
    if off is None or off or not 0.0 < module.rate < 1.0 or source is None:
        return base.__call__(module, x, deterministic=deterministic, rngs=rngs)
    if isinstance(source, nnx.Rngs):
        source = source[module.rng_collection]
    key = source if isinstance(source, jax.Array) else source()
    return dropped(x, key, module.rate, module.broadcast_dims)


def dropped(x: jax.Array, key: jax.Array, rate: float, broadcast_dims: Sequence[int]) -> jax.Array:
    """x with elements set to 0 at that rate, the same ones along `broadcast_dims`, and the others enlarged."""
    keep = 1.0 - rate
    shape = [1 if axis in {d % x.ndim for d in broadcast_dims} else n for axis, n in enumerate(x.shape)]

    def function(x: jax.Array, key: jax.Array) -> list[jax.Array]:
        mask = jnp.broadcast_to(jax.random.bernoulli(key, p=keep, shape=shape), x.shape)
        return [lax.select(mask, x / keep, jnp.zeros_like(x))]

    (y,) = bind(Layer("dropout", ("x", "key"), (("rate", float(rate)),), function), x, key)
    return y
