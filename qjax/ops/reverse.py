"""Reversal of axes."""

from collections.abc import Collection, Sequence
from typing import Any

import jax
from jax import lax

from qjax.ops.base import Attributes, Constants, Equation, Shape, register
from qjax.ops.facts import always, no_filling
from qjax.ops.fields import Axes
from qjax.ops.grid import GridOp


@register
class Reverse(GridOp):
    """`lax.rev`."""

    name = "reverse"
    fields = Axes
    primitives = ("rev",)
    moves = True
    keeps_batch = always
    filling = no_filling

    def attributes(self, eqn: Equation) -> dict[str, Any]:
        return {"axes": list(eqn.params["dimensions"])}

    def works_along(self, attributes: Attributes, inputs: Sequence[Shape], output: Shape) -> Sequence[Collection[int]]:
        return [attributes["axes"]]

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        return lax.rev(inputs[0], attributes["axes"])
