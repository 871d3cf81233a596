"""Normalisation of codes over axes, in integers: (x - mean) / sqrt(variance + epsilon) and its relatives.

For n codes c of scale s (with the zero point subtracted), centered or not:

    D = n c - sum c,  W = n sum c^2 - (sum c)^2      or      D = c,  W = sum c^2

`D / sqrt(W + E)` is the normalised number up to a constant factor, where `E = K epsilon / s^2` is epsilon in W's unit
(see `Setup`). V = (W + E) 2^f, where f is such that V has as many bits as fit, and epsilon's rounding to an integer
costs a relative 2^-31 at most where it matters. With (r, h) the reciprocal root of V, see `reciprocal_root`,

    t = rint(D r 2^(h + f / 2 - 61 + p)) = 2^p D / sqrt(W + E) (1 + e) + 1/2 at most

in steps of 2^-p, |t| <= 2^30, e within 2^-29: root and quotient 2^-30 + 2^-31, half of what V's two roundings lose. The
remaining factors (gamma, beta, the output's scale) are an affine step per channel after an int32 accumulator.
"""

import dataclasses
import math
from typing import Any, Literal

import numpy as np
from jax.typing import ArrayLike

from qjax.numerics._namespace import host_or_trace, like_inputs, wide
from qjax.numerics.calls import within
from qjax.numerics.reciprocal_root import RECIPROCAL_BITS, reciprocal_root
from qjax.numerics.rounding import Rounding, right_shift_with_headroom
from qjax.numerics.softfloat import Real

_I = np.int64
_ENERGY_BITS = 61
_MOST_GAIN = 30

Joined = Literal["add", "max"]


@dataclasses.dataclass(frozen=True)
class Setup:
    """What depends on shapes and ranges alone.

    count: n. centered: whether the mean is subtracted. gain: the even number by which W is shifted left. places: p, t's
    unit is 2^-p.
    """

    count: int
    centered: bool
    gain: int
    places: int

    @classmethod
    def of(cls, count: int, span: int, *, centered: bool) -> "Setup":
        """For `count` codes with |code - zero point| <= span, whose range is not wider than span.

        Centered: |D| <= count * span and W <= count^2 span^2 / 4, while count * sum c^2 <= count^2 span^2 is below
        2^63; otherwise |D| <= span, W <= count span^2. By W = sum D^2 / n (or sum c^2), |D| <= sqrt(count W) (or
        sqrt(W)): that bounds t.

        Raises:
          ValueError: so many codes that W, or a product of D with 31 bits, does not fit 64.
        """
        product = (count * span) ** 2 if centered else count * span**2
        most = product // 4 + 1 if centered else product
        reach = count * span if centered else span
        if product >= 1 << 62 or reach >= 1 << 30 or most.bit_length() > _ENERGY_BITS:
            raise ValueError(
                f"normalize: {count} codes of a range of {span} have a sum of squares that does not fit 64 bits. Use "
                "fewer bits for this tensor (an override of the recipe), or normalise over fewer elements."
            )
        gain = min(_MOST_GAIN, (_ENERGY_BITS - most.bit_length()) // 2 * 2)
        widest = math.isqrt(max(count - 1, 0)) + 1 if centered else 1
        return cls(count, centered, gain, 30 - (widest - 1).bit_length())


def prepare(setup: Setup, divisor: int, epsilon: float, x_scale: ArrayLike, joined: Joined = "add") -> dict[str, Any]:
    """The constants of `normalized`, int32 scalars by name.

    The divisor is `sqrt(sum (x - mean)^2 / divisor + epsilon)` (or, joined by "max", the greater of the root and
    epsilon): in W's unit epsilon is K epsilon / s^2, or K epsilon^2 / s^2, with K = n divisor if the mean is subtracted
    and K = divisor otherwise. x_scale: float32 scalar, also traced.

    Returns:
      energy_high, energy_low: epsilon in V's unit, high 2^31 + low. right: how far V is shifted right if epsilon is so
      large that it would not fit. half: f / 2.
    """
    xp = host_or_trace(x_scale)
    scale, number = Real.of(x_scale), Real.of(np.float64(epsilon))
    unit = Real.of(np.float64(divisor * (setup.count if setup.centered else 1)))
    energy = unit * (number * number if joined == "max" else number) / (scale * scale)
    energy = energy.scale_by_power_of_two(np.int32(setup.gain))
    with wide(xp):
        bits = xp.where(energy.is_zero, np.int32(0), energy.exponent + np.int32(53))
        # An even shift, so that the root halves it.
        right = xp.maximum(np.int32(0), (bits - np.int32(_ENERGY_BITS) + np.int32(1)) >> np.int32(1)) << np.int32(1)
        integer = energy.scale_by_power_of_two(-right).to_int64()
        return {
            "energy_high": (integer >> _I(31)).astype(np.int32),
            "energy_low": (integer & _I(2**31 - 1)).astype(np.int32),
            "right": xp.minimum(right, np.int32(62)),
            "half": (np.int32(setup.gain) - right) >> np.int32(1),
        }


def factor(setup: Setup, divisor: int) -> Real:
    """The normalised number over D / sqrt(W + E): sqrt(divisor / n) if the mean is subtracted, or sqrt(divisor).

    It is D / n over sqrt(W / (n divisor)), or c over sqrt(sum c^2 / divisor).
    """
    if not setup.centered:
        return Real.of(np.int64(divisor)).sqrt()
    if divisor == setup.count:
        return Real.of(np.int64(1))
    return (Real.of(np.int64(divisor)) / Real.of(np.int64(setup.count))).sqrt()


def normalized(
    codes: ArrayLike, axes: tuple[int, ...], setup: Setup, constants: dict[str, Any], joined: Joined = "add"
) -> Any:
    """t, int32 of the codes' shape; 0 where W + E is 0.

    Args:
      codes: int32, with the zero point subtracted. axes: those of the `setup.count` codes of one row.
      constants: of `prepare`.
    """
    xp = like_inputs(codes, *constants.values())
    with wide(xp):
        energy, low, right, half = (
            xp.asarray(constants[name]).astype(np.int64) for name in ("energy_high", "energy_low", "right", "half")
        )
        energy = (energy << _I(31)) + low
        c = xp.asarray(codes).astype(np.int64)
        squares = xp.sum(c * c, axis=axes, keepdims=True)
        deviation = c
        if setup.centered:
            total = xp.sum(c, axis=axes, keepdims=True)
            deviation = c * _I(setup.count) - xp.broadcast_to(total, c.shape)
            squares = squares * _I(setup.count) - total * total
        shape = squares.shape
        v = (squares << _I(setup.gain)) >> xp.broadcast_to(right, shape)
        energy = xp.broadcast_to(energy, shape)
        v = xp.maximum(v, energy) if joined == "max" else v + energy
        # a row of equal codes without epsilon: every deviation is 0, and so is t
        r, h = reciprocal_root(xp, xp.maximum(v, _I(1)))
        shift = xp.broadcast_to(_I(RECIPROCAL_BITS - setup.places) - half, shape) - h
        # |D r| <= 2^61: from 62 on, every quotient rounds to 0
        shift = xp.minimum(xp.maximum(shift, _I(0)), _I(62))
        product = deviation * xp.broadcast_to(r, c.shape)
        t = right_shift_with_headroom(xp, product, xp.broadcast_to(shift, c.shape), Rounding.NEAREST_EVEN)
        return within(t, -(1 << 30), 1 << 30).astype(np.int32)
