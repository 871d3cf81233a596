"""Casts between float types and other operations that do not change the value, so the codes do not change either."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from qjax.numerics.meshes import PLACEMENTS
from qjax.ops.base import Attributes, Constants, Elementwise, Equation, Quantized, Role, Shape, real, register
from qjax.ops.facts import no_filling
from qjax.ops.fields import NoFields
from qjax.ops.float_accumulator import Pending

_BESIDE = (*sorted(PLACEMENTS), "name")
"""Equations that only place an array, or name it for rematerialisation; they are applied to the codes."""


@register
class Cast(Elementwise):
    """`lax.convert_element_type` from float to float."""

    name = "cast"
    fields = NoFields
    role = Role.CHAIN
    primitives = (
        *("convert_element_type", "reduce_precision", "copy", "optimization_barrier", "stop_gradient"),
        *_BESIDE,
        "identity",
    )
    on_grid = True
    filling = no_filling
    vanishes = True
    clamps = False

    def reads(self, eqn: Equation, constant: Sequence[bool]) -> bool:
        kinds = (*eqn.in_dtypes, *eqn.out_dtypes)
        return not constant[0] and len(kinds) == 2 and all(jnp.issubdtype(kind, jnp.floating) for kind in kinds)

    def training(self, eqn: Equation, inputs: Sequence[Any]) -> list[Any]:
        (x,) = inputs
        if isinstance(x, (Quantized, Pending)):
            if eqn.primitive == "stop_gradient":
                return [jax.tree.map(jax.lax.stop_gradient, x)]
            if eqn.primitive in _BESIDE and isinstance(x, Quantized):
                return [dataclasses.replace(x, codes=eqn.bind(x.codes)[0])]
            if eqn.primitive == "identity":
                return [_same(eqn, x)]
            return [dataclasses.replace(x, dtype=eqn.out_dtypes[0])]
        return eqn.bind(real(x))

    def has_integer_form(self, eqn: Equation) -> bool:
        return True

    def compose(self, attributes: Attributes, constants: Constants, affine: Any) -> Any:
        return affine

    def may_negate(self, attributes: Attributes) -> bool:
        return False

    def is_identity(self, attributes: Attributes, before: Shape, after: Shape) -> bool:
        return True

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        return inputs[0]


def _same(eqn: Equation, x: Any) -> Any:
    """The same codes, or the same accumulator, with the gradient of the function on floats."""
    result = eqn.bind(x.real())[0].astype(jnp.float32)
    # zero in value, so no bit changes; it only adds the derivative
    gradient = result - jax.lax.stop_gradient(result)

    def carrying(steps: jax.Array, scale: jax.Array) -> jax.Array:
        scale = jnp.broadcast_to(scale, steps.shape)
        return steps + gradient / jnp.where(scale == 0, jnp.ones_like(scale), scale)

    x = jax.tree.map(jax.lax.stop_gradient, x)
    if isinstance(x, Pending):
        return dataclasses.replace(x, acc=carrying(x.acc, x.scale))
    return dataclasses.replace(x, codes=carrying(x.codes, x.scale))
