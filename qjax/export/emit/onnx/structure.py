"""The ONNX operators of primitives that move, gather and sum, on views (see `views`)."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from qjax.export.emit.onnx.elementwise import extreme
from qjax.export.emit.onnx.views import NeedsBatch, View, Views

Entry = Callable[[Views, Any, Sequence[View]], View]
"""(translator, parameters, operands) -> the result."""

_END, _BEGIN = 2**63 - 1, -(2**63)


def transpose(t: Views, params: Any, x: Sequence[View]) -> View:
    """`lax.transpose`, which needs no node."""
    return t.transpose(x[0], params["permutation"])


def broadcast_in_dim(t: Views, params: Any, x: Sequence[View]) -> View:
    """`lax.broadcast_in_dim`, which needs no node."""
    view, places = x[0], params["broadcast_dimensions"]
    value = view.value
    return dataclasses.replace(
        view, shape=tuple(params["shape"]), axes=tuple(places[axis] for axis in view.axes), value=value
    )


def reshape(t: Views, params: Any, x: Sequence[View]) -> View:
    """`lax.reshape`."""
    return t.reshape(x[0], tuple(params["new_sizes"]))


def squeeze(t: Views, params: Any, x: Sequence[View]) -> View:
    """`lax.squeeze`: a reshape."""
    gone = params["dimensions"]
    return t.reshape(x[0], tuple(size for axis, size in enumerate(x[0].shape) if axis not in gone))


def rev(t: Views, params: Any, x: Sequence[View]) -> View:
    """`lax.rev`: a slice with a step of -1."""
    view = x[0]
    axes = [index for index, axis in enumerate(view.axes) if axis in params["dimensions"] and view.stored[index] != 1]
    if not axes:
        return view
    bounds = [[start] * len(axes) for start in (-1, _BEGIN)]
    rows = (*bounds, axes, [-1] * len(axes))
    name = t.builder.op("Slice", view.name, *(t.builder.integers(row) for row in rows))
    return dataclasses.replace(view, name=name)


def slice_(t: Views, params: Any, x: Sequence[View]) -> View:
    """`lax.slice`."""
    steps = params["strides"] or (1,) * len(x[0].shape)
    return sliced(t, x[0], params["start_indices"], params["limit_indices"], steps)


def sliced(t: Views, view: View, starts: Sequence[int], limits: Sequence[int], steps: Sequence[int]) -> View:
    """Strided slices with constant bounds; along the batch only complete ones."""
    shape = tuple(max(0, -(-(b - a) // step)) for a, b, step in zip(starts, limits, steps, strict=True))
    rows: list[tuple[int, int, int, int]] = []
    stored = list(view.stored)
    for index, axis in enumerate(view.axes):
        bounds, size = (starts[axis], limits[axis], steps[axis]), view.shape[axis]
        if bounds == (0, size, 1) or view.stored[index] != size:
            continue
        start, limit, step = bounds
        if t.is_free(size) and (start or limit != size):
            raise NeedsBatch
        rows.append((start, _END if limit == size else limit, index, step))
        stored[index] = shape[axis]
    if not rows:
        return dataclasses.replace(view, shape=shape)
    columns = (t.builder.integers(column) for column in zip(*rows, strict=True))
    return dataclasses.replace(
        view, name=t.builder.op("Slice", view.name, *columns), shape=shape, stored=tuple(stored), value=None
    )


def concatenate(t: Views, params: Any, x: Sequence[View]) -> View:
    """`lax.concatenate`."""
    axis = params["dimension"]
    order = t.common_order(x)
    names = [t.materialized(view, order) for view in x]
    if any(t.is_free(view.shape[axis]) for view in x) and len(x) > 1:
        raise NeedsBatch
    shape = list(x[0].shape)
    shape[axis] = sum(view.shape[axis] for view in x)
    name = names[0] if len(names) == 1 else t.builder.op("Concat", *names, axis=order.index(axis))
    return View.full(name, x[0].dtype, tuple(shape), order)


def stack(t: Views, params: Any, x: Sequence[View]) -> View:
    """`jnp.stack`: a concatenation along a new axis."""
    axis = params["axis"]
    shape = (*x[0].shape[:axis], 1, *x[0].shape[axis:])
    return concatenate(t, {"dimension": axis}, [t.reshape(view, shape) for view in x])


def pad(t: Views, params: Any, x: Sequence[View]) -> View:
    """`lax.pad`: first between elements, which ONNX's Pad cannot do, then around them; negative amounts crop."""
    view, fill = x
    config = params["padding_config"]
    touched = [axis for axis, triple in enumerate(config) if any(triple) and view.shape[axis] != 0]
    if not touched:
        return view
    if any(t.is_free(view.shape[axis]) for axis in touched):
        raise NeedsBatch
    view, dtype = t.expanded(view, touched), view.dtype
    narrow = dtype in ("int16", "uint16")
    if narrow:
        view, fill = t.cast(view, "int32"), t.cast(fill, "int32")
    value = t.builder.op("Squeeze", fill.name) if fill.stored else fill.name
    for axis in touched:
        if config[axis][2] and view.shape[axis] > 1:
            view = _insert_between(t, view, axis, config[axis][2], value)
    added = [(axis, max(0, config[axis][0]), max(0, config[axis][1])) for axis in touched]
    added = [triple for triple in added if any(triple[1:])]
    if added:
        around = {view.axes.index(axis): (low, high) for axis, low, high in added}
        name = _padded(t, view.name, len(view.axes), around, value)
        more = {axis: low + high for axis, low, high in added}
        view = _resized(view, {axis: view.shape[axis] + n for axis, n in more.items()}, name)
    starts = [max(0, -low) for low, _, _ in config]
    limits = [size - max(0, -high) for size, (_, high, _) in zip(view.shape, config, strict=True)]
    view = sliced(t, view, starts, limits, [1] * len(config))
    return t.cast(view, dtype) if narrow else view


def _padded(t: Views, name: str, rank: int, around: Mapping[int, tuple[int, int]], value: str) -> str:
    """`Pad` with amounts for all axes, because ONNX Runtime's move to channels last confuses amounts for some axes.

    ONNX Runtime 1.31.1 permutes the input `pads` as if it contained every axis, and then fails or pads the wrong ones.
    """
    amounts = [around.get(axis, (0, 0))[side] for side in (0, 1) for axis in range(rank)]
    return t.builder.op("Pad", name, t.builder.integers(amounts), value)


def _resized(view: View, sizes: dict[int, int], name: str) -> View:
    """A tensor that replaces the view's, with other sizes along some axes."""
    shape, stored = list(view.shape), list(view.stored)
    for axis, size in sizes.items():
        shape[axis] = stored[view.axes.index(axis)] = size
    return dataclasses.replace(view, name=name, shape=tuple(shape), stored=tuple(stored), value=None)


def _insert_between(t: Views, view: View, axis: int, between: int, value: str) -> View:
    """Insert the fill value `between` times after every element but the last."""
    place, size, b = view.axes.index(axis), view.shape[axis], t.builder
    name = b.op("Unsqueeze", view.name, b.integers([place + 1]))
    name = _padded(t, name, len(view.stored) + 1, {place + 1: (0, between)}, value)
    whole = size * (between + 1)
    name = t.reshaped(name, [whole if index == place else n for index, n in enumerate(view.stored)])
    name = b.op("Slice", name, *(b.integers([n]) for n in (0, whole - between, place)))
    return _resized(view, {axis: whole - between}, name)


def gather(t: Views, params: Any, x: Sequence[View]) -> View:
    """Rows of a table: `jnp.take(table, indices, axis=0)` with indices that are clipped or known to be in range."""
    table, indices = x
    kept = rows_of_table(t, params, table, indices)
    b = t.builder
    place, zero, high = b.cast(t.materialized(kept), "int64"), np.int64(0), np.int64(table.shape[0] - 1)
    for kind, bound in (("Max", zero), ("Min", high)):
        place = extreme(b, kind, "int64", place, b.constant(bound))
    name = b.op("Gather", t.materialized(table), place, axis=0)
    return View.full(name, table.dtype, (*kept.shape, *table.shape[1:]))


def rows_of_table(t: Views, params: Any, table: View, indices: View) -> View:
    """The indices of the rows that a gather reads. Raises ValueError for any other gather."""
    numbers, mode = params["dimension_numbers"], str(params["mode"])
    rank = len(indices.shape) - 1
    whole = tuple(params["slice_sizes"]) == (1, *table.shape[1:])
    rows = tuple(numbers.start_index_map) == tuple(numbers.collapsed_slice_dims) == (0,) and indices.shape[-1] == 1
    placed = tuple(numbers.offset_dims) == tuple(range(rank, rank + len(table.shape) - 1))
    if not (whole and rows and placed) or "FILL" in mode:
        raise ValueError(f"ONNX: no form for a gather of {params}.")
    return t.reshape(indices, indices.shape[:-1])


def iota(t: Views, params: Any, x: Sequence[View]) -> View:
    """`lax.iota` as one row, which is broadcast."""
    shape, axis, dtype = tuple(params["shape"]), params["dimension"], np.dtype(params["dtype"]).name
    if t.is_free(shape[axis]):
        raise NeedsBatch
    count = "int64" if dtype == "int64" else "int32"
    bounds = (t.builder.constant(np.asarray(n, count)) for n in (0, shape[axis], 1))
    name = t.builder.op("Range", *bounds)
    return View(name if dtype == count else t.builder.cast(name, dtype), dtype, shape, (shape[axis],), (axis,))


def _reduce(op: str) -> Entry:
    def entry(t: Views, params: Any, x: Sequence[View]) -> View:
        axes = tuple(params["axes"])
        view = t.expanded(x[0], axes)
        dtype = view.dtype
        if op != "ReduceSum" and dtype == "int64":
            raise ValueError(f"ONNX: no form for {op} of int64, which ONNX Runtime 1.31 computes wrongly.")
        if op == "ReduceSum" and dtype == "float32":
            raise ValueError("ONNX: no form for a sum of floats, which depends on its order.")
        narrow = dtype in ("int16", "uint16") or (op == "ReduceSum" and dtype in ("int8", "uint8"))
        name = t.builder.cast(view.name, "int32") if narrow else view.name
        if axes:
            places = sorted(view.axes.index(axis) for axis in axes)
            source, over = name, t.builder.integers(places)
            name = t.builder.op(op, source, over, keepdims=0)
            if dtype == "float32":
                name = _with_nans(t, name, source, over)
        left = [axis for axis in view.axes if axis not in axes]
        rank = [axis for axis in range(len(view.shape)) if axis not in axes]
        return View(
            t.builder.cast(name, dtype) if narrow else name,
            dtype,
            tuple(view.shape[axis] for axis in rank),
            tuple(view.size(axis) for axis in left),
            tuple(rank.index(axis) for axis in left),
        )

    return entry


def _with_nans(t: Views, extreme: str, source: str, axes: str) -> str:
    """The extreme, or NaN if the source contains one, because ONNX Runtime 1.31 overlooks NaNs that are not first."""
    b = t.builder
    marks = b.op("Where", b.op("IsNaN", source), b.constant(np.float32(np.nan)), b.constant(np.float32(0)))
    return b.op("Add", extreme, b.op("ReduceSum", marks, axes, keepdims=0))


STRUCTURE: dict[str, Entry] = {
    "transpose": transpose,
    "broadcast_in_dim": broadcast_in_dim,
    "reshape": reshape,
    "squeeze": squeeze,
    "rev": rev,
    "slice": slice_,
    "concatenate": concatenate,
    "stack": stack,
    "pad": pad,
    "gather": gather,
    "iota": iota,
    "reduce_sum": _reduce("ReduceSum"),
    "reduce_max": _reduce("ReduceMax"),
    "reduce_min": _reduce("ReduceMin"),
}
