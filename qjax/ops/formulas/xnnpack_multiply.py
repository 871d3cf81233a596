"""XNNPACK's multiplication on x86: rint(float32(x_0 x_1) * r) + z_y with r = float32(float32(s_0 s_1) / s_y).

LiteRT does not delegate scales r outside [2^-16, 2^8) or int16 codes, and computes them with its own kernel,
`tflite_multiply_neon`. XNNPACK for ARM has another kernel, `xnnpack_multiply_arm`, which follows the rule
`xnnpack_rndnu`.

Source: xnn_init_qs8_mul_minmax_scalar_params. Compared with ai-edge-litert 2.3.0, 0 of 760,000 products within these
bounds and 0 of 58,000 outside of them differ.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from qjax.numerics import float32
from qjax.ops.formulas import float_steps
from qjax.ops.formulas.base import Array, Formula, Setting, register
from qjax.ops.formulas.float_steps import dequantize, number
from qjax.ops.formulas.tflite_multiply import float32_scale, multiply_roles, neon_multiply
from qjax.ops.formulas.tflite_steps import constant, is_wide
from qjax.ops.formulas.xnnpack_steps import either, has_kernel, is_delegated, within


def _prepare(setting: Setting) -> dict[str, Array]:
    scale = float32_scale(setting)
    return {
        **multiply_roles(setting),
        **float_steps.roles(scale=float32.of(scale)),
        "delegated": within(scale, 2.0**-16, 2.0**8),
    }


def _kernel(operands: Sequence[jax.Array], constants: Mapping[str, Any], attributes: Mapping[str, Any]) -> jax.Array:
    def kept() -> jax.Array:
        return neon_multiply(operands, constants, attributes)

    def xnnpack() -> jax.Array:
        first, second = operands
        # |x_0 x_1 r| < 2^16 * 2^8
        product = dequantize(first * second, number(constants, "scale"))
        return float32.to_int32(product) + constant(constants, "y_zero_point")

    if not has_kernel(attributes):
        return kept()
    return either(constants["delegated"], xnnpack, kept)


def _pointwise(attributes: Mapping[str, Any], constants: Mapping[str, Any]) -> bool:
    return is_wide(attributes) or is_delegated(attributes, constants)


xnnpack_multiply = register(
    Formula("xnnpack_multiply", frozenset({"multiply"}), _prepare, _kernel, pointwise=_pointwise)
)
