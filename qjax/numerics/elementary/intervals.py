"""The steps of an expression on whole arrays: float64 intervals that contain the real result.

Sums and products of exact numbers stay exact as long as their result is a float64, which error-free transformations
decide. Every other result is widened by more than the error of any library. If an interval does not decide a
comparison, a sign or the edge of a domain, the element is marked in `unsure` and computed by `reals`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.typing import ArrayLike

from qjax.numerics.elementary.bounds import (
    TINY,
    ULP,
    Interval,
    each,
    exact_product,
    is_exact,
    pair,
    point,
    unless_exact,
    widened,
)
from qjax.numerics.elementary.expression import BOOLEAN, Expression, number

_LIBRARY = 2.0**-46
"""64 units in the last place: far more than the error of any float64 function of numpy or C."""


class Steps:
    """Evaluates expressions on an array of exact numbers; where `unsure` is true, the result is meaningless."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.unsure = np.zeros(shape, bool)

    def run(self, expression: Expression, x: np.ndarray, parameters: Sequence[Any]) -> Interval:
        """The interval of the last step; a truth value is 0 or 1."""
        with np.errstate(all="ignore"):
            values: list[Any] = [(x, x)]
            for parameter in parameters:
                values.append(parameter if isinstance(parameter, bool) else point(parameter))
            for primitive, operands in expression.steps:
                given = [values[o] if type(o) is int else point(number(o)) if type(o) is str else o for o in operands]
                values.append(self._step(primitive, operands, given))
            last = values[-1]
            return last if isinstance(last, tuple) else point(np.asarray(last, np.float64))

    def _step(self, primitive: str, operands: Sequence[Any], given: list[Any]) -> Any:
        if primitive in _LOGIC:
            return _LOGIC[primitive](*given)
        if primitive == "select":
            return self._select(*given)
        if len(operands) == 2 and type(operands[0]) is int and operands[0] == operands[1] and primitive in _SAME:
            return _SAME[primitive](*given[0])
        if primitive in BOOLEAN:
            return self._compared(primitive, *given)
        own = getattr(self, f"_{primitive}", None)
        low, high = self._monotone(primitive, *given) if own is None else own(*given)
        fresh = np.isnan(low) | np.isnan(high)
        known = [np.isnan(v[0]) & np.isnan(v[1]) for v in given]
        lost = fresh & ~np.logical_or.reduce(np.broadcast_arrays(*known)) if len(known) > 1 else fresh & ~known[0]
        if primitive not in _WITH_DOMAIN:
            self._mark(lost)
        else:
            self._mark(lost & (np.isnan(low) ^ np.isnan(high)))
        return low, high

    def _mark(self, where: Any) -> None:
        self.unsure |= where

    # ------------------------------------------------------------------ truth values

    def _compared(self, primitive: str, a: Interval, b: Interval | None = None) -> Any:
        if b is None:
            self._mark(np.isinf(a[0]) ^ np.isinf(a[1]))
            return np.isfinite(a[0])
        if primitive in ("gt", "ge"):
            primitive, a, b = {"gt": "lt", "ge": "le"}[primitive], b, a
        if primitive == "lt":
            yes, no = a[1] < b[0], a[0] >= b[1]
        elif primitive == "le":
            yes, no = a[1] <= b[0], a[0] > b[1]
        else:
            no = (a[1] < b[0]) | (a[0] > b[1])
            yes = (a[0] == a[1]) & (b[0] == b[1]) & (a[0] == b[0])
        missing = np.isnan(a[0]) | np.isnan(b[0])
        self._mark(~(yes | no | missing))
        return ~yes if primitive == "ne" else yes

    def _select(self, which: Any, a: Any, b: Any) -> Any:
        if not isinstance(a, tuple) or not isinstance(b, tuple):
            return np.where(which, b, a)
        low = np.where(which, b[0], a[0])
        return (low, low) if is_exact(a, b) else (low, np.where(which, b[1], a[1]))

    # ------------------------------------------------------------------ arithmetic

    def _neg(self, a: Interval) -> Interval:
        return pair(-a[1], None if is_exact(a) else -a[0])

    def _abs(self, a: Interval) -> Interval:
        if is_exact(a):
            return point(np.abs(a[0]))
        straddles = (a[0] < 0) & (a[1] > 0)
        ends = np.abs(a[0]), np.abs(a[1])
        return np.where(straddles, 0.0, np.minimum(*ends)), np.maximum(*ends)

    def _add(self, a: Interval, b: Interval) -> Interval:
        low = a[0] + b[0]
        if not is_exact(a, b):
            return widened(low, a[1] + b[1], ULP)
        back = low - a[0]
        error = (a[0] - (low - back)) + (b[0] - back)
        return unless_exact(low, error == 0)

    def _sub(self, a: Interval, b: Interval) -> Interval:
        return self._add(a, self._neg(b))

    def _mul(self, a: Interval, b: Interval) -> Interval:
        if is_exact(a, b):
            return unless_exact(*exact_product(a[0], b[0]))
        if np.ndim(a[0]) == 0 and is_exact(a):
            a, b = b, a
        if np.ndim(b[0]) == 0 and is_exact(b):
            ends = (a[0], a[1]) if b[0] >= 0 else (a[1], a[0])
            return widened(ends[0] * b[0], ends[1] * b[0], ULP)
        products = [a[0] * b[0], a[0] * b[1], a[1] * b[0], a[1] * b[1]]
        low = np.minimum(np.minimum(products[0], products[1]), np.minimum(products[2], products[3]))
        high = np.maximum(np.maximum(products[0], products[1]), np.maximum(products[2], products[3]))
        return widened(low, high, ULP)

    def quotient(self, a: Interval, b: Interval) -> Interval:
        """a / b; there is one zero, and it counts as positive."""
        zero = (b[0] == 0) & (b[1] == 0)
        self._mark((b[0] <= 0) & (b[1] >= 0) & ~zero)
        if np.any(zero):
            b = (
                point(np.where(zero, 0.0, b[0]))
                if is_exact(b)
                else (
                    np.where(zero, 0.0, b[0]),
                    np.where(zero, 0.0, b[1]),
                )
            )
        if is_exact(a, b):
            quotient = a[0] / b[0]
            product, fits = exact_product(quotient, b[0])
            return unless_exact(quotient, fits & (product == a[0]) | np.isinf(quotient))
        if np.ndim(b[0]) == 0 and is_exact(b):
            ends = (a[0], a[1]) if b[0] >= 0 else (a[1], a[0])
            return widened(ends[0] / b[0], ends[1] / b[0], ULP)
        quotients = [a[0] / b[0], a[0] / b[1], a[1] / b[0], a[1] / b[1]]
        low = np.minimum(np.minimum(quotients[0], quotients[1]), np.minimum(quotients[2], quotients[3]))
        high = np.maximum(np.maximum(quotients[0], quotients[1]), np.maximum(quotients[2], quotients[3]))
        return widened(low, high, ULP)

    _div = quotient

    def _square(self, a: Interval) -> Interval:
        a = self._abs(a)
        return self._mul(a, a) if is_exact(a) else widened(a[0] * a[0], a[1] * a[1], ULP)

    def _integer_pow(self, a: Interval, power: Interval) -> Interval:
        n = int(power[0])
        result, square, rest = point(1.0), a, abs(n)
        while rest:
            if rest & 1:
                result = self._mul(result, square)
            rest >>= 1
            if rest:
                square = self._square(square)
        if n == 0:
            result = point(np.ones_like(a[0]))
        return self.quotient(point(1.0), result) if n < 0 else result

    def _max(self, a: Interval, b: Interval) -> Interval:
        return pair(np.maximum(a[0], b[0]), None if is_exact(a, b) else np.maximum(a[1], b[1]))

    def _min(self, a: Interval, b: Interval) -> Interval:
        return pair(np.minimum(a[0], b[0]), None if is_exact(a, b) else np.minimum(a[1], b[1]))

    def _clamp(self, low: Interval, a: Interval, high: Interval) -> Interval:
        return self._min(self._max(a, low), high)

    def _rem(self, a: Interval, b: Interval) -> Interval:
        if not is_exact(a, b):
            self._mark(True)
        return point(np.fmod(a[0], b[0]))

    # ------------------------------------------------------------------ jumps

    def _sign(self, a: Interval) -> Interval:
        return self._jump(np.sign, a)

    def _floor(self, a: Interval) -> Interval:
        return self._jump(np.floor, a)

    def _ceil(self, a: Interval) -> Interval:
        return self._jump(np.ceil, a)

    def _round_even(self, a: Interval) -> Interval:
        return self._jump(np.rint, a)

    def _round_away(self, a: Interval) -> Interval:
        def rounded(x: ArrayLike) -> Any:
            whole = np.trunc(x)
            return whole + np.sign(x) * (np.abs(x - whole) >= 0.5)

        return self._jump(rounded, a)

    def _jump(self, function: Callable[[Any], Any], a: Interval) -> Interval:
        low = function(a[0])
        if not is_exact(a):
            high = function(a[1])
            self._mark((low != high) & ~np.isnan(low))
        return point(low)

    # ------------------------------------------------------------------ functions

    def _monotone(self, primitive: str, a: Interval) -> Interval:
        function, bottom, top = _RISING[primitive]
        low = function(a[0])
        high = low if is_exact(a) else function(a[1])
        if primitive in _WITH_DOMAIN:
            # The interval lies partly outside of the domain.
            self._mark(np.isnan(low) ^ np.isnan(high))
        low, high = widened(low, high, _LIBRARY)
        low, high = np.maximum(low, bottom), np.minimum(high, top)
        if primitive in _KEEPS_SIGN:
            low = np.where(a[0] >= 0, np.maximum(low, 0.0), low)
            high = np.where(a[1] <= 0, np.minimum(high, 0.0), high)
        return low, high

    def _erfc(self, a: Interval) -> Interval:
        return widened(_ERFC(a[1]), _ERFC(a[0]), _LIBRARY)

    def _acos(self, a: Interval) -> Interval:
        return widened(np.arccos(a[1]), np.arccos(a[0]), _LIBRARY)

    def _rsqrt(self, a: Interval) -> Interval:
        return self.quotient(point(1.0), self._step("sqrt", (0,), [a]))

    def _cosh(self, a: Interval) -> Interval:
        a = self._abs(a)
        return widened(np.cosh(a[0]), np.cosh(a[1]), _LIBRARY)

    def _sin(self, a: Interval) -> Interval:
        return self._wave(np.sin, a)

    def _cos(self, a: Interval) -> Interval:
        return self._wave(np.cos, a)

    def _wave(self, function: Callable[[Any], Any], a: Interval) -> Interval:
        middle = a[0] + (a[1] - a[0]) / 2
        reach = np.maximum(a[1] - middle, middle - a[0]) + 4 * TINY
        value = function(middle)
        error = reach + 2 * _LIBRARY * np.abs(value) + 2.0**-60
        self._mark(~(error < 1.0) & ~np.isnan(a[0]))
        return np.maximum(value - error, -1.0), np.minimum(value + error, 1.0)

    def _tan(self, a: Interval) -> Interval:
        low, high = np.tan(a[0]), np.tan(a[1])
        self._mark((a[1] - a[0] > 1e-3) | (low > high) | (np.abs(low) > 1e8))
        return widened(low, high, _LIBRARY)

    def _pow(self, a: Interval, b: Interval) -> Interval:
        if is_exact(b) and np.ndim(b[0]) == 0 and float(b[0]).is_integer() and abs(b[0]) <= 256:
            return self._integer_pow(a, b)
        # `reals` decides at the edges of the domain.
        self._mark(~(a[0] > 0) | np.isinf(a[1]) | ~np.isfinite(b[0]) | ~np.isfinite(b[1]))
        powers = [np.power(a[0], b[0]), np.power(a[0], b[1]), np.power(a[1], b[0]), np.power(a[1], b[1])]
        low = np.minimum(np.minimum(powers[0], powers[1]), np.minimum(powers[2], powers[3]))
        high = np.maximum(np.maximum(powers[0], powers[1]), np.maximum(powers[2], powers[3]))
        return widened(low, high, _LIBRARY)


_ERFC = each(math.erfc)


def _logistic(x: Any) -> Any:
    power = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, power) / (1.0 + power)


_RISING: Mapping[str, tuple[Callable[[Any], Any], float, float]] = {
    "acosh": (np.arccosh, 0.0, np.inf),
    "asin": (np.arcsin, -2.0, 2.0),
    "asinh": (np.arcsinh, -np.inf, np.inf),
    "atan": (np.arctan, -2.0, 2.0),
    "atanh": (np.arctanh, -np.inf, np.inf),
    "cbrt": (np.cbrt, -np.inf, np.inf),
    "erf": (each(math.erf), -1.0, 1.0),
    "exp": (np.exp, 0.0, np.inf),
    "exp2": (np.exp2, 0.0, np.inf),
    "expm1": (np.expm1, -1.0, np.inf),
    "log": (np.log, -np.inf, np.inf),
    "log1p": (np.log1p, -np.inf, np.inf),
    "logistic": (_logistic, 0.0, 1.0),
    "sinh": (np.sinh, -np.inf, np.inf),
    "sqrt": (np.sqrt, 0.0, np.inf),
    "tanh": (np.tanh, -1.0, 1.0),
}
"""Functions that never decrease, with the bounds of their values."""

_KEEPS_SIGN = frozenset({"asin", "asinh", "atan", "atanh", "cbrt", "erf", "expm1", "log1p", "sinh", "tanh"})

_WITH_DOMAIN = frozenset({"acos", "acosh", "asin", "atanh", "log", "log1p", "sqrt", "rsqrt"})

_LOGIC: Mapping[str, Callable[..., Any]] = {
    "not": np.logical_not,
    "and": np.logical_and,
    "or": np.logical_or,
    "xor": np.logical_xor,
}


def _missing(low: ArrayLike, high: ArrayLike) -> Any:
    return np.isnan(low) | np.isnan(high)


def _zero(low: ArrayLike, high: ArrayLike) -> Interval:
    bad = ~np.isfinite(low) | ~np.isfinite(high)
    return point(np.where(bad, np.nan, 0.0))


_SAME: Mapping[str, Callable[[Any, Any], Any]] = {
    "eq": lambda low, high: ~_missing(low, high),
    "ne": _missing,
    "ge": lambda low, high: ~_missing(low, high),
    "le": lambda low, high: ~_missing(low, high),
    "gt": lambda low, high: np.zeros(np.shape(low), bool),
    "lt": lambda low, high: np.zeros(np.shape(low), bool),
    "sub": _zero,
}
"""The result of operations on two equal operands."""
