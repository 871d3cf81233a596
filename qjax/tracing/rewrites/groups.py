"""Groups of channels in a normalisation: statistics over a split last axis, broadcast back to the channels."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from qjax.tracing.program import Value
from qjax.tracing.rewrites.dataflow import Flow, Found


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """found: a statistic, before the moves that broadcast it to `shape`: (..., channels) as (..., groups, width)."""

    found: Found
    shape: tuple[int, ...]


def splits(flow: Flow, found: Found, shape: Sequence[int]) -> list[Split]:
    """The statistic before a reshape of (..., groups, width) to (..., channels), as in Linen's GroupNorm.

    found: a value broadcast to a tensor of `shape`, whose last axis is the channels. With one group, or groups of one
    channel, the reshape is an ordinary move, which `found` has skipped already, so both readings are possible.
    """
    if len(found.axes) != len(shape) or not shape:
        return []
    channels, before, axis = shape[-1], found.axes[:-1], found.axes[-1]
    eqn, last = found.equation, len(found.value.shape) - 1
    if eqn is None or eqn.primitive != "reshape":
        one = Split(Found(found.value, eqn, (*before, None, axis)), (*shape[:-1], 1, channels))
        each = Split(Found(found.value, eqn, (*before, axis, None)), (*shape[:-1], channels, 1))
        return [one, each]
    (source,) = eqn.inputs
    inner, outer = source.shape, found.value.shape
    whole = axis == last and last not in before and outer[-1] == channels
    if len(inner) != len(outer) + 1 or inner[:-2] != outer[:-1] or not whole:
        return []
    return [Split(flow.behind(source, (*before, last, last + 1)), (*shape[:-1], *inner[-2:]))]


def reference(params: Mapping[str, Any], result: Value) -> Callable[[jax.Array], jax.Array]:
    """The float normalisation, for a group whose own equations include a factor."""

    def function(x: jax.Array) -> jax.Array:
        axes, groups = params["axes"], params["groups"]
        rows = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        if groups > 1:
            rows = rows.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)
            axes = tuple(axis + 1 if axis == x.ndim - 1 else axis for axis in axes)
        rows = rows - jnp.mean(rows, axis=axes, keepdims=True) if params["center"] else rows
        count = math.prod(rows.shape[axis] for axis in axes)
        power = jnp.sum(rows * rows, axis=axes, keepdims=True) / (params["divisor"] or count)
        epsilon = params["epsilon"]
        power = jnp.maximum(power, epsilon * epsilon) if params["joined"] == "max" else power + epsilon
        return (rows / jnp.sqrt(power)).reshape(x.shape).astype(result.dtype)

    return function
