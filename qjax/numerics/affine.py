"""Affine quantization: `real = (code - zero_point) * scale`.

A `QSpec` defines which codes exist and which slices of a tensor have their own scale. A `QParams` adds the numbers.
`quantize` and `dequantize` convert between floats and codes. `choose_qparams` derives parameters from a range of data.
The formula of a code exists once, in `round_to_grid`; fake quantization uses the same one.

All arithmetic is float32, whatever the dtype of the tensor, and agrees bit for bit in eager mode, jit, vmap, scan and
numpy. For that it multiplies by the reciprocal of the scale, because XLA sometimes rewrites `x / s` in this way. It
rounds *before* it adds the zero point: under jit `round(x * inv + zp)` becomes a fused multiply-add, whose ties depend
on the parity of `zp`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from qjax.numerics.input_quantization import InputQuantization, emulated_steps
from qjax.numerics.output_dequantization import OutputDequantization, dequantized
from qjax.numerics.qparams import (
    SCALE_MAX,
    SCALE_MIN,
    QParams,
    as_float32,
    broadcast_to_tensor,
    integer_zero_point,
)
from qjax.numerics.qspec import QSpec, split_groups
from qjax.numerics.quotient import reciprocal
from qjax.numerics.rounding import Rounding, round_float
from qjax.numerics.unfused import unfused

__all__ = [
    "SCALE_MAX",
    "SCALE_MIN",
    "QParams",
    "QSpec",
    "broadcast_to_tensor",
    "centered_bounds",
    "choose_qparams",
    "dequantize",
    "float_tensor",
    "integer_zero_point",
    "power_of_two_at_least",
    "quantize",
    "reciprocal",
    "round_to_grid",
    "split_groups",
]


def round_to_grid(
    x: jax.Array,
    scale: jax.Array,
    rounding: Rounding | str,
    key: jax.Array | None = None,
    *,
    zero_point: jax.Array | None = None,
    quantization: InputQuantization = "reciprocal",
) -> jax.Array:
    """`round(x * (1/scale))` in float32: how many steps of its grid x is from zero, before any clipping.

    This is the only formula of a code; `clip(round_to_grid(...), *centered_bounds(...))` is the code minus its zero
    point. Infinities stay beyond every bound, NaN stays NaN. x may itself be a product: see `unfused`.

    quantization: another runtime's formula instead, see `numerics.input_quantization`. It defines its own rounding (so
    `rounding` must be "nearest_even") and may need the zero point, int32.
    """
    if quantization != "reciprocal":
        if Rounding.of(rounding) is not Rounding.NEAREST_EVEN:
            raise ValueError(
                f"quantization={quantization!r} defines its own rounding. Got rounding={rounding!r}; leave it out"
            )
        zero = jnp.zeros((), jnp.int32) if zero_point is None else zero_point
        return emulated_steps(unfused(x.astype(jnp.float32)), scale, zero, quantization)
    return round_float(unfused(x.astype(jnp.float32)) * reciprocal(scale), rounding, key=key)


def centered_bounds(zero_point: jax.Array, qmin: int, qmax: int) -> tuple[jax.Array, jax.Array]:
    """float32 `(qmin - zero_point, qmax - zero_point)`."""
    low = (np.int32(qmin) - zero_point).astype(jnp.float32)
    high = (np.int32(qmax) - zero_point).astype(jnp.float32)
    return low, high


def quantize(
    x: ArrayLike,
    qparams: QParams,
    *,
    rounding: Rounding | str = Rounding.NEAREST_EVEN,
    key: jax.Array | None = None,
    quantization: InputQuantization = "reciprocal",
) -> jax.Array:
    """Codes of `x` in `spec.dtype`: `clip(round(x * (1/scale)) + zero_point, qmin, qmax)`.

    Values outside the range, infinities included, saturate. NaN becomes the zero point, the code of 0.0
    (torch gives qmin on x86 and something else on ARM).

    Args:
      x: a float tensor; float16 and bfloat16 are computed in float32, and so is float64.
      qparams: scale and zero point for a tensor of x's shape.
      rounding: how to round `x * (1/scale)`; `stochastic` needs `key`.
      key: the random key of stochastic rounding.
      quantization: the formula of another runtime, see `numerics.input_quantization`.

    Examples:
      >>> import numpy as np
      >>> import qjax
      >>> qparams = qjax.QParams(np.float32(0.5), 3, qjax.QSpec(symmetric=False))
      >>> print(qjax.numerics.quantize(np.float32([0.0, 1.0, -2.0, 900.0]), qparams))
      [  3   5  -1 127]
    """
    return _quantize(float_tensor(x), qparams, rounding, key, quantization)


# Compiled outside of a trace too, because XLA needs as long for each single operation as for all together.
@functools.partial(jax.jit, static_argnames=("rounding", "quantization"))
def _quantize(x: jax.Array, qparams: QParams, rounding: Any, key: Any, quantization: Any) -> jax.Array:
    spec = qparams.spec
    scale = broadcast_to_tensor(qparams.scale, spec, x.shape)
    zero_point = broadcast_to_tensor(qparams.integer_zero_point(), spec, x.shape)
    steps = round_to_grid(x, scale, rounding, key, zero_point=zero_point, quantization=quantization)
    centered = jnp.clip(steps, *centered_bounds(zero_point, spec.qmin, spec.qmax))
    centered = jnp.where(jnp.isnan(centered), jnp.zeros_like(centered), centered)
    # In range by the clip above: XLA may drop the saturation of a narrowing cast, and numpy's casts wrap.
    return (centered.astype(jnp.int32) + zero_point).astype(spec.dtype)


def dequantize(codes: ArrayLike, qparams: QParams, *, dequantization: OutputDequantization = "product") -> jax.Array:
    """float32 values of integer codes: `(codes - zero_point) * scale`, the subtraction in int32.

    Args:
      codes: integers.
      qparams: scale and zero point for a tensor of their shape.
      dequantization: the formula of another runtime, see `numerics.output_dequantization`.

    Examples:
      >>> import numpy as np
      >>> import qjax
      >>> qparams = qjax.QParams(np.float32(0.5), 3, qjax.QSpec(symmetric=False))
      >>> print(qjax.numerics.dequantize(np.int8([3, 5, -1]), qparams))
      [ 0.  1. -2.]
    """
    codes = jnp.asarray(codes)
    if not jnp.issubdtype(codes.dtype, jnp.integer):
        raise TypeError(f"dequantize: codes must be integers. Got {codes.dtype}; round and cast them first")
    scale = broadcast_to_tensor(qparams.scale, qparams.spec, codes.shape)
    zero_point = broadcast_to_tensor(qparams.integer_zero_point(), qparams.spec, codes.shape)
    return dequantized(codes, scale, zero_point, dequantization)


def choose_qparams(lo: Any, hi: Any, spec: QSpec, *, power_of_two: bool = False) -> QParams:
    """Parameters whose codes cover the observed range [lo, hi] and 0.0, which gets a code of its own.

    Symmetric: `scale = max(-lo, hi) * fl(1 / qmax)`, or `hi * fl(1 / qmax)` where unsigned; zero point 0.
    Asymmetric: `scale = (hi - lo) * fl(1 / (qmax - qmin))` and
    `zero_point = clip(qmin - round(lo * (1/scale)), qmin, qmax)`: the nudge of TFLite and of Jacob et al.
    2018 (arXiv 1712.05877, section 3), with the rounding before the subtraction. The same bits in eager,
    under jit and in numpy.

    A range so narrow that its scale would be under 2^-100 (the range of a tensor of zeros, above all) gets
    scale 1.0, and if asymmetric the zero point qmin. Concrete ranges must be finite, ordered and within
    2^100; traced ones cannot be checked: there a NaN range gives scale 1.0 and an infinite one 2^100.

    Args:
      lo, hi: float arrays of the parameters' shape.
      spec: the codes. A symmetric unsigned one refuses a concrete negative `lo`, which it cannot represent.
      power_of_two: round the scale up to a power of two, exactly.

    Examples:
      >>> import numpy as np
      >>> import qjax
      >>> qparams = qjax.numerics.choose_qparams(
      ...     np.float32(-1.0), np.float32(4.1), qjax.QSpec(symmetric=False)
      ... )
      >>> print(qparams.scale, qparams.zero_point)
      0.020000001 -78
    """
    lo, hi = as_float32(lo), as_float32(hi)
    if lo.shape != hi.shape:
        raise ValueError(f"choose_qparams: lo and hi must have one shape. Got {lo.shape} and {hi.shape}")
    if isinstance(lo, np.ndarray) and isinstance(hi, np.ndarray):
        _check_range(lo, hi, spec)
    scale, zero_point = _scale_and_zero_point(jnp.asarray(lo), jnp.asarray(hi), spec, power_of_two)
    return QParams(scale, zero_point, spec)


@functools.partial(jax.jit, static_argnames=("spec", "power_of_two"))
def _scale_and_zero_point(lo: jax.Array, hi: jax.Array, spec: QSpec, power_of_two: bool) -> tuple[jax.Array, jax.Array]:
    lo, hi = jnp.minimum(lo, np.float32(0)), jnp.maximum(hi, np.float32(0))
    if spec.symmetric:
        scale = (jnp.maximum(-lo, hi) if spec.signed else hi) * np.float32(1 / spec.qmax)
    else:
        scale = (hi - lo) * np.float32(1 / (spec.qmax - spec.qmin))
    if power_of_two:
        scale = power_of_two_at_least(scale)
    # Written so that NaN becomes 1.0 too.
    scale = jnp.where(scale >= np.float32(SCALE_MIN), jnp.minimum(scale, np.float32(SCALE_MAX)), np.float32(1))
    if spec.symmetric:
        return scale, jnp.zeros(scale.shape, jnp.int32)
    steps = jnp.round(lo * reciprocal(scale))
    steps = jnp.where(jnp.isnan(steps), np.float32(0), steps)
    zero_point = jnp.clip(np.float32(spec.qmin) - steps, np.float32(spec.qmin), np.float32(spec.qmax))
    return scale, zero_point.astype(jnp.int32)


def power_of_two_at_least(x: jax.Array) -> jax.Array:
    """The smallest power of two that is >= x, for normal positive float32 below 2^127; by bits, so exact.

    A power of two has a zero mantissa; anything above one carries into the exponent. (`exp2(ceil(log2(x)))`
    is off by one exponent or by an ulp at many inputs under XLA.)
    """
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    return jax.lax.bitcast_convert_type((bits + np.int32(0x7FFFFF)) & np.int32(0x7F800000), jnp.float32)


def float_tensor(x: ArrayLike) -> jax.Array:
    """`x` as a JAX array; raises TypeError unless it is a float array."""
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"Expected a float tensor to quantize. Got {x.dtype}; cast it to float32 first")
    return x


def _check_range(lo: np.ndarray, hi: np.ndarray, spec: QSpec) -> None:
    if not (np.isfinite(lo).all() and np.isfinite(hi).all()):
        raise ValueError(
            "choose_qparams: the range is not finite: NaN, infinity or a number beyond float32 was observed. "
            "Look for it in the data, or clip"
        )
    if (lo > hi).any():
        raise ValueError("choose_qparams: lo must not exceed hi. If they come from an observer, it has seen no data")
    if spec.symmetric and not spec.signed and (lo < 0).any():
        raise ValueError(
            f"choose_qparams: a symmetric unsigned spec has no negative codes. Got lo = {lo.min()}; "
            "use signed=True or symmetric=False"
        )
    if max(float(-lo.min(initial=0)), float(hi.max(initial=0))) > SCALE_MAX:
        raise ValueError(
            f"choose_qparams: a range beyond 2^100 is not supported. Got [{lo.min()}, {hi.max()}]. If such "
            "numbers hide scores from a softmax, use a boolean mask: jnp.where, or where= of jax.nn.softmax"
        )
