"""Learned scales: turns an unconstrained raw parameter, which an optimizer may change, into a positive float32.

For every raw value, infinities and NaN included, the scale is finite and positive. The gradient of the raw parameter is
0 where it would not be finite, so that one bad batch cannot destroy a scale. Values are computed in integers, so the
bits are the same in eager mode, under jit and vmap, on every backend and in every version of XLA, whose `exp2` is not
exact even at whole numbers.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from qjax.numerics.fence import apart

LOG2_LIMIT = 64
"""Raw log2 parameters are clipped to [-64, 64] where they are used."""

# round(ln(2)^k / k! * 2^31) for k = 0..11: the Taylor series of 2^f. The first omitted term is below 2^-35.
_EXP2_SERIES = (
    *(2147483648, 1488522236, 515882496, 119194166, 20654775, 2863360),
    *(330788, 32755, 2838, 219, 15, 1),
)
_LN2 = np.float32(math.log(2))


def learned_scale(log2_scale: Any) -> jax.Array:
    """float32 `2^log2_scale`, to within one unit in the last place and exact at whole numbers.

    The raw value is clipped to [-64, 64]; NaN counts as 0, so the scale is 1.0. The gradient is `scale * ln 2`,
    beyond the limits too, so that a raw value thrown out of them can come back; where it would not be finite
    it is 0.

    The raw value is first rounded to a multiple of 2^-24 (which moves the result by 2^-25.5 at most), its
    fraction f determines the mantissa 2^f by a Taylor series in 31-bit fixed point, its whole part the exponent.

    Args:
      log2_scale: the base-2 logarithm of the scale, a float array.

    Examples:
      >>> import numpy as np
      >>> from qjax import numerics
      >>> print(numerics.learned_scale(np.float32([-3.0, 0.0, 1.0])))
      [0.125 1.    2.   ]
    """
    raw = _float32(log2_scale, "learned_scale")
    value = exp2(jax.lax.stop_gradient(raw))
    return _with_gradient(raw, value, value * _LN2)


def exp2(x: jax.Array) -> jax.Array:
    """The value of `learned_scale`, without its gradient: portable 2^x of float32 x."""
    if not isinstance(x, Tracer):
        return _compiled_exp2(x)
    x = _clip(x, float(-LOG2_LIMIT), float(LOG2_LIMIT), 0.0)
    if x.size == 0:
        return _exp2(x)
    return apart(x.reshape(-1)[0] < np.float32(2 * LOG2_LIMIT), _exp2, x)


def _exp2(x: jax.Array) -> jax.Array:
    # An exact product of at most 2^30, so the only rounding is the requested one.
    fixed = jnp.round(x * np.float32(2**24)).astype(jnp.int32)
    whole = fixed >> np.int32(24)
    fraction = (fixed & np.int32(0xFFFFFF)).astype(jnp.uint32) << np.uint32(8)
    total = jnp.full_like(fraction, np.uint32(_EXP2_SERIES[-1]))
    # Horner's scheme. The high word is the product with the fraction of 32 bits.
    for coefficient in _EXP2_SERIES[-2::-1]:
        total = _high_word(total, fraction) + np.uint32(coefficient)
    mantissa = ((total + np.uint32(128)) >> np.uint32(8)).astype(jnp.int32)
    # The mantissa's leading bit, and its carry where it rounded up to 2, add to the exponent field.
    bits = ((whole + np.int32(126)) << np.int32(23)) + mantissa
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


@jax.jit
def _compiled_exp2(x: jax.Array) -> jax.Array:
    return _exp2(_clip(x, float(-LOG2_LIMIT), float(LOG2_LIMIT), 0.0))


def _high_word(a: jax.Array, b: jax.Array) -> jax.Array:
    """The high 32 bits of the product of two uint32.

    `lax.mulhi` is that product too, but XLA cannot compile it where the program is partitioned over devices; and
    16-bit limbs would read `a` four times, which its fusion repeats at every step of a polynomial.
    """
    with jax.enable_x64(True):
        product = a.astype(jnp.uint64) * b.astype(jnp.uint64)
        return (product >> np.uint64(32)).astype(jnp.uint32)


def log2_scale_of(scale: ArrayLike) -> np.ndarray:
    """Raw float32 parameters whose `learned_scale` is closest to `scale`; on the host.

    Near r = -7, for example, raw values are 2^-21 apart, so the scale comes back to within 2^-21.5 of its value; powers
    of two come back exactly. Raises ValueError outside [2^-64, 2^64].

    Args:
      scale: positive numbers.

    Examples:
      >>> import numpy as np
      >>> from qjax import numerics
      >>> print(numerics.log2_scale_of(np.float32([0.125, 2.0])))
      [-3.  1.]
    """
    scale = np.asarray(scale, np.float64)
    bad = ~((scale >= 2.0**-LOG2_LIMIT) & (scale <= 2.0**LOG2_LIMIT))
    if bad.any():
        raise ValueError(
            f"log2_scale_of: scale must lie in [2^-64, 2^64]. Got {scale[bad].flat[0]}; multiply the data or the "
            'parameters by a constant, or use method="static" (of weights: weight_method="static"), whose scales '
            "lie in [2^-100, 2^100]"
        )
    return np.log2(scale).astype(np.float32)


def power_of_two_scale(log2_threshold: Any, qmax: int) -> jax.Array:
    """float32 `2^ceil(log2_threshold) / (qmax + 1)`, an exact power of two.

    Trained quantization thresholds (Jain et al. 2020, arXiv 1903.08066): the clipping threshold t
    is learned as log2 t; qmax + 1 is 2^(bits-1) for signed codes and 2^bits for unsigned ones. The gradient
    passes straight through the ceiling, `ds / d(log2 t) = s ln 2`, and is 0 where it would not be finite.
    The raw value is clipped to [-64, 64]; NaN counts as 0.

    Args:
      log2_threshold: the base-2 logarithm of the threshold, a float array.
      qmax: the greatest code.

    Examples:
      >>> import numpy as np
      >>> from qjax import numerics
      >>> print(numerics.power_of_two_scale(np.float32(1.3), 127))
      0.03125
    """
    bits = qmax.bit_length()
    if qmax < 1 or qmax + 1 != 1 << bits:
        raise ValueError(f"power_of_two_scale: qmax + 1 must be a power of two (127, 255, 7, ...). Got qmax = {qmax}")
    raw = _float32(log2_threshold, "power_of_two_scale")
    clipped = _clip(jax.lax.stop_gradient(raw), float(-LOG2_LIMIT), float(LOG2_LIMIT), 0.0)
    exponent = jnp.ceil(clipped).astype(jnp.int32) - np.int32(bits)
    value = jax.lax.bitcast_convert_type((exponent + np.int32(127)) << np.int32(23), jnp.float32)
    return _with_gradient(raw, value, value * _LN2)


def pact_scale(alpha: Any, qmax: int) -> jax.Array:
    """float32 `alpha * fl(1/qmax)`: the scale of an activation clipped to [0, alpha].

    PACT (Choi et al. 2018, arXiv 1805.06085), for codes [0, qmax]; use with gradient="pact".
    alpha is clipped to [2^-64, 2^64]; NaN counts as 1. The gradient is `1/qmax`, beyond the limits too, and 0
    where it would not be finite.

    Args:
      alpha: the clipping value, a float array.
      qmax: the greatest code.

    Examples:
      >>> import numpy as np
      >>> from qjax import numerics
      >>> print(numerics.pact_scale(np.float32(6.0), 15))
      0.40000004
    """
    if qmax < 1:
        raise ValueError(f"pact_scale: qmax must be at least 1. Got {qmax}")
    raw = _float32(alpha, "pact_scale")
    slope = np.float32(1 / qmax)
    value = _clip(jax.lax.stop_gradient(raw), 2.0**-LOG2_LIMIT, 2.0**LOG2_LIMIT, 1.0) * slope
    return _with_gradient(raw, value, jnp.full_like(value, slope))


@jax.custom_vjp
def _with_gradient(raw: jax.Array, value: jax.Array, slope: jax.Array) -> jax.Array:
    """`value`, with `d value / d raw = slope`, where products that are not finite are replaced by 0."""
    return value


def _forward(raw: jax.Array, value: jax.Array, slope: jax.Array) -> tuple[jax.Array, jax.Array]:
    return value, slope


def _backward(slope: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    gradient = cotangent * slope
    zero = jnp.zeros_like(gradient)
    return jnp.where(jnp.isfinite(gradient), gradient, zero), zero, zero


_with_gradient.defvjp(_forward, _backward)


def _clip(x: jax.Array, low: float, high: float, instead_of_nan: float) -> jax.Array:
    x = jnp.where(jnp.isnan(x), jnp.full_like(x, instead_of_nan), x)
    return jnp.clip(x, np.float32(low), np.float32(high))


def _float32(raw: Any, name: str) -> jax.Array:
    raw = jnp.asarray(raw)
    if not jnp.issubdtype(raw.dtype, jnp.floating):
        raise TypeError(f"{name}: the raw parameter must be a float. Got {raw.dtype}")
    return raw.astype(jnp.float32)
