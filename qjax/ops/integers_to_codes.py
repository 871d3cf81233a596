"""Turns integers into codes: a mask into 0 and 1, a choice between two constants, an integer used as a float.

where(mask, a, b)    ->    where(mask, code(a), code(b))
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from qjax.numerics._namespace import host_or_trace
from qjax.numerics.softfloat import Real
from qjax.ops.base import Attributes, Constants, Elementwise, Equation, Preparation, Prepared, Role, real, register
from qjax.ops.epilogue import clamp_codes, finish
from qjax.ops.facts import ChoosesNoPlace, no_formula
from qjax.ops.fields import NoFields
from qjax.ops.float_accumulator import Pending


def _is_float(dtype: DTypeLike) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


@register
class Choose(ChoosesNoPlace, Elementwise):
    """y = on where the mask holds, else off, as in `jnp.where(mask, a, b)` with two constants or `mask.astype(float)`.

    The input is the mask. constants: on and off are int32 codes, which include the affine steps after the choice.
    """

    name = "choose"
    fields = NoFields
    role = Role.PRODUCER
    primitives = ("select_n", "convert_element_type")
    takes_steps = True

    def reads(self, eqn: Equation, constant: Sequence[bool]) -> bool:
        if constant[0] or eqn.in_dtypes[0] != np.bool_ or not _is_float(eqn.out_dtypes[0]):
            return False
        return len(constant) == 1 or (len(constant) == 3 and constant[1] and constant[2])

    def data(self, eqn: Equation, constant: Sequence[bool]) -> tuple[int, ...]:
        return ()

    def integers(self, eqn: Equation, constant: Sequence[bool]) -> tuple[int, ...]:
        return (0,)

    def chain_constants(self, eqn: Equation, constant: Sequence[bool]) -> dict[str, int]:
        return {"off": 1, "on": 2} if len(constant) == 3 else {}

    def training(self, eqn: Equation, inputs: Sequence[Any]) -> list[Any]:
        chosen = eqn.bind(*(real(x) for x in inputs))[0]
        return [Pending.of_real(chosen.astype(jnp.float32), eqn.out_dtypes[0])]

    def prepare(self, given: Preparation) -> Prepared:
        output, affine = given.output, given.affine
        found: dict[str, Any] = {}
        for role, default in (("off", 0), ("on", 1)):
            value = given.constants.get(role, np.float32(default))
            exact = (affine.g * Real.of(value) + affine.b) / Real.of(output.scale)
            xp = host_or_trace(exact.mantissa, output.zero_point)
            bounds = (xp.asarray(bound - output.zero_point).astype(np.int32) for bound in (output.qmin, output.qmax))
            steps = xp.clip(exact.to_int32(), *bounds)
            found[role] = (steps + xp.asarray(output.zero_point)).astype(np.int32)
        return Prepared(found)

    def restated(self, given: Preparation) -> Prepared | None:
        # the constants are codes, the same for every target
        return None

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        (which,) = inputs
        off, on = (jnp.asarray(constants[role]) for role in ("off", "on"))
        shape = jnp.broadcast_shapes(which.shape, off.shape, on.shape)
        codes = lax.select(*(jnp.broadcast_to(x, shape) for x in (which, on, off)))
        return clamp_codes(codes, constants).astype(attributes["dtype"])


@register
class Number(ChoosesNoPlace, Elementwise):
    """y = float(x) for integers: the accumulator is the integer itself."""

    name = "number"
    fields = NoFields
    role = Role.PRODUCER
    primitives = ("convert_element_type",)
    takes_steps = True
    operation = no_formula

    def reads(self, eqn: Equation, constant: Sequence[bool]) -> bool:
        return not constant[0] and jnp.issubdtype(eqn.in_dtypes[0], jnp.integer) and _is_float(eqn.out_dtypes[0])

    def data(self, eqn: Equation, constant: Sequence[bool]) -> tuple[int, ...]:
        return ()

    def integers(self, eqn: Equation, constant: Sequence[bool]) -> tuple[int, ...]:
        return (0,)

    def training(self, eqn: Equation, inputs: Sequence[Any]) -> list[Any]:
        return [Pending.of_real(inputs[0].astype(jnp.float32), eqn.out_dtypes[0])]

    def scales(self, attributes: Attributes, inputs: Sequence[Any]) -> list[Any]:
        return [Real.of(np.float32(1))]

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        return finish([inputs[0].astype(jnp.int32)], constants, attributes)
