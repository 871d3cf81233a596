"""XNNPACK's requantization: a multiplier with 8 fractional bits.

    m = rint(256 float32(s_x / s_y));  y = ((x m + 128) >> 8) + z_y

The multiplier is coarse: near a ratio of 2^-8 it is 1 or 2. LiteRT does not delegate ratios outside [2^-8, 2^7] or
conversions unless both sides have 8-bit codes, and computes them with its own kernel, `tflite_rescale_neon`.

Source: xnn_init_qs8_cvt_scalar_params. Compared with ai-edge-litert 2.3.0 on x86, 0 of 610,000 codes within these
bounds and 0 of 82,000 outside of them differ.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from qjax.numerics.rounding import Rounding, rounding_right_shift
from qjax.numerics.softfloat import Real
from qjax.ops.formulas.base import Array, Formula, Setting, register
from qjax.ops.formulas.tflite_rescale import neon_rescale, rescale_roles
from qjax.ops.formulas.tflite_steps import constant, is_wide, same_types
from qjax.ops.formulas.xnnpack_steps import either, within


def _prepare(setting: Setting) -> dict[str, Array]:
    ratio = (Real.of(setting.scales[0]) / Real.of(setting.y_scale)).to_float32()
    return {
        **rescale_roles(setting),
        "factor": Real.of(ratio).scale_by_power_of_two(8).to_int32(),
        "delegated": within(ratio, 2.0**-8, most=2.0**7),
    }


def _kernel(operands: Sequence[jax.Array], constants: Mapping[str, Any], attributes: Mapping[str, Any]) -> jax.Array:
    def kept() -> jax.Array:
        return neon_rescale(operands, constants, attributes)

    def xnnpack() -> jax.Array:
        # |x m| <= 255 * 2^15
        scaled = rounding_right_shift(operands[0] * constant(constants, "factor"), 8, Rounding.NEAREST_UP)
        return scaled + constant(constants, "y_zero_point")

    if is_wide(attributes) or not same_types(attributes):
        return kept()
    return either(constants["delegated"], xnnpack, kept)


xnnpack_rescale = register(Formula("xnnpack_rescale", frozenset({"rescale"}), _prepare, _kernel))
