"""Broadcasting to a larger shape."""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from qjax.ops.base import Attributes, Constants, Equation, register
from qjax.ops.grid import GridOp


@register
class Broadcast(GridOp):
    """`lax.broadcast_in_dim`; None in `shape` takes the size of the operand's axis that maps there."""

    name = "broadcast"
    primitives = ("broadcast_in_dim",)
    moves = True

    def attributes(self, eqn: Equation) -> dict[str, Any]:
        return {"shape": list(eqn.out_shapes[0]), "dimensions": list(eqn.params["broadcast_dimensions"])}

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        (x,) = inputs
        dimensions = attributes["dimensions"]
        shape = [
            x.shape[dimensions.index(axis)] if size is None else size for axis, size in enumerate(attributes["shape"])
        ]
        return lax.broadcast_in_dim(x, shape, dimensions)
