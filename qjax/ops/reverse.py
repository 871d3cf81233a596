"""Reversal of axes."""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from qjax.ops.base import Attributes, Constants, Equation, register
from qjax.ops.grid import GridOp


@register
class Reverse(GridOp):
    """`lax.rev`."""

    name = "reverse"
    primitives = ("rev",)
    moves = True

    def attributes(self, eqn: Equation) -> dict[str, Any]:
        return {"axes": list(eqn.params["dimensions"])}

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        return lax.rev(inputs[0], attributes["axes"])
