"""The requantization of an accumulator in few operators: a product, a sum, a shift and a clamp.

`requantize_as_shift` finds the numbers, from the rule's own kernel and the accumulators that can occur. The function of
a node then contains them as constants, one per channel:

| operator | purpose |
| --- | --- |
| Equal, Or, Cast, Add | only for rules in float32: move exceptional accumulators to the next one |
| Cast, Mul | factor * acc in int64 |
| Add, or Less, Where, Add | the offset, or one of two; it includes what keeps the sum positive |
| Cast, BitShift, Cast | the floor: BitShift takes unsigned integers and is several times as fast as Div of int64 |
| Clip, Cast | the codes; what was added for the sign is a multiple of 2^bits, which the cast drops |

If everything fits in 32 bits: Mul, Add, Div, Clip, Cast. None of it applies to rules that are not monotone, or whose
codes have no such form; their kernel is translated unchanged.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from qjax.export.emit.onnx.views import View, Views
from qjax.export.emit.requantizations import Product, line_of
from qjax.export.emit.requantize_as_shift import Integers, Line

_INT32 = 2**31


def short(t: Views, product: Product, acc: View) -> View | None:
    """The codes of an int32 accumulator without its bias; None if the rule has no such form."""
    found = line_of(product)
    return None if found is None else written(t, product.attributes["dtype"], acc, *found)


def written(t: Views, dtype: str, acc: View, line: Line, shape: Sequence[int]) -> View:
    """The codes of an accumulator by a `Line` with channels of that shape, as a dtype of at most 16 bits."""
    b = t.builder
    bits = np.iinfo(dtype).bits
    # a multiple of 2^bits that keeps the quotient positive
    lift = max(0, -(line.least >> bits)) << bits
    narrow = max(line.product, (line.most + lift + 1) << line.shift) < _INT32
    wide = np.int32 if narrow else np.int64

    def constant(values: Integers, kind: Any) -> str:
        return b.constant(_order_channels(values.astype(kind), shape, acc))

    x = acc.name
    if line.raised is not None:
        flags = [b.op("Equal", x, constant(row, np.int32)) for row in line.raised]
        late = flags[0]
        for flag in flags[1:]:
            late = b.op("Or", late, flag)
        x = b.op("Add", x, b.cast(late, "int32"))
    scaled = b.op("Mul", x if narrow else b.cast(x, "int64"), constant(line.factor, wide))
    more = np.int64(lift) << np.int64(line.shift)
    offset = constant(line.offset + more, wide)
    if line.kink is not None:
        assert line.below is not None
        negative = b.op("Less", x, constant(line.kink, np.int32))
        offset = b.op("Where", negative, constant(line.below + more, wide), offset)
    total = b.op("Add", scaled, offset)
    if narrow:
        quotient = b.op("Div", total, b.constant(np.int32(2**line.shift)))
    else:
        moved = b.op("BitShift", b.cast(total, "uint64"), b.constant(np.uint64(line.shift)), direction="RIGHT")
        quotient = b.cast(moved, "int32")
    if line.least < line.lowest or line.most > line.highest:
        bounds = (b.constant(np.int32(bound + lift)) for bound in (line.lowest, line.highest))
        quotient = b.op("Clip", quotient, *bounds)
    return dataclasses.replace(acc, name=b.cast(quotient, dtype), dtype=dtype)


def _order_channels(values: np.ndarray, shape: Sequence[int], acc: View) -> np.ndarray:
    """Values of channels in the order of the accumulator's stored axes; one number if all are equal."""
    if values.size and np.all(values == values[0]):
        return values[0]
    full = values.reshape((1,) * (len(acc.shape) - len(shape)) + tuple(shape)).transpose(acc.axes)
    while full.shape[0] == 1:
        full = full[0]
    return full
