"""The elementwise product of two tensors of codes: gates, squeeze-and-excitation, attention masks.

y = round((q0 - z0) (q1 - z1) s0 s1 / s_y) + z_y
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from qjax.ops import accumulator_bounds
from qjax.ops.base import (
    Attributes,
    Bounds,
    Constants,
    Elementwise,
    Equation,
    Quantized,
    Role,
    Site,
    centered,
    real,
    register,
)
from qjax.ops.epilogue import finish
from qjax.ops.fields import NoFields
from qjax.ops.float_accumulator import Pending


@register
class Multiply(Elementwise):
    """y = x0 * x1; the accumulator is the product of the centered codes."""

    name = "multiply"
    fields = NoFields
    role = Role.PRODUCER
    primitives = ("mul",)
    takes_steps = True
    one_order = True

    def reads(self, eqn: Equation, constant: Sequence[bool]) -> bool:
        return not any(constant)

    def data(self, eqn: Equation, constant: Sequence[bool]) -> tuple[int, ...]:
        return (0, 1)

    def training(self, eqn: Equation, inputs: Sequence[Any]) -> list[Any]:
        x, w = inputs
        if not (isinstance(x, Quantized) and isinstance(w, Quantized)):
            return eqn.bind(real(x), real(w))
        acc = eqn.bind(x.codes, w.codes)[0]
        scale = lax.stop_gradient(x.scale.reshape(()) * w.scale.reshape(()))
        return [Pending.start(acc, scale, eqn.out_dtypes[0], rounded=False)]

    def operation(self, attributes: Attributes) -> str | None:
        return "multiply"

    def commutes(self, attributes: Attributes) -> bool:
        return True

    def scales(self, attributes: Attributes, inputs: Sequence[Any]) -> list[Any]:
        return [inputs[0] * inputs[1]]

    def accumulator(self, site: Site) -> Bounds | None:
        x, w = site.inputs
        return accumulator_bounds.within(accumulator_bounds.reach(x) * accumulator_bounds.reach(w))

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        x, w = centered(inputs[0], constants, 0), centered(inputs[1], constants, 1)
        return finish([x, w], constants, attributes, lambda: [x * w])
