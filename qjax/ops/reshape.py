"""reshape, squeeze and expand_dims."""

from collections.abc import Sequence
from typing import Any

import jax

from qjax.ops.base import Attributes, Constants, Equation, register
from qjax.ops.grid import GridOp


@register
class Reshape(GridOp):
    """The same codes in another shape; None in `shape` is the axis that holds the batch."""

    name = "reshape"
    primitives = ("reshape", "squeeze", "expand_dims")
    moves = True

    def attributes(self, eqn: Equation) -> dict[str, Any]:
        return {"shape": list(eqn.out_shapes[0])}

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        return inputs[0].reshape([-1 if size is None else size for size in attributes["shape"]])
