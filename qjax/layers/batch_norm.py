"""`nnx.BatchNorm` as one marked operation."""

from typing import Any

import jax
from flax import nnx

from qjax.tracing import Layer, bind


def call(module: Any, base: type, x: jax.Array, use_running_average: bool | None = None, **kwargs: Any) -> Any:
    """The layer as flax computes it, statistics included, in one equation.

    With a mask or statistics over a mapped axis the layer is left to the tracer as it is: such a model trains,
    and converts in evaluation mode, where neither plays a part.
    """
    running = module.use_running_average if use_running_average is None else use_running_average
    axis = module.axis
    if running is None or kwargs.get("mask") is not None or not isinstance(axis, int):
        return base.__call__(module, x, use_running_average, **kwargs)
    if module.axis_name is not None and not running:
        return base.__call__(module, x, use_running_average, **kwargs)
    graphdef, state = nnx.split(module)
    paths, treedef = jax.tree_util.tree_flatten_with_path(state)
    names = tuple(_name(path) for path, _ in paths)

    def function(x: jax.Array, *leaves: jax.Array) -> list[jax.Array]:
        copy = nnx.merge(graphdef, treedef.unflatten(leaves))
        y = base.__call__(copy, x, use_running_average=running)
        return [y] if running else [y, *jax.tree.leaves(nnx.state(copy))]

    attributes = {
        "epsilon": float(module.epsilon),
        "trailing": x.ndim - 1 - axis % x.ndim,
        "use_running_average": bool(running),
    }
    layer = Layer("batch_norm", ("x", *names), tuple(sorted(attributes.items())), function)
    y, *leaves = bind(layer, x, *(leaf for _, leaf in paths))
    if not running:
        nnx.update(module, treedef.unflatten(leaves))
    return y


def _name(path: Any) -> str:
    keys = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
    return next(key for key in keys if key in ("bias", "mean", "scale", "var"))
