"""ONNX Runtime's averages on codes: QLinearGlobalAveragePool and QLinearAveragePool.

The global average sums integers: y = rint(float32(sum of q) * r) + z_y with r = float32(s_x / float32(s_y *
float32(n))). The other one sums float32 numbers one by one, in the window's order (rows, then columns), and rounds
every addition:

    acc = float32(acc + float32(q_i * s_x));  y = rint(float32(float32(float32(acc / n) / s_y) + z_y)).

It therefore needs the codes of a window rather than their sum. n counts the elements inside the image. A window that is
the whole image, without padding, is computed as a global average.

Sources: MLAS's MlasQLinearGlobalAveragePool and contrib_ops/cpu/quantization/qlinear_pool.cc. Compared with onnxruntime
1.31.1, 0 of 170,000 global averages and 0 of 802,000 others differ.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qjax.numerics import float32
from qjax.numerics.float32 import Float32
from qjax.ops.formulas.base import Array, Formula, Setting, register
from qjax.ops.formulas.float_steps import dequantize, number, roles, round_inside, round_outside, whole


def global_roles(setting: Setting) -> dict[str, Array]:
    """The role "share": float32(s_x / float32(s_y * float32(n)))."""
    count = float32.from_int32(np.asarray(setting.count, np.int32))
    share = float32.divide(float32.of(setting.scales[0]), float32.multiply(float32.of(setting.y_scale), count))
    return roles(share=share)


def global_average(acc: jax.Array, constants: Mapping[str, Any]) -> jax.Array:
    """The average of centred codes whose sum is acc."""
    return round_outside(dequantize(acc, number(constants, "share")), constants)


def window_average(codes: jax.Array, constants: Mapping[str, Any]) -> Float32:
    """The real average over the leading axis of the centred codes, added up in float32 in that order.

    Padding may be included as zeros, because adding 0 changes nothing.
    """
    scale = number(constants, "scale0")

    def step(acc: Float32, q: jax.Array) -> tuple[Float32, None]:
        total = float32.add(acc, dequantize(q, scale))
        return Float32(*(jnp.asarray(field, jnp.int32) for field in total)), None

    zero = jnp.zeros(codes.shape[1:], jnp.int32)
    total, _ = jax.lax.scan(step, Float32(zero, zero), codes)
    return float32.divide(total, whole(constants, "count"))


def window_roles(setting: Setting) -> dict[str, Array]:
    """The two scales, unchanged."""
    return roles(scale0=float32.of(setting.scales[0]), y_scale=float32.of(setting.y_scale))


def _global_kernel(
    operands: Sequence[jax.Array], constants: Mapping[str, Any], attributes: Mapping[str, Any]
) -> jax.Array:
    return global_average(operands[0], constants)


def _window_prepare(setting: Setting) -> dict[str, Array]:
    return {**window_roles(setting), **global_roles(setting)}


def _window_kernel(
    operands: Sequence[jax.Array], constants: Mapping[str, Any], attributes: Mapping[str, Any]
) -> jax.Array:
    (codes,) = operands
    average = window_average(codes, constants)
    return round_inside(float32.divide(average, number(constants, "y_scale")), constants, "indefinite")


onnx_global_average = register(
    Formula("onnx_global_average", frozenset({"mean", "average_pool"}), global_roles, _global_kernel)
)

onnx_average_pool = register(
    Formula(
        "onnx_average_pool",
        frozenset({"average_pool"}),
        _window_prepare,
        _window_kernel,
        windows=True,
        whole=onnx_global_average.name,
    )
)
