"""XNNPACK's mean: float32, the zero points gathered in one constant inside the rounding.

    r = float32(float32(s_x / s_y) * float32(1 / n));  c = float32(z_y - float32(float32(n z_x) * r))
    y = rint(float32(float32(float32(sum q) * r) + c))

The sum is that of the codes as they are; product and sum are rounded apart on x86, which has no fused multiply-add in
this kernel. LiteRT keeps int16 codes for its own kernel, `tflite_mean`. Source: reduce-nd.c and
xnn_update_qs8_reduce_scalar_params; ai-edge-litert 2.3.0 on x86, 0 of 700,000 means.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from qjax.numerics import float32
from qjax.numerics.float32 import Float32
from qjax.numerics.softfloat import Real
from qjax.ops.formulas.base import Array, Formula, Setting, register
from qjax.ops.formulas.tflite_mean import tflite_mean
from qjax.ops.formulas.tflite_steps import constant, is_wide, same_types, whole


def mean_scale(setting: Setting) -> tuple[Array, Array]:
    """The float32 numbers r and n z_x."""
    count = Real.of(Real.of(whole(setting.count)).to_float32())
    ratio = Real.of((Real.of(setting.scales[0]) / Real.of(setting.y_scale)).to_float32())
    share = Real.of((Real.of(np.float32(1)) / count).to_float32())
    zeros = (count * Real.of(whole(setting.zero_points[0]))).to_float32()
    return (ratio * share).to_float32(), zeros


def _prepare(setting: Setting) -> dict[str, Array]:
    scale, zeros = (Real.of(number) for number in mean_scale(setting))
    offset = Real.of(whole(setting.y_zero_point)) - Real.of((zeros * scale).to_float32())
    r, c = float32.of(scale), float32.of(offset)
    return {
        **tflite_mean.prepare(setting),
        "scale_mantissa": r.mantissa,
        "scale_exponent": r.exponent,
        "offset_mantissa": c.mantissa,
        "offset_exponent": c.exponent,
    }


def _kernel(operands: Sequence[jax.Array], constants: Mapping[str, Any], attributes: Mapping[str, Any]) -> jax.Array:
    if is_wide(attributes) or not same_types(attributes):
        return tflite_mean.kernel(operands, constants, attributes)
    total = operands[0] + constant(constants, "count") * constant(constants, "zero_point0")
    scale = Float32(constant(constants, "scale_mantissa"), constant(constants, "scale_exponent"))
    offset = Float32(constant(constants, "offset_mantissa"), constant(constants, "offset_exponent"))
    return float32.to_int32(float32.add(float32.multiply(float32.from_int32(total), scale), offset))


xnnpack_mean = register(Formula("xnnpack_mean", frozenset({"mean"}), _prepare, _kernel))
