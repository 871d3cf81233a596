"""Scales that are computed at run time from the range of each tensor.

    scale = (hi - lo) / (qmax - qmin),  zero_point = rint(clip(qmin - lo / scale, qmin, qmax))
    code = clip(rint(x / scale) + zero_point, qmin, qmax)

with the range [lo, hi] widened to contain 0. This is the formula of ONNX's DynamicQuantizeLinear (operator set 11; ONNX
Runtime computes it in float32), for any bits and signedness. Symmetric codes have `scale = max|x| / qmax` and the zero
point 0.

The quotients are IEEE divisions, so the codes equal ONNX Runtime's. `affine.choose_qparams` and `affine.round_to_grid`
multiply by a reciprocal instead, which rounds a few ties to another code.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.numerics.affine import centered_bounds
from qjax.numerics.qparams import SCALE_MAX, SCALE_MIN
from qjax.numerics.qspec import QSpec
from qjax.numerics.quotient import quotient
from qjax.numerics.rounding import Rounding, round_float


def dynamic_codes(x: jax.Array, spec: QSpec, reduced: Sequence[int]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """int32 codes of a tensor on grids computed from its own range, with their scales and zero points.

    NaN becomes the zero point, as in `affine.quantize`; a range with NaN, or too narrow for a scale (zeros alone), gets
    scale 1. Infinities saturate.

    Args:
      x: float32. spec: per tensor; symmetric codes are signed. reduced: the axes that share a scale.

    Returns:
      codes: int32, of x's shape. scale: float32, zero_point: int32, both in the shape of the other axes.
    """
    scale, zero_point = dynamic_qparams(x, spec, reduced)
    kept = tuple(axis for axis in range(x.ndim) if axis not in reduced)
    # Broadcast explicitly, because jnp decides by which sizes are 1, and a program must not depend on the batch.
    step, zero = (lax.broadcast_in_dim(v, x.shape, kept) for v in (scale, zero_point))
    steps = round_float(divided(x, step), Rounding.NEAREST_EVEN)
    centered = jnp.clip(steps, *centered_bounds(zero, spec.qmin, spec.qmax))
    centered = jnp.where(jnp.isnan(centered), jnp.zeros_like(centered), centered)
    return centered.astype(jnp.int32) + zero, scale, zero_point


def dynamic_qparams(x: jax.Array, spec: QSpec, reduced: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """float32 scales and int32 zero points of a tensor's ranges over the axes `reduced`; see `dynamic_codes`."""
    axes, low, high = tuple(reduced), np.float32(spec.qmin), np.float32(spec.qmax)
    if spec.symmetric:
        scale = _usable(divided(jnp.max(jnp.abs(x), axes), high))
        return scale, jnp.zeros_like(scale, jnp.int32)
    lo, hi = jnp.minimum(jnp.min(x, axes), np.float32(0)), jnp.maximum(jnp.max(x, axes), np.float32(0))
    scale = _usable(divided(hi - lo, high - low))
    zero_point = jnp.clip(low - divided(lo, scale), low, high)
    zero_point = jnp.where(jnp.isnan(zero_point), low, zero_point)
    return scale, round_float(zero_point, Rounding.NEAREST_EVEN).astype(jnp.int32)


def divided(x: jax.Array, divisor: jax.Array | np.float32) -> jax.Array:
    """The IEEE quotient, rounded once, in eager mode and under jit alike; the divisor has x's shape or is a number.

    XLA turns a division by a constant into a product with the reciprocal, which is off by an ulp. In some programs it
    does so for a divisor that is repeated along an axis, but never for a divisor that may differ by element. So the
    divisor is replaced by x where x is NaN, which changes no quotient.
    """
    return quotient(x, jnp.where(x == x, divisor, x))


def _usable(scale: jax.Array) -> jax.Array:
    """A scale within the bounds of `affine.choose_qparams`; NaN becomes 1, too."""
    return jnp.where(scale >= np.float32(SCALE_MIN), jnp.minimum(scale, np.float32(SCALE_MAX)), np.float32(1))
