"""TFLite's mean, in which an integer division of the multiplier replaces the division by the count.

`tflite_mean` is what the reference kernels and TFLite Micro compute. With (M, s) the multiplier of s_x / s_y in double
and k the least of floor(log2 n), 32 and 31 + s,

    M' = floor((M << k) / n);  y = RDBPOT(SRDHM((sum - n z_x) << left, M'), right) + z_y,  the shift being s - k.

M' is not normalized, so it may have 30 bits. The optimised kernels compute int16 codes, and means over axes other than
height and width, in the same way.

`tflite_mean_neon` is the optimised kernel for int8 codes over height and width of an NHWC tensor. Its scale is formed
in float32 as s_x / (float32(n) * s_y), the sum is not centred, and the offset that results from the zero points is
rounded separately:

    t = float32(z_x) * s_x / s_y;  y = MBQM(sum q) + z_y - trunc(t > 0 ? t + 0.5 : t - 0.5).

Whole blocks of 16 channels are rounded as in `neon`, the remaining channels as in `double_round`. The channels are the
last axis.

Sources: reference_ops::QuantizedMeanOrSum, optimized_integer_ops::Mean, reduce.cc. Compared with ai-edge-litert 2.3.0
and tflite-micro 0.dev20261023, 0 of 580,000 int8 and 0 of 390,000 int16 means per kernel differ.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from qjax.numerics._namespace import host_or_trace, wide
from qjax.numerics.fixed_point import Multiplier, quantize_multiplier
from qjax.numerics.rounding import Rounding
from qjax.numerics.softfloat import Real
from qjax.ops.formulas.base import Array, Formula, Setting, register
from qjax.ops.formulas.float_steps import integer
from qjax.ops.formulas.tflite_steps import (
    channels_in_vectors,
    constant,
    is_wide,
    roles,
    scaled,
    scaled_in_vectors,
)


def _mean_roles(setting: Setting) -> dict[str, Array]:
    m = quantize_multiplier(Real.of(setting.scales[0]) / Real.of(setting.y_scale))
    xp = host_or_trace(m.multiplier, setting.count)
    with wide(xp):
        count = xp.asarray(setting.count).astype(np.int32)
        floor_log2 = Real.of(count).exponent + np.int32(52)
        places = xp.minimum(xp.minimum(floor_log2, np.int32(32)), np.int32(31) + m.shift).astype(np.int32)
        quotient = (xp.asarray(m.multiplier).astype(np.int64) << places.astype(np.int64)) // count.astype(np.int64)
        divided = Multiplier(quotient.astype(np.int32), (m.shift - places).astype(np.int32))
    return roles("", divided)


def _mean(operands: Sequence[jax.Array], constants: Mapping[str, Any], attributes: Mapping[str, Any]) -> jax.Array:
    return scaled(operands[0], constants) + constant(constants, "y_zero_point")


def _neon_roles(setting: Setting) -> dict[str, Array]:
    if is_wide({"dtype": setting.dtype}):
        return {**_mean_roles(setting), "offset": np.zeros((), np.int32)}
    s_x, s_y = Real.of(setting.scales[0]), Real.of(setting.y_scale)
    count = Real.of(integer(setting.count)).to_float32()
    step = Real.of((Real.of(count) * s_y).to_float32())
    scale = (s_x / step).to_float32()
    zero = Real.of((Real.of(integer(setting.zero_points[0])) * s_x).to_float32())
    shifted = Real.of((zero / s_y).to_float32())
    half = Real.of(np.float32(0.5))
    nearest = Real.where(shifted > Real.of(np.float32(0)), shifted + half, shifted - half).to_float32()
    offset = integer(setting.y_zero_point) - Real.of(nearest).to_int32(Rounding.TOWARD_ZERO)
    return {**roles("", quantize_multiplier(scale)), "offset": offset}


def _neon_mean(operands: Sequence[jax.Array], constants: Mapping[str, Any], attributes: Mapping[str, Any]) -> jax.Array:
    if is_wide(attributes):
        return _mean(operands, constants, attributes)
    acc = operands[0]
    total = acc + constant(constants, "count") * constant(constants, "zero_point0")
    return scaled_in_vectors(total, constants, channels_in_vectors(acc.shape)) + constant(constants, "offset")


tflite_mean = register(Formula("tflite_mean", frozenset({"mean"}), _mean_roles, _mean))

tflite_mean_neon = register(
    Formula("tflite_mean_neon", frozenset({"mean"}), _neon_roles, _neon_mean, elsewhere="tflite_mean")
)
