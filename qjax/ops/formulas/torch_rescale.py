"""PyTorch's requantization: quantize_per_tensor of the dequantized tensor.

y = rint(fma(float32(s_x * (q - z_x)), float32(1 / s_y), z_y)). The zero point is added before the rounding, and product
and sum are rounded once.

Source: FBGEMM's Dequantize and QuantizeAvx2, which masks the last elements, so that all elements are computed in the
same way. Compared with torch 2.13.0, 0 of 51,200 codes differ, and 0 of 76,800 and of 792,000 codes for the two halves.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from qjax.numerics import float32
from qjax.ops.formulas.base import Array, Formula, Setting, register
from qjax.ops.formulas.float_steps import dequantize, number, roles, whole
from qjax.ops.formulas.torch_steps import reciprocal


def _prepare(setting: Setting) -> dict[str, Array]:
    return roles(scale0=float32.of(setting.scales[0]), share=reciprocal(setting.y_scale))


def _kernel(operands: Sequence[jax.Array], constants: Mapping[str, Any], attributes: Mapping[str, Any]) -> jax.Array:
    real = dequantize(operands[0], number(constants, "scale0"))
    return float32.to_int32(float32.fma(real, number(constants, "share"), whole(constants, "y_zero_point")))


torch_rescale = register(Formula("torch_rescale", frozenset({"rescale"}), _prepare, _kernel))
