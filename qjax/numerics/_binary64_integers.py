"""Binary64 arithmetic in 64-bit integers, for a `Real` on the host and on processors without doubles.

It is written for numpy and `jax.numpy` alike, on numbers sign * mantissa * 2^exponent in canonical form: mantissas in
[2^52, 2^53), and (0, 0, 0) for zero.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from qjax.numerics._words import multiply_wide, normalized, repeat, round_off, sticky_right_shift

_U = np.uint64
BITS = 53


class Parts(NamedTuple):
    """sign: int32, -1, 0 or 1. mantissa: uint64. exponent: int32. Arrays of one shape."""

    sign: Any
    mantissa: Any
    exponent: Any


def rounded(xp: ModuleType, sign: Any, mantissa: Any, exponent: Any) -> Parts:
    """The canonical Real of sign * mantissa * 2^exponent for any uint64, rounded to 53 bits, ties to even.

    The last bit of a mantissa of 55 bits or more may represent whatever was lost below it (a sticky bit).
    """
    zero = (mantissa == 0) | (sign == 0)
    mantissa, lifted = normalized(xp, mantissa)
    mantissa = round_off(xp, mantissa, _U(64 - BITS))
    carry = mantissa == _U(1 << BITS)
    mantissa = xp.where(carry, _U(1 << (BITS - 1)), mantissa)
    exponent = exponent - lifted + np.int32(64 - BITS) + carry.astype(np.int32)
    return Parts(
        xp.where(zero, np.int32(0), sign),
        xp.where(zero, _U(0), mantissa),
        xp.where(zero, np.int32(0), exponent),
    )


def add(xp: ModuleType, a: Parts, b: Parts) -> Parts:
    """The sum, with 10 guard bits and one sticky bit for what is shifted out of the smaller operand.

    If bits are lost, the sticky sum is an odd integer within 1 of the exact one, and every number at which the rounding
    changes is even there. So both round to the same number.
    """
    swap = (b.sign == 0) | (~(a.sign == 0) & _less(b, a))
    big = Parts(*(xp.where(swap, p, q) for p, q in zip(a, b, strict=True)))
    small = Parts(*(xp.where(swap, q, p) for p, q in zip(a, b, strict=True)))
    gap = xp.where(small.sign == 0, np.int32(0), big.exponent - small.exponent)
    aligned = sticky_right_shift(xp, small.mantissa << _U(10), xp.minimum(gap, np.int32(63)).astype(_U))
    top = big.mantissa << _U(10)
    total = xp.where(big.sign == small.sign, top + aligned, top - aligned)
    return rounded(xp, big.sign, total, big.exponent - np.int32(10))


def multiply(xp: ModuleType, a: Parts, b: Parts) -> Parts:
    """The product: 106 bits by 32-bit limbs, of which 64 and a sticky bit remain before rounding."""
    high, low = multiply_wide(a.mantissa, b.mantissa)
    kept = (high << _U(22)) | (low >> _U(42))
    sticky = (low & _U((1 << 42) - 1)) != 0
    return rounded(xp, a.sign * b.sign, kept | sticky.astype(_U), a.exponent + b.exponent + np.int32(42))


def divide(xp: ModuleType, a: Parts, b: Parts) -> Parts:
    """The quotient: long division, 11 bits per step, to at least 55 bits and a sticky remainder."""
    divisor = xp.where((b.sign == 0), _U(1 << 52), b.mantissa)
    rest, quotient = a.mantissa, xp.zeros_like(a.mantissa)
    for _ in range(5):
        rest = rest << _U(11)
        digit = rest // divisor
        rest = rest - digit * divisor
        quotient = (quotient << _U(11)) | digit
    quotient = quotient | (rest != 0).astype(_U)
    return rounded(xp, a.sign * b.sign, quotient, a.exponent - b.exponent - np.int32(55))


def sqrt(xp: ModuleType, a: Parts) -> Parts:
    """The square root.

    The mantissa is brought to an even exponent and extended to 112 bits, whose integer root has 56; the remainder is
    the sticky bit. Each step finds one root bit, by comparing 4 root + 1 with the remainder.
    """
    odd = (a.exponent & np.int32(1)).astype(_U)
    # 54 bits in the top of a word, taken two at a time; the zeros that follow are the extension
    digits = a.mantissa << (odd + _U(10))

    def step(state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        digits, rest, root = state
        rest = (rest << _U(2)) | (digits >> _U(62))
        trial = (root << _U(2)) | _U(1)
        fits = (rest >= trial).astype(_U)
        return digits << _U(2), rest - fits * trial, (root << _U(1)) | fits

    zero = xp.zeros_like(digits)
    _, rest, root = repeat(xp, 56, step, (digits, zero, zero))
    root = root | (rest != 0).astype(_U)
    return rounded(xp, a.sign, root, ((a.exponent - odd.astype(np.int32)) >> np.int32(1)) - np.int32(29))


FORMULAS: dict[str, Callable[..., Parts]] = {"add": add, "multiply": multiply, "divide": divide, "sqrt": sqrt}
"""Operation -> (namespace, parts of the operands) -> parts of the result."""


def _less(a: Parts, b: Parts) -> Any:
    """|a| < |b| for nonzero canonical numbers: by exponent, then by mantissa."""
    return (a.exponent < b.exponent) | ((a.exponent == b.exponent) & (a.mantissa < b.mantissa))
