"""Sums of products as values: `lax.dot_general` and convolutions. Weights are stored as they are read."""

from collections.abc import Sequence

import numpy as np
from jax.extend.core import JaxprEqn

from qjax.export.emit.c.index import Index, Indices
from qjax.export.emit.c.values import (
    Computed,
    Guarded,
    Kept,
    Literal,
    Reduced,
    Table,
    Value,
    View,
    cast,
)
from qjax.support.errors import Unsupported


def read_dot(eqn: JaxprEqn, inputs: list[Value], shape: tuple[int, ...], dtype: str) -> Value:
    """The equation of a `dot_general`."""
    contracting, batch = eqn.params["dimension_numbers"]
    return product(inputs[0], inputs[1], contracting, batch, dtype)


def product(
    lhs: Value, rhs: Value, contracting: Sequence[Sequence[int]], batch: Sequence[Sequence[int]], dtype: str
) -> Value:
    """`lax.dot_general`, its axes being those of the batch, then the free ones of the left and of the right."""
    inputs = (lhs, rhs)
    free = [
        [a for a in range(len(v.shape)) if a not in contracting[i] and a not in batch[i]] for i, v in enumerate(inputs)
    ]
    shape = tuple(lhs.shape[a] for a in batch[0])
    shape += tuple(v.shape[a] for v, axes in zip(inputs, free, strict=True) for a in axes)
    extra = tuple(lhs.shape[axis] for axis in contracting[0])
    rank = len(shape)
    inputs = tuple(Kept(v.shape, v.dtype, v) if _divides(v) else v for v in inputs)
    sides: list[Value] = []
    for side, source in enumerate(inputs):
        start = len(batch[0]) + (len(free[0]) if side == 1 else 0)
        sides.append(_side(cast(source, dtype), batch[side], free[side], contracting[side], start, rank, shape, extra))
    body = Computed((*shape, *extra), dtype, "mul", tuple(sides))
    return Reduced(shape, dtype, "add", 0, extra, body)


def _side(
    source: Value,
    batch: Sequence[int],
    free: Sequence[int],
    summed: Sequence[int],
    start: int,
    rank: int,
    shape: tuple[int, ...],
    extra: tuple[int, ...],
) -> Value:
    """One operand of a product, read at (batch, free of the left, free of the right, summed)."""
    order = (*batch, *free, *summed)
    # weights are stored in the order in which they are read
    source = _store_weights(source, order)
    position = {axis: i for i, axis in enumerate(order)} if _table(source) is None else None

    def where(at: Indices) -> Indices:
        ordered = (*at[: len(batch)], *at[start : start + len(free)], *at[rank:])
        if position is None:
            return ordered
        return tuple(ordered[position[axis]] for axis in range(len(order)))

    return View((*shape, *extra), source.dtype, source, where)


def _divides(value: Value) -> bool:
    """Whether an element needs a division of floats: a code whose scale is computed at run time."""
    if isinstance(value, Computed):
        return value.function == "div" or any(_divides(operand) for operand in value.operands)
    return isinstance(value, View) and _divides(value.source)


def _table(source: Value) -> Table | None:
    """The table of a value that is a table, or a table cast to another type."""
    if isinstance(source, Computed) and source.function == "convert_element_type":
        return _table(source.operands[0])
    return source if isinstance(source, Table) else None


def _store_weights(source: Value, order: Sequence[int]) -> Value:
    table = _table(source)
    if table is None:
        return source
    array = np.ascontiguousarray(np.transpose(table.array, order))
    return cast(Table(array.shape, table.dtype, array, table.role), source.dtype)


def read_convolution(eqn: JaxprEqn, inputs: list[Value], shape: tuple[int, ...], dtype: str) -> Value:
    """The equation of a `conv_general_dilated`."""
    params = eqn.params
    if params["batch_group_count"] != 1:
        raise Unsupported("a convolution with batch groups has no form in C.")
    numbers = params["dimension_numbers"]
    layout = (tuple(numbers.lhs_spec), tuple(numbers.rhs_spec), tuple(numbers.out_spec))
    return convolution(
        inputs[0],
        inputs[1],
        Literal((), inputs[0].dtype, 0),
        shape,
        dtype,
        strides=params["window_strides"],
        padding=params["padding"],
        lhs_dilation=params["lhs_dilation"],
        rhs_dilation=params["rhs_dilation"],
        groups=params["feature_group_count"],
        layout=layout,
    )


def convolution(
    x: Value,
    w: Value,
    fill: Value,
    shape: tuple[int, ...],
    dtype: str,
    *,
    strides: Sequence[int],
    padding: Sequence[Sequence[int]],
    lhs_dilation: Sequence[int],
    rhs_dilation: Sequence[int],
    groups: int,
    layout: tuple[Sequence[int], Sequence[int], Sequence[int]],
) -> Value:
    """sum over (*window, channels of one group) of x, padded and dilated with `fill`, times w; layout: as in lax."""
    lhs, rhs, out = layout
    spatial, rank = len(strides), len(shape)
    per_group, features = w.shape[rhs[1]] if groups else 0, w.shape[rhs[0]]
    window = tuple(w.shape[axis] for axis in rhs[2:])
    extra = (*window, per_group)
    stored = _store_weights(w, (rhs[0], *rhs[2:], rhs[1]))

    def read_x(at: Indices) -> Indices:
        found: dict[int, Index] = {lhs[0]: at[out[0]]}
        group = at[out[1]].floordiv(features // groups) if groups > 1 else Index()
        found[lhs[1]] = group * per_group + at[rank + spatial]
        for d in range(spatial):
            place = at[out[2 + d]] * strides[d] + at[rank + d] * rhs_dilation[d]
            found[lhs[2 + d]] = place + -padding[d][0]
        return tuple(found[axis] for axis in range(rank))

    def read_w(at: Indices) -> Indices:
        if _table(stored) is not None:
            return (at[out[1]], *at[rank:])
        found = {rhs[0]: at[out[1]], rhs[1]: at[rank + spatial]}
        found |= {rhs[2 + d]: at[rank + d] for d in range(spatial)}
        return tuple(found[axis] for axis in range(rank))

    steps = [1] * rank
    for d in range(spatial):
        steps[lhs[2 + d]] = lhs_dilation[d]
    full = (*shape, *extra)
    left = cast(Guarded(full, x.dtype, x, fill, read_x, tuple(steps)), dtype)
    right = View(full, dtype, cast(stored, dtype), read_w)
    names = {1: ("kx", "ic"), 2: ("ky", "kx", "ic"), 3: ("kz", "ky", "kx", "ic")}.get(spatial, ())
    return Reduced(shape, dtype, "add", 0, extra, Computed(full, dtype, "mul", (left, right)), names)
