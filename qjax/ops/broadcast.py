"""Broadcasting to a larger shape."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, TypedDict

import jax
from jax import lax

from qjax.ops.base import Attributes, Constants, Equation, Shape, register
from qjax.ops.facts import Follows, no_filling
from qjax.ops.fields import Natural
from qjax.ops.grid import GridOp


class Fields(TypedDict):
    """dimensions: the axis of the result for each axis of the operand."""

    shape: list[Natural | None]
    dimensions: list[Natural]


@register
class Broadcast(GridOp):
    """`lax.broadcast_in_dim`; where `shape` has None, the size is that of the operand's axis that maps there."""

    name = "broadcast"
    fields = Fields
    primitives = ("broadcast_in_dim",)
    moves = True
    free: ClassVar[Mapping[str, Follows]] = {"shape": "sizes"}
    filling = no_filling

    def attributes(self, eqn: Equation) -> dict[str, Any]:
        return {"shape": list(eqn.out_shapes[0]), "dimensions": list(eqn.params["broadcast_dimensions"])}

    def works_along(self, attributes: Attributes, inputs: Sequence[Shape], output: Shape) -> Sequence[Collection[int]]:
        # new and repeated axes are not axes of the operand
        return [()]

    def is_identity(self, attributes: Attributes, before: Shape, after: Shape) -> bool:
        return before == after

    def keeps_batch(self, attributes: Attributes, inputs: Sequence[Shape]) -> bool:
        (operand,), dimensions = inputs, attributes["dimensions"]
        free = [axis for axis, size in enumerate(attributes["shape"]) if size is None]
        return all(axis in dimensions and operand[dimensions.index(axis)] is None for axis in free)

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        (x,) = inputs
        dimensions = attributes["dimensions"]
        shape = [
            x.shape[dimensions.index(axis)] if size is None else size for axis, size in enumerate(attributes["shape"])
        ]
        return lax.broadcast_in_dim(x, shape, dimensions)
