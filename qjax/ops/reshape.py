"""reshape, squeeze and expand_dims: the same codes in another shape."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, TypedDict

import jax

from qjax.ops.base import Attributes, Constants, Equation, Shape, register
from qjax.ops.facts import Follows, always, no_filling
from qjax.ops.fields import Natural
from qjax.ops.grid import GridOp


class Fields(TypedDict):
    """shape: of the result, with None for the batch."""

    shape: list[Natural | None]


@register
class Reshape(GridOp):
    """The same codes in another shape; None in `shape` is the axis that holds the batch."""

    name = "reshape"
    fields = Fields
    primitives = ("reshape", "squeeze", "expand_dims")
    moves = True
    free: ClassVar[Mapping[str, Follows]] = {"shape": "sizes"}
    keeps_batch = always
    filling = no_filling

    def attributes(self, eqn: Equation) -> dict[str, Any]:
        return {"shape": list(eqn.out_shapes[0])}

    def works_along(self, attributes: Attributes, inputs: Sequence[Shape], output: Shape) -> Sequence[Collection[int]]:
        # if the size of the first axis does not change, neither does the axis
        kept = len(inputs[0]) > 0 and len(output) > 0 and inputs[0][0] == output[0]
        return [range(1 if kept else 0, len(inputs[0]))]

    def keeps_order(self, attributes: Attributes) -> bool:
        return True

    def is_identity(self, attributes: Attributes, before: Shape, after: Shape) -> bool:
        return before == after

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        return inputs[0].reshape([-1 if size is None else size for size in attributes["shape"]])
