"""exp, log, erf, sine and other functions of one Decimal, to 60 digits, so that no library's last bit decides a code.

Each function takes and returns a finite Decimal, with a relative error below 10^-55. A formula that loses digits by
cancellation is computed with as many more.
"""

import decimal
from collections.abc import Callable
from decimal import Decimal, localcontext
from functools import cache

DIGITS = 60
_SPARE = 10
LARGEST_EXPONENT = 10**6
"""Beyond |x| = 10^6, e^x is treated as infinite or as 0, because no code of any grid can tell the difference."""


def context(extra: int = 0) -> decimal.Context:
    """A context of 60 digits plus `extra`, with unlimited exponents."""
    return decimal.Context(
        prec=DIGITS + _SPARE + extra,
        rounding=decimal.ROUND_HALF_EVEN,
        Emax=decimal.MAX_EMAX,
        Emin=decimal.MIN_EMIN,
        traps=[decimal.InvalidOperation, decimal.DivisionByZero, decimal.Overflow],
    )


def _with(extra: int, compute: Callable[[], Decimal]) -> Decimal:
    with localcontext(context(extra)):
        return compute()


def _lost(x: Decimal) -> int:
    """How many digits 1 + x has in front of those of x."""
    return max(0, -x.adjusted()) if x else 0


def expm1(x: Decimal) -> Decimal:
    """e^x - 1."""
    lost = _lost(x)
    if lost > 5 * DIGITS:
        return x
    return _with(lost, lambda: x.exp() - 1)


def log1p(x: Decimal) -> Decimal:
    """ln(1 + x), x > -1."""
    lost = _lost(x)
    if lost > 5 * DIGITS:
        return x
    return _with(lost, lambda: (1 + x).ln())


@cache
def pi(digits: int) -> Decimal:
    """Machin: pi = 16 atan(1/5) - 4 atan(1/239)."""
    with localcontext(context(digits)):
        return 16 * _atan_series(Decimal(1) / 5) - 4 * _atan_series(Decimal(1) / 239)


def _atan_series(x: Decimal) -> Decimal:
    total, power, square, n = x, x, x * x, 1
    while True:
        power, n = -power * square, n + 2
        following = total + power / n
        if following == total:
            return total
        total = following


def atan(x: Decimal) -> Decimal:
    """The arc tangent, in (-pi/2, pi/2)."""
    if abs(x) > 1:
        half = pi(0) / 2
        return (half if x > 0 else -half) - atan(1 / x)
    # atan(x) = 2 atan(x / (1 + sqrt(1 + x^2))), until the series is short
    factor = 1
    while abs(x) > Decimal("0.05"):
        x, factor = x / (1 + (1 + x * x).sqrt()), 2 * factor
    return factor * _atan_series(x)


def sin_cos(x: Decimal) -> tuple[Decimal, Decimal]:
    """Sine and cosine."""
    extra = max(0, x.adjusted() if x else 0)

    def reduced() -> tuple[int, Decimal, Decimal]:
        half = pi(extra + DIGITS) / 2
        turns = (x / half).to_integral_value(decimal.ROUND_HALF_EVEN)
        rest = x - turns * half
        return int(turns) % 4, rest, rest * rest

    with localcontext(context(extra + DIGITS)):
        quarter, rest, square = reduced()
        sine, cosine = _alternating(rest, square, 1), _alternating(Decimal(1), square, 0)
    return [(sine, cosine), (cosine, -sine), (-sine, -cosine), (-cosine, sine)][quarter]


def _alternating(first: Decimal, square: Decimal, n: int) -> Decimal:
    total = term = first
    while True:
        term = -term * square / ((n + 1) * (n + 2))
        n += 2
        following = total + term
        if following == total:
            return total
        total = following


def erf(x: Decimal) -> Decimal:
    """The error function; +-1 beyond |x| = 13, where the rest is below 10^-75."""
    return Decimal(1).copy_sign(x) if abs(x) > 13 else _erf(x)


def erfc(x: Decimal) -> Decimal:
    """1 - erf(x), with the digits that cancel added in front; 0 beyond x = 60, where it is below 10^-1565."""
    if x > 60:
        return Decimal(0)
    if x < Decimal("0.5"):
        return 1 - erf(x)
    return _with(int(x * x / 2) + 3, lambda: 1 - _erf(x))


def _erf(x: Decimal) -> Decimal:
    """2/sqrt(pi) * e^(-x^2) * sum of 2^n x^(2n+1) / (1 * 3 * ... * (2n+1)): no term cancels another."""
    square, n = x * x, 0
    total = term = x
    while True:
        n += 1
        term = term * 2 * square / (2 * n + 1)
        following = total + term
        if following == total:
            return 2 * total * (-square).exp() / pi(decimal.getcontext().prec).sqrt()
        total = following
