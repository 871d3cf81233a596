"""Minima over axes and windows. Codes are ordered like their float values, so the minimum code is the minimum."""

from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from qjax.ops.base import Attributes, Constants, Equation, Shape, register
from qjax.ops.facts import End, always, no_filling
from qjax.ops.fields import Axes
from qjax.ops.grid import GridOp


@register
class Min(GridOp):
    """`lax.reduce_min` over any axes."""

    name = "min"
    fields = Axes
    primitives = ("reduce_min",)
    keeps_batch = always
    filling = no_filling

    def hides(self, eqn: Equation) -> Collection[End]:
        return ("high",)

    def attributes(self, eqn: Equation) -> dict[str, Any]:
        return {"axes": list(eqn.params["axes"])}

    def works_along(self, attributes: Attributes, inputs: Sequence[Shape], output: Shape) -> Sequence[Collection[int]]:
        return [attributes["axes"]]

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        return jnp.min(inputs[0], axis=tuple(attributes["axes"]))
