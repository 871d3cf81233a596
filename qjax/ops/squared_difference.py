"""The square of a difference of two tensors, (x0 - x1)^2, as in variances that another tool's converter spelled out.

| method | who | how |
| --- | --- | --- |
| `tflite` | LiteRT, TFLite Micro | both operands in steps of 2 max(s_0, s_1) / 2^7, then one rescaling of the square |
| `exact` | every other target | one rounding of s_0^2 d_0^2 - 2 s_0 s_1 d_0 d_1 + s_1^2 d_1^2, d_i = x_i - z_i |

Every multiplication by a scale rounds twice (`double_round`). Source: squared_difference.cc of LiteRT and tflite-micro.
"""

from typing import Any, NotRequired, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from qjax.numerics.fixed_point import quantize_multiplier
from qjax.numerics.softfloat import Real
from qjax.ops.accumulator_bounds import reach, within
from qjax.ops.base import (
    Attributes,
    Bounds,
    Constants,
    Elementwise,
    Preparation,
    Prepared,
    Role,
    Site,
    centered,
    register,
)
from qjax.ops.epilogue import clamp_codes, finish_sum, fold_sum
from qjax.ops.fields import NoFields
from qjax.ops.formulas.tflite_steps import constant, roles, scaled
from qjax.support.errors import Unsupported

_BITS = 7
"""How far operands of 8 bits are shifted up."""


class PreparedFields(TypedDict):
    """method: see the module. rounding: of the exact one."""

    method: str
    rounding: NotRequired[str]


@register
class SquaredDifference(Elementwise):
    """y = (x0 - x1)^2; shapes broadcast."""

    name = "squared_difference"
    fields = NoFields
    prepared = PreparedFields
    role = Role.PRODUCER
    takes_steps = False

    def prepare(self, given: Preparation) -> Prepared:
        first, second = (Real.of(x.scale) for x in given.inputs)
        native = all(x.dtype == "int8" for x in (*given.inputs, given.output))
        if given.target.squared_difference == "exact" or not native:
            both = Real.of(-2.0) * first * second
            folded = fold_sum([first * first, both, second * second], given.output.scale, given.affine)
            return Prepared(folded, {"method": "exact", "rounding": given.target.rounding.value})
        twice = first.maximum(second).scale_by_power_of_two(1)
        last = quantize_multiplier(twice * twice / Real.of(given.output.scale).scale_by_power_of_two(2 * _BITS))
        if np.any(np.asarray(last.shift) > 0):
            raise Unsupported(
                "the square of a difference has such a small output scale that LiteRT aborts",
                "Calibrate the output again",
            )
        constants = roles("0", quantize_multiplier(first / twice)) | roles("1", quantize_multiplier(second / twice))
        return Prepared(constants | roles("", last), {"method": "tflite"})

    def restated(self, given: Preparation) -> Prepared | None:
        return self.prepare(given)

    def arithmetic(self, attributes: Attributes) -> str:
        return f"squared difference of {attributes['method']}"

    def accumulator(self, site: Site) -> Bounds | None:
        if site.attributes["method"] == "tflite":
            # at most (2^7 255)^2, for codes of 8 bits
            return within(((1 << _BITS) * 255) ** 2)
        return within((reach(site.inputs[0]) + reach(site.inputs[1])) ** 2)

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Any) -> jax.Array:
        x, w = centered(inputs[0], constants, 0), centered(inputs[1], constants, 1)
        shape = jnp.broadcast_shapes(x.shape, w.shape)
        x, w = jnp.broadcast_to(x, shape), jnp.broadcast_to(w, shape)
        if attributes["method"] == "exact":
            return finish_sum([x * x, x * w, w * w], constants, attributes)
        difference = scaled(x << np.int32(_BITS), constants, "0") - scaled(w << np.int32(_BITS), constants, "1")
        zero_point = jnp.broadcast_to(constant(constants, "y_zero_point"), shape)
        codes = scaled(difference * difference, constants) + zero_point
        low, high = np.int32(attributes["qmin"]), np.int32(attributes["qmax"])
        return clamp_codes(jnp.minimum(jnp.maximum(codes, low), high), constants).astype(attributes["dtype"])
