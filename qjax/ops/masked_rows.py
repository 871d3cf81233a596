"""Masks as operands: which elements of a row a softmax or a sum of exponentials includes."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NotRequired, TypedDict

import jax
import jax.numpy as jnp

from qjax.ops.base import Attributes, Equation
from qjax.ops.fields import Natural

FILL = -3e38
"""The float32 value of a hidden number: its exponential is 0 next to any other."""


class Masked(TypedDict):
    """mask_axes: for each mask and axis of the codes, the mask's axis or None. mask_inverted: whether True hides."""

    mask_axes: NotRequired[list[list[Natural | None]]]
    mask_inverted: NotRequired[list[bool]]


def attributes_of(eqn: Equation) -> dict[str, Any]:
    """mask_axes: for each mask and axis of the codes, the mask's axis or None. mask_inverted: whether True hides."""
    if len(eqn.in_shapes) < 2:
        return {}
    return {
        "mask_axes": [list(axes) for axes in eqn.params["mask_axes"]],
        "mask_inverted": list(eqn.params["mask_inverted"]),
    }


def works_along(attributes: Attributes) -> list[Collection[int]]:
    """Per input: the axes of the codes, then of each mask, along which the rows run."""
    axes = attributes["axes"]
    return [axes, *([own[a] for a in axes if own[a] is not None] for own in attributes.get("mask_axes", ()))]


def taking_part(attributes: Mapping[str, Any], masks: Sequence[Any], shape: tuple[int, ...]) -> jax.Array:
    """The masks combined into one, in the shape of the codes."""
    found: jax.Array | None = None
    for mask, axes, inverted in zip(masks, attributes["mask_axes"], attributes["mask_inverted"], strict=True):
        mask = jnp.asarray(mask)
        used = sorted(axis for axis in axes if axis is not None)
        mask = jnp.squeeze(mask, axis=tuple(axis for axis in range(mask.ndim) if axis not in used))
        mask = jnp.transpose(mask, [used.index(axis) for axis in axes if axis is not None])
        mask = jnp.expand_dims(mask, [place for place, axis in enumerate(axes) if axis is None])
        mask = jnp.broadcast_to(jnp.logical_not(mask) if inverted else mask, shape)
        found = mask if found is None else jnp.logical_and(found, mask)
    assert found is not None
    return found


def visible(attributes: Mapping[str, Any], masks: Sequence[Any], values: jax.Array) -> jax.Array:
    """The numbers with hidden ones moved far below the rest; a row with all elements hidden is unchanged."""
    mask = taking_part(attributes, masks, values.shape)
    some = jnp.any(mask, axis=tuple(attributes["axes"]), keepdims=True)
    return jnp.where(jnp.logical_or(mask, jnp.logical_not(some)), values, jnp.full_like(values, FILL))
