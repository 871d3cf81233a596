"""Quantization without the k lowest bits, where k is learned: the rounding and the gradients behind `LearnedBits`.

With the step S = s 2^k, a float x becomes v = S clip(round(x / S), low, high), where low and high are the bounds of the
recipe's codes divided by 2^k, without their fraction. These are the bounds of a quantizer with the step S and k bits
less. Where x is not clipped, the gradients are

| with respect to | is | source |
| --- | --- | --- |
| x | 1 | straight-through |
| k | ln(2) (v - x) | HGQ, section III.B: dv/df = -ln(2) (v - x) |
| s | that of the recipe's method | see `qjax.calibration.estimators` |

HGQ: Sun et al. 2024, Gradient-based Automatic Mixed Precision Quantization for Neural Networks On-Chip (arXiv
2405.00645). k is a real number. It is rounded half to even where it is used, with a straight-through gradient. Below 0,
where no further bit can be added, it gets no gradient from v.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.calibration.learned import Quantizer
from qjax.numerics.affine import QSpec, broadcast_to_tensor, reciprocal, round_to_grid
from qjax.numerics.fake_quant import lsq_gradient_scale, times
from qjax.numerics.gradients import Rule
from qjax.numerics.input_quantization import InputQuantization
from qjax.numerics.rounding import Rounding
from qjax.ops import Quantized

_LN2 = np.float32(math.log(2))


def most(spec: QSpec, weight: bool) -> int:
    """How many bits a quantizer can drop: a weight keeps its sign, an activation the 2 bits of the narrowest spec."""
    return spec.bits - (1 if weight else 2)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def used(k: jax.Array, limit: int) -> jax.Array:
    """The number of dropped bits: k rounded to whole float32 numbers from 0 to `limit`; NaN counts as 0.

    The gradient is straight-through, but zero beyond the limit, where a greater k saves nothing.
    """
    return jnp.round(jnp.clip(jnp.nan_to_num(k), np.float32(0), np.float32(limit)))


@used.defjvp
def _(limit: int, primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    (k,), (tangent,) = primals, tangents
    return used(k, limit), jnp.where(k > limit, jnp.zeros_like(tangent), tangent)


def power_of_two(k: jax.Array) -> jax.Array:
    """float32 2^k of whole numbers k, exactly."""
    return jnp.ldexp(np.float32(1), k.astype(jnp.int32))


def bounds(spec: QSpec, k: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The least and the greatest code of `spec` without its k lowest bits; k holds whole float32 numbers."""
    power = power_of_two(k)
    return jnp.trunc(np.float32(spec.qmin) / power), jnp.trunc(np.float32(spec.qmax) / power)


def quantized(
    quantizer: Quantizer,
    params: Mapping[str, Any],
    x: jax.Array,
    k: jax.Array,
    *,
    weight: bool,
    formula: InputQuantization = "reciprocal",
) -> Quantized:
    """The codes of a tensor without the k lowest bits, in units of the finest step, that of the least k.

    Args:
      quantizer: with symmetric codes. params: its arrays.
      x: the tensor. k: float32, broadcastable to it. weight: whether x is a weight. formula: see `Plan.formula_of`.
    """
    spec, qparams = quantizer.spec, quantizer.qparams(params)
    scale = broadcast_to_tensor(qparams.scale, spec, x.shape)
    if spec.per_tensor:
        scale = scale.reshape((1,) * x.ndim)
    k = jnp.broadcast_to(k, np.broadcast_shapes(k.shape, (1,) * x.ndim))
    unit = power_of_two(jnp.min(used(lax.stop_gradient(k), most(spec, weight))))
    sharing = max(1, math.prod(quantizer.shape) // max(1, math.prod(np.shape(qparams.scale))))
    rule = (
        spec,
        most(spec, weight),
        quantizer.estimator.gradient,
        lsq_gradient_scale(sharing, spec.qmax) if quantizer.learned else 1.0,
        formula,
    )
    coarse = dataclasses.replace(qparams, scale=lax.stop_gradient(qparams.scale) * unit)
    return Quantized(_codes(rule, x, scale, k, unit), lax.stop_gradient(scale) * unit, coarse, x.dtype)


# (spec, the most bits to drop, gradient, the factor of the scale's gradient, formula)
_Rule = tuple[QSpec, int, Rule, float, InputQuantization]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _codes(rule: _Rule, x: jax.Array, scale: jax.Array, k: jax.Array, unit: jax.Array) -> jax.Array:
    rounded, low, high, power = _round_steps(rule, x, scale, k)
    return jnp.clip(rounded, low, high) * (power / unit)


def _round_steps(
    rule: _Rule, x: jax.Array, scale: jax.Array, k: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(x in steps of S before clipping, its bounds, 2^k)."""
    spec, limit, _, _, formula = rule
    whole = used(k, limit)
    power = power_of_two(whole)
    rounded = round_to_grid(x, scale * power, Rounding.NEAREST_EVEN, quantization=formula)
    return rounded, *bounds(spec, whole), power


@_codes.defjvp
def _(rule: _Rule, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
    (x, scale, k, unit), (x_dot, scale_dot, k_dot, _) = primals, tangents
    _, _, gradient, factor, _ = rule
    rounded, low, high, power = _round_steps(rule, x, scale, k)
    steps, real = jnp.clip(rounded, low, high), x.astype(jnp.float32)
    slopes = gradient(real * reciprocal(scale * power), rounded, low, high)
    total = jnp.zeros_like(rounded)
    if slopes.x is not None:
        total = total + times(slopes.x, x_dot.astype(jnp.float32))
    if slopes.scale is not None:
        total = total + slopes.scale.astype(jnp.float32) * power * (scale_dot * np.float32(factor))
    # Below 0 no bit can be added, so k learns nothing from the error.
    learns = jnp.logical_and(rounded == steps, k >= 0)
    total = total + _LN2 * jnp.where(learns, steps * power * scale - real, jnp.zeros_like(real)) * k_dot
    # By convention the gradient of codes is that of the real tensor over its scale, see `fake_quant_codes`.
    return steps * (power / unit), total * reciprocal(scale * unit)
