"""Primitives that move, cast, gather and reduce integers whose ranges are known (see `carried`)."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from qjax.export.emit import bounds
from qjax.export.emit.onnx.carried import EXACT, FLOATS, Carried
from qjax.export.emit.onnx.products import dot_general
from qjax.export.emit.onnx.structure import STRUCTURE, rows_of_table
from qjax.export.emit.onnx.views import View

Entry = Callable[[Carried, Any, Sequence[View]], View | None]
"""(translator, parameters, operands) -> the result, or None if the ranges do not help."""

_FEW = 512
"""Up to this many elements per example Gather is faster."""
_MOVES = ("transpose", "broadcast_in_dim", "reshape", "squeeze", "rev", "slice")


def _move_entry(name: str) -> Entry:
    def entry(t: Carried, params: Any, x: Sequence[View]) -> View:
        view = x[0]
        found = STRUCTURE[name](t, params, [dataclasses.replace(view, known=None)])
        return dataclasses.replace(found, dtype=view.dtype, low=view.low, high=view.high, held=view.held)

    return entry


def _cast(t: Carried, params: Any, x: Sequence[View]) -> View | None:
    """A cast without an operator: the tensor does not change, and is cast where an operator needs it."""
    (view,), dtype = x, np.dtype(params["new_dtype"]).name
    if not {view.dtype, dtype} <= set(bounds.INTEGERS) or dtype == "bool" or not bounds.fits(view.range, dtype):
        return None
    if view.value is not None:
        return t.number(int(view.value), dtype, view.shape)
    return dataclasses.replace(view, dtype=dtype, low=view.range[0], high=view.range[1], held=view.kind)


def _clamp(t: Carried, params: Any, x: Sequence[View]) -> View | None:
    low, view, high = x
    raised = t.in_range("max", None, [view, low], view.shape, view.dtype)
    return None if raised is None else t.in_range("min", None, [raised, high], view.shape, view.dtype)


def _sum(t: Carried, params: Any, x: Sequence[View]) -> View | None:
    """A sum, in int32 if every sum fits; in float64, where ONNX Runtime adds fastest, for many terms or float64 terms.

    ONNX Runtime 1.31 adds integers as float64, and results beyond the type saturate. An int64 sum that may exceed 2^53
    is therefore written as one of its high words and one of its low words, and an int32 sum that may wrap as one of
    int64.
    """
    (view,), axes = x, tuple(params["axes"])
    sizes = [view.shape[axis] for axis in axes]
    if view.dtype not in ("int32", "int64") or not axes:
        return None
    if any(t.is_free(size) for size in sizes):
        # a batch may have any number of terms; words of 32 bits are exact up to two million
        return _sum_of_words(t, view, axes)
    count = math.prod(sizes)
    found = min(0, count * view.range[0]), max(0, count * view.range[1])
    if not bounds.fits(found, view.dtype) or not -EXACT <= found[0] <= found[1] <= EXACT:
        if count > EXACT >> _WORD:
            raise ValueError(f"ONNX: no form for a sum of {count} numbers that leave 2^53.")
        return _sum_of_words(t, view, axes)
    kind = "int32" if bounds.fits(found, "int32") else view.dtype
    if view.kind == FLOATS or (t.for_runtime and not t.is_small(view)):
        kind = FLOATS
    return _reduced(t, "ReduceSum", t.carried(view, kind), axes, found)


_WORD = 32


def _sum_of_words(t: Carried, view: View, axes: Sequence[int]) -> View:
    """A sum modulo 2^32 or 2^64, from words of 32 bits."""
    b, dtype = t.builder, view.dtype
    whole = t.carried(t.settled(view), "int64")
    anything = bounds.of_dtype(dtype)
    if bounds.fits(view.range, "int32"):
        total = _reduced(t, "ReduceSum", whole, axes, anything)
    else:
        word = t.number(_WORD, "int64", whole.shape)
        high = t.in_range("shift_right_arithmetic", None, [whole, word], whole.shape, "int64")
        assert high is not None
        low = dataclasses.replace(
            whole, name=b.op("BitwiseAnd", whole.name, b.constant(np.int64(2**_WORD - 1))), held=None
        )
        sums = [_reduced(t, "ReduceSum", t.carried(part, "int64"), axes, anything) for part in (high, low)]
        raised = b.op("Mul", sums[0].name, b.constant(np.int64(2**_WORD)))
        total = dataclasses.replace(sums[1], name=b.op("Add", raised, sums[1].name))
    return t.settled(dataclasses.replace(total, dtype=dtype, held="int64", low=None, high=None))


def _extreme(op: str) -> Entry:
    def entry(t: Carried, params: Any, x: Sequence[View]) -> View | None:
        (view,), axes = x, tuple(params["axes"])
        if view.dtype not in ("int8", "int32", "int64") or not axes or not all(view.shape[axis] for axis in axes):
            return None
        if view.kind not in ("int8", "uint8", FLOATS):
            if not bounds.fits(view.range, "int32"):
                return None
            view = t.carried(view, "int32")
        return _reduced(t, op, view, axes, view.range)

    return entry


def _reduced(t: Carried, op: str, view: View, axes: Sequence[int], found: bounds.Range) -> View:
    full = t.expanded(view, axes)
    over = t.builder.integers(sorted(full.axes.index(axis) for axis in axes))
    name = t.builder.op(op, full.name, over, keepdims=0)
    kept = [axis for axis in range(len(full.shape)) if axis not in axes]
    left = [axis for axis in full.axes if axis not in axes]
    return View(
        name,
        full.dtype,
        tuple(full.shape[axis] for axis in kept),
        tuple(full.size(axis) for axis in left),
        tuple(kept.index(axis) for axis in left),
        low=found[0],
        high=found[1],
        held=full.held,
    )


def _gather(t: Carried, params: Any, x: Sequence[View]) -> View | None:
    """Entries of a table; indices beyond it read its ends."""
    table, indices = x
    view = rows_of_table(t, params, table, indices)
    view = dataclasses.replace(view, low=indices.range[0], high=indices.range[1], held=indices.held)
    if len(table.shape) != 1 or table.axes != (0,) or table.stored != table.shape:
        return None
    for name, bound in (("max", 0), ("min", table.shape[0] - 1)):
        bounded = t.in_range(name, None, [view, t.number(bound, view.dtype)], view.shape, view.dtype)
        if bounded is None:
            return None
        view = bounded
    found = (int(table.known.min()), int(table.known.max())) if table.known is not None else table.range
    place = t.narrowest(view)
    return dataclasses.replace(
        place,
        name=read_table(t, table.name, place),
        dtype=table.dtype,
        held=table.held,
        low=found[0],
        high=found[1],
        value=None,
        known=None,
    )


def read_table(t: Carried, table: str, place: View) -> str:
    """A lookup by GatherElements, which is five times as fast as Gather in ONNX Runtime, but only takes lists.

    Gather is used for a few elements, where the two reshapes cost more, and for other runtimes, because ONNX's
    reference evaluator supports GatherElements for 64 entries only.
    """
    if t.is_small(place, _FEW) or not t.for_runtime:
        return t.builder.op("Gather", table, place.name, axis=0)
    flat = t.builder.op("Reshape", place.name, t.builder.integers([-1]))
    return t.reshaped(t.builder.op("GatherElements", table, flat, axis=0), place.stored)


def _product(t: Carried, params: Any, x: Sequence[View]) -> View | None:
    """The usual operators, with the range of a sum of that many products."""
    (contracted, _), _ = params["dimension_numbers"]
    terms = [x[0].shape[axis] for axis in contracted]
    found = bounds.of("mul", [view.range for view in x])
    if found is None or any(t.is_free(size) for size in terms):
        return None
    count = math.prod(terms)
    sums = count * found[0], count * found[1]
    if not bounds.fits(sums, "int32"):
        return None
    made = dot_general(t, params, [t.settled(view) for view in x])
    return dataclasses.replace(made, low=sums[0], high=sums[1])


RANGED: dict[str, Entry] = {
    "dot_general": _product,
    **{name: _move_entry(name) for name in _MOVES},
    "convert_element_type": _cast,
    "clamp": _clamp,
    "reduce_sum": _sum,
    "reduce_max": _extreme("ReduceMax"),
    "reduce_min": _extreme("ReduceMin"),
    "gather": _gather,
}
