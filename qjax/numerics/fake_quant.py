"""Fake quantization: the values of the codes, with a gradient.

Forward, `v = c * s` with `c = clip(round(x * (1/s)), qmin - zp, qmax - zp)`: the codes of `affine.quantize`, bit for
bit. Backward, a rule of `numerics.gradients`: "ste", "lsq", "pact", or a function of your own.

Gradients of scale and zero point are multiplied by `gradient_scale` and summed in float32 over the axes to which they
were broadcast. Both directions of differentiation work.

NaN results in NaN, so that training sees it; its x-gradient is 0 and its scale gradient NaN. Infinities saturate.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike

from qjax.numerics._namespace import traced
from qjax.numerics.affine import (
    QParams,
    broadcast_to_tensor,
    centered_bounds,
    float_tensor,
    integer_zero_point,
    reciprocal,
    round_to_grid,
)
from qjax.numerics.gradients import Gradient, Rule, rule_of
from qjax.numerics.input_quantization import InputQuantization
from qjax.numerics.learned_scale import learned_scale, log2_scale_of, pact_scale, power_of_two_scale
from qjax.numerics.qparams import zero_point_for
from qjax.numerics.rounding import Rounding
from qjax.numerics.unfused import unfused

__all__ = [
    "Gradient",
    "fake_quant",
    "fake_quant_codes",
    "learned_scale",
    "log2_scale_of",
    "lsq_gradient_scale",
    "pact_scale",
    "power_of_two_scale",
]


def fake_quant(
    x: ArrayLike,
    qparams: QParams,
    *,
    gradient: Gradient = "ste",
    gradient_scale: float = 1.0,
    rounding: Rounding | str = Rounding.NEAREST_EVEN,
    key: jax.Array | None = None,
    quantization: InputQuantization = "reciprocal",
) -> jax.Array:
    """`x` on the grid of `qparams`: `dequantize(quantize(x))`, differentiable. Shape and dtype of x.

    float16 and bfloat16 are computed in float32 and rounded once, at the end.

    Args:
      x: a float tensor.
      qparams: scale and zero point for a tensor of x's shape; a float zero point is a learned latent.
      gradient: "ste", "lsq", "pact", or a function; see `numerics.gradients`.
      gradient_scale: multiplies the gradients of scale and zero point; LSQ's is `lsq_gradient_scale`.
      rounding: "nearest_even" or another `Rounding`; "stochastic" needs `key`.
      key: the random key of stochastic rounding.
      quantization: the formula of another runtime, see `numerics.input_quantization`; the gradient is the same.

    Examples:
      >>> import numpy as np
      >>> import qjax
      >>> qparams = qjax.QParams(np.float32(0.5), 0, qjax.QSpec(bits=4))
      >>> print(qjax.fake_quant(np.float32([0.2, 0.3, 9.0]), qparams))
      [0.  0.5 3.5]
    """
    x, spec = float_tensor(x), qparams.spec
    scale = broadcast_to_tensor(qparams.scale, spec, x.shape)
    zero_point = zero_point_for(qparams, x.shape)
    rule = (
        spec.qmin,
        spec.qmax,
        rule_of(gradient),
        _number(gradient_scale),
        Rounding.of(rounding),
        quantization,
        True,
    )
    return _fake_quant(rule, x, scale, zero_point, key, None).astype(x.dtype)


def fake_quant_codes(
    x: ArrayLike,
    scale: ArrayLike,
    zero_point: ArrayLike,
    qmin: int,
    qmax: int,
    *,
    gradient: Gradient = "ste",
    gradient_scale: float = 1.0,
    rounding: Rounding | str = Rounding.NEAREST_EVEN,
    key: jax.Array | None = None,
    quantization: InputQuantization = "reciprocal",
    elementwise_scale: jax.Array | None = None,
) -> jax.Array:
    """Centred codes `c = code - zero_point` of `x`: integers in float32, with the gradient of `c * scale`.

    For layers that multiply integers and scale afterwards. The convention: whoever uses c multiplies by
    `stop_gradient(scale)`, so the cotangent of c is `dL/dv * scale` with v = c * scale the quantized real.
    The rule here divides by the scale again, and x, scale and zero point get the gradients of v, which are those
    of `fake_quant`.

    Args:
      x: a float tensor.
      scale: float32, broadcastable to x: the same number of dimensions, or a scalar.
      zero_point: int32, likewise; or a float latent, rounded half to even and clipped to [qmin, qmax] in the
        forward, with a gradient that ignores both.
      qmin, qmax: the range of the codes.
      gradient, gradient_scale, rounding, key, quantization: as for `fake_quant`.
      elementwise_scale: `scale` once for each element of x. It takes the gradient of `scale`, which is not summed yet,
        and nothing else reads it. A loop whose steps share a scale then sums once, after its last step.

    Examples:
      >>> import numpy as np
      >>> from qjax import numerics
      >>> print(numerics.fake_quant_codes(np.float32([0.2, 0.3, 9.0]), np.float32(0.5), 0, -8, 7))
      [0. 1. 7.]
    """
    x = float_tensor(x)
    scale, zero_point = jnp.asarray(scale), jnp.asarray(zero_point)
    for name, param in (("scale", scale), ("zero_point", zero_point)):
        fits = len(param.shape) in (0, x.ndim) and all(
            one in (1, size) for one, size in zip(param.shape, x.shape, strict=False)
        )
        if not fits:
            raise ValueError(
                f"fake_quant_codes: {name} must broadcast to x of shape {x.shape}, "
                f"with as many dimensions or none. Got shape {param.shape}"
            )
    if elementwise_scale is not None:
        if elementwise_scale.shape != x.shape:
            raise ValueError(
                f"fake_quant_codes: expected an elementwise_scale of x's shape, {x.shape}. "
                f"Got {elementwise_scale.shape}"
            )
        scale = jax.lax.stop_gradient(scale)
    rule = (qmin, qmax, rule_of(gradient), _number(gradient_scale), Rounding.of(rounding), quantization, False)
    return _fake_quant(rule, x, scale.astype(jnp.float32), zero_point, key, elementwise_scale)


def lsq_gradient_scale(n_elements: int, qmax: int) -> float:
    """`1 / sqrt(N * Qp)`: LSQ's balance of a scale's gradient against its weights'.

    Esser et al. 2020 (arXiv 1902.08153), section 2.2. N counts the elements that share one scale: weights of
    the slice, or features of one example for activations.

    Args:
      n_elements: N, how many elements share the scale.
      qmax: the greatest code.

    Examples:
      >>> from qjax import numerics
      >>> numerics.lsq_gradient_scale(n_elements=100, qmax=1)
      0.1
    """
    if n_elements < 1 or qmax < 1:
        raise ValueError(f"lsq_gradient_scale: both arguments must be positive. Got {n_elements}, {qmax}")
    return 1 / math.sqrt(n_elements * qmax)


# (qmin, qmax, gradient, gradient_scale, rounding, quantization, whether to return real values rather than codes)
_Rule = tuple[int, int, Rule, float, Rounding, InputQuantization, bool]


def _fake_quant_value(
    rule: _Rule,
    x: jax.Array,
    scale: jax.Array,
    zero_point: jax.Array,
    key: jax.Array | None,
    elementwise_scale: jax.Array | None,
) -> jax.Array:
    qmin, qmax, _, _, rounding, quantization, reals = rule
    zero = integer_zero_point(zero_point, qmin, qmax)
    rounded = round_to_grid(x, scale, rounding, key, zero_point=zero, quantization=quantization)
    codes = jnp.clip(rounded, *centered_bounds(zero, qmin, qmax))
    return unfused(codes * scale) if reals else codes


_fake_quant = jax.custom_jvp(_fake_quant_value, nondiff_argnums=(0,))


def _jvp(rule: _Rule, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
    x, scale, zero_point, key, elementwise_scale = primals
    # Zero tangents are dropped here, so that a frozen scale costs nothing.
    moving = [None if t is None or isinstance(t, SymbolicZero) else t for t in (*tangents[:3], tangents[4])]

    def tangent(x: Any, scale: Any, zero_point: Any, key: Any, moving: list[Any]) -> jax.Array:
        return _surrogate(rule, x, scale, zero_point, key, moving)

    # Remat: the backward pass keeps x and the parameters, not two more arrays of x's size.
    remat = jax.checkpoint(tangent, prevent_cse=False)
    value = _fake_quant(rule, x, scale, zero_point, key, elementwise_scale)
    return value, remat(x, scale, zero_point, key, moving)


_fake_quant.defjvp(_jvp, symbolic_zeros=True)


def _surrogate(
    rule: _Rule,
    x: jax.Array,
    scale: jax.Array,
    zero_point: jax.Array,
    key: jax.Array | None,
    moving: list[Any],
) -> jax.Array:
    """The tangent of the value, linear in those of (x, scale, zero_point, elementwise_scale), `moving`; None is zero.

    For codes every term is divided by the scale, see `fake_quant_codes`.
    """
    qmin, qmax, gradient, gradient_scale, rounding, quantization, reals = rule
    x_dot, scale_dot, zero_point_dot, each_dot = moving
    inv = reciprocal(scale)
    zero = integer_zero_point(zero_point, qmin, qmax)
    low, high = centered_bounds(zero, qmin, qmax)
    rounded = round_to_grid(x, scale, rounding, key, zero_point=zero, quantization=quantization)
    slopes = gradient(x.astype(jnp.float32) * inv, rounded, low, high)
    total = jnp.zeros_like(rounded)
    if x_dot is not None and slopes.x is not None:
        x_dot = x_dot.astype(jnp.float32)
        total = total + times(slopes.x, x_dot if reals else x_dot * inv)
    if scale_dot is not None and slopes.scale is not None:
        scale_dot = scale_dot * np.float32(gradient_scale)
        total = total + _times_spread(slopes.scale.astype(jnp.float32), scale_dot if reals else scale_dot * inv)
    if each_dot is not None and slopes.scale is not None:
        each_dot = each_dot.astype(jnp.float32) * np.float32(gradient_scale)
        total = total + times(slopes.scale, each_dot if reals else each_dot * inv)
    if zero_point_dot is not None and slopes.zero_point is not None:
        step = zero_point_dot.astype(jnp.float32) * np.float32(-gradient_scale)
        total = total + times(slopes.zero_point, step * scale if reals else step)
    return total


def times(slope: jax.Array, tangent: jax.Array) -> jax.Array:
    """A product in which a boolean slope selects: where it is False the result is 0, even if the tangent is NaN."""
    if slope.dtype != jnp.bool_:
        return slope.astype(jnp.float32) * jnp.broadcast_to(tangent, slope.shape)
    return jnp.where(slope, tangent, jnp.zeros(slope.shape, jnp.float32))


PARTS = 4
"""The number of parts of the first axis that a scale's gradient is summed over first, before their elements are."""

SMALL = 2**16
"""Below this many elements one part is enough."""


def _times_spread(slope: jax.Array, scale_dot: jax.Array) -> jax.Array:
    """`slope * broadcast(scale_dot)`, whose transpose sums over the axes to which the scale was broadcast.

    The barrier makes XLA CPU sum a finished array with vector instructions instead of fusing the slope into a scalar
    loop. That array is already a sum over parts of the first axis, so only a quarter of the elements is written and
    read. Other platforms sum quickly while they compute the slope, and write none of it.
    """

    def plain(slope: jax.Array, scale_dot: jax.Array) -> jax.Array:
        return slope * jnp.broadcast_to(scale_dot, slope.shape)

    def finished(slope: jax.Array, scale_dot: jax.Array) -> jax.Array:
        return slope * jax.lax.optimization_barrier(jnp.broadcast_to(scale_dot, slope.shape))

    def in_parts(slope: jax.Array, scale_dot: jax.Array) -> jax.Array:
        # Neighbours along the first axis are summed, so that each device sums its own elements if that axis is
        # distributed.
        count = slope.shape[0] // PARTS
        shape = (count, *slope.shape[1:])
        spread = jax.lax.optimization_barrier(jnp.broadcast_to(scale_dot, shape))
        parts = slope.reshape(count, PARTS, *slope.shape[1:])
        return jnp.stack([parts[:, i] * spread for i in range(PARTS)], axis=1).reshape(slope.shape)

    shared = scale_dot.ndim == 0 or scale_dot.shape[0] == 1
    whole = slope.size < SMALL or slope.shape[0] % PARTS != 0 or not shared
    return jax.lax.platform_dependent(slope, scale_dot, cpu=finished if whole else in_parts, default=plain)


def _number(gradient_scale: Any) -> float:
    if traced(gradient_scale):
        raise TypeError("gradient_scale must be a Python number: it is part of the program. Got a traced value")
    return float(gradient_scale)
