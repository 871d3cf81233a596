"""gemmlowp's fixed-point functions: exp of negative numbers and reciprocals, in 32-bit integers.

A number is an int32 with i integer bits, Qi.(31-i): the raw value times 2^(i-31). exp is computed from a polynomial on
[-1/4, 0) and seven constants, a reciprocal by three Newton steps. The code is written once for numpy and for JAX,
elementwise, with the same bits. Names are gemmlowp's. Source: gemmlowp's fixedpoint.h.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qjax.numerics._namespace import like_inputs
from qjax.numerics.calls import named
from qjax.numerics.fixed_point import rounding_divide_by_power_of_two, saturating_rounding_doubling_high_mul

ONE = 2**31 - 1
"""The greatest Q0.31, which represents 1."""

NEWTON_START, NEWTON_SLOPE = 1515870810, -1010580540
"""48/17 - 32/17 d as Q2.29: the first step of the reciprocal of d in [1/2, 1]."""

EXP_OF_MINUS_POWERS = {
    -2: 1672461947,
    -1: 1302514674,
    0: 790015084,
    1: 290630308,
    2: 39332535,
    3: 720401,
    4: 242,
}
"""exp(-2^k) as Q0.31."""


def exp_on_negative_values(x: Any, integer_bits: int) -> Any:
    """exp(x) as Q0.31 for x <= 0 with these integer bits: exp of x modulo 1/4, times exp(-2^k) for each bit set."""
    xp = like_inputs(x)
    fraction = 31 - integer_bits
    quarter = np.int32(1 << (fraction - 2))
    rest = (x & (quarter - np.int32(1))) - quarter
    y = _exp_on_quarter(rest << np.int32(integer_bits))
    remainder = rest - x
    for exponent, factor in EXP_OF_MINUS_POWERS.items():
        if exponent < integer_bits:
            bit = (remainder >> np.int32(fraction + exponent)) & np.int32(1)
            y = xp.where(bit != 0, product(y, factor), y)
    return xp.where(x == 0, np.int32(ONE), y)


@named()
def one_over_one_plus_x(a: Any) -> Any:
    """1 / (1 + a) as Q0.31, for a in [0, 1) as Q0.31."""
    return shifted_left(_newton_reciprocal(a), 1)


def one_minus_x_over_one_plus_x(a: Any) -> Any:
    """(1 - a) / (1 + a) as Q0.31, for a in [0, 1) as Q0.31."""
    return shifted_left(_newton_reciprocal(a) - np.int32(1 << 29), 2)


def product(a: Any, b: Any) -> Any:
    """The product of two fixed-point numbers; their integer bits add up."""
    return saturating_rounding_doubling_high_mul(a, b)


def _exp_on_quarter(a: Any) -> Any:
    """exp on [-1/4, 0), Q0.31: four terms of the series around -1/8."""
    constant, third = 1895147668, 715827883
    x = a + np.int32(1 << 28)
    x2 = product(x, x)
    x3, x4 = product(x2, x), product(x2, x2)
    tail = product(rounding_divide_by_power_of_two(x4, 2) + x3, third) + x2
    return np.int32(constant) + product(x + rounding_divide_by_power_of_two(tail, 1), constant)


def _newton_reciprocal(a: Any) -> Any:
    """2 / (1 + a) as Q2.29 for a in [0, 1), Q0.31."""
    # half of the sum of a and 1, with 1 represented as 2^31
    half = (a >> np.int32(1)) + np.int32(1 << 30)
    x = np.int32(NEWTON_START) + product(half, NEWTON_SLOPE)
    for _ in range(3):
        rest = np.int32(1 << 29) - product(half, x)
        x = x + shifted_left(product(x, rest), 2)
    return x


def shifted_left(x: Any, bits: int) -> Any:
    """x * 2^bits, saturated to int32."""
    xp = like_inputs(x)
    high, low = np.int32(ONE >> bits), np.int32(-(2**31) >> bits)
    y = xp.where(x > high, np.int32(ONE), x << np.int32(bits))
    return xp.where(x < low, np.int32(-(2**31)), y)


def leading_zeros(x: Any) -> Any:
    """How many zero bits a positive int32 begins with."""
    if like_inputs(x) is jnp:
        return jax.lax.clz(x)
    return (np.int32(32) - np.frexp(x.astype(np.float64))[1]).astype(np.int32)
