"""Normalisation of codes inside of a traced kernel, with statistics and products in float64, where they are exact.

The kernel multiplies deviations `n c - sum c` by the reciprocal root r of a row, and rounds at a power of two. Here
that is one product and one difference per element,

    t = rint(c (n r 2^-shift) - (sum c) (r 2^-shift)),

which is exact if float64 represents both products. Deviations and W are the same for codes with and without the zero
point.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from qjax.export.emit.onnx.carried import EXACT, FLOATS, Carried
from qjax.export.emit.onnx.named_roots import divide_to_even, lift, lifted_root, ranged
from qjax.export.emit.onnx.views import View
from qjax.numerics.calls import Named
from qjax.numerics.normalize import Setup
from qjax.numerics.reciprocal_root import RECIPROCAL_BITS

_MOST = 1 << 30
"""A bound on t."""
_ROOTS = 62
"""V is below 2^62."""
_UNNAMED = Named("", ())


def normalized_codes(t: Carried, call: Named, operands: Sequence[View]) -> list[View] | None:
    """For 8-bit codes in files for ONNX Runtime, with statistics of known constants."""
    axes, setup, joined, groups = call.static
    codes, zero_point, *given = operands
    numbers = [view.value for view in (zero_point, *given)]
    if not t.for_runtime or groups != 1 or None in numbers:
        return None
    zero, high, low, half, right = (int(number) for number in numbers if number is not None)
    energy = (high << 31) + low
    ends = codes.range if setup.centered else (codes.range[0] - zero, codes.range[1] - zero)
    reach = max(abs(end) for end in ends) * setup.count
    # c n r and (sum c) r are below 2^53; so are n sum c^2 and (sum c)^2. Without epsilon a row may have no root.
    if reach << (RECIPROCAL_BITS - 30) > EXACT or reach**2 > EXACT or right or energy < 1 or joined != "add":
        return None
    c = t.expanded(t.carried(codes, FLOATS), axes)
    if not setup.centered and zero:
        c = dataclasses.replace(c, name=t.builder.op("Sub", c.name, t.builder.constant(np.float64(zero))))
    return [_normalized(t, c, axes, setup, energy, half)]


def _normalized(t: Carried, c: View, axes: Sequence[int], setup: Setup, energy: int, half: int) -> View:
    b = t.builder
    over = b.integers(sorted(c.axes.index(axis) for axis in axes))
    stored = tuple(1 if axis in axes else size for axis, size in zip(c.axes, c.stored, strict=True))
    shape = tuple(1 if axis in axes else size for axis, size in enumerate(c.shape))
    count = b.constant(np.float64(setup.count))
    squares = b.op("ReduceSum", b.op("Mul", c.name, c.name), over, keepdims=1)
    total = ""
    if setup.centered:
        total = b.op("ReduceSum", c.name, over, keepdims=1)
        squares = b.op("Sub", b.op("Mul", squares, count), b.op("Mul", total, total))
    v = b.cast(squares, "int64")
    if setup.gain:
        v = b.op("Mul", v, b.constant(np.int64(1 << setup.gain)))
    v = b.op("Add", v, b.constant(np.int64(energy)))
    rows = View(v, "int64", shape, stored, c.axes, low=energy, high=(1 << _ROOTS) - 1)
    lifted = lift(t, _UNNAMED, [rows])
    assert lifted is not None
    root = lifted_root(t, _UNNAMED, lifted[:1])
    assert root is not None
    unit = t.number(1 << RECIPROCAL_BITS, "int64", shape)
    reciprocal = divide_to_even(t, _UNNAMED, [unit, *root])
    assert reciprocal is not None
    halves = lifted[1]
    shifts = np.clip(RECIPROCAL_BITS - setup.places - half - np.arange(halves.range[1] + 1), 0, 62)
    power = b.op("Gather", b.constant(np.ldexp(1.0, -shifts)), halves.name, axis=0)
    slope = b.op("Mul", b.cast(reciprocal[0].name, FLOATS), power)
    if setup.centered:
        scaled = b.op("Mul", c.name, b.op("Mul", slope, count))
        scaled = b.op("Sub", scaled, b.op("Mul", total, slope))
    else:
        scaled = b.op("Mul", c.name, slope)
    return ranged(dataclasses.replace(c, name=b.op("Round", scaled), dtype="int32", held=FLOATS), (-_MOST, _MOST))
