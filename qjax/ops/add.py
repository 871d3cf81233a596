"""Addition and subtraction of two tensors of codes, as in residual connections.

y = round((s0 (q0 - z0) + s1 (q1 - z1)) / s_y) + z_y
"""

from collections.abc import Sequence
from typing import Any, TypedDict

import jax

from qjax.ops.base import Attributes, Constants, Elementwise, Equation, Quantized, Role, centered, real, register
from qjax.ops.epilogue import finish
from qjax.ops.float_accumulator import Pending


class Fields(TypedDict):
    """subtract: whether the second input is subtracted."""

    subtract: bool


@register
class Add(Elementwise):
    """y = x0 + x1 or x0 - x1: both operands in fixed point on one grid finer than any code, then one rounding."""

    name = "add"
    fields = Fields
    role = Role.PRODUCER
    primitives = ("add", "sub", "add_any")
    takes_steps = True
    one_order = True

    def reads(self, eqn: Equation, constant: Sequence[bool]) -> bool:
        return not any(constant)

    def data(self, eqn: Equation, constant: Sequence[bool]) -> tuple[int, ...]:
        return (0, 1)

    def training(self, eqn: Equation, inputs: Sequence[Any]) -> list[Any]:
        x, y = inputs
        if not (isinstance(x, Quantized) and isinstance(y, Quantized)):
            return eqn.bind(real(x), real(y))
        a, b = x.real32(), y.real32()
        return [Pending.of_real(a - b if eqn.primitive == "sub" else a + b, eqn.out_dtypes[0])]

    def attributes(self, eqn: Equation) -> dict[str, Any]:
        return {"subtract": eqn.primitive == "sub"}

    def operation(self, attributes: Attributes) -> str | None:
        return "subtract" if attributes["subtract"] else "add"

    def commutes(self, attributes: Attributes) -> bool:
        return not attributes["subtract"]

    def scales(self, attributes: Attributes, inputs: Sequence[Any]) -> list[Any]:
        first, second = inputs
        return [first, -second if attributes["subtract"] else second]

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        return finish([centered(x, constants, i) for i, x in enumerate(inputs)], constants, attributes)
