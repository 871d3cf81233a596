"""Requantization by one shift: effective scales that are powers of two, as in ap_fixed and ac_fixed hardware.

acc * 2^-n has no other fraction than the n bits that are shifted out, so a rounding and an overflow mode define
everything. Both are named as AMD's Vitis HLS names them for ap_fixed (UG1399, "Arbitrary Precision Fixed-Point Data
Types"; Siemens' ac_fixed has the same ones with the prefix AC_). "power_of_two:ROUNDING:OVERFLOW" chooses; the name
"power_of_two" alone is RND_CONV and SAT.

| rounding | 2^-n acc becomes | tie 1/2, -1/2, 3/2, -3/2 |
| --- | --- | --- |
| TRN | the floor | 0, -1, 1, -2 |
| TRN_ZERO | toward zero | 0, 0, 1, -1 |
| RND | nearest, ties up | 1, 0, 2, -1 |
| RND_CONV | nearest, ties to even | 0, 0, 2, -2 |
| RND_ZERO | nearest, ties toward zero | 0, 0, 1, -1 |
| RND_INF | nearest, ties away from zero | 1, -1, 2, -2 |
| RND_MIN_INF | nearest, ties down | 0, -1, 1, -2 |

The overflow applies to the code; adding the zero point does not overflow:

| overflow | a code outside of [qmin, qmax] becomes |
| --- | --- |
| SAT | the nearest one inside |
| SAT_ZERO | the zero point, which represents 0 |
| SAT_SYM | as SAT, in [max(qmin, -qmax), qmax] |
| WRAP | the code modulo 2^bits, with the fewest bits that fit qmin and qmax; then SAT, for a narrow range |
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from qjax.numerics._namespace import host_or_trace
from qjax.numerics.rounding import Rounding, right_shift_with_headroom
from qjax.numerics.rules.multiplier import check_int32
from qjax.numerics.rules.registry import Call, Rule, register_family, register_rule
from qjax.numerics.softfloat import Real

_ROUNDINGS = {
    "TRN": Rounding.FLOOR,
    "TRN_ZERO": Rounding.TOWARD_ZERO,
    "RND": Rounding.NEAREST_UP,
    "RND_CONV": Rounding.NEAREST_EVEN,
    "RND_ZERO": None,
    "RND_INF": Rounding.NEAREST_AWAY,
    "RND_MIN_INF": None,
}
_OVERFLOWS = ("SAT", "SAT_ZERO", "SAT_SYM", "WRAP")
_MOST = 2**20


class PowerOfTwo(NamedTuple):
    """The scale 2^-shift.

    Attributes:
      shift: int32; negative for a scale above 1.
    """

    shift: Any


def power_of_two_shift(effective_scale: Any) -> PowerOfTwo:
    """The shift of an effective scale that is a power of two.

    Raises:
      ValueError: another scale, on the host. A trace takes the next lower power of two.
    """
    e = Real.of(effective_scale)
    if host_or_trace(e.mantissa) is np:
        bad = (np.asarray(e.sign) <= 0) | (np.asarray(e.mantissa) != 2**52)
        if np.any(bad):
            worst = np.ravel(e.to_float64())[np.ravel(bad)][:4]
            raise ValueError(
                f"rule power_of_two needs effective scales s_x * s_w / s_y that are powers of two. Got {worst}; train "
                'with power-of-two scales, Recipe(method="tqt", weight_method="tqt"), without batch norm.'
            )
    return PowerOfTwo(-(e.exponent + np.int32(52)))


def shift_and_overflow(acc: jax.Array, c: PowerOfTwo, call: Call, *, rounding: str, overflow: str) -> jax.Array:
    """acc * 2^-shift + zero_point by the two named modes; see the module."""
    x = acc.astype(jnp.int64)
    left = jnp.clip(-c.shift, np.int32(0), np.int32(31)).astype(jnp.int64)
    # A larger left shift exceeds every range of codes, and leaves only zeros in a register that wraps. A shift by 40
    # does the same.
    x = jnp.where(c.shift < -31, jnp.sign(x) << np.int64(40), x << left)
    # Beyond 40 every rounding is that of a number near 0.
    right = jnp.clip(c.shift, np.int32(0), np.int32(40)).astype(jnp.int64)
    y = _rounded(x, right, rounding) + call.zero_point.astype(jnp.int64)
    low, high = np.int64(call.qmin), np.int64(call.qmax)
    match overflow:
        case "SAT_ZERO":
            y = jnp.where((y < low) | (y > high), call.zero_point.astype(jnp.int64), y)
        case "SAT_SYM":
            low = max(low, -high)
        case "WRAP":
            base, bits = _register(call.qmin, call.qmax)
            y = ((y - base) & np.int64(2**bits - 1)) + base
        case _:
            pass
    return jnp.minimum(jnp.maximum(y, low), high).astype(jnp.int32)


def _rounded(x: jax.Array, shift: jax.Array, rounding: str) -> jax.Array:
    named = _ROUNDINGS[rounding]
    if named is not None:
        return right_shift_with_headroom(jnp, x, shift, named)
    # ties down: one less than the half; ties toward zero: the half again for a negative number
    some = jnp.minimum(shift, np.int64(1))
    nudge = ((np.int64(1) << shift) >> np.int64(1)) - some
    if rounding == "RND_ZERO":
        nudge = nudge + ((x < 0).astype(jnp.int64) & some)
    return (x + nudge) >> shift


def _register(qmin: int, qmax: int) -> tuple[np.int64, int]:
    """The lowest value and the width of the narrowest register, two's complement or unsigned, that fits both."""
    if qmin >= 0:
        return np.int64(0), max(qmax.bit_length(), 1)
    bits = max((-qmin - 1).bit_length(), qmax.bit_length()) + 1
    return np.int64(-(2 ** (bits - 1))), bits


def _build(name: str, parameters: list[str]) -> Rule:
    rounding, overflow = parameters if len(parameters) == 2 else ("", "")
    if rounding not in _ROUNDINGS or overflow not in _OVERFLOWS:
        raise ValueError(
            f"rule 'power_of_two:ROUNDING:OVERFLOW' needs a rounding among {', '.join(_ROUNDINGS)} and an overflow "
            f"among {', '.join(_OVERFLOWS)}. Got {name!r}."
        )
    apply = partial(shift_and_overflow, rounding=rounding, overflow=overflow)
    return Rule(name, power_of_two_shift, PowerOfTwo, apply, finishes=True, check=_check, powers_of_two=True)


def _check(c: PowerOfTwo) -> None:
    check_int32(c)
    shift = np.asarray(c.shift)
    if np.any(np.abs(shift.astype(np.int64)) > _MOST):
        raise ValueError(f"a shift must lie in [-{_MOST}, {_MOST}]. Got values from {shift.min()} to {shift.max()}.")


register_rule(_build("power_of_two", ["RND_CONV", "SAT"]))
register_family("power_of_two", ("power_of_two:ROUNDING:OVERFLOW",), _build)
