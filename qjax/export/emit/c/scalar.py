"""Integer expressions: the computation of one element, as C99 without undefined behaviour.

An expression knows the interval of its values. If the interval proves that an operation cannot overflow, C's operator
is used. Otherwise a helper computes modulo 2^n with unsigned arithmetic, as XLA does:

    a + b with both in [-1000, 1000]    ->    a + b
    a + b with any int32                ->    add_32(a, b)

Right shifts of possibly negative numbers and conversions to narrower signed types, which C leaves to the compiler, have
helpers too. gcc and clang compile each to one instruction. Floats (float32, of float islands) have no interval. Their
operations are those that IEEE 754 rounds exactly.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from qjax.export.emit import bounds
from qjax.export.emit.c.text import literal
from qjax.support.errors import Unsupported

SIGNED = ("int8", "int16", "int32", "int64")


def limits(dtype: str) -> tuple[int, int]:
    """The lowest and the highest value; for floats, which have no interval, two meaningless numbers."""
    return (0, 1) if dtype == "float32" else bounds.of_dtype(dtype)


def bits(dtype: str) -> int:
    """The width of a dtype in bits."""
    return 1 if dtype == "bool" else np.dtype(dtype).itemsize * 8


@dataclasses.dataclass(frozen=True, eq=False)
class Scalar:
    """One value: an operation on others, a parameter (`name`), or a constant (low == high)."""

    function: str
    args: tuple["Scalar", ...]
    dtype: str
    low: int
    high: int
    name: str = ""

    @property
    def value(self) -> int | None:
        return self.low if self.low == self.high else None

    @property
    def interval(self) -> bounds.Range:
        return self.low, self.high


Interval = bounds.Range


class Expressions:
    """Creates expressions that are folded and shared: equal ones are one object."""

    def __init__(self) -> None:
        self._made: dict[tuple[object, ...], Scalar] = {}

    def _intern(self, function: str, args: Sequence[Scalar], dtype: str, low: int, high: int, name: str = "") -> Scalar:
        if low == high and function != "const":
            return self.constant(low, dtype)
        key = (function, *(id(a) for a in args), dtype, low, high, name)
        return self._made.setdefault(key, Scalar(function, tuple(args), dtype, low, high, name))

    def constant(self, value: Any, dtype: str) -> Scalar:
        if dtype == "float32":
            return self._intern("float", (), dtype, 0, 1, literal(value, dtype))
        return self._intern("const", (), dtype, value, value)

    def parameter(self, name: str, dtype: str, interval: Interval | None = None) -> Scalar:
        low, high = interval or limits(dtype)
        return self._intern("param", (), dtype, low, high, name)

    def apply(self, function: str, args: Sequence[Scalar], dtype: str) -> Scalar:
        """A primitive of JAX by its name; dtype: of the result.

        Raises:
          Unsupported: the primitive has no form on integers.
        """
        if dtype == "float32" or any(arg.dtype == "float32" for arg in args):
            return self.floating(function, args, dtype)
        make = _RULES.get(function)
        if make is None:
            raise Unsupported(f"the primitive {function!r} has no form in C; known are {', '.join(sorted(_RULES))}.")
        short = self.in_32_bits(function, args, dtype)
        return make(self, list(args), dtype) if short is None else short

    def in_32_bits(self, function: str, args: Sequence[Scalar], dtype: str) -> Scalar | None:
        """An operation of int64 computed in int32, if its operands and its result fit; otherwise None.

        It is faster on processors of 32 bits, and compilers can vectorize it.
        """
        if function not in _IN_32_BITS or not any(arg.dtype == "int64" for arg in args):
            return None
        least, most = limits("int32")
        if any(arg.dtype == "int64" and not least <= arg.low <= arg.high <= most for arg in args):
            return None
        if function in _SHIFTS and not 0 <= args[1].low <= args[1].high < 32:
            return None
        short = [self.cast([arg], "int32") if arg.dtype == "int64" else arg for arg in args]
        made = _RULES[function](self, short, "int32" if dtype == "int64" else dtype)
        if made.function.endswith("_wrap"):
            return None
        return self.cast([made], dtype)

    def floating(self, function: str, args: Sequence[Scalar], dtype: str) -> Scalar:
        """A primitive with floats among its operands, or a float as its result."""
        if function in SAME or (function == "convert_element_type" and args[0].dtype == dtype):
            return args[0]
        if function == "select_n" and args[0].value is not None:
            return args[2] if args[0].value else args[1]
        if function == "clamp":
            return self.floating("min", [self.floating("max", [args[1], args[0]], dtype), args[2]], dtype)
        known = function in FLOATS and (function != "convert_element_type" or {dtype, args[0].dtype} != {"float32"})
        if not known or (function == "convert_element_type" and dtype not in ("float32", "int32")):
            raise Unsupported(f"the primitive {function!r} to {dtype} has no form on floats in C.")
        return self._intern(f"float {function}", args, dtype, *limits(dtype))

    # ------------------------------------------------------------------ arithmetic

    def arithmetic(self, function: str, args: Sequence[Scalar], dtype: str, interval: Interval) -> Scalar:
        """An operation whose exact result lies in `interval`, modulo 2^n."""
        least, most = limits(dtype)
        if least <= interval[0] and interval[1] <= most:
            return self._intern(function, args, dtype, *interval)
        return self._intern(function + "_wrap", args, dtype, least, most)

    def add(self, args: list[Scalar], dtype: str) -> Scalar:
        a, b = args
        if a.value == 0:
            return b
        if b.value == 0:
            return a
        return self.arithmetic("add", args, dtype, _interval("add", args))

    def sub(self, args: list[Scalar], dtype: str) -> Scalar:
        a, b = args
        if b.value == 0:
            return a
        if a is b:
            return self.constant(0, dtype)
        if a.value == 0:
            return self.neg([b], dtype)
        return self.arithmetic("sub", args, dtype, _interval("sub", args))

    def mul(self, args: list[Scalar], dtype: str) -> Scalar:
        a, b = args
        if a.value == 1:
            return b
        if b.value == 1:
            return a
        return self.arithmetic("mul", args, dtype, _interval("mul", args))

    def neg(self, args: list[Scalar], dtype: str) -> Scalar:
        return self.arithmetic("neg", args, dtype, _interval("neg", args))

    def absolute(self, args: list[Scalar], dtype: str) -> Scalar:
        (a,) = args
        if a.low >= 0:
            return a
        return self.arithmetic("abs", args, dtype, _interval("abs", args))

    def sign(self, args: list[Scalar], dtype: str) -> Scalar:
        (a,) = args
        return self._intern("sign", args, dtype, (a.low > 0) - (a.low < 0), (a.high > 0) - (a.high < 0))

    def divide(self, function: str, args: list[Scalar], dtype: str) -> Scalar:
        a, b = args
        least, most = limits(dtype)
        safe = (b.low > 0 or b.high < 0) and not (a.low == least < 0 and b.low <= -1 <= b.high)
        if not safe:
            return self._intern(function + "_wrap", args, dtype, least, most)
        if function == "rem":
            size = max(abs(b.low), abs(b.high)) - 1
            return self._intern("rem", args, dtype, max(-size, min(a.low, 0)), min(size, max(a.high, 0)))
        return self._intern("div", args, dtype, *_interval("div", args))

    def extreme(self, function: str, args: list[Scalar], dtype: str) -> Scalar:
        a, b = args
        first, second = (a, b) if function == "max" else (b, a)
        if a is b or first.low >= second.high:
            return a
        if function == "max":
            if b.low >= a.high:
                return b
        elif a.high <= b.low:
            return a
        return self._intern(function, args, dtype, *_interval(function, args))

    # ------------------------------------------------------------------ bits

    def bitwise(self, function: str, args: list[Scalar], dtype: str) -> Scalar:
        a, b = args
        x, y = a.value, b.value
        if x is not None and y is not None:
            return self.constant({"and": x & y, "or": x | y, "xor": x ^ y}[function], dtype)
        if a is b:
            return self.constant(0, dtype) if function == "xor" else a
        ones = 1 if dtype == "bool" else -1 if dtype in SIGNED else limits(dtype)[1]
        for this, other in ((a, b), (b, a)):
            if this.value == 0:
                return other if function != "and" else this
            if this.value == ones and function == "and":
                return other
            # all bits are selected, so "and" changes nothing
            if function == "and" and this.value is not None and other.low >= 0 and _is_mask(this.value, other.high):
                return other
        return self._intern(function, args, dtype, *_interval(function, args))

    def inverted(self, args: list[Scalar], dtype: str) -> Scalar:
        (a,) = args
        if dtype == "bool":
            return self._intern("not", args, dtype, 1 - a.high, 1 - a.low)
        if dtype in SIGNED:
            return self._intern("not", args, dtype, ~a.high, ~a.low)
        most = limits(dtype)[1]
        return self._intern("not", args, dtype, most - a.high, most - a.low)

    def shift(self, function: str, args: list[Scalar], dtype: str) -> Scalar:
        """JAX's shifts: by the width or more, a left or logical shift results in 0, an arithmetic one in the sign."""
        a, s = args
        width = bits(dtype)
        if s.value == 0:
            return a
        if not (s.low >= 0 and s.high < width):
            zero, last = self.constant(0, s.dtype), self.constant(width - 1, s.dtype)
            inside = self.extreme("max", [self.extreme("min", [s, last], s.dtype), zero], s.dtype)
            if s.low >= 0 and function == "sar":
                return self.shift(function, [a, inside], dtype)
            known = self.compare("le", [s, last])
            if s.low < 0:
                known = self.bitwise("and", [self.compare("ge", [s, zero]), known], "bool")
            beyond = self.constant(0, dtype) if function != "sar" else self.shift(function, [a, last], dtype)
            return self.select(known, beyond, self.shift(function, [a, inside], dtype), dtype)
        if function == "shl":
            return self.arithmetic("shl", args, dtype, _interval("shift_left", args))
        if function == "shr" and a.low < 0:
            return self._intern("shr_wrap", args, dtype, *limits(dtype))
        return self._intern("sar" if a.low < 0 else "shr", args, dtype, *_interval("shift_right_arithmetic", args))

    def leading_zeros(self, args: list[Scalar], dtype: str) -> Scalar:
        (a,) = args
        width = bits(dtype)
        low, high = (0, width) if a.low < 0 else (width - a.high.bit_length(), width - a.low.bit_length())
        return self._intern("clz", args, dtype, low, high)

    # ------------------------------------------------------------------ choices

    def compare(self, function: str, args: list[Scalar]) -> Scalar:
        a, b = args
        known = bounds.decided(function, a.interval, b.interval)
        if a is b and function in ("eq", "ne"):
            known = function == "eq"
        if known is not None:
            return self.constant(int(known), "bool")
        return self._intern(function, args, "bool", 0, 1)

    def select(self, condition: Scalar, no: Scalar, yes: Scalar, dtype: str) -> Scalar:
        if condition.value is not None:
            return yes if condition.value else no
        if no is yes:
            return no
        if dtype == "bool" and (yes.value, no.value) == (1, 0):
            return condition
        return self._intern("select", [condition, no, yes], dtype, *_interval("select_n", [condition, no, yes]))

    def cast(self, args: list[Scalar], dtype: str) -> Scalar:
        """`convert_element_type` between integers: modulo 2^n; to bool: whether the number is not 0."""
        (a,) = args
        if a.dtype == dtype:
            return a
        if dtype == "bool":
            return self.compare("ne", [a, self.constant(0, a.dtype)])
        least, most = limits(dtype)
        if least <= a.low and a.high <= most:
            # a cast to a wider type, followed by a cast to another one
            if a.function == "cast":
                return self.cast([a.args[0]], dtype)
            return self._intern("cast", args, dtype, a.low, a.high)
        if a.value is not None:
            return self.constant((a.value - least) % 2 ** bits(dtype) + least, dtype)
        return self._intern("cast_wrap", args, dtype, least, most)


def _is_mask(value: int, most: int) -> bool:
    """Whether a value has all bits set up to the highest bit of `most`."""
    return value > 0 and value & (value + 1) == 0 and value >= most


def _interval(primitive: str, args: Sequence[Scalar]) -> Interval:
    """The interval of a primitive that has one for these operands."""
    found = bounds.of(primitive, [arg.interval for arg in args])
    assert found is not None
    return found


def _power(made: Expressions, args: list[Scalar], dtype: str) -> Scalar:
    return made.mul([args[0], args[0]], dtype)


def _clamp(made: Expressions, args: list[Scalar], dtype: str) -> Scalar:
    low, x, high = args
    return made.extreme("min", [made.extreme("max", [x, low], dtype), high], dtype)


SAME = ("copy", "copy_p", "stop_gradient", "optimization_barrier")
FLOATS = frozenset(
    [
        *("add", "sub", "mul", "div", "neg", "abs", "max", "min", "sign", "floor", "ceil", "round", "is_finite"),
        *("eq", "ne", "lt", "le", "gt", "ge", "select_n", "convert_element_type"),
    ]
)
"""The primitives that have a form on floats."""


def _only_floats(made: Expressions, args: list[Scalar], dtype: str) -> Scalar:
    raise Unsupported(f"a rounding of {dtype} has no form in C: floats are expected.")


_Rule = Callable[[Expressions, list[Scalar], str], Scalar]

_RULES: dict[str, _Rule] = {
    "add": Expressions.add,
    "add_any": Expressions.add,
    "sub": Expressions.sub,
    "mul": Expressions.mul,
    "square": _power,
    "neg": Expressions.neg,
    "abs": Expressions.absolute,
    "sign": Expressions.sign,
    "div": lambda made, args, dtype: made.divide("div", args, dtype),
    "rem": lambda made, args, dtype: made.divide("rem", args, dtype),
    "max": lambda made, args, dtype: made.extreme("max", args, dtype),
    "min": lambda made, args, dtype: made.extreme("min", args, dtype),
    "clamp": _clamp,
    "and": lambda made, args, dtype: made.bitwise("and", args, dtype),
    "or": lambda made, args, dtype: made.bitwise("or", args, dtype),
    "xor": lambda made, args, dtype: made.bitwise("xor", args, dtype),
    "not": Expressions.inverted,
    "shift_left": lambda made, args, dtype: made.shift("shl", args, dtype),
    "shift_right_arithmetic": lambda made, args, dtype: made.shift("sar", args, dtype),
    "shift_right_logical": lambda made, args, dtype: made.shift("shr", args, dtype),
    "clz": Expressions.leading_zeros,
    "convert_element_type": Expressions.cast,
    "bitcast_convert_type": Expressions.cast,
    **{name: lambda made, args, dtype: args[0] for name in SAME},
    **dict.fromkeys(("floor", "ceil", "round", "is_finite"), _only_floats),
    "select_n": lambda made, args, dtype: made.select(args[0], args[1], args[2], dtype),
}

COMPARISONS = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})
ELEMENTWISE = frozenset(_RULES) | COMPARISONS
"""The primitives that work element by element."""

_SHIFTS = ("shift_left", "shift_right_arithmetic")
_IN_32_BITS = COMPARISONS | {
    *("add", "add_any", "sub", "mul", "square", "neg", "abs", "sign", "div", "rem", "max", "min", "clamp"),
    *("and", "or", "xor", "not", "select_n", *_SHIFTS),
}
"""Operations whose result does not depend on the width, as long as it fits."""

for _name in sorted(COMPARISONS):
    _RULES[_name] = lambda made, args, dtype, name=_name: made.compare(name, args)
