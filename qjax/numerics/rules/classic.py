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
    """Round the exact product once, ties to even; the rule is unbiased and is qjax's default.

    In real numbers it is rint(acc * M / 2^(31-s)), rounded once as in IEEE arithmetic, without an intermediate result.
    """
    return _one_shift(acc, m, Rounding.NEAREST_EVEN)


@fixed_point("nearest_away", monotone=True)
def nearest_away(acc: jax.Array, m: Multiplier, call: Call) -> jax.Array:
    """Round the exact product once, ties away from zero, so that the rule is symmetric in the sign of acc.

    In real numbers it is C's round(acc * M / 2^(31-s)). `tvm_tonearest` computes the same number.
    """
    return _one_shift(acc, m, Rounding.NEAREST_AWAY)


@fixed_point("single_round", monotone=True)
def single_round(acc: jax.Array, m: Multiplier, call: Call) -> jax.Array:
    """SGL: round the exact product once, ties up.

    In real numbers it is floor(acc * M / 2^(31-s) + 1/2) = (acc * M + 2^(30-s)) >> (31-s). A result beyond int32
    saturates here, whereas the sources cast the 64-bit result to int32 and require that it fits.

    Sources: TFLite's MultiplyByQuantizedMultiplier with TFLITE_SINGLE_ROUNDING, Relay's requantize with UPWARD,
    CMSIS-NN's single rounding.
    """
    return _one_shift(acc, m, Rounding.NEAREST_UP)


@fixed_point("double_round", monotone=True)
def double_round(acc: jax.Array, m: Multiplier, call: Call) -> jax.Array:
    """DBL: round the high word with ties up, then the right shift with ties away from zero.

    The formula is RDBPOT(SRDHM(acc << l, M), r), where acc << l wraps in int32 as in the sources. The first rounding
    can create a tie that the second one breaks, so with probability 2^-(r+1) the result differs by one from the single
    rounding.

    Sources: gemmlowp's SaturatingRoundingDoublingHighMul and RoundingDivideByPOT, as TFLite's reference kernels compose
    them.
    """
    left, right = _split_shift(m)
    return _two_shifts(acc << left, m, Rounding.NEAREST_UP, right, Rounding.NEAREST_AWAY)


@fixed_point("neon", monotone=True)
def neon(acc: jax.Array, m: Multiplier, call: Call) -> jax.Array:
    """TWO: round the high word with ties up, then the right shift with ties up.

    The formula is SRSHL(SQRDMULH(acc << l, M), -r), where acc << l wraps in int32 (VSHL). TFLite's optimised kernels
    run these two NEON instructions without gemmlowp's correction of negative ties.
    """
    left, right = _split_shift(m)
    return _two_shifts(acc << left, m, Rounding.NEAREST_UP, right, Rounding.NEAREST_UP)


@fixed_point("ruy", monotone=True)
def ruy(acc: jax.Array, m: Multiplier, call: Call) -> jax.Array:
    """RUY: round the high word down, then a right shift of at least 1 with ties up.

    The formula is SRSHL(SQDMULH(acc << l', M), -r') with r' = max(1, -s) and l' = s + r'. A floor followed by a
    rounding shift is one rounding, because h is an integer in floor((floor(p / 2^31) + h) / 2^r') = floor((p + h 2^31)
    / 2^(31+r')). The result is therefore that of `single_round`, unless acc << l' wraps in int32. Source: ruy's ARM
    kernels.
    """
    right = jnp.maximum(-m.shift, np.int32(1))
    return _two_shifts(acc << (m.shift + right), m, Rounding.FLOOR, right, Rounding.NEAREST_UP)


@fixed_point("stochastic", needs_key=True)
def stochastic(acc: jax.Array, m: Multiplier, call: Call) -> jax.Array:
    """Round the exact product up with a probability equal to its fraction, so that the rule is unbiased in the mean.

    In real numbers it is floor((acc * M + U) / 2^t) with U uniform on the integers [0, 2^t), drawn from the key.
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
