"""Minima over axes and windows: the order of codes is the order of reals."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from qjax.ops.base import Attributes, Constants, Equation, register
from qjax.ops.grid import GridOp


@register
class Min(GridOp):
    """`lax.reduce_min` over any axes."""

    name = "min"
    primitives = ("reduce_min",)

    def attributes(self, eqn: Equation) -> dict[str, Any]:
        return {"axes": list(eqn.params["axes"])}

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        return jnp.min(inputs[0], axis=tuple(attributes["axes"]))
