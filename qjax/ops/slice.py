"""Strided slices with constant bounds, and splits."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, NotRequired, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.ops.base import Attributes, Constants, Equation, Shape, register
from qjax.ops.facts import Follows, always, no_filling
from qjax.ops.fields import Axis, Natural
from qjax.ops.grid import GridOp


class SliceFields(TypedDict):
    """One number for each axis; a limit of None is the end of the batch."""

    start: list[Natural]
    limit: list[Natural | None]
    strides: list[Natural]


@register
class Slice(GridOp):
    """`lax.slice`, and `lax.dynamic_slice` with constant starts; a limit of None is the end of the axis."""

    name = "slice"
    fields = SliceFields
    primitives = ("slice", "dynamic_slice")
    moves = True
    free: ClassVar[Mapping[str, Follows]] = {"limit": "ends"}
    varying = ("start", "limit")
    keeps_batch = always
    filling = no_filling

    def reads(self, eqn: Equation, constant: Sequence[bool]) -> bool:
        return not constant[0] and (eqn.primitive == "slice" or all(v is not None for v in eqn.literals[1:]))

    def attributes(self, eqn: Equation) -> dict[str, Any]:
        rank = len(eqn.in_shapes[0])
        if eqn.primitive == "dynamic_slice":
            sizes = eqn.params["slice_sizes"]
            # JAX moves a slice that would reach beyond the tensor so that it fits
            room = [whole - size for whole, size in zip(eqn.in_shapes[0], sizes, strict=True)]
            start = [min(max(int(v), 0), most) for v, most in zip(eqn.literals[1:], room, strict=True)]
            return {
                "start": start,
                "limit": [first + size for first, size in zip(start, sizes, strict=True)],
                "strides": [1] * rank,
            }
        return {
            "start": list(eqn.params["start_indices"]),
            "limit": list(eqn.params["limit_indices"]),
            "strides": list(eqn.params["strides"] or (1,) * rank),
        }

    def works_along(self, attributes: Attributes, inputs: Sequence[Shape], output: Shape) -> Sequence[Collection[int]]:
        bounds = zip(inputs[0], *(attributes[key] for key in ("start", "limit", "strides")), strict=True)
        return [[a for a, (n, *cut) in enumerate(bounds) if cut not in ([0, None, 1], [0, n, 1])]]

    def is_identity(self, attributes: Attributes, before: Shape, after: Shape) -> bool:
        # if the batch is free (None), a slice of every second example has the shape of its input
        return before == after and all(stride == 1 for stride in attributes["strides"])

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        (x,) = inputs
        return lax.slice(x, attributes["start"], _limit(attributes, x), attributes["strides"])

    def iterated(self, attributes: Sequence[Attributes], x: jax.Array) -> jax.Array:
        first, strides = attributes[0], attributes[0]["strides"]
        starts = np.asarray([entry["start"] for entry in attributes])
        moving = np.flatnonzero(np.any(starts != starts[0], axis=0))
        steps = np.unique(np.diff(starts, axis=0), axis=0)
        limit = _limit(first, x)
        if len(moving) == 1 and len(steps) == 1 and limit[axis := int(moving[0])] == first["start"][axis] + 1:
            # if the starts follow each other, take one slice of all of them
            step, start = int(steps[0][axis]), list(first["start"])
            places = starts[:, axis]
            start[axis], limit[axis] = int(places.min()), int(places.max()) + 1
            along = [abs(step) if a == axis else stride for a, stride in enumerate(strides)]
            found = jnp.expand_dims(jnp.moveaxis(lax.slice(x, start, limit, along), axis, 0), axis + 1)
            return found if step > 0 else lax.rev(found, (0,))
        # up to the last element that is taken: a larger window could reach beyond the tensor and would then be moved
        cuts = zip(first["start"], limit, strides, strict=True)
        sizes = [stop - begin if by == 1 else (stop - begin - 1) // by * by + 1 for begin, stop, by in cuts]
        part = jax.vmap(lambda start: lax.dynamic_slice(x, start, sizes))(jnp.asarray(starts, jnp.int32))
        return lax.slice(part, [0] * part.ndim, part.shape, [1, *strides])


def _limit(attributes: Attributes, x: jax.Array) -> list[Any]:
    return [size if stop is None else stop for stop, size in zip(attributes["limit"], x.shape, strict=True)]


class SplitFields(Axis):
    """sizes: of the parts. index: which part this node is."""

    sizes: list[Natural]
    index: NotRequired[Natural]


@register
class Split(GridOp):
    """`lax.split`: each part has its own node, whose `index` tells which it is (a split into one part has none)."""

    name = "split"
    fields = SplitFields
    primitives = ("split",)
    moves = True
    keeps_batch = always
    filling = no_filling

    def attributes(self, eqn: Equation) -> dict[str, Any]:
        return {"sizes": [int(n) for n in eqn.params["sizes"]], "axis": int(eqn.params["axis"])}

    def works_along(self, attributes: Attributes, inputs: Sequence[Shape], output: Shape) -> Sequence[Collection[int]]:
        return [[attributes["axis"]]]

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        sizes, index = attributes["sizes"], attributes.get("index", 0)
        start = sum(sizes[:index])
        return lax.slice_in_dim(inputs[0], start, start + sizes[index], axis=attributes["axis"])
