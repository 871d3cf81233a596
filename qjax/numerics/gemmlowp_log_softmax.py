"""Log-softmax of int8 codes over the last axis in gemmlowp's fixed point: TFLite's LOG_SOFTMAX.

This is the kernel of TFLite Micro and of LiteRT's reference kernels. The result has the scale 1/16 and the zero point
127, so its range is -255/16 to 0. The sum of exponentials is that of `softmax`, a Q12.19 number. Its logarithm is
Q5.26, from a rational function around a power of sqrt(1/2); Newton's method divides.

Source: LogSoftmax of TFLite's integer reference kernels, and log_x_for_x_greater_than_or_equal_to_1 in its common.h.
"""

from typing import Any, NamedTuple

import numpy as np

from qjax.numerics._namespace import like_inputs
from qjax.numerics.fixed_point import quantize_multiplier, rounding_divide_by_power_of_two
from qjax.numerics.gemmlowp_functions import ONE, leading_zeros, one_over_one_plus_x, product, shifted_left
from qjax.numerics.softfloat import Real
from qjax.numerics.softmax import SUM_BITS, Gemmlowp, gemmlowp_powers, prepare

SCALE, ZERO_POINT = np.float32(1 / 16), 127
LEAST_SCALE, GREATEST_SCALE = 2.0**-20, 16.0
"""Input scales between which the kernel's constants neither overflow nor are capped."""

_INTEGER_BITS, _OUTPUT_BITS = 5, 4
_LOG_2 = 1488522236
_HALF_ROOT, _QUARTER_ROOT = 1518500250, 1805811301
"""sqrt(1/2) and its square root."""
_NUMERATOR, _SQUARE, _CONSTANT, _LINEAR = 117049297, 127690142, 1057819769, 638450708
"""Coefficients of the rational function: 11/240 r, r/20, 2/r - r and r/4 with r = 2^(1/4)."""


class LogGemmlowp(NamedTuple):
    """Constants, int32 scalars.

    Attributes:
      multiplier, shift, least: as in `softmax.Gemmlowp`.
      inverse_multiplier, inverse_shift: 1 / scale, of a difference that is Q5.26.
    """

    multiplier: Any
    shift: Any
    least: Any
    inverse_multiplier: Any
    inverse_shift: Any


def prepare_log(x_scale: float | np.floating) -> LogGemmlowp:
    """The constants for codes with this scale, a float32 number.

    Raises:
      ValueError: a scale outside of (2^-20, 16).
    """
    scale = np.float32(x_scale)
    if not LEAST_SCALE < scale < GREATEST_SCALE:
        raise ValueError(f"log_softmax: gemmlowp's kernel takes input scales between 2^-20 and 16. Got {x_scale}.")
    own = prepare("gemmlowp", scale)
    assert isinstance(own, Gemmlowp)
    # computed in double, as in the kernel
    inverse = 2.0 ** (31 - int(own.shift)) / float(own.multiplier)
    back = quantize_multiplier(Real.of(np.float64(inverse)))
    return LogGemmlowp(*own, back.multiplier, back.shift)


def log_softmax(codes: Any, constants: LogGemmlowp) -> Any:
    """Codes at 1/16 with the zero point 127, int32, of int8 codes (..., n) with n from 1 to 4095."""
    xp = like_inputs(codes, *constants)
    multiplier, shift, least, back, right = (xp.asarray(c) for c in constants)
    values = xp.asarray(codes).astype(np.int32)
    _, _, terms = gemmlowp_powers(values, multiplier, shift, least)
    logarithm = log_of_sum(xp.sum(terms, axis=-1, keepdims=True, dtype=np.int32))
    # the room that the range of Q5.26 has below the logarithm
    lowest = rounding_divide_by_power_of_two(product(logarithm + np.int32(-(2**31)), back), -right)
    difference = values - xp.max(values, axis=-1, keepdims=True)
    inside = difference > xp.maximum(least - np.int32(1), lowest)
    scaled = product(xp.where(inside, difference, np.int32(0)) << shift, multiplier)
    found = rounding_divide_by_power_of_two(scaled - logarithm, 31 - _INTEGER_BITS - _OUTPUT_BITS)
    return xp.where(inside, xp.clip(found + np.int32(ZERO_POINT), np.int32(-128), np.int32(127)), np.int32(-128))


def log_of_sum(x: Any) -> Any:
    """The natural logarithm as Q5.26, for x from 1 up as Q12.19.

    x = 2^k r with r near 2^(-1/4), where k is a multiple of a half: the better of two candidates is chosen. All
    products and sums are those of the kernel, each rounded as there.
    """
    xp = like_inputs(x)
    places = np.int32(31 - _INTEGER_BITS - 1)
    quarter = np.int32(1 << (int(places) - 2))
    zeros = leading_zeros(x)
    first = shifted_left(product(x << (zeros - np.int32(1)), _HALF_ROOT), 1)
    power = ((np.int32(SUM_BITS) - zeros) << places) + quarter
    headroom = leading_zeros(product(x, _HALF_ROOT)) - np.int32(1)
    second = xp.where(x > (np.int32(ONE) >> headroom), np.int32(ONE), x << headroom)
    other = ((np.int32(SUM_BITS) - headroom) << places) - quarter
    r, power = xp.minimum(first, second), xp.maximum(power, other)
    root = np.int32(_QUARTER_ROOT)
    # half of the sum, ties up; the sum itself may not fit
    p = (r >> np.int32(1)) + (root >> np.int32(1)) + ((r | root) & np.int32(1))
    q = (r - root) << np.int32(1)
    square = product(q, q)
    numerator = product(q, r) + product(product(q, square), _NUMERATOR)
    denominator = product(p, np.int32(_CONSTANT) + q + product(square, _SQUARE)) + product(q, _LINEAR)
    quotient = product(rounding_divide_by_power_of_two(numerator, _INTEGER_BITS + 1), one_over_one_plus_x(denominator))
    return shifted_left(product(power, _LOG_2) + quotient, 1)
