"""Additions in float32 steps that are all exact, for runtimes whose optimizer may fuse or reorder them.

With the ratios r_i = s_i / s_y and t = 13 - floor(log2(max r_i)), where t is from 0 to 40, the factors are m_i =
rint(r_i * 2^t), of at most 15 bits, and y = rint((m_0 (q_0 - z_0) + m_1 (q_1 - z_1)) / 2^t) + z_y, ties to even. For
codes of 8 bits the sum stays below 2^24, so float32 holds every step exactly. A fused multiply-add and any order of the
additions then result in the same number.

OpenVINO's CPU plugin adds in an order that depends on what is around the addition. The files that qjax writes for it
contain these steps (`contrib/onnx_styles/openvino`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qjax.numerics._namespace import host_or_trace, wide
from qjax.numerics.rounding import Rounding
from qjax.numerics.softfloat import Real
from qjax.ops.formulas.base import Array, Formula, Setting, register
from qjax.ops.formulas.two_factors import shifted_sum

_FACTOR_BITS = 14
_MAX_SHIFT = 40


def _prepare(setting: Setting) -> dict[str, Array]:
    s_y = Real.of(setting.y_scale)
    ratios = [Real.of(scale) / s_y for scale in setting.scales]
    largest = ratios[0].maximum(ratios[1])
    xp = host_or_trace(largest.mantissa)
    with wide(xp):
        # largest = mantissa * 2^exponent with a mantissa of 53 bits: below 2^(exponent + 53)
        exponent = largest.exponent + 53
        if xp is np and np.any(exponent > _FACTOR_BITS):
            raise ValueError(
                f"openvino_add: expected ratios of scales s_0 / s_y, s_1 / s_y below 2^{_FACTOR_BITS}. Got scales "
                f"{setting.scales[0]} and {setting.scales[1]} for an output scale of {setting.y_scale}; calibrate the "
                "output on the sum."
            )
        shift = xp.clip(_FACTOR_BITS - exponent, 0, _MAX_SHIFT).astype(np.int32)
    factors = {f"factor{i}": r.scale_by_power_of_two(shift).to_int32() for i, r in enumerate(ratios)}
    if setting.op == "subtract":
        factors["factor1"] = -factors["factor1"]
    return {**factors, "shift": shift}


def _kernel(operands: Sequence[jax.Array], constants: Mapping[str, Any], attributes: Mapping[str, Any]) -> jax.Array:
    with wide(jnp):
        rounded = shifted_sum(operands, constants, Rounding.NEAREST_EVEN)
        # codes of 16 bits may exceed int32
        rounded = jnp.clip(rounded, np.int64(-(2**30)), np.int64(2**30)).astype(jnp.int32)
    return rounded + jnp.asarray(constants["y_zero_point"])


openvino_add = register(Formula("openvino_add", frozenset({"add", "subtract"}), _prepare, _kernel, pointwise=True))
