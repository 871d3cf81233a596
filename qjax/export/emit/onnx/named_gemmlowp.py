"""gemmlowp's softmax and reciprocal inside of a traced kernel, with few operators; see `named_calls`.

- An exponential of an 8-bit difference is an entry of a table.
- A product of Q0.31 numbers is rounded by a sum and one right shift: (a b + 2^30) >> 31, ties up.
- Two shifts in a row are one shift of a sum: (((x + 2^30) >> 31) + 2^(k-1)) >> k is (x + 2^30 + 2^(30+k)) >> (31+k).
- Newton's steps have known bounds, so only the last step can saturate. ONNX divides towards zero, and its shifts only
  accept unsigned numbers, so numbers that may be negative are first shifted upwards.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from qjax.export.emit.onnx.carried import Carried
from qjax.export.emit.onnx.named_roots import counted, ranged
from qjax.export.emit.onnx.ranged import read_table
from qjax.export.emit.onnx.views import View
from qjax.numerics.calls import Named
from qjax.numerics.gemmlowp_functions import NEWTON_SLOPE, NEWTON_START, ONE
from qjax.numerics.softmax import SUM_BITS, exponentials


def powers(t: Carried, call: Named, operands: Sequence[View]) -> list[View] | None:
    """A table of the exponentials of all differences, if the constants are known. The terms are these, rounded."""
    codes, *constants = operands
    numbers = [np.int32(view.value) for view in constants if view.value is not None]
    low, high = codes.range
    if len(numbers) < len(constants) or high - low > 255:
        return None
    inside, table = exponentials(-np.arange(256, dtype=np.int32), *numbers)
    b, last = t.builder, len(codes.shape) - 1
    x = t.carried(t.expanded(codes, [last]), "int32")
    greatest = b.op("ReduceMax", x.name, b.integers([x.axes.index(last)]), keepdims=1)
    place = dataclasses.replace(x, name=b.op("Sub", greatest, x.name))
    read = read_table(t, b.constant(np.where(inside, table, 0).astype(np.int64)), place)
    found = ranged(dataclasses.replace(place, name=read, dtype="int64", held=None), (0, ONE))
    half = t.in_range("add", None, [found, t.number(1 << (SUM_BITS - 1), "int64")], codes.shape, "int64")
    assert half is not None
    terms = t.in_range("shift_right_arithmetic", None, [half, t.number(SUM_BITS, "int64")], codes.shape, "int64")
    assert terms is not None
    as_read = dataclasses.replace(found, dtype="int32", held="int64")
    return [t.number(True, "bool", codes.shape), as_read, dataclasses.replace(terms, dtype="int32", held=terms.kind)]


def reciprocal(t: Carried, call: Named, operands: Sequence[View]) -> list[View] | None:
    """`gemmlowp_reciprocal` of a sum that includes the term of its greatest code."""
    (bits,), (total,) = call.static, operands
    b, total = t.builder, t.carried(t.expanded(total), "int64")
    # a number below 2^31 begins with one zero bit, and with one more for each limit that it is below
    limits = [1 << k for k in range(31 - SUM_BITS + 1, 31)]
    count = counted(t, total, limits, "Less").name
    factors = b.constant(np.asarray([1 << (1 + j) for j in range(len(limits) + 1)], np.int64))
    normal = b.op("Mul", total.name, b.op("Gather", factors, count, axis=0))
    mantissa = dataclasses.replace(total, name=b.op("Sub", normal, b.constant(np.int64(1 << 31))))
    right = b.op("Sub", b.constant(np.int32(SUM_BITS + 31 - bits - 1)), count)
    found = dataclasses.replace(total, name=right, dtype="int32", held=None, known=None, value=None)
    most = SUM_BITS + 31 - bits - 1
    return [_write_reciprocal(t, mantissa), dataclasses.replace(found, low=most - len(limits), high=most)]


def shares(t: Carried, call: Named, operands: Sequence[View]) -> list[View] | None:
    """For exponentials that are 0 where a code does not count: one product, one sum and one shift."""
    inverse, power, inside, right = operands
    known = inverse.range[0] >= 0 and power.range[0] >= 0 and inside.value is True and right.range[0] >= 1
    if not known:
        return None
    b, shape, last = t.builder, power.shape, right.range[1]
    rows = np.arange(last + 1, dtype=np.int64)
    # beyond a shift of 31 the share is 0, and so is a product below 2^62 shifted by 63
    starts = np.where(rows <= 31, (1 << 30) + np.left_shift(np.int64(1), 30 + np.minimum(rows, 31)), 0)
    shifts = np.where(rows <= 31, 31 + rows, 63).astype(np.uint64)
    whole = [dataclasses.replace(view, shape=shape) for view in (inverse, right)]
    places = t.carried(whole[1], "int32")
    start, amount = (
        dataclasses.replace(places, name=b.op("Gather", b.constant(table), places.name, axis=0))
        for table in (starts, shifts)
    )
    given = [t.carried(view, "int64") for view in (power, whole[0])]

    def write(power: str, inverse: str, start: str, amount: str) -> str:
        total = b.op("Add", b.op("Mul", power, inverse), start)
        return b.cast(b.op("BitShift", b.cast(total, "uint64"), amount, direction="RIGHT"), "int32")

    least = right.range[0]
    most = (ONE + (1 << (least - 1))) >> least
    return [ranged(t.apply(write, [*given, start, amount], shape, "int32"), (0, most))]


def one_over_one_plus_x(t: Carried, call: Named, operands: Sequence[View]) -> list[View] | None:
    """`gemmlowp_functions.one_over_one_plus_x` on [0, 1)."""
    (a,) = operands
    if a.range[0] < 0:
        return None
    return [_write_reciprocal(t, t.carried(t.settled(a), "int64"))]


def _write_reciprocal(t: Carried, a: View) -> View:
    """1 / (1 + a) for a tensor of int64. Each x lies in (0, 2^30], and each residue in (-2^29, 2^29)."""
    b = t.builder
    small, raised = t.is_small(a), 1 << 30

    def number(value: int) -> str:
        return b.constant(np.int64(value))

    def halved(x: str, bits: int) -> str:
        if small:
            return b.op("Div", x, number(1 << bits))
        moved = b.op("BitShift", b.cast(x, "uint64"), b.constant(np.uint64(bits)), direction="RIGHT")
        return b.cast(moved, "int64")

    def product(x: str, y: str, lift: int = 0) -> str:
        """lift: added to the product, so that it is not negative."""
        return halved(b.op("Add", b.op("Mul", x, y), number((lift << 31) + (1 << 30))), 31)

    half = b.op("Add", halved(a.name, 1), number(1 << 30))
    x = b.op("Add", product(half, number(NEWTON_SLOPE), raised), number(NEWTON_START - raised))
    for _ in range(3):
        residue = b.op("Sub", number(1 << 29), product(half, x))
        step = b.op("Mul", product(x, residue, raised), number(4))
        x = b.op("Add", b.op("Sub", x, number(4 * raised)), step)
    doubled = b.op("Where", b.op("Less", x, number(1 << 30)), b.op("Add", x, x), number(ONE))
    return ranged(dataclasses.replace(a, name=doubled, dtype="int32", held="int64"), (0, ONE))
