"""Tables of int8 sigmoid and tanh as gemmlowp's fixed-point functions fill them: TFLite Micro's kernels.

Unlike the tables of `lookup`, these are not correctly rounded: about one code in a thousand is off by one. An input
code becomes Q4.27, exp comes from a polynomial on [-1/4, 0) and seven constants, a reciprocal from three Newton steps.
Names are gemmlowp's. Source: gemmlowp's fixedpoint.h, TFLite's reference_integer_ops::Logistic and Tanh; tflite-micro
0.dev20261023, 0 of 512,000 entries of each function.
"""

import math
from typing import Any

import numpy as np

from qjax.numerics.fixed_point import (
    quantize_multiplier,
    rounding_divide_by_power_of_two,
    saturating_rounding_doubling_high_mul,
)
from qjax.numerics.requantize import requantize
from qjax.numerics.softfloat import Real

_INTEGER_BITS = 4
"""The input's fixed point is Q4.27: reals below 16."""
_ONE = 2**31 - 1

_EXP_OF_MINUS_POWERS = {
    -2: 1672461947,
    -1: 1302514674,
    0: 790015084,
    1: 290630308,
    2: 39332535,
    3: 720401,
    4: 242,
}
"""exp(-2^k) as Q0.31."""


def gemmlowp_table(function: str, x_scale: float | np.floating, x_zero_point: int) -> np.ndarray:
    """int32 output codes of the 256 int8 input codes -128, ..., 127.

    "logistic": codes at 1/256 with zero point -128. "tanh": codes at 1/128 with zero point 0.

    Raises:
      ValueError: another function, or a scale that is not finite and positive.
    """
    if function not in ("logistic", "tanh"):
        raise ValueError(f"gemmlowp_table: expected a function out of logistic, tanh. Got {function!r}.")
    scale = float(x_scale)
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"gemmlowp_table: the scale must be finite and positive. Got {scale}.")
    fraction = 31 - _INTEGER_BITS
    multiplier = quantize_multiplier(Real.of(np.float64(scale)).scale_by_power_of_two(fraction))
    # CalculateInputRadius: inputs from here on would leave Q4.27
    radius = math.floor((2**_INTEGER_BITS - 1) * 2.0**fraction / 2.0 ** int(multiplier.shift))
    centred = np.arange(-128, 128, dtype=np.int32) - np.int32(x_zero_point)
    inside = np.abs(centred) < radius
    limits: dict[str, Any] = {"qmin": -(2**31), "qmax": 2**31 - 1}
    x = np.asarray(requantize(np.where(inside, centred, np.int32(0)), multiplier, rule="double_round", **limits))
    if function == "logistic":
        y = rounding_divide_by_power_of_two(_logistic(x), 31 - 8) - np.int32(128)
    else:
        y = rounding_divide_by_power_of_two(_tanh(x), 31 - 7)
    ends = np.where(centred < 0, np.int32(-128), np.int32(127))
    return np.where(inside, np.clip(y, np.int32(-128), np.int32(127)), ends)


def _logistic(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)) as Q0.31, of x in Q4.27."""
    positive = _one_over_one_plus_x(_exp_on_negative_values(-np.abs(x), _INTEGER_BITS))
    return np.where(x == 0, np.int32(2**30), np.where(x > 0, positive, np.int32(_ONE) - positive))


def _tanh(x: np.ndarray) -> np.ndarray:
    """The hyperbolic tangent as Q0.31, of x in Q4.27: with twice the input in Q5.26, (1 - e) / (1 + e)."""
    t = _one_minus_x_over_one_plus_x(_exp_on_negative_values(-np.abs(x), _INTEGER_BITS + 1))
    return np.where(x == 0, np.int32(0), np.where(x < 0, -t, t))


def _exp_on_negative_values(x: np.ndarray, integer_bits: int) -> np.ndarray:
    """exp(x) as Q0.31 of x <= 0 with these integer bits: exp of the part modulo 1/4, times exp(-2^k) per bit set."""
    fraction = 31 - integer_bits
    quarter = np.int32(1 << (fraction - 2))
    rest = (x & (quarter - np.int32(1))) - quarter
    y = _exp_on_quarter(rest << np.int32(integer_bits))
    remainder = rest - x
    for exponent, factor in _EXP_OF_MINUS_POWERS.items():
        if exponent < integer_bits:
            bit = (remainder >> np.int32(fraction + exponent)) & np.int32(1)
            y = np.where(bit != 0, _product(y, factor), y)
    return np.where(x == 0, np.int32(_ONE), y)


def _exp_on_quarter(a: np.ndarray) -> np.ndarray:
    """exp on [-1/4, 0), Q0.31: four terms of the series around -1/8."""
    constant, third = 1895147668, 715827883
    x = a + np.int32(1 << 28)
    x2 = _product(x, x)
    x3, x4 = _product(x2, x), _product(x2, x2)
    tail = _product(rounding_divide_by_power_of_two(x4, 2) + x3, third) + x2
    return np.int32(constant) + _product(x + rounding_divide_by_power_of_two(tail, 1), constant)


def _newton_reciprocal(a: np.ndarray) -> np.ndarray:
    """2 / (1 + a) as Q2.29 for a in [0, 1), Q0.31."""
    half = ((a.astype(np.int64) + _ONE + 1) >> 1).astype(np.int32)
    x = np.int32(1515870810) + _product(half, -1010580540)
    for _ in range(3):
        rest = np.int32(1 << 29) - _product(half, x)
        x = x + _saturated(_product(x, rest).astype(np.int64) << 2)
    return x


def _one_over_one_plus_x(a: np.ndarray) -> np.ndarray:
    return _saturated(_newton_reciprocal(a).astype(np.int64) << 1)


def _one_minus_x_over_one_plus_x(a: np.ndarray) -> np.ndarray:
    return _saturated((_newton_reciprocal(a).astype(np.int64) - (1 << 29)) << 2)


def _product(a: np.ndarray, b: Any) -> np.ndarray:
    return saturating_rounding_doubling_high_mul(a, b)


def _saturated(x: np.ndarray) -> np.ndarray:
    return np.clip(x, -(2**31), 2**31 - 1).astype(np.int32)
