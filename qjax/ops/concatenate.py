"""Concatenation. All inputs share one quantizer, so codes are copied and never requantized."""

from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from qjax.ops.base import Attributes, Constants, Equation, Quantized, Shape, real, register
from qjax.ops.facts import always, no_filling
from qjax.ops.fields import Axis
from qjax.ops.grid import GridOp


@register
class Concatenate(GridOp):
    """`lax.concatenate`; a part of size 1 along another axis is repeated (a class token, for every example)."""

    name = "concatenate"
    fields = Axis
    primitives = ("concatenate",)
    moves = True
    keeps_batch = always
    one_order = True
    filling = no_filling

    def reads(self, eqn: Equation, constant: Sequence[bool]) -> bool:
        return not all(constant)

    def data(self, eqn: Equation, constant: Sequence[bool]) -> tuple[int, ...]:
        return tuple(range(len(constant)))

    def attributes(self, eqn: Equation) -> dict[str, Any]:
        return {"axis": eqn.params["dimension"]}

    def training(self, eqn: Equation, inputs: Sequence[Any]) -> list[Any]:
        if not all(isinstance(x, Quantized) for x in inputs):
            return eqn.bind(*(real(x) for x in inputs))
        return [inputs[0].with_codes(eqn.bind(*(x.codes for x in inputs))[0])]

    def works_along(self, attributes: Attributes, inputs: Sequence[Shape], output: Shape) -> Sequence[Collection[int]]:
        return [[attributes["axis"]]] * len(inputs)

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        axis = attributes["axis"]
        sizes = jnp.broadcast_shapes(*((*x.shape[:axis], 1, *x.shape[axis + 1 :]) for x in inputs))
        wanted = [(*sizes[:axis], x.shape[axis], *sizes[axis + 1 :]) for x in inputs]
        parts = [x if x.shape == shape else jnp.broadcast_to(x, shape) for x, shape in zip(inputs, wanted, strict=True)]
        return jnp.concatenate(parts, axis=axis)

    def of_stack(self, attributes: Attributes, stack: jax.Array) -> jax.Array:
        axis = attributes["axis"]
        shape = (*stack.shape[1 : axis + 1], stack.shape[0] * stack.shape[axis + 1], *stack.shape[axis + 2 :])
        return jnp.reshape(jnp.moveaxis(stack, 0, axis), shape)
