"""XNNPACK's mean in float32, where one constant inside the rounding combines the zero points.

    r = float32(float32(s_x / s_y) * float32(1 / n));  c = float32(z_y - float32(float32(n z_x) * r))
    y = rint(float32(float32(float32(sum q) * r) + c))

The sum is that of the codes as they are. Product and sum are rounded separately on x86, which has no fused multiply-add
in this kernel, whereas `xnnpack_mean_arm` has one. LiteRT does not delegate int16 codes, and computes them with its own
kernel, `tflite_mean`.

Source: reduce-nd.c and xnn_update_qs8_reduce_scalar_params. Compared with ai-edge-litert 2.3.0 on x86, 0 of 700,000
means differ.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from qjax.numerics import float32
from qjax.numerics.float32 import Float32
from qjax.numerics.softfloat import Real
from qjax.ops.formulas import float_steps
from qjax.ops.formulas.base import Array, Formula, Setting, register
from qjax.ops.formulas.float_steps import integer, number
from qjax.ops.formulas.tflite_mean import tflite_mean
from qjax.ops.formulas.tflite_steps import constant, is_wide, same_types


def mean_formula(
    name: str,
    offset: Callable[[Setting, Array, Array], Float32],
    multiply_add: Callable[[Float32, Float32, Float32], Float32],
) -> Formula:
    """The formula for one way to multiply and add.

    offset: (setting, r, n z_x) -> the constant c; r and n z_x are float32. multiply_add: (sum q, r, c) -> the operand
    of rint.
    """

    def prepare(setting: Setting) -> dict[str, Array]:
        scale, zeros = _scale(setting)
        numbers = {"scale": float32.of(scale), "offset": offset(setting, scale, zeros)}
        return {**tflite_mean.prepare(setting), **float_steps.roles(**numbers)}

    def kernel(operands: Sequence[jax.Array], constants: Mapping[str, Any], attributes: Mapping[str, Any]) -> jax.Array:
        if is_wide(attributes) or not same_types(attributes):
            return tflite_mean.kernel(operands, constants, attributes)
        total = operands[0] + constant(constants, "count") * constant(constants, "zero_point0")
        real = multiply_add(float32.from_int32(total), number(constants, "scale"), number(constants, "offset"))
        return float32.to_int32(real)

    return Formula(name, frozenset({"mean"}), prepare, kernel)


def _scale(setting: Setting) -> tuple[Array, Array]:
    """The float32 numbers r and n z_x."""
    count = Real.of(Real.of(integer(setting.count)).to_float32())
    ratio = Real.of((Real.of(setting.scales[0]) / Real.of(setting.y_scale)).to_float32())
    share = Real.of((Real.of(np.float32(1)) / count).to_float32())
    zeros = (count * Real.of(integer(setting.zero_points[0]))).to_float32()
    return (ratio * share).to_float32(), zeros


def _offset(setting: Setting, scale: Array, zeros: Array) -> Float32:
    product = (Real.of(zeros) * Real.of(scale)).to_float32()
    return float32.of(Real.of(integer(setting.y_zero_point)) - Real.of(product))


xnnpack_mean = register(
    mean_formula("xnnpack_mean", _offset, lambda total, r, c: float32.add(float32.multiply(total, r), c))
)
