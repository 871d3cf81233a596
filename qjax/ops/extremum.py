"""Elementwise maximum or minimum of two tensors with the same scale, or of a tensor and an array of constants."""

from collections.abc import Collection, Sequence
from typing import Any, Literal, TypedDict

import jax
import jax.numpy as jnp
from jax import lax

from qjax.ops.base import Attributes, Constants, Elementwise, Equation, Operand, Quantized, Role, real, register
from qjax.ops.constant_codes import code, steps_on
from qjax.ops.facts import End, filled_with_constants


class Fields(TypedDict):
    """function: which of the two elements is taken."""

    function: Literal["max", "min"]


@register
class Extremum(Elementwise):
    """`lax.max` and `lax.min` of two tensors; a constant beyond the grid is clipped to the grid's end, in training too.

    attributes: function is max or min. constants: value holds the int32 codes of a constant operand.
    """

    name = "extremum"
    fields = Fields
    role = Role.GRID
    primitives = ("max", "min")
    per_example = "value"
    filling = filled_with_constants

    def reads(self, eqn: Equation, constant: Sequence[bool]) -> bool:
        if not jnp.issubdtype(eqn.out_dtypes[0], jnp.floating) or all(constant):
            return False
        return not any(constant) or eqn.in_shapes[constant.index(False)] == eqn.out_shapes[0]

    def data(self, eqn: Equation, constant: Sequence[bool]) -> tuple[int, ...]:
        return tuple(i for i in (0, 1) if not constant[i])

    def chain_constants(self, eqn: Equation, constant: Sequence[bool]) -> dict[str, int]:
        return {"value": constant.index(True)} if any(constant) else {}

    def hides(self, eqn: Equation) -> Collection[End]:
        return ("low",) if eqn.primitive == "max" else ("high",)

    def attributes(self, eqn: Equation) -> dict[str, Any]:
        return {"function": eqn.primitive}

    def training(self, eqn: Equation, inputs: Sequence[Any]) -> list[Any]:
        known = next((x for x in inputs if isinstance(x, Quantized)), None)
        if known is None:
            return eqn.bind(*(real(x) for x in inputs))
        codes = [x.codes if isinstance(x, Quantized) else steps_on(x, known) for x in inputs]
        return [known.with_codes(_extreme(eqn.primitive, codes))]

    def in_codes(self, attributes: Attributes, constants: Constants, operand: Operand) -> Constants | None:
        return {role: code(value, operand) for role, value in constants.items()} or None

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        operands = list(inputs)
        if "value" in constants:
            operands.append(jnp.asarray(constants["value"]).astype(operands[0].dtype))
        return _extreme(attributes["function"], operands)


def _extreme(function: str, operands: Sequence[jax.Array]) -> jax.Array:
    shape = jnp.broadcast_shapes(*(x.shape for x in operands))
    return (lax.max if function == "max" else lax.min)(*(jnp.broadcast_to(x, shape) for x in operands))
