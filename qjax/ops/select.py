"""Choices between two tensors by a mask: `jnp.where`, `jnp.tril`, masked filling."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.ops.base import Array, Attributes, Constants, Elementwise, Equation, Operand, Quantized, Role, real, register
from qjax.ops.constant_codes import code, steps_on
from qjax.ops.facts import ChoosesNoPlace, filled_with_constants
from qjax.ops.fields import NoFields

_ROLES = {1: "off", 2: "on"}
"""Operand of `select_n` -> role of a constant in its place: the values for masks of False and of True."""


@register
class Select(ChoosesNoPlace, Elementwise):
    """`lax.select_n` of two cases: codes on one grid, codes and real constants, or integers.

    inputs: the mask (bool, constant or data), then the case where it is False and the case where it is True, unless
    these are real constants. constants: off, on, the codes of real constants; a number beyond the grid is clipped to
    the grid's end, in training too. All operands broadcast.
    """

    name = "select"
    fields = NoFields
    role = Role.GRID
    primitives = ("select_n",)
    moves = True
    filling = filled_with_constants

    def reads(self, eqn: Equation, constant: Sequence[bool]) -> bool:
        if len(constant) != 3 or eqn.in_dtypes[0] != np.bool_:
            return False
        return not all(constant[1:]) or not jnp.issubdtype(eqn.out_dtypes[0], jnp.floating)

    def _real(self, eqn: Equation, constant: Sequence[bool], index: int) -> bool:
        return constant[index] and jnp.issubdtype(eqn.out_dtypes[0], jnp.floating)

    def data(self, eqn: Equation, constant: Sequence[bool]) -> tuple[int, ...]:
        return tuple(index for index in (1, 2) if not self._real(eqn, constant, index))

    def integers(self, eqn: Equation, constant: Sequence[bool]) -> tuple[int, ...]:
        return (0,)

    def chain_constants(self, eqn: Equation, constant: Sequence[bool]) -> dict[str, int]:
        return {_ROLES[index]: index for index in (1, 2) if self._real(eqn, constant, index)}

    def training(self, eqn: Equation, inputs: Sequence[Any]) -> list[Any]:
        which, *cases = inputs
        known = next((x for x in cases if isinstance(x, Quantized)), None)
        if known is None:
            return eqn.bind(*(real(x) for x in inputs))
        off, on = (x.codes if isinstance(x, Quantized) else steps_on(x, known) for x in cases)
        return [known.with_codes(_choose(which, off, on))]

    def in_codes(self, attributes: Attributes, constants: Constants, operand: Operand) -> Constants:
        return {role: code(value, operand) for role, value in constants.items()}

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        which, *rest = inputs
        cases = iter(rest)
        off = constants["off"] if "off" in constants else next(cases)
        on = constants["on"] if "on" in constants else next(cases)
        return _choose(which, jnp.asarray(off).astype(attributes["dtype"]), jnp.asarray(on).astype(attributes["dtype"]))


def _choose(which: Array, off: jax.Array, on: jax.Array) -> jax.Array:
    shape = jnp.broadcast_shapes(jnp.shape(which), off.shape, on.shape)
    return lax.select(*(jnp.broadcast_to(jnp.asarray(x), shape) for x in (which, on, off)))
