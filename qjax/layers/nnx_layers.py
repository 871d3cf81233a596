"""Turns `nnx.BatchNorm`, `Dropout` and `Embed` into one marked operation each."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from qjax.tracing import Layer, bind


def batch_norm(
    module: Any, base: type, x: jax.Array, use_running_average: bool | None = None, *, mask: Any = None
) -> Any:
    """The layer as flax computes it, including its statistics, in one equation. Evaluation does not read the mask.

    A layer with statistics over a mapped axis or with several feature axes is not marked, and the tracer reads its
    equations. Such a model converts in evaluation mode; in training mode it has other tensors, so its call is refused.
    """
    running = module.use_running_average if use_running_average is None else use_running_average
    axis = module.axis
    mapped = module.axis_name is not None and not running
    if running is None or not isinstance(axis, int) or mapped:
        return base.__call__(module, x, use_running_average, mask=mask)
    graphdef, state = nnx.split(module)
    paths, treedef = jax.tree_util.tree_flatten_with_path(state)
    names = tuple(_name(path) for path, _ in paths)
    masks = {} if running or mask is None else {"mask": mask}

    def function(x: jax.Array, *operands: jax.Array) -> list[jax.Array]:
        copy = nnx.merge(graphdef, treedef.unflatten(operands[: len(names)]))
        y = base.__call__(copy, x, use_running_average=running, **dict(zip(masks, operands[len(names) :], strict=True)))
        return [y] if running else [y, *jax.tree.leaves(nnx.state(copy))]

    attributes = {
        "epsilon": float(module.epsilon),
        "trailing": x.ndim - 1 - axis % x.ndim,
        "use_running_average": bool(running),
        **({} if running else {"updated": names}),
    }
    layer = Layer("batch_norm", ("x", *names, *masks), tuple(sorted(attributes.items())), function)
    y, *leaves = bind(layer, x, *(leaf for _, leaf in paths), *masks.values())
    if not running:
        nnx.update(module, treedef.unflatten(leaves))
    return y


def _name(path: Any) -> str:
    keys = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
    return next(key for key in keys if key in ("bias", "mean", "scale", "var"))


def dropout(module: Any, base: type, x: jax.Array, *, deterministic: bool | None = None, rngs: Any = None) -> Any:
    """Drop the elements that flax drops with the same stream; in evaluation mode nothing is recorded."""
    off = module.deterministic if deterministic is None else deterministic
    source = module.rngs if rngs is None else rngs
    # Test the rate first, as flax does, because the flag may be traced where there is no dropout.
    if not 0.0 < module.rate < 1.0 or source is None or off is None or off:
        return base.__call__(module, x, deterministic=deterministic, rngs=rngs)
    if isinstance(source, nnx.Rngs):
        source = source[module.rng_collection]
    key = source if isinstance(source, jax.Array) else source()
    return drop_elements(x, key, module.rate, module.broadcast_dims)


def drop_elements(x: jax.Array, key: jax.Array, rate: float, broadcast_dims: Sequence[int]) -> jax.Array:
    """x with random elements set to 0 at that rate (shared along `broadcast_dims`), and the others scaled up."""
    keep = 1.0 - rate
    shape = [1 if axis in {d % x.ndim for d in broadcast_dims} else n for axis, n in enumerate(x.shape)]

    def function(x: jax.Array, key: jax.Array) -> list[jax.Array]:
        mask = jnp.broadcast_to(jax.random.bernoulli(key, p=keep, shape=shape), x.shape)
        return [lax.select(mask, x / keep, jnp.zeros_like(x))]

    (y,) = bind(Layer("dropout", ("x", "key"), (("rate", float(rate)),), function), x, key)
    return y


def embed(module: Any, base: type, inputs: jax.Array, *args: Any, **kwargs: Any) -> Any:
    """The lookup as one equation."""
    if args or any(v is not None for v in kwargs.values()) or module.num_embeddings == 1:
        return base.__call__(module, inputs, *args, **kwargs)
    if not jnp.issubdtype(inputs.dtype, jnp.integer):
        raise ValueError(f"Embed: expected integer indices, got {inputs.dtype}.")
    (table,) = module.promote_dtype((module.embedding[...],), dtype=module.dtype, inexact=False)
    return look_up_rows(inputs, table)


def look_up_rows(inputs: jax.Array, table: jax.Array) -> jax.Array:
    """Look up rows of the table."""

    def function(indices: jax.Array, table: jax.Array) -> list[jax.Array]:
        return [jnp.take(table, indices, axis=0)]

    (y,) = bind(Layer("embed", ("indices", "table"), (), function), inputs, table)
    return y
