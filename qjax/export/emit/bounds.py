"""The range of every integer of a traced kernel, computed from the ranges of its operands, for all emitters.

    x in [-128, 127], w in [-127, 127]    ->    x * w in [-16256, 16256], which fits int16

With ranges a translation uses narrower types, omits clamps, and proves that nothing overflows. A range is that of the
mathematical result. If it exceeds the dtype, the operation may wrap, and nothing is known.
"""

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from qjax.numerics.rounding import Rounding

Range = tuple[int, int]
"""The lowest and the highest number, both included."""

INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "bool")
_WIDEST = 63
"""No shift is by more bits than this."""


def of_dtype(dtype: str) -> Range:
    """All integers of a dtype."""
    if dtype == "bool":
        return 0, 1
    info = np.iinfo(dtype)
    return int(info.min), int(info.max)


def fits(found: Range, dtype: str) -> bool:
    """Whether a range fits a dtype of integers."""
    low, high = of_dtype(dtype)
    return low <= found[0] and found[1] <= high


def of(name: str, operands: Sequence[Range]) -> Range | None:
    """The range of an elementwise primitive of integers; None if nothing is known of it."""
    rule = _RULES.get(name)
    return None if rule is None else rule(*operands)


def of_rounded_shift(x: Range, shift: Range, rounding: Rounding) -> Range | None:
    """The range of x / 2^shift, rounded."""
    if not 0 <= shift[0] <= shift[1] <= _WIDEST:
        return None
    if rounding is Rounding.FLOOR:
        return _shift_right(x, shift)
    low, high = (end + 1 for end in _shift_right((x[0] - 1, x[1] - 1), shift))
    # any rounding of a fraction lies between its floor and its ceiling
    floors = _shift_right(x, shift)
    return min(floors[0], low), max(floors[1], high)


def of_rounded_quotient(numerator: Range, divisor: Range) -> Range:
    """The range of a quotient of two positive ranges, rounded to the nearest."""
    ends = [(2 * a + b) // (2 * b) for a, b in itertools.product(numerator, divisor)]
    return min(ends), max(ends)


def fold(name: str, values: Sequence[int], dtype: str) -> int | None:
    """The result of a primitive on numbers of one dtype, wrapped to the dtype; None if there is no entry."""
    function = _FOLDS.get(name)
    if function is None or (name.startswith("shift") and not 0 <= values[1] < 8 * np.dtype(dtype).itemsize):
        return None
    with np.errstate(over="ignore"):
        return function(*(np.asarray(value, dtype) for value in values)).item()


_FOLDS: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "neg": np.negative,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "shift_left": np.left_shift,
    "shift_right_arithmetic": np.right_shift,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}

FOLDED = frozenset(_FOLDS)
"""The primitives of numbers that `fold` computes."""

_BY_ORDER: dict[str, tuple[Callable[[Any, Any], bool], Callable[[Any, Any], bool]]] = {
    "lt": (operator.lt, operator.ge),
    "le": (operator.le, operator.gt),
    "gt": (operator.gt, operator.le),
    "ge": (operator.ge, operator.lt),
}


def decided(name: str, a: Range, b: Range) -> bool | None:
    """The result of a comparison if the ranges decide it, else None."""
    if name in ("eq", "ne"):
        if a[1] < b[0] or b[1] < a[0]:
            return name == "ne"
        return name == "eq" if a == b and a[0] == a[1] else None
    holds, fails = _BY_ORDER[name]
    # the pair of ends for which the comparison is hardest to satisfy, and the one for which it is hardest to fail
    hard, easy = ((a[1], b[0]), (a[0], b[1])) if name in ("lt", "le") else ((a[0], b[1]), (a[1], b[0]))
    if holds(*hard):
        return True
    return False if fails(*easy) else None


def _corners(function: Callable[[int, int], int]) -> Callable[[Range, Range], Range]:
    def rule(a: Range, b: Range) -> Range:
        found = [function(x, y) for x, y in itertools.product(a, b)]
        return min(found), max(found)

    return rule


def _shift_right(x: Range, shift: Range) -> Range:
    return _corners(operator.rshift)(x, shift)


def _shifted_right(x: Range, shift: Range) -> Range | None:
    return _shift_right(x, shift) if 0 <= shift[0] <= shift[1] <= _WIDEST else None


def _shifted_left(x: Range, shift: Range) -> Range | None:
    return _corners(operator.lshift)(x, shift) if 0 <= shift[0] <= shift[1] <= _WIDEST else None


def _absolute(x: Range) -> Range:
    return (0 if x[0] <= 0 <= x[1] else min(map(abs, x))), max(map(abs, x))


def _quotient(a: Range, b: Range) -> Range | None:
    """The range of a quotient that truncates toward zero, for divisors other than 0."""
    if b[0] <= 0 <= b[1]:
        return None
    found = [abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1) for x, y in itertools.product(a, b)]
    return min(found), max(found)


def _and(a: Range, b: Range) -> Range:
    """The result does not exceed an operand that is not negative; with 0 or all ones, it is 0 or the other operand."""
    low, high = _bits(a, b)
    for this, other in ((a, b), (b, a)):
        if this[0] >= -1 and this[1] <= 0:
            low, high = max(low, min(other[0], 0)), min(high, max(other[1], 0))
        if this[0] >= 0:
            low, high = max(low, 0), min(high, this[1])
    return low, high


def _or(a: Range, b: Range) -> Range:
    low, high = _bits(a, b)
    return (max(a[0], b[0]) if a[0] >= 0 and b[0] >= 0 else low), high


def _bits(a: Range, b: Range) -> Range:
    """The range of any bitwise operation: all numbers of as many bits."""
    width = max(max(x[1], ~x[0]).bit_length() for x in (a, b))
    return (0 if a[0] >= 0 and b[0] >= 0 else -(1 << width)), (1 << width) - 1


def _either(which: Range, first: Range, second: Range) -> Range:
    return min(first[0], second[0]), max(first[1], second[1])


def _flag(a: Range, b: Range) -> Range:
    return 0, 1


_RULES: dict[str, Callable[..., Range | None]] = {
    "add": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "sub": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "mul": _corners(operator.mul),
    "square": lambda a: (_absolute(a)[0] ** 2, _absolute(a)[1] ** 2),
    "neg": lambda a: (-a[1], -a[0]),
    "abs": _absolute,
    "max": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "min": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "div": _quotient,
    "and": _and,
    "or": _or,
    "xor": _bits,
    "shift_left": _shifted_left,
    "shift_right_arithmetic": _shifted_right,
    "select_n": _either,
    "eq": _flag,
    "ne": _flag,
    "lt": _flag,
    "le": _flag,
    "gt": _flag,
    "ge": _flag,
}
