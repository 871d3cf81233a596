"""Casts between float types, and other operations that leave the number alone: the codes do not change."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from qjax.ops.base import Attributes, Constants, Equation, Op, Quantized, Role, real, register
from qjax.ops.pending import Pending


@register
class Cast(Op):
    """`lax.convert_element_type` from float to float."""

    name = "cast"
    role = Role.CHAIN
    primitives = ("convert_element_type", "reduce_precision", "copy", "optimization_barrier", "stop_gradient")
    on_grid = True

    def reads(self, eqn: Equation, constant: Sequence[bool]) -> bool:
        return not constant[0] and len(eqn.in_shapes) == 1 and jnp.issubdtype(eqn.out_dtypes[0], jnp.floating)

    def training(self, eqn: Equation, inputs: Sequence[Any]) -> list[Any]:
        (x,) = inputs
        if isinstance(x, (Quantized, Pending)):
            if eqn.primitive == "stop_gradient":
                return [jax.tree.map(jax.lax.stop_gradient, x)]
            return [dataclasses.replace(x, dtype=eqn.out_dtypes[0])]
        return eqn.bind(real(x))

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        return inputs[0]
