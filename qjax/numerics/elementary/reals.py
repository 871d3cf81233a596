"""The steps of an expression on one number: exact fractions as long as results are rational, then 60 digits.

See `exact` for how a number is represented.
"""

import decimal
import operator
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from qjax.numerics.elementary import exact, functions, series
from qjax.numerics.elementary.expression import Expression, number


def evaluate(expression: Expression, x: Fraction, parameters: Sequence[Any]) -> exact.Number:
    """The value of the last step."""
    with decimal.localcontext(series.context()):
        values: list[exact.Number] = [x, *(exact.exact(p) for p in parameters)]
        for primitive, operands in expression.steps:
            given = [values[o] if type(o) is int else exact.exact(number(o)) if type(o) is str else o for o in operands]
            values.append(exact.shortened(_STEPS[primitive](*given)))
        return values[-1]


def code(value: exact.Number, scale: Fraction, low: int, high: int) -> int:
    """rint(value / scale), ties to even, clamped to [low, high]; value must not be nan."""
    with decimal.localcontext(series.context()):
        steps = exact.div(value, scale)
        if isinstance(steps, float) or exact.less(steps, Fraction(low)) or exact.less(Fraction(high), steps):
            return high if exact.sign(steps) > 0 else low
        if isinstance(steps, Fraction):
            return min(max(round(steps), low), high)
        twice = exact.whole(steps * 2)
        if twice is not None:
            return min(max(round(Fraction(twice, 2)), low), high)
        return min(max(int(steps.to_integral_value(decimal.ROUND_HALF_EVEN)), low), high)


_STEPS: Mapping[str, Callable[..., exact.Number]] = {
    "abs": abs,
    "acos": functions.acos,
    "acosh": functions.acosh,
    "add": exact.add,
    "and": operator.and_,
    "asin": functions.asin,
    "asinh": functions.asinh,
    "atan": functions.atan,
    "atanh": functions.atanh,
    "cbrt": functions.cbrt,
    "ceil": lambda a: exact.neg(exact.floor(exact.neg(a))),
    "clamp": lambda low, a, high: exact.smaller(exact.larger(a, low), high),
    "cos": functions.cos,
    "cosh": functions.cosh,
    "div": exact.div,
    "eq": exact.equal,
    "erf": functions.erf,
    "erfc": functions.erfc,
    "exp": functions.exp,
    "exp2": functions.exp2,
    "expm1": functions.expm1,
    "floor": exact.floor,
    "ge": lambda a, b: not exact.is_nan(a) and not exact.is_nan(b) and not exact.less(a, b),
    "gt": lambda a, b: exact.less(b, a),
    "integer_pow": exact.integer_pow,
    "is_finite": lambda a: not exact.special(a),
    "le": lambda a, b: not exact.is_nan(a) and not exact.is_nan(b) and not exact.less(b, a),
    "log": functions.log,
    "log1p": functions.log1p,
    "logistic": functions.logistic,
    "lt": lambda a, b: exact.less(a, b),
    "max": exact.larger,
    "min": exact.smaller,
    "mul": exact.mul,
    "ne": lambda a, b: not exact.equal(a, b),
    "neg": exact.neg,
    "not": operator.not_,
    "or": operator.or_,
    "pow": functions.pow,
    "rem": exact.rem,
    "round_away": exact.round_away,
    "round_even": exact.round_even,
    "rsqrt": lambda a: exact.div(Fraction(1), functions.sqrt(a)),
    "select": lambda which, a, b: b if which else a,
    "sign": lambda a: a if exact.is_nan(a) else Fraction(exact.sign(a)),
    "sin": functions.sin,
    "sinh": functions.sinh,
    "sqrt": functions.sqrt,
    "square": lambda a: exact.mul(a, a),
    "sub": lambda a, b: exact.add(a, exact.neg(b)),
    "tan": functions.tan,
    "tanh": functions.tanh,
    "xor": operator.xor,
}
