"""Padding with a constant other than zero."""

from collections.abc import Collection, Sequence
from typing import Any, NotRequired, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.ops.base import Attributes, Constants, Equation, Operand, Quantized, Shape, real, register
from qjax.ops.constant_codes import code, steps_on
from qjax.ops.facts import always, filled_with_constants
from qjax.ops.grid import GridOp


class Fields(TypedDict):
    """padding: low, high and interior of each axis. number: for plain integers; codes have a constant instead."""

    padding: list[list[int]]
    number: NotRequired[int]


@register
class PadValue(GridOp):
    """`lax.pad` with a constant, which is clipped to the codes' range, in training too. See `pad` for zero and -inf.

    constants: value is its code, int32. attributes: padding, and number, which replaces `value` for plain integers or
    booleans.
    """

    name = "pad_value"
    fields = Fields
    primitives = ("pad",)
    moves = True
    keeps_batch = always
    filling = filled_with_constants

    def reads(self, eqn: Equation, constant: Sequence[bool]) -> bool:
        known = jnp.issubdtype(eqn.in_dtypes[0], jnp.floating) or eqn.literals[1] is not None
        return not constant[0] and constant[1] and known

    def data(self, eqn: Equation, constant: Sequence[bool]) -> tuple[int, ...]:
        return (0,)

    def chain_constants(self, eqn: Equation, constant: Sequence[bool]) -> dict[str, int]:
        return {"value": 1} if jnp.issubdtype(eqn.in_dtypes[0], jnp.floating) else {}

    def attributes(self, eqn: Equation) -> dict[str, Any]:
        padding = [[int(n) for n in triple] for triple in eqn.params["padding_config"]]
        if jnp.issubdtype(eqn.in_dtypes[0], jnp.floating):
            return {"padding": padding}
        return {"padding": padding, "number": int(np.ravel(eqn.literals[1])[0])}

    def training(self, eqn: Equation, inputs: Sequence[Any]) -> list[Any]:
        x, value = inputs
        if not isinstance(x, Quantized):
            return eqn.bind(real(x), real(value))
        return [x.with_codes(eqn.bind(x.codes, steps_on(value, x).reshape(()))[0])]

    def in_codes(self, attributes: Attributes, constants: Constants, operand: Operand) -> Constants:
        return {role: code(value, operand).reshape(()) for role, value in constants.items()}

    def works_along(self, attributes: Attributes, inputs: Sequence[Shape], output: Shape) -> Sequence[Collection[int]]:
        return [[axis for axis, widths in enumerate(attributes["padding"]) if any(widths)]]

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        (x,) = inputs
        fill = constants["value"] if "value" in constants else np.asarray(attributes["number"])
        fill = np.asarray(fill).astype(x.dtype) if isinstance(fill, np.ndarray) else jnp.asarray(fill).astype(x.dtype)
        return lax.pad(x, fill.reshape(()), [tuple(triple) for triple in attributes["padding"]])
