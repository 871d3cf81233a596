"""Elements selected by integers along one axis: `jnp.take`, `x[:, indices]`, `jnp.take_along_axis`."""

import math
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.ops.base import Attributes, Constants, Equation, Quantized, Shape, real, register
from qjax.ops.facts import always, no_filling
from qjax.ops.fields import Natural
from qjax.ops.grid import GridOp
from qjax.ops.indices import Lookup, fills, has_number, outside, wrapped

_OUT = (
    "indices from {low} to {high} do not fit an axis of {size}. JAX fills with NaN there, which is no code: keep them "
    'in range, or say mode="clip"'
)


def _numbers(eqn: Equation) -> tuple[Any, ...]:
    n = eqn.params["dimension_numbers"]
    batching = tuple(getattr(n, "operand_batching_dims", ()))
    indexed = tuple(getattr(n, "start_indices_batching_dims", ()))
    return tuple(n.offset_dims), tuple(n.collapsed_slice_dims), tuple(n.start_index_map), batching, indexed


def axis_of(eqn: Equation) -> int | None:
    """The axis along which a gather takes whole slices, or None if it does anything else."""
    _, collapsed, mapped, batching, _ = _numbers(eqn)
    shape, sizes = eqn.in_shapes[0], tuple(eqn.params["slice_sizes"])
    if len(mapped) != 1 or collapsed != mapped or batching or eqn.in_shapes[1][-1:] != (1,):
        return None
    whole = all(sizes[axis] == (1 if axis == mapped[0] else size) for axis, size in enumerate(shape))
    return mapped[0] if whole else None


class _Gather(GridOp):
    """What both kinds share: the indices are integers; `ops.indices` defines the meaning of those out of range."""

    primitives = ("gather",)
    moves = True
    keeps_batch = always
    filling = no_filling

    def integers(self, eqn: Equation, constant: Sequence[bool]) -> tuple[int, ...]:
        return (1,)

    def refuses(self, eqn: Equation, index: int, value: Any) -> str | None:
        size = eqn.in_shapes[0][eqn.params["dimension_numbers"].start_index_map[0]]
        if index != 1 or not fills(eqn.params) or not value.size or (value.min() >= 0 and value.max() < size):
            return None
        return _OUT.format(low=value.min(), high=value.max(), size=size)

    def training(self, eqn: Equation, inputs: Sequence[Any]) -> list[Any]:
        x, indices = inputs
        if not isinstance(x, Quantized):
            return eqn.bind(real(x), indices)
        return [x.with_codes(eqn.bind(x.codes, jnp.asarray(indices))[0])]

    def misplaced(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array | None:
        return outside(attributes, inputs[1], inputs[0].shape[attributes["axis"]])


class TakeFields(Lookup):
    """places: the axes of the result that come from the indices."""

    axis: Natural
    places: list[Natural]


@register
class Take(_Gather):
    """`lax.gather` of whole slices along one axis; inputs: the tensor, int32 indices with a last axis of size 1.

    attributes: axis is the axis of the tensor. places are the axes of the result that come from the indices. For wraps
    and fills, see `ops.indices`.
    """

    name = "take"
    fields = TakeFields

    def reads(self, eqn: Equation, constant: Sequence[bool]) -> bool:
        return not constant[0] and axis_of(eqn) is not None and not has_number(eqn.params, eqn.in_dtypes[0])

    def attributes(self, eqn: Equation) -> dict[str, Any]:
        offset = _numbers(eqn)[0]
        rank = len(eqn.out_shapes[0])
        places = [axis for axis in range(rank) if axis not in offset]
        return {"axis": axis_of(eqn), "places": places, "fills": fills(eqn.params)}

    def works_along(self, attributes: Attributes, inputs: Sequence[Shape], output: Shape) -> Sequence[Collection[int]]:
        return [[attributes["axis"]], ()]

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        x, indices = inputs
        places = attributes["places"]
        indices = wrapped(attributes, indices, x.shape[attributes["axis"]])
        rows = jnp.take(
            jnp.moveaxis(x, attributes["axis"], 0), indices.reshape(indices.shape[:-1]), axis=0, mode="clip"
        )
        rest = [axis for axis in range(rows.ndim) if axis not in places]
        order = [0] * rows.ndim
        for source, target in enumerate((*places, *rest)):
            order[target] = source
        return jnp.transpose(rows, order)


class AlongFields(Lookup):
    """operand, indices: the axes that the two share. places: the axes of the result that come from the indices."""

    axis: Natural
    operand: list[Natural]
    indices: list[Natural]
    places: list[Natural]


@register
class TakeAlong(_Gather):
    """`jnp.take_along_axis`: each example has its own indices, and a result is the x at the position of its index.

    inputs: the tensor, and int32 indices of its rank. attributes: axis is the axis that the indices select from.
    batching are the other axes along which the indices run, paired with the tensor's own. kept are those along which
    whole slices are taken.
    """

    name = "take_along"
    fields = AlongFields

    def reads(self, eqn: Equation, constant: Sequence[bool]) -> bool:
        return not constant[0] and self._layout(eqn) is not None and not has_number(eqn.params, eqn.in_dtypes[0])

    def _layout(self, eqn: Equation) -> dict[str, Any] | None:
        """The axes, or None for any other gather."""
        offset, collapsed, mapped, batching, indexed = _numbers(eqn)
        shape, indices, sizes = eqn.in_shapes[0], eqn.in_shapes[1], tuple(eqn.params["slice_sizes"])
        if len(mapped) != 1 or collapsed != mapped or not batching or indices[-1:] != (1,):
            return None
        free = [axis for axis in range(len(shape)) if axis not in batching and axis != mapped[0]]
        if any(sizes[axis] != shape[axis] for axis in free):
            return None
        return {
            "axis": mapped[0],
            "operand": [int(axis) for axis in batching],
            "indices": [int(axis) for axis in indexed],
            "places": [axis for axis in range(len(eqn.out_shapes[0])) if axis not in offset],
        }

    def attributes(self, eqn: Equation) -> dict[str, Any]:
        found = self._layout(eqn)
        assert found is not None
        return {**found, "fills": fills(eqn.params)}

    def works_along(self, attributes: Attributes, inputs: Sequence[Shape], output: Shape) -> Sequence[Collection[int]]:
        return [[attributes["axis"]], ()]

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        x, indices = inputs
        axis, operand, own, places = (attributes[key] for key in ("axis", "operand", "indices", "places"))
        indices = indices.reshape(indices.shape[:-1])
        size = x.shape[axis]
        indices = wrapped(attributes, indices, size)
        batch = [x.shape[a] for a in operand]
        rest = [a for a in range(x.ndim) if a not in operand and a != axis]
        chosen = [a for a in range(indices.ndim) if a not in own]
        count = math.prod(indices.shape[a] for a in chosen)
        # (batch, chosen, size, rest): compare every position with every index; no gather is needed
        flat = math.prod(x.shape[a] for a in rest)
        values = jnp.transpose(x, (*operand, axis, *rest)).reshape(*batch, 1, size, flat)
        wanted = jnp.transpose(indices, (*own, *chosen)).reshape(*batch, count, 1, 1)
        wanted = jnp.clip(wanted, np.int32(0), np.int32(size - 1))
        shape = (*batch, count, size, flat)
        here = lax.broadcasted_iota(jnp.int32, shape, len(shape) - 2) == jnp.broadcast_to(wanted, shape)
        wide = jnp.broadcast_to(values if values.dtype == jnp.float32 else values.astype(jnp.int32), shape)
        lowest = jnp.full(shape, -(2.0**30) if wide.dtype == jnp.float32 else -(2**31), wide.dtype)
        taken = jnp.max(lax.select(here, wide, lowest), axis=-2).astype(x.dtype)
        taken = taken.reshape(*batch, *(indices.shape[a] for a in chosen), *(x.shape[a] for a in rest))
        # the axes are those of the indices, then the rest; transpose them to the result's order
        front = [*own, *chosen]
        targets = [places[a] for a in front] + [a for a in range(taken.ndim) if a not in places]
        order = [0] * taken.ndim
        for source, target in enumerate(targets):
            order[target] = source
        return jnp.transpose(taken, order)
