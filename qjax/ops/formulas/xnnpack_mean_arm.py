"""XNNPACK's mean on ARM: that of x86 (`xnnpack_mean`), each product and sum fused into one rounding.

    r = float32(float32(s_x / s_y) * float32(1 / n));  c = fma(-n z_x, r, z_y);  y = rint(fma(sum q, r, c))

The compiler contracts both expressions to FMADD and FMSUB, in the constants as in the kernel. It shows at ties and
near the steps of float32 only: none of 223,000 random means tells it from x86, so inputs were searched that do. Of
12,969 such means of ai-edge-litert 2.3.0 for AArch64 under emulation, this formula misses none, separate roundings
miss 11,799, a fused kernel with separately rounded constants 2,409.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from qjax.numerics import float32
from qjax.numerics.float32 import Float32
from qjax.ops.formulas.base import Array, Formula, Setting, register
from qjax.ops.formulas.tflite_mean import tflite_mean
from qjax.ops.formulas.tflite_steps import constant, is_wide, same_types, whole
from qjax.ops.formulas.xnnpack_mean import mean_scale


def _prepare(setting: Setting) -> dict[str, Array]:
    scale, zeros = mean_scale(setting)
    r = float32.of(scale)
    c = float32.fma(float32.negative(float32.of(zeros)), r, float32.from_int32(whole(setting.y_zero_point)))
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
    return float32.to_int32(float32.fma(float32.from_int32(total), scale, offset))


xnnpack_mean_arm = register(Formula("xnnpack_mean_arm", frozenset({"mean"}), _prepare, _kernel))
