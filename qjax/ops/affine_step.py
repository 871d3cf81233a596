"""Affine steps with constants: bias, scalar or per-channel multiplication, division, negation.

y = (x + b) * c    folds into the producer of x: its accumulator gets the scale s c and the bias b c
"""

from collections.abc import Sequence
from typing import Any, Literal, NotRequired, TypedDict

import numpy as np

from qjax.numerics.softfloat import Real
from qjax.ops.base import Attributes, Constants, Elementwise, Equation, Role, real, register
from qjax.ops.channels import trailing
from qjax.ops.epilogue import Affine
from qjax.ops.float_accumulator import Pending


class Fields(TypedDict):
    """step: the primitive. reversed: the constant comes first, c - x.

    literal: the constant is a number of the program itself, which no parameter changes.
    """

    step: Literal["mul", "div", "neg", "add", "sub", "add_any"]
    reversed: NotRequired[bool]
    literal: NotRequired[bool]


@register
class AffineStep(Elementwise):
    """y = x * c, x / c, -x, x + c, x - c or c - x with a constant c, folded into the producer before it."""

    name = "affine_step"
    fields = Fields
    role = Role.CHAIN
    primitives = ("mul", "div", "neg", "add", "sub", "add_any")
    label = "rescale"
    clamps = False
    per_example = "value"

    def reads(self, eqn: Equation, constant: Sequence[bool]) -> bool:
        if eqn.primitive == "div":
            return not constant[0] and constant[1]
        return len(constant) == 1 or sum(constant) == 1

    def data(self, eqn: Equation, constant: Sequence[bool]) -> tuple[int, ...]:
        return (0,) if not constant[0] else (1,)

    def chain_constants(self, eqn: Equation, constant: Sequence[bool]) -> dict[str, int]:
        return {"value": constant.index(True)} if len(constant) == 2 else {}

    def training(self, eqn: Equation, inputs: Sequence[Any]) -> list[Any]:
        index = next((i for i, x in enumerate(inputs) if isinstance(x, Pending)), None)
        if index is None:
            return eqn.bind(*(real(x) for x in inputs))
        x: Pending = inputs[index]
        if eqn.primitive == "neg":
            return [x.times(-1.0)]
        value = real(inputs[1 - index])
        if eqn.primitive == "mul":
            return [x.times(value)]
        if eqn.primitive == "div":
            return [x.over(value)]
        if eqn.primitive == "sub":
            return [x.plus(-value) if index == 0 else x.times(-1.0).plus(value)]
        return [x.plus(value)]

    def attributes(self, eqn: Equation) -> dict[str, Any]:
        literal = any(value is not None and np.ndim(value) == 0 for value in eqn.literals)
        return {"step": eqn.primitive, **({"literal": True} if literal else {})}

    def has_integer_form(self, eqn: Equation) -> bool:
        return True

    def may_negate(self, attributes: Attributes) -> bool:
        # `reversed` is c - x, which negates x
        return attributes["step"] in ("mul", "div", "neg") or attributes.get("reversed", False)

    def compose(self, attributes: Attributes, constants: Constants, affine: Affine) -> Affine:
        step = attributes["step"]
        if step == "neg":
            return affine.times(Real.of(np.float32(-1)))
        value = Real.of(trailing(constants["value"]))
        if step == "mul":
            return affine.times(value)
        if step == "div":
            return Affine(affine.g / value, affine.b / value)
        if step == "sub":
            if attributes.get("reversed"):
                return affine.times(Real.of(np.float32(-1))).plus(value)
            return affine.plus(-value)
        return affine.plus(value)
