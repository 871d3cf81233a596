"""The fixed-point rules of gemmlowp, TFLite, NEON and ruy, and the roundings of the exact product.

With e ~ M 2^(s-31), M in [2^30, 2^31) and s in [-31, 30], the exact product is p = acc * M, |p| < 2^62, and
acc * e ~ p / 2^t with t = 31 - s in [1, 62]: one 64-bit product and one right shift, never a left one. 64-bit
integers cost no more than a float32 product here: on a CPU this beats the high word of a 32-bit product,
which needs its low word as well to round exactly.

Notation: l = max(s, 0), r = max(-s, 0); names in parentheses are those of the runtimes' own functions.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qjax.numerics.fixed_point import Multiplier
from qjax.numerics.rounding import Rounding, right_shift_with_headroom
from qjax.numerics.rules.multiplier import fixed_point, saturated
from qjax.numerics.rules.registry import Call


@fixed_point("nearest_even", monotone=True)
def nearest_even(acc: jax.Array, m: Multiplier, call: Call) -> jax.Array:
    """One rounding of the exact product, ties to even; unbiased, and qjax's default.

    Reals: rint(acc * M / 2^(31-s)). It is what IEEE arithmetic does once, without an intermediate result.
    """
    return _one_shift(acc, m, Rounding.NEAREST_EVEN)


@fixed_point("nearest_away", monotone=True)
def nearest_away(acc: jax.Array, m: Multiplier, call: Call) -> jax.Array:
    """One rounding of the exact product, ties away from zero; symmetric in the sign of acc.

    Reals: C's round(acc * M / 2^(31-s)). `tvm_tonearest` is the same number.
    """
    return _one_shift(acc, m, Rounding.NEAREST_AWAY)


@fixed_point("single_round", monotone=True)
def single_round(acc: jax.Array, m: Multiplier, call: Call) -> jax.Array:
    """SGL: one rounding of the exact product, ties up.

    Reals: floor(acc * M / 2^(31-s) + 1/2) = (acc * M + 2^(30-s)) >> (31-s). Source: TFLite's
    MultiplyByQuantizedMultiplier with TFLITE_SINGLE_ROUNDING, Relay's requantize with UPWARD, CMSIS-NN's
    single rounding. Those cast the 64-bit result to int32 and require it to fit; here a result beyond int32
    saturates.
    """
    return _one_shift(acc, m, Rounding.NEAREST_UP)


@fixed_point("double_round", monotone=True)
def double_round(acc: jax.Array, m: Multiplier, call: Call) -> jax.Array:
    """DBL: the high word rounded with ties up, then the right shift rounded with ties away from zero.

    RDBPOT(SRDHM(acc << l, M), r). The first rounding may make a tie that the second breaks: with probability
    2^-(r+1) the result is one off the single rounding. Source: gemmlowp's SaturatingRoundingDoublingHighMul
    and RoundingDivideByPOT as TFLite's reference kernels compose them. acc << l wraps in int32, as theirs
    does.
    """
    left, right = _split_shift(m)
    return _two_shifts(acc << left, m, Rounding.NEAREST_UP, right, Rounding.NEAREST_AWAY)


@fixed_point("neon", monotone=True)
def neon(acc: jax.Array, m: Multiplier, call: Call) -> jax.Array:
    """TWO: the high word rounded with ties up, then the right shift rounded with ties up.

    SRSHL(SQRDMULH(acc << l, M), -r): the two NEON instructions without gemmlowp's fix-up of negative ties, as
    TFLite's optimised kernels run them. acc << l wraps in int32 (VSHL).
    """
    left, right = _split_shift(m)
    return _two_shifts(acc << left, m, Rounding.NEAREST_UP, right, Rounding.NEAREST_UP)


@fixed_point("ruy", monotone=True)
def ruy(acc: jax.Array, m: Multiplier, call: Call) -> jax.Array:
    """RUY: the high word rounded down, then a right shift of at least 1 rounded with ties up.

    SRSHL(SQDMULH(acc << l', M), -r') with r' = max(1, -s) and l' = s + r'. A floor followed by a rounding
    shift is one rounding: floor((floor(p / 2^31) + h) / 2^r') = floor((p + h 2^31) / 2^(31+r')) as h is an
    integer, so the result is that of `single_round` unless acc << l' wraps in int32. Source: ruy's ARM
    kernels.
    """
    right = jnp.maximum(-m.shift, np.int32(1))
    return _two_shifts(acc << (m.shift + right), m, Rounding.FLOOR, right, Rounding.NEAREST_UP)


@fixed_point("stochastic", needs_key=True)
def stochastic(acc: jax.Array, m: Multiplier, call: Call) -> jax.Array:
    """The exact product, rounded up with a probability equal to its fraction; unbiased in the mean.

    Reals: floor((acc * M + U) / 2^t) with U uniform on the integers [0, 2^t), drawn from the key.
    """
    return _one_shift(acc, m, Rounding.STOCHASTIC, call.key)


def _one_shift(acc: jax.Array, m: Multiplier, rounding: Rounding, key: jax.Array | None = None) -> jax.Array:
    """The product acc * M / 2^(31 - s), exact until one rounding, saturated to int32."""
    p = acc.astype(jnp.int64) * m.multiplier.astype(jnp.int64)
    t = np.int64(31) - m.shift.astype(jnp.int64)
    return saturated(right_shift_with_headroom(jnp, p, t, rounding, key))


def _two_shifts(acc: jax.Array, m: Multiplier, first: Rounding, right: Any, second: Rounding) -> jax.Array:
    """The product acc * M / 2^31 rounded by `first`, then / 2^right rounded by `second`.

    Nothing can overflow: M < 2^31 keeps the high word within int32, and the second shift runs in the 64 bits
    of the product.
    """
    p = acc.astype(jnp.int64) * m.multiplier.astype(jnp.int64)
    high = right_shift_with_headroom(jnp, p, np.int64(31), first)
    return right_shift_with_headroom(jnp, high, right.astype(jnp.int64), second).astype(jnp.int32)


def _split_shift(m: Multiplier) -> tuple[jax.Array, jax.Array]:
    """The shift as a left and a right one, of which one is 0."""
    return jnp.maximum(m.shift, np.int32(0)), jnp.maximum(-m.shift, np.int32(0))
