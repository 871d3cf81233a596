"""Requantization as an operation of its own, or an affine step without a producer to fold it into."""

from collections.abc import Sequence

import jax

from qjax.ops.base import Attributes, Constants, Elementwise, Role, centered, register
from qjax.ops.epilogue import finish
from qjax.ops.facts import scale_of_input
from qjax.ops.fields import NoFields


@register
class Rescale(Elementwise):
    """y = g * x + b per channel, which lowering inserts where codes meet an affine step; never read from a jaxpr."""

    name = "rescale"
    fields = NoFields
    role = Role.PRODUCER
    takes_steps = True
    any_zero_point = True
    scales = scale_of_input

    def operation(self, attributes: Attributes) -> str | None:
        return "rescale"

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        return finish([centered(inputs[0], constants, 0)], constants, attributes)
