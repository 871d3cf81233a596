"""Permutations of axes."""

from collections.abc import Collection, Sequence
from typing import Any, TypedDict

import jax
import jax.numpy as jnp

from qjax.ops.base import Attributes, Constants, Equation, Shape, register
from qjax.ops.facts import always, no_filling
from qjax.ops.fields import Natural
from qjax.ops.grid import GridOp


class Fields(TypedDict):
    """permutation: the order of the axes, as `lax.transpose` takes it."""

    permutation: list[Natural]


@register
class Transpose(GridOp):
    """`lax.transpose`."""

    name = "transpose"
    fields = Fields
    primitives = ("transpose",)
    moves = True
    keeps_batch = always
    filling = no_filling

    def attributes(self, eqn: Equation) -> dict[str, Any]:
        return {"permutation": list(eqn.params["permutation"])}

    def works_along(self, attributes: Attributes, inputs: Sequence[Shape], output: Shape) -> Sequence[Collection[int]]:
        return [()]

    def permutation(self, attributes: Attributes) -> list[int] | None:
        return attributes["permutation"]

    def is_identity(self, attributes: Attributes, before: Shape, after: Shape) -> bool:
        return attributes["permutation"] == sorted(attributes["permutation"])

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        return jnp.transpose(inputs[0], attributes["permutation"])
