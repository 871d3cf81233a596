"""Turns `nnx.LayerNorm`, `RMSNorm`, `GroupNorm` and `InstanceNorm` into one marked operation each."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from qjax.tracing import Layer, bind

Axes = int | tuple[int, ...] | list[int]


def layer_norm(module: Any, base: type, x: jax.Array, **kwargs: Any) -> Any:
    """Normalise over `reduction_axes`, with a scale and a bias along `feature_axes`."""
    return _bind_marker(
        "layer_norm", module, base, x, kwargs, _axes(module.reduction_axes, x), _axes(module.feature_axes, x)
    )


def rms_norm(module: Any, base: type, x: jax.Array, mask: Any = None, **kwargs: Any) -> Any:
    """Divide by the root mean square, without subtracting a mean."""
    kwargs = kwargs if mask is None else {**kwargs, "mask": mask}
    axes, features = _axes(module.reduction_axes, x), _axes(module.feature_axes, x)
    return _bind_marker("rms_norm", module, base, x, kwargs, axes, features, center=False)


def group_norm(module: Any, base: type, x: jax.Array, **kwargs: Any) -> Any:
    """Normalise over groups of the last axis and all axes between it and the batch, or over `reduction_axes`."""
    last = x.ndim - 1
    given = module.reduction_axes
    axes = _axes(given, x) if given is not None else tuple(range(1, x.ndim))
    whole = tuple(sorted({*axes, last}))
    return _bind_marker("group_norm", module, base, x, kwargs, whole, (last,), groups=module.num_groups)


def instance_norm(module: Any, base: type, x: jax.Array, **kwargs: Any) -> Any:
    """Normalise over all axes but the batch and the features."""
    features = _axes(module.feature_axes, x)
    axes = tuple(axis for axis in range(1, x.ndim) if axis not in features)
    return _bind_marker("instance_norm", module, base, x, kwargs, axes, features)


CALLS: dict[type, Callable[..., Any]] = {
    nnx.LayerNorm: layer_norm,
    nnx.RMSNorm: rms_norm,
    nnx.GroupNorm: group_norm,
    nnx.InstanceNorm: instance_norm,
}


def _bind_marker(
    name: str,
    module: Any,
    base: type,
    x: jax.Array,
    kwargs: dict[str, Any],
    axes: tuple[int, ...],
    features: tuple[int, ...],
    *,
    center: bool = True,
    groups: int = 1,
) -> Any:
    """The layer as flax computes it, in one equation, unless its statistics involve a mask or a mapped axis."""
    if any(value is not None for value in kwargs.values()) or module.axis_name is not None or not axes:
        return base.__call__(module, x, **kwargs)
    graphdef, state = nnx.split(module)
    paths, treedef = jax.tree_util.tree_flatten_with_path(state)

    def function(x: jax.Array, *leaves: jax.Array) -> list[jax.Array]:
        return [base.__call__(nnx.merge(graphdef, treedef.unflatten(leaves)), x)]

    attributes = {
        "axes": axes,
        "center": center,
        "divisor": 0,
        "epsilon": float(module.epsilon),
        "feature_axes": features,
        "groups": int(groups),
        "joined": "add",
    }
    names = tuple(str(getattr(path[0], "key", getattr(path[0], "name", path[0]))) for path, _ in paths)
    layer = Layer(name, ("x", *names), tuple(sorted(attributes.items())), function)
    (y,) = bind(layer, x, *(leaf for _, leaf in paths))
    return y


def _axes(axes: Axes, x: jax.Array) -> tuple[int, ...]:
    """Axes counted from the front, in ascending order."""
    given = (axes,) if isinstance(axes, int) else axes
    return tuple(sorted(axis % x.ndim for axis in given))
