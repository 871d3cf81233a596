"""TFLite's optimised kernels on AArch64: the shapes decide which of them runs, and therefore how it rounds.

Notation as in `classic`. Sources: cpu_backend_gemm_custom_gemv.h, depthwiseconv_3x3_filter_common.h,
depthwiseconv_int8_3x3_filter.h of TensorFlow Lite; compared with the AArch64 build of ai-edge-litert 2.3.0.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qjax.numerics.fixed_point import Multiplier
from qjax.numerics.rounding import Rounding, right_shift_with_headroom
from qjax.numerics.rules.classic import neon, ruy
from qjax.numerics.rules.multiplier import fixed_point, saturated
from qjax.numerics.rules.registry import Call, Product

_LEAST_DEPTH, _LEAST_CHANNELS = 8, 4
"""The sizes that fill the registers of the product of a matrix and a vector."""
_LANES = 8


def _gemm_variant(product: Product) -> str:
    wide = product.depth >= _LEAST_DEPTH and product.channels >= _LEAST_CHANNELS
    return "tflite_arm_gemm" if wide else "ruy"


@fixed_point("tflite_arm_gemm", variant=_gemm_variant)
def tflite_arm_gemm(acc: jax.Array, m: Multiplier, call: Call) -> jax.Array:
    """FULLY_CONNECTED and CONV_2D: the rule `ruy`, but `neon` where the output is a single row of channels.

    The channels are acc's last axis. Where all other axes have length 1 (one row of a matrix, one pixel of one image),
    TFLite multiplies a matrix by a vector with a separate kernel. A batch of one is therefore rounded differently from
    a batch of two. That kernel needs a depth of 8 and 4 channels, so smaller products always follow `ruy`.
    """
    rows: Any = math.prod(acc.shape[:-1])
    channels = acc.shape[-1] if acc.ndim else 1
    if channels < _LEAST_CHANNELS:
        return ruy(acc, m, call)
    if not isinstance(rows, int):
        # A symbolic size is compared when it is known. Compared in Python, it would be unequal to everything.
        return jnp.where(jnp.asarray(rows, jnp.int32) == 1, neon(acc, m, call), ruy(acc, m, call))
    return (neon if rows == 1 else ruy)(acc, m, call)


def _depthwise_variant(product: Product) -> str:
    return "tflite_arm_depthwise_3x3" if _fast_3x3(product) else "tflite_depthwise_neon"


def _fast_3x3(product: Product) -> bool:
    """Whether the kernel for windows of 3x3 supports the product (Fast3x3FilterKernelSupported)."""
    p = product
    stride, low = p.strides[:1] * 2, p.padding[0][0] if p.padding else 0
    fits = (
        p.window == (3, 3)
        and p.channels == p.groups
        and p.channels % _LANES == 0
        and p.strides in ((1, 1), (2, 2))
        and p.dilation == (1, 1)
        and low in (0, 1)
        and all(lows == low for lows, _ in p.padding)
    )
    if not fits:
        return False
    for size, step, (_, high) in zip(p.sizes, stride, p.padding, strict=True):
        outputs = (size + low + high - 3) // step + 1
        # the last window may reach as far beyond the input as the first
        if (outputs - 1) * step - low + 3 > size + low:
            return False
    return low == 0 or p.sizes[0] == p.sizes[1] or 1 not in p.sizes


@fixed_point("tflite_arm_depthwise", variant=_depthwise_variant, monotone=True)
def tflite_arm_depthwise(acc: jax.Array, m: Multiplier, call: Call) -> jax.Array:
    """DEPTHWISE_CONV_2D: `tflite_depthwise_neon`, or `tflite_arm_depthwise_3x3` for convolutions of its shape.

    Under this name, where the shape is unknown, the rule is `neon`. Both kernels compute it for whole vectors of 8
    channels and an effective scale below 1.
    """
    return neon(acc, m, call)


@fixed_point("tflite_arm_depthwise_3x3", monotone=True)
def tflite_arm_depthwise_3x3(acc: jax.Array, m: Multiplier, call: Call) -> jax.Array:
    """SRSHL(SQRDMULH(acc, M), s): `neon`, but with the left shift after the product, whose rounding it magnifies.

    For s <= 0, an effective scale below 1, the rule is `neon`. For other scales the result is a multiple of 2^s. The
    result saturates. TFLite uses this kernel for windows of 3x3 with one output per channel, a multiple of 8 channels,
    equal strides of 1 or 2 and a padding of 0 or 1 on all sides.
    """
    p = acc.astype(jnp.int64) * m.multiplier.astype(jnp.int64)
    high = right_shift_with_headroom(jnp, p, np.int64(31), Rounding.NEAREST_UP)
    left = jnp.maximum(m.shift, np.int32(0)).astype(jnp.int64)
    right = jnp.maximum(-m.shift, np.int32(0)).astype(jnp.int64)
    return saturated(right_shift_with_headroom(jnp, high << left, right, Rounding.NEAREST_UP))
