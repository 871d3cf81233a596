"""Quotients, roots and leading bits of integers inside of a traced kernel; see `named_calls`."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from qjax.export.emit import bounds
from qjax.export.emit.onnx.carried import FLOATS, Carried
from qjax.export.emit.onnx.views import View
from qjax.numerics.calls import Named
from qjax.numerics.integer_softmax import BITS

_LIMIT = 62
"""`lift` takes numbers below 2 to this power."""


def ranged(view: View, found: bounds.Range) -> View:
    """The view of a computed tensor whose range is known."""
    return dataclasses.replace(view, low=found[0], high=found[1], value=None, known=None)


def divide_to_even(t: Carried, call: Named, operands: Sequence[View]) -> list[View] | None:
    """The quotient q, plus 1 if 2 r + (q odd) is above the divisor: r is above half, or at half and q odd."""
    numerator, divisor = operands
    if numerator.range[0] < 0 or divisor.range[0] < 1 or divisor.range[1] >= 2**61:
        return None
    b, dtype = t.builder, numerator.dtype
    value = numerator.value
    if value is not None and value & (value - 1) == 0 and divisor.range[1] < value:
        return [_of_power(t, int(value), t.settled(divisor))]
    one = b.constant(np.asarray(1, dtype))

    def write(a: str, divisor: str) -> str:
        q = b.op("Div", a, divisor)
        rest = b.op("Sub", a, b.op("Mul", q, divisor))
        twice = b.op("Add", b.op("Add", rest, rest), b.op("BitwiseAnd", q, one))
        return b.op("Add", q, b.cast(b.op("Greater", twice, divisor), dtype))

    result = t.apply(write, [t.settled(x) for x in operands], divisor.shape, dtype)
    return [ranged(result, bounds.of_rounded_quotient(numerator.range, divisor.range))]


def _of_power(t: Carried, value: int, divisor: View) -> View:
    """The quotient of a power of two by a smaller divisor: the floor of (2 value + divisor) / (2 divisor).

    This rounds ties up, but there are none. At a tie, the divisor times an odd number would be 2 value. Only 1 is odd
    and divides a power of two, and the divisor is smaller than that.
    """
    b, dtype = t.builder, divisor.dtype
    if 2 * value + divisor.range[1] >= 2**63:
        raise AssertionError(f"2 * {value} + {divisor.range[1]} leaves int64")
    raised = b.op("Add", divisor.name, b.constant(np.asarray(2 * value, dtype)))
    name = b.op("Div", raised, b.op("Add", divisor.name, divisor.name))
    return ranged(dataclasses.replace(divisor, name=name), bounds.of_rounded_quotient((value, value), divisor.range))


def counted(t: Carried, x: View, limits: Sequence[int], operator: str) -> View:
    """How many limits a number is below (Less), or has reached (GreaterOrEqual); int64."""
    b, last, rank = t.builder, x.name, len(x.stored)
    # in rows of one number, the limits are placed beside each
    in_place = bool(x.stored) and x.stored[-1] == 1
    if not in_place:
        last = b.op("Unsqueeze", last, b.integers([rank]))
    flags = b.op(operator, last, b.constant(np.asarray(limits, np.int64)))
    # int32, because ONNX Runtime is slower in int64
    over = b.integers([rank - 1 if in_place else rank])
    count = b.op("ReduceSum", b.cast(flags, "int32"), over, keepdims=int(in_place))
    return dataclasses.replace(x, name=count, held="int32", low=0, high=len(limits), value=None, known=None)


def lift(t: Carried, call: Named, operands: Sequence[View]) -> list[View] | None:
    """`reciprocal_root.lift`: h is the number of limits below which x lies."""
    (x,) = operands
    if x.range[0] < 1 or x.range[1] >= 1 << _LIMIT:
        return None
    x = t.settled(x)
    limits = [1 << (_LIMIT - 2 * h) for h in range(1, _LIMIT // 2)]
    least = sum(x.range[1] < limit for limit in limits)
    limits = [limit for limit in limits if x.range[0] < limit]
    half = dataclasses.replace(counted(t, x, limits, "Less"), low=least)
    powers = t.builder.constant(np.left_shift(np.int64(1), 2 * np.arange(len(limits) + 1, dtype=np.int64)))
    factor = t.builder.op("Gather", powers, half.name, axis=0)
    lifted = dataclasses.replace(x, name=t.builder.op("Mul", x.name, factor))
    return [ranged(lifted, (1 << (_LIMIT - 2), (1 << _LIMIT) - 1)), half]


def lifted_root(t: Carried, call: Named, operands: Sequence[View]) -> list[View] | None:
    """The floor of a root in [2^30, 2^31): float64 is off by 2^-21, so slightly more is the floor or one above."""
    (x,) = operands
    if not t.for_runtime or x.range[0] < 1 << (_LIMIT - 2) or x.range[1] >= 1 << _LIMIT:
        return None
    b, x = t.builder, t.settled(x)
    root = b.op("Sqrt", b.cast(x.name, FLOATS))
    near = b.cast(b.op("Add", root, b.constant(np.float64(2.0**-16))), x.dtype)
    above = b.cast(b.op("Greater", b.op("Mul", near, near), x.name), x.dtype)
    floor = dataclasses.replace(x, name=b.op("Sub", near, above))
    return [ranged(floor, (1 << (_LIMIT // 2 - 1), (1 << _LIMIT // 2) - 1))]


def leading(t: Carried, call: Named, operands: Sequence[View]) -> list[View] | None:
    """`integer_softmax.leading`: the shift is the number of limits that the sum has reached."""
    (total,) = operands
    if total.range[0] < 1:
        return None
    total = t.settled(total)
    # the least j for which total / 2^j is below 2^31
    limits = [1 << (BITS + j) for j in range(1, max(1, total.range[1].bit_length() - BITS))]
    if not limits:
        return [t.number(0, "int64", total.shape), total]
    shift = counted(t, total, limits, "GreaterOrEqual")
    rest = t.in_range("shift_right_arithmetic", None, [total, shift], total.shape, total.dtype)
    return None if rest is None else [shift, rest]
