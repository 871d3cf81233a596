"""Embedding lookups: rows of codes chosen by an integer input."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from qjax.ops.base import Attributes, Constants, Equation, Op, Quantized, Role, register


@register
class Embed(Op):
    """y = table[indices]; the result stands on the table's grid (per tensor). Indices out of range are clipped."""

    name = "embed"
    role = Role.GRID
    primitives = ("embed",)

    def reads(self, eqn: Equation, constant: Sequence[bool]) -> bool:
        return not constant[0] and constant[1]

    def weight(self, eqn: Equation, constant: Sequence[bool]) -> int | None:
        return 1

    def data(self, eqn: Equation, constant: Sequence[bool]) -> tuple[int, ...]:
        return (1,)

    def integers(self, eqn: Equation, constant: Sequence[bool]) -> tuple[int, ...]:
        return (0,)

    def training(self, eqn: Equation, inputs: Sequence[Any]) -> list[Any]:
        indices, table = inputs
        if not isinstance(table, Quantized):
            return eqn.bind(indices, table)
        return [table.with_codes(jnp.take(table.codes, indices, axis=0, mode="clip"))]

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        return jnp.take(jnp.asarray(constants["kernel"]), inputs[0], axis=0, mode="clip")
