"""Oracles in unbounded integers and fractions, written from the definitions and not from the library."""

from fractions import Fraction
from math import ceil, floor


def nearest_even(q: Fraction) -> int:
    return round(q)


def nearest_away(q: Fraction) -> int:
    return floor(abs(q) + Fraction(1, 2)) * (1 if q >= 0 else -1)


def nearest_up(q: Fraction) -> int:
    return floor(q + Fraction(1, 2))


def toward_zero(q: Fraction) -> int:
    return int(q)


ROUNDINGS = {
    "nearest_even": nearest_even,
    "nearest_away": nearest_away,
    "nearest_up": nearest_up,
    "toward_zero": toward_zero,
    "floor": floor,
    "ceil": ceil,
}


def wrap32(x: int) -> int:
    return (x + 2**31) % 2**32 - 2**31


def saturate32(x: int) -> int:
    return max(-(2**31), min(2**31 - 1, x))


def truncating_division(a: int, b: int) -> int:
    """C's a / b for b > 0."""
    return a // b if a >= 0 else -(-a // b)


def gemmlowp_srdhm(a: int, b: int) -> int:
    if a == b == -(2**31):
        return 2**31 - 1
    nudge = 2**30 if a * b >= 0 else 1 - 2**30
    return truncating_division(a * b + nudge, 2**31)


def gemmlowp_rdbpot(x: int, exponent: int) -> int:
    mask = 2**exponent - 1
    threshold = (mask >> 1) + (1 if x < 0 else 0)
    return (x >> exponent) + (1 if (x & mask) > threshold else 0)


def single_rounding(rounding: str):
    def rule(acc: int, multiplier: int, shift: int) -> int:
        return saturate32(ROUNDINGS[rounding](Fraction(acc * multiplier, 2 ** (31 - shift))))

    return rule


def double_round(acc: int, multiplier: int, shift: int) -> int:
    return gemmlowp_rdbpot(gemmlowp_srdhm(wrap32(acc << max(shift, 0)), multiplier), max(-shift, 0))


def neon(acc: int, multiplier: int, shift: int) -> int:
    high = nearest_up(Fraction(wrap32(acc << max(shift, 0)) * multiplier, 2**31))
    return nearest_up(Fraction(high, 2 ** max(-shift, 0)))


def ruy(acc: int, multiplier: int, shift: int) -> int:
    right = max(1, -shift)
    high = (2 * wrap32(acc << (shift + right)) * multiplier) >> 32
    return nearest_up(Fraction(high, 2**right))


RULES = {
    "nearest_even": single_rounding("nearest_even"),
    "nearest_away": single_rounding("nearest_away"),
    "single_round": single_rounding("nearest_up"),
    "double_round": double_round,
    "neon": neon,
    "ruy": ruy,
}
