"""The elementwise quotient of two tensors of codes.

q_y = round(s0 (q0 - z0) / (s1 (q1 - z1) s_y)) + z_y
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qjax.numerics.division import fold_quotient, quotient
from qjax.ops.base import (
    Attributes,
    Constants,
    Elementwise,
    Equation,
    Preparation,
    Prepared,
    Quantized,
    Role,
    centered,
    real,
    register,
)
from qjax.ops.epilogue import clamp_codes
from qjax.ops.fields import NoFields
from qjax.ops.float_accumulator import Pending


@register
class Divide(Elementwise):
    """y = x0 / x1, both data: one exact rounding of the quotient of codes, ties to even.

    With a divisor of 0 the result is the end of the range that has the dividend's sign; 0 / 0 is the code of 0.
    """

    name = "divide"
    fields = NoFields
    role = Role.PRODUCER
    primitives = ("div",)
    takes_steps = False

    def reads(self, eqn: Equation, constant: Sequence[bool]) -> bool:
        return not any(constant)

    def data(self, eqn: Equation, constant: Sequence[bool]) -> tuple[int, ...]:
        return (0, 1)

    def training(self, eqn: Equation, inputs: Sequence[Any]) -> list[Any]:
        x, w = inputs
        if not (isinstance(x, Quantized) and isinstance(w, Quantized)):
            return eqn.bind(real(x), real(w))
        # only the codes show where the divisor is 0, and there the quotient is infinite or NaN
        x, w = jnp.broadcast_arrays(x.real32(), w.real32())
        zero = w == 0
        y = x / jnp.where(zero, jnp.ones_like(w), w)
        end = jnp.sign(x) * np.float32(1e30)
        return [Pending.of_real(jnp.where(zero, jax.lax.stop_gradient(end), y), eqn.out_dtypes[0])]

    def prepare(self, given: Preparation) -> Prepared:
        return Prepared(fold_quotient(given.inputs[0].scale, given.inputs[1].scale, given.output.scale))

    def restated(self, given: Preparation) -> Prepared | None:
        # the constants depend on the scales alone, in the same way for every target
        return None if given.constants else self.prepare(given)

    def arithmetic(self, attributes: Attributes) -> str:
        return "int64 quotient"

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        x, w = centered(inputs[0], constants, 0), centered(inputs[1], constants, 1)
        shape = jnp.broadcast_shapes(x.shape, w.shape)
        codes = quotient(jnp.broadcast_to(x, shape), jnp.broadcast_to(w, shape), constants)
        low, high = np.int32(attributes["qmin"]), np.int32(attributes["qmax"])
        zero_point = jnp.broadcast_to(jnp.asarray(constants["y_zero_point"]), shape)
        codes = jnp.minimum(jnp.maximum(codes + zero_point, low), high)
        return clamp_codes(codes, constants).astype(attributes["dtype"])
