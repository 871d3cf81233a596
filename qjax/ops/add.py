"""Addition and subtraction of two tensors of codes: residual connections."""

from collections.abc import Sequence
from typing import Any

import jax

from qjax.ops.base import Attributes, Constants, Equation, Op, Role, register
from qjax.ops.centered import centered
from qjax.ops.epilogue import finish_sum


@register
class Add(Op):
    """y = x0 + x1 or x0 - x1: both operands in fixed point on one grid finer than any code, then one rounding."""

    name = "add"
    role = Role.PRODUCER
    primitives = ("add", "sub", "add_any")

    def reads(self, eqn: Equation, constant: Sequence[bool]) -> bool:
        return not any(constant)

    def data(self, eqn: Equation, constant: Sequence[bool]) -> tuple[int, ...]:
        return (0, 1)

    def attributes(self, eqn: Equation) -> dict[str, Any]:
        return {"subtract": eqn.primitive == "sub"}

    def scales(self, attributes: Attributes, inputs: Sequence[Any]) -> list[Any]:
        first, second = inputs
        return [first, -second if attributes["subtract"] else second]

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        return finish_sum([centered(x, constants, i) for i, x in enumerate(inputs)], constants, attributes)
