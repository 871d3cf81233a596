"""XNNPACK's multiplication on ARM: the rule `xnnpack_rndnu` of float32(float32(s_0 s_1) / s_y), ties up.

On x86 the formula is `xnnpack_multiply`, with ties to even. The same .tflite file therefore computes different codes on
ARM wherever the product is a tie. Operations that LiteRT does not delegate are the same on both.

Sources: xnn_init_qs8_mul_minmax_rndnu_params and the kernels qs8-vmul/rndnu-neon. Compared with ai-edge-litert 2.3.0
for AArch64 under emulation, 0 of 262,144 int8 products with every pair of codes differ, whereas `xnnpack_multiply`
differs in 866.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from qjax.numerics.fixed_point import Multiplier
from qjax.numerics.requantize import requantize
from qjax.ops.formulas.base import Array, Formula, Setting, register
from qjax.ops.formulas.tflite_multiply import float32_scale, multiply_roles, neon_multiply
from qjax.ops.formulas.tflite_steps import constant, is_wide
from qjax.ops.formulas.xnnpack_steps import either, has_kernel, is_delegated, within


def _prepare(setting: Setting) -> dict[str, Array]:
    scale = float32_scale(setting)
    # both kernels use the same multiplier, that of the float32 scale
    return {**multiply_roles(setting), "delegated": within(scale, 2.0**-16, 2.0**8)}


def _kernel(operands: Sequence[jax.Array], constants: Mapping[str, Any], attributes: Mapping[str, Any]) -> jax.Array:
    def kept() -> jax.Array:
        return neon_multiply(operands, constants, attributes)

    def xnnpack() -> jax.Array:
        first, second = operands
        info = jnp.iinfo(attributes["dtype"])
        return requantize(
            first * second,
            Multiplier(constant(constants, "multiplier"), constant(constants, "shift")),
            rule="xnnpack_rndnu",
            zero_point=constant(constants, "y_zero_point"),
            qmin=int(info.min),
            qmax=int(info.max),
        )

    if not has_kernel(attributes):
        return kept()
    return either(constants["delegated"], xnnpack, kept)


def _pointwise(attributes: Mapping[str, Any], constants: Mapping[str, Any]) -> bool:
    return is_wide(attributes) or is_delegated(attributes, constants)


xnnpack_multiply_arm = register(
    Formula("xnnpack_multiply_arm", frozenset({"multiply"}), _prepare, _kernel, pointwise=_pointwise)
)
