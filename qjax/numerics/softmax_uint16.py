"""Softmax of int8 codes as TFLite's optimised kernel computes it on AArch64: exponentials of 16 bits.

    t_d = min(floor(double(float32(65535 expf(-s d))) + 1/2), 65535);  inv = float32(1 / float32(float32(sum t) / 256))
    y = MBQM(t_i, inv) - 128

d is the difference to the greatest code; (M, r) = quantize_multiplier(inv), and MBQM rounds twice: SRDHM(t, M), then a
shift right by r with ties up (`neon`) in whole blocks of 16 codes of the last axis, with ties away from zero
(`double_round`) in what is left of each row. Source: PopulateSoftmaxUInt8LookupTable and SoftmaxInt8LUT of TFLite,
compiled by clang for AArch64 only; elsewhere the kernel is `softmax`'s method float32.
"""

from typing import Any, NamedTuple

import numpy as np

from qjax.numerics import float32, libm
from qjax.numerics.fixed_point import rounding_divide_by_power_of_two, saturating_rounding_doubling_high_mul
from qjax.numerics.rounding import Rounding, rounding_right_shift

_BLOCK = 16


class Uint16(NamedTuple):
    """Constants of the method `uint16`: exp(-scale * d) for d = 0, ..., 255 in steps of 1/65535, int32."""

    powers: Any


def prepare_uint16(scale: np.float32) -> Uint16:
    """The table of a softmax of codes with this scale."""
    powers = libm.expf(np.float32(-scale) * np.arange(256).astype(np.float32)) * np.float32(65535)
    nearest = np.floor(powers.astype(np.float64) + 0.5)
    return Uint16(np.minimum(nearest, 65535).astype(np.int32))


def quotient_uint16(xp: Any, difference: Any, constants: Uint16) -> Any:
    """256 times the softmax, int32, from differences to the greatest code, (..., n) with n below 2^15."""
    # Mode "clip" is the form of a lookup that the emitters know. All differences lie within the table.
    powers = xp.take(xp.asarray(constants.powers), -difference, mode="clip")
    total = float32.from_int32(xp.sum(powers, axis=-1, keepdims=True, dtype=np.int32))
    inverse = float32.of(float32.divide(float32.of(1.0), float32.multiply(total, float32.of(2.0**-8))))
    # The greatest code contributes 65535, so the sum lies in [2^16 - 1, 2^31) and inv = M 2^(s - 31) in (2^-23, 2^-7).
    multiplier, right = inverse.mantissa << np.int32(7), np.int32(-24) - inverse.exponent
    high = saturating_rounding_doubling_high_mul(powers, xp.broadcast_to(multiplier, powers.shape))
    right = xp.broadcast_to(right, powers.shape)
    whole = powers.shape[-1] - powers.shape[-1] % _BLOCK
    in_vectors = xp.arange(powers.shape[-1], dtype=np.int32) < np.int32(whole)
    up = rounding_right_shift(high, right, Rounding.NEAREST_UP)
    away = rounding_divide_by_power_of_two(high, right)
    return xp.where(xp.broadcast_to(in_vectors, powers.shape), up, away)
