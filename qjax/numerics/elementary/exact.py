"""Arithmetic on one number that is exact as long as the number is rational.

A value is a `Fraction` (exact), a `Decimal` (relative error below 10^-50), a bool, or the float inf, -inf or nan. Two
Decimals that agree to 40 digits count as equal: log(exp(x)) equals x, and x - log(exp(x)) is 0.
"""

import decimal
import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

Number = Any
_EQUAL = Decimal(10) ** -40
_LONGEST = 1 << 14
"""Bits of a fraction beyond which it is continued as a Decimal."""


def exact(value: Any) -> Number:
    """A Python number as a value."""
    if isinstance(value, bool):
        return value
    if isinstance(value, float) and not math.isfinite(value):
        return value
    return Fraction(value)


def shortened(value: Number) -> Number:
    """A fraction with more digits than anything here needs becomes a Decimal."""
    if isinstance(value, Fraction) and max(value.numerator.bit_length(), value.denominator.bit_length()) > _LONGEST:
        return as_decimal(value)
    return value


def as_decimal(value: Number) -> Decimal:
    """A finite number to 60 digits."""
    if isinstance(value, Decimal):
        return value
    return Decimal(value.numerator) / Decimal(value.denominator)


def sign(value: Number) -> int:
    """-1, 0 or 1."""
    return (value > 0) - (value < 0)


def whole(x: Decimal) -> int | None:
    """The integer that equals x to 40 digits, or None."""
    nearest = x.to_integral_value(decimal.ROUND_HALF_EVEN)
    return int(nearest) if abs(x - nearest) <= _EQUAL * max(abs(x), Decimal(1)) else None


def special(*values: Number) -> bool:
    """Whether one of them is infinite or nan."""
    return any(isinstance(v, float) for v in values)


def rough(value: Number) -> float:
    """A float of the same sign, for arithmetic with infinities."""
    return value if isinstance(value, float) else float(sign(value))


def add(a: Number, b: Number) -> Number:
    """a + b; 0 where Decimals cancel to their last digits."""
    if special(a, b):
        return rough(a) + rough(b)
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a + b
    left, right = as_decimal(a), as_decimal(b)
    total = left + right
    return Fraction(0) if abs(total) <= _EQUAL * max(abs(left), abs(right)) else total


def neg(a: Number) -> Number:
    """-a."""
    return -a if not isinstance(a, Decimal) else a.copy_negate()


def mul(a: Number, b: Number) -> Number:
    """a * b; 0 * inf is nan."""
    if special(a, b):
        return rough(a) * rough(b)
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a * b
    if not a or not b:
        return Fraction(0)
    return as_decimal(a) * as_decimal(b)


def div(a: Number, b: Number) -> Number:
    """a / b; 1/0 is infinite, 0/0 nan."""
    if special(a, b):
        if special(b):
            return math.nan if special(a) or math.isnan(b) else Fraction(0)
        return a if sign(b) >= 0 else -a
    if not b:
        return math.nan if not a else math.inf * sign(a)
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a / b
    return as_decimal(a) / as_decimal(b) if a else Fraction(0)


def less(a: Number, b: Number) -> bool:
    """a < b; false for nan."""
    if special(a, b):
        return (a if special(a) else 0.0) < (b if special(b) else 0.0)
    difference = add(a, neg(b))
    return difference < 0


def equal(a: Number, b: Number) -> bool:
    """a == b; false for nan."""
    if isinstance(a, bool) or special(a, b):
        return a == b
    return not add(a, neg(b))


def unless_nan(choose: Callable[[Number, Number], Number]) -> Callable[[Number, Number], Number]:
    """The choice between two numbers, nan where one of them is."""

    def chosen(a: Number, b: Number) -> Number:
        return math.nan if is_nan(a) or is_nan(b) else choose(a, b)

    return chosen


def is_nan(a: Number) -> bool:
    """Whether it is nan."""
    return isinstance(a, float) and math.isnan(a)


def floor(a: Number) -> Number:
    """The largest integer that is not above."""
    if special(a):
        return a
    near = whole(a) if isinstance(a, Decimal) else None
    return Fraction(near if near is not None else math.floor(a))


def round_even(a: Number) -> Number:
    """The nearest integer, ties to even."""
    if special(a):
        return a
    twice = whole(a * 2) if isinstance(a, Decimal) else None
    return Fraction(round(a if twice is None else Fraction(twice, 2)))


def round_away(a: Number) -> Number:
    """The nearest integer, ties away from zero."""
    return a if special(a) else times_sign(floor(add(abs(a), Fraction(1, 2))), a)


def times_sign(magnitude: Number, a: Number) -> Number:
    """The magnitude with the sign of a; a = 0 counts as positive."""
    return magnitude if sign(a) >= 0 else neg(magnitude)


def rem(a: Number, b: Number) -> Number:
    """The remainder of a truncated quotient, as `jax.lax.rem`."""
    if special(a) or (not special(b) and not b) or is_nan(b):
        return math.nan
    if special(b):
        return a
    quotient = div(a, b)
    return add(a, neg(mul(b, times_sign(floor(abs(quotient)), quotient))))


def integer_pow(a: Number, n: Fraction) -> Number:
    """a^n of an integer n."""
    return power(a, int(n))


def power(a: Number, n: int) -> Number:
    """a^n of a Python integer."""
    if n < 0:
        return div(Fraction(1), power(a, -n))
    if special(a):
        return a**n
    return a**n if n else Fraction(1)


larger = unless_nan(lambda a, b: b if less(a, b) else a)
"""max(a, b)."""

smaller = unless_nan(lambda a, b: b if less(b, a) else a)
"""min(a, b)."""
