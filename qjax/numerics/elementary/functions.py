"""Roots, powers and transcendental functions of one number; rational if the result is known to be rational.

Values are those of `exact`. Transcendental functions of a nonzero rational never hit a tie exactly.
"""

import math
from decimal import Decimal
from fractions import Fraction

from qjax.numerics.elementary import series
from qjax.numerics.elementary.exact import (
    Number,
    add,
    as_decimal,
    div,
    equal,
    exact,
    is_nan,
    mul,
    neg,
    power,
    rough,
    sign,
    special,
    times_sign,
)


def sqrt(a: Number) -> Number:
    """The square root; that of a rational square is rational."""
    if special(a):
        return a if a > 0 else math.nan
    if a < 0:
        return math.nan
    if isinstance(a, Fraction):
        p, q = math.isqrt(a.numerator), math.isqrt(a.denominator)
        if p * p == a.numerator and q * q == a.denominator:
            return Fraction(p, q)
    return as_decimal(a).sqrt()


def cbrt(a: Number) -> Number:
    """The cube root; that of a rational cube is rational."""
    if special(a) or not a:
        return a
    root = (as_decimal(abs(a)).ln() / 3).exp()
    # If numerator and denominator are cubes of integers, take their exact roots.
    if isinstance(a, Fraction):
        p = round(float(abs(a.numerator)) ** (1 / 3)) if a.numerator.bit_length() < 150 else 0
        q = round(float(a.denominator) ** (1 / 3)) if a.denominator.bit_length() < 150 else 0
        if p**3 == abs(a.numerator) and q**3 == a.denominator:
            return times_sign(Fraction(p, q), a)
    return times_sign(root, a)


def pow(a: Number, b: Number) -> Number:
    """a^b; nan for a negative a unless b is an integer."""
    if is_nan(a) or is_nan(b):
        return math.nan
    if not special(b):
        whole = b if isinstance(b, Fraction) and b.denominator == 1 else None
        if whole is not None and abs(whole) <= 1024:
            return power(a, int(whole))
        if isinstance(b, Fraction) and b.denominator in (2, 4, 8) and abs(b) <= 64:
            return pow(sqrt(a), b * 2)
        if not special(a) and a < 0:
            return math.nan
    if special(a, b) or not a:
        base = 2.0 if not special(a) and a > 1 else 0.5 if not special(a) and 0 < a < 1 else rough(a)
        if base < 0:
            return math.nan
        if base == 0:
            return math.inf if sign(b) < 0 else Fraction(0)
        result = base ** rough(b)
        return exact(result)
    return exp(mul(b, log(a)))


# ---------------------------------------------------------------------------- transcendental functions


def exp(a: Number) -> Number:
    """e^a."""
    if special(a):
        return Fraction(0) if a == -math.inf else a
    if not a:
        return Fraction(1)
    if abs(a) > series.LARGEST_EXPONENT:
        return math.inf if a > 0 else Fraction(0)
    return as_decimal(a).exp()


def expm1(a: Number) -> Number:
    """e^a - 1."""
    if special(a) or not a or abs(a) > series.LARGEST_EXPONENT:
        return add(exp(a), Fraction(-1))
    return series.expm1(as_decimal(a))


def exp2(a: Number) -> Number:
    """2^a; rational for an integer a."""
    if isinstance(a, Fraction) and a.denominator == 1 and abs(a) < 1024:
        return Fraction(2) ** int(a)
    return exp(mul(a, Decimal(2).ln()))


def log(a: Number) -> Number:
    """The natural logarithm; -inf at 0."""
    if special(a):
        return a if a > 0 else math.nan
    if not a:
        return -math.inf
    if a < 0:
        return math.nan
    return Fraction(0) if a == 1 else as_decimal(a).ln()


def log1p(a: Number) -> Number:
    """ln(1 + a)."""
    if special(a) or a <= -1:
        return log(add(a, Fraction(1)))
    return series.log1p(as_decimal(a)) if a else Fraction(0)


def tanh(a: Number) -> Number:
    """The hyperbolic tangent."""
    if is_nan(a) or equal(a, Fraction(0)):
        return a
    if special(a) or abs(a) > 100:
        return Fraction(sign(a))
    power = series.expm1(2 * as_decimal(a))
    return power / (power + 2)


def logistic(a: Number) -> Number:
    """1 / (1 + e^-a)."""
    if is_nan(a):
        return a
    if not special(a) and a > 0:
        return div(Fraction(1), add(Fraction(1), exp(neg(a))))
    if special(a):
        return Fraction(1 if a > 0 else 0)
    power = exp(a)
    return div(power, add(Fraction(1), power))


def erf(a: Number) -> Number:
    """The error function."""
    if is_nan(a) or special(a):
        return a if is_nan(a) else Fraction(sign(a))
    return series.erf(as_decimal(a)) if a else Fraction(0)


def erfc(a: Number) -> Number:
    """1 - erf(a)."""
    if is_nan(a) or special(a):
        return a if is_nan(a) else Fraction(1 - sign(a))
    return series.erfc(as_decimal(a)) if a else Fraction(1)


def sin(a: Number) -> Number:
    """The sine."""
    return math.nan if special(a) else series.sin_cos(as_decimal(a))[0] if a else Fraction(0)


def cos(a: Number) -> Number:
    """The cosine."""
    return math.nan if special(a) else series.sin_cos(as_decimal(a))[1] if a else Fraction(1)


def tan(a: Number) -> Number:
    """The tangent."""
    return div(sin(a), cos(a))


def atan(a: Number) -> Number:
    """The arc tangent."""
    if is_nan(a):
        return a
    if special(a):
        return series.pi(0) / 2 * sign(a)
    return series.atan(as_decimal(a)) if a else Fraction(0)


def asin(a: Number) -> Number:
    """The arc sine."""
    if special(a) or abs(a) > 1:
        return math.nan
    return atan(div(a, sqrt(mul(add(Fraction(1), a), add(Fraction(1), neg(a))))))


def acos(a: Number) -> Number:
    """The arc cosine."""
    if special(a) or abs(a) > 1:
        return math.nan
    root = sqrt(div(add(Fraction(1), neg(a)), add(Fraction(1), a)))
    return mul(Fraction(2), atan(root))


def sinh(a: Number) -> Number:
    """The hyperbolic sine."""
    power = expm1(abs(a))
    half = add(power, div(power, add(power, Fraction(1)))) if not special(power) else power
    return times_sign(div(half, Fraction(2)), a)


def cosh(a: Number) -> Number:
    """The hyperbolic cosine."""
    return div(add(exp(a), exp(neg(a))), Fraction(2))


def asinh(a: Number) -> Number:
    """The inverse hyperbolic sine."""
    magnitude = abs(a)
    if special(a):
        return a
    square = mul(a, a)
    rest = div(square, add(Fraction(1), sqrt(add(Fraction(1), square))))
    return times_sign(log1p(add(magnitude, rest)), a)


def acosh(a: Number) -> Number:
    """The inverse hyperbolic cosine."""
    if special(a) or a < 1:
        return a if special(a) and a > 0 else math.nan
    above = add(a, Fraction(-1))
    return log1p(add(above, sqrt(mul(above, add(above, Fraction(2))))))


def atanh(a: Number) -> Number:
    """The inverse hyperbolic tangent."""
    if special(a) or abs(a) > 1:
        return math.nan
    if abs(a) == 1:
        return math.inf * sign(a)
    return div(log1p(div(mul(Fraction(2), a), add(Fraction(1), neg(a)))), Fraction(2))
