"""Choices: comparisons, masks, Where, maxima of tensors, the index of the greatest, elements selected by indices.

All are exact on codes: DequantizeLinear and QuantizeLinear preserve the order, so the greater of two tensors may be
taken after their requantization.
"""

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qjax.contrib.importers.onnx.draft import Grid
from qjax.contrib.importers.onnx.elementwise import aligned
from qjax.contrib.importers.onnx.model import OnnxNode
from qjax.contrib.importers.onnx.moves import axis_of, first
from qjax.contrib.importers.onnx.tensors import code_range
from qjax.contrib.importers.onnx.values import Codes, Known, Pending, Real, Value, Weight
from qjax.contrib.importers.onnx.walk import Walk, handles
from qjax.export.read_errors import ReadError
from qjax.support.errors import Unsupported

Inputs = list[Value | None]

_NEVER = 2**20
"""A number that no code equals."""


def _given(node: OnnxNode, inputs: Inputs, count: int) -> list[Value]:
    if len(inputs) != count or any(value is None for value in inputs):
        raise ReadError(f"{node.title}: expected {count} inputs.")
    return [value for value in inputs if value is not None]


def _broadcast(node: OnnxNode, shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    try:
        return tuple(np.broadcast_shapes(*shapes))
    except ValueError:
        raise ReadError(f"{node.title}: {[list(shape) for shape in shapes]} do not broadcast.") from None


def is_integers(walk: Walk, value: Value) -> bool:
    """Whether a value is plain integers or booleans, not codes."""
    if isinstance(value, Known):
        return value.value.dtype.kind in "biu"
    return isinstance(value, Codes) and walk.draft.tensors[value.tensor].grid is None


def integers(walk: Walk, node: OnnxNode, value: Value, kind: str) -> str:
    """The tensor of integers ("int32") or booleans ("bool")."""
    if isinstance(value, Known) and value.value.dtype.kind in "biu":
        numbers = value.value
        if kind == "int32" and numbers.size and not -(2**31) <= int(numbers.min()) <= int(numbers.max()) < 2**31:
            raise Unsupported(f"the constant {value.name!r} has integers beyond 32 bits")
        return walk.draft.constant(value.name or walk.draft.fresh(f"{node.outputs[0]}/constant"), numbers.astype(kind))
    if isinstance(value, Codes) and walk.draft.tensors[value.tensor].dtype == kind:
        return value.tensor
    raise Unsupported(f"expected {kind}, got other values")


def result(walk: Walk, node: OnnxNode, op: str, operands: tuple[str, ...], kind: str, **known: Any) -> Codes:
    """A node whose result is integers or booleans."""
    shape = known.pop("shape")
    constants = known.pop("constants", {})
    walk.draft.tensor(node.outputs[0], shape, None, kind)
    return Codes(walk.draft.node(op, operands, node.outputs[0], known, constants))


# ---------------------------------------------------------------------------- masks

_FUNCTIONS = {"Greater": "gt", "GreaterOrEqual": "ge", "Less": "lt", "LessOrEqual": "le", "Equal": "eq"}
_SWAPPED = {"gt": "lt", "ge": "le", "lt": "gt", "le": "ge", "eq": "eq"}


@handles(*_FUNCTIONS)
def _compare(walk: Walk, node: OnnxNode, inputs: Inputs) -> list[Value]:
    a, b = _given(node, inputs, 2)
    function = _FUNCTIONS[node.op]
    if is_integers(walk, a) and is_integers(walk, b):
        kinds = {walk.draft.tensors[v.tensor].dtype for v in (a, b) if isinstance(v, Codes)}
        operands = [integers(walk, node, value, kinds.pop() if len(kinds) == 1 else "int32") for value in (a, b)]
        shape = _broadcast(node, [walk.draft.shape(name) for name in operands])
        names = tuple(aligned(walk, name, len(shape)) for name in operands)
        return [result(walk, node, "compare", names, "bool", function=function, shape=shape)]
    if isinstance(a, Known):
        a, b, function = b, a, _SWAPPED[function]
    x = walk.plain(walk.real(a))
    grid = walk.draft.grid(x)
    if isinstance(b, Known):
        shape = _broadcast(node, [walk.draft.shape(x), b.value.shape])
        if shape != walk.draft.shape(x):
            raise Unsupported("compares with a constant of a larger shape")
        function, bounds = _thresholds(function, b.value.astype(np.float32), grid)
        held = {"right": walk.draft.constant(walk.draft.fresh(f"{node.outputs[0]}/right"), bounds)}
        return [result(walk, node, "compare", (x,), "bool", function=function, shape=shape, constants=held)]
    y = walk.plain(walk.real(b))
    if not grid.same(walk.draft.grid(y)):
        raise Unsupported("compares codes with different scales or zero points; give both one quantizer")
    shape = _broadcast(node, [walk.draft.shape(name) for name in (x, y)])
    names = tuple(aligned(walk, name, len(shape)) for name in (x, y))
    return [result(walk, node, "compare", names, "bool", function=function, shape=shape)]


def _thresholds(function: str, numbers: NDArray[np.float32], grid: Grid) -> tuple[str, NDArray[np.int32]]:
    """The comparison of codes that equals a comparison of their float32 values with constants."""
    if np.isnan(numbers).any():
        raise Unsupported("compares with NaN")
    low, high = code_range(grid.dtype)
    scale = np.float32(1 if grid.scale is None else grid.scale)
    reals = (np.arange(low, high + 1) - grid.zero_point).astype(np.float32) * scale
    # The first code whose value is greater than the number ("gt", "le"), or at least the number.
    first_beyond = np.searchsorted(reals, numbers, side="right" if function in ("gt", "le") else "left")
    bounds = first_beyond + low
    if function == "eq":
        bounds = np.where(reals[np.minimum(first_beyond, high - low)] == numbers, bounds, _NEVER)
    way = {"gt": "ge", "ge": "ge", "lt": "lt", "le": "lt", "eq": "eq"}[function]
    return way, np.asarray(bounds, np.int32)


@handles("And", "Or", "Xor", "Not")
def _logic(walk: Walk, node: OnnxNode, inputs: Inputs) -> list[Value]:
    operands = [integers(walk, node, value, "bool") for value in _given(node, inputs, 1 if node.op == "Not" else 2)]
    shape = _broadcast(node, [walk.draft.shape(name) for name in operands])
    names = tuple(aligned(walk, name, len(shape)) for name in operands)
    return [result(walk, node, "logic", names, "bool", function=node.op.lower(), shape=shape)]


@handles("Where")
def _where(walk: Walk, node: OnnxNode, inputs: Inputs) -> list[Value]:
    mask, on, off = _given(node, inputs, 3)
    which = integers(walk, node, mask, "bool")
    if is_integers(walk, on) and is_integers(walk, off):
        operands = [which, *(integers(walk, node, value, "int32") for value in (off, on))]
        shape = _broadcast(node, [walk.draft.shape(name) for name in operands])
        names = tuple(aligned(walk, name, len(shape)) for name in operands)
        return [result(walk, node, "select", names, "int32", shape=shape)]
    return [_of_parts(walk, node, "select", (off, on), which, {}, broadcasts=True)]


@handles("Max", "Min")
def _extremum(walk: Walk, node: OnnxNode, inputs: Inputs) -> list[Value]:
    values = _given(node, inputs, len(inputs))
    if not values:
        raise ReadError(f"{node.title}: expected an input.")
    found = values[0]
    for index, other in enumerate(values[1:]):
        last = index == len(values) - 2
        name = node.outputs[0] if last else walk.draft.fresh(f"{node.outputs[0]}/{index}")
        inner = dataclasses.replace(node, outputs=(name,))
        if index:
            assert isinstance(found, Pending)
            if found.grid is None:
                raise Unsupported("takes more than two operands with different scales or zero points")
        found = _of_parts(
            walk, inner, "extremum", (found, other), None, {"function": node.op.lower()}, broadcasts=False
        )
    return [found]


def _of_parts(
    walk: Walk,
    node: OnnxNode,
    op: str,
    values: tuple[Value, ...],
    mask: str | None,
    attributes: dict[str, Any],
    *,
    broadcasts: bool,
) -> Pending:
    """A choice between values on grids, possibly with constant numbers among them, for the grid of a later quantizer.

    broadcasts: whether a constant may have a larger shape than the codes.
    """
    parts = tuple(value if isinstance(value, Known) else walk.real(value) for value in values)
    names = [walk.plain(part) for part in parts if isinstance(part, Real)]
    shapes = [part.value.shape if isinstance(part, Known) else walk.shape(part) for part in parts]
    shape = _broadcast(node, [*shapes, *([walk.draft.shape(mask)] if mask is not None else [])])
    if not names or any(isinstance(part, Known) and part.value.dtype.kind != "f" for part in parts):
        raise Unsupported("its operands are neither quantized tensors nor constant numbers")
    if not broadcasts and len(names) < len(parts) and walk.draft.shape(names[0]) != shape:
        raise Unsupported("combines codes with a constant of a larger shape")
    first_grid = walk.draft.grid(names[0])
    shared = all(walk.draft.grid(name).same(first_grid) for name in names) and len(names) == len(parts)
    own = tuple(part if isinstance(part, Known) else Real(walk.plain(part)) for part in parts)
    return Pending(
        op, node.outputs[0], shape, tuple(names), {**attributes, "mask": mask},
        parts=own, write=_write_choice, grid=first_grid if shared else None,
    )  # fmt: skip


def _write_choice(walk: Walk, value: Pending, name: str, grid: Grid, clamps: dict[str, str]) -> str:
    """Bring every operand to the grid of the result, then choose among codes."""
    draft, rank = walk.draft, len(value.shape)
    own = name if not clamps else draft.fresh(f"{name}/{value.op}")
    attributes = dict(value.attributes)
    mask = attributes.pop("mask")
    inputs = [aligned(walk, mask, rank)] if mask is not None else []
    constants: dict[str, str] = {}
    roles = ("off", "on") if mask is not None else ("value", "value")
    for index, part in enumerate(value.parts):
        if isinstance(part, Known):
            constants[roles[index]] = draft.constant(draft.fresh(f"{own}/{roles[index]}"), grid.codes(part.value))
            continue
        source = aligned(walk, part.tensor, rank)
        inputs.append(on_grid(walk, source, grid, f"{own}/input{index}"))
    draft.tensor(own, value.shape, grid)
    draft.node(value.op, tuple(inputs), own, attributes, constants)
    return clamped(walk, own, name, grid, clamps)


def on_grid(walk: Walk, source: str, grid: Grid, name: str) -> str:
    """A tensor requantized to another grid, or the tensor itself if it has that grid already."""
    if walk.draft.grid(source).same(grid):
        return source
    rescaled = walk.draft.tensor(walk.draft.fresh(name), walk.draft.shape(source), grid)
    return walk.draft.node("rescale", (source,), rescaled, {})


def clamped(walk: Walk, source: str, name: str, grid: Grid, clamps: dict[str, str]) -> str:
    """A clamp of codes after a node that cannot have one itself."""
    if not clamps:
        return source
    walk.draft.tensor(name, walk.draft.shape(source), grid)
    return walk.draft.node("clamp", (source,), name, {}, clamps)


# ---------------------------------------------------------------------------- places


@handles("ArgMax", "ArgMin")
def _argument(walk: Walk, node: OnnxNode, inputs: Inputs) -> list[Value]:
    value = first(node, inputs)
    if node.get("select_last_index", 0):
        raise Unsupported("takes the last of equal elements; the first is read")
    x = value.tensor if isinstance(value, Codes) else walk.plain(walk.real(value))
    shape = walk.draft.shape(x)
    axis = axis_of(node, node.get("axis", 0), len(shape))
    rest = tuple(n for a, n in enumerate(shape) if a != axis)
    keep = node.get("keepdims", 1) != 0
    name = node.outputs[0] if not keep else walk.draft.fresh(f"{node.outputs[0]}/place")
    inner = dataclasses.replace(node, outputs=(name,))
    found = result(walk, inner, "argument", (x,), "int32", function=node.op.lower(), axis=axis, shape=rest)
    if not keep:
        return [found]
    kept = [1 if a == axis else n for a, n in enumerate(shape)]
    walk.draft.tensor(node.outputs[0], tuple(kept), None)
    return [Codes(walk.draft.node("reshape", (found.tensor,), node.outputs[0], {"shape": kept}))]


@handles("Gather")
def _gather(walk: Walk, node: OnnxNode, inputs: Inputs) -> list[Value]:
    x, indices = _given(node, inputs, 2)
    axis = axis_of(node, node.get("axis", 0), len(walk.shape(x)))
    if isinstance(x, Weight) and isinstance(indices, Codes) and axis == 0:
        positions = integers(walk, node, indices, "int32")
        kernel = walk.constant(x)
        rows = (*walk.draft.shape(positions), *walk.shape(x)[1:])
        grid = walk.draft.grid(kernel)
        return [Pending("embed", node.outputs[0], rows, (positions,), table=kernel, write=_write_lookup, grid=grid)]
    if isinstance(x, Pending):
        x = walk.real(x)
    return [picked(walk, node, x, axis, indices)]


def _write_lookup(walk: Walk, value: Pending, name: str, grid: Grid, clamps: dict[str, str]) -> str:
    """Rows of a table on the table's own grid, requantized afterwards if the result has another grid."""
    draft = walk.draft
    assert value.table is not None
    own = draft.grid(value.table)
    same = own.same(grid) and not clamps
    rows = draft.tensor(name if same else draft.fresh(f"{name}/rows"), value.shape, own)
    draft.node("embed", value.inputs, rows, {"wraps": True}, {"kernel": value.table})
    if same:
        return rows
    draft.tensor(name, value.shape, grid)
    return draft.node("clamp" if own.same(grid) else "rescale", (rows,), name, {}, clamps)


def picked(walk: Walk, node: OnnxNode, x: Value, axis: int, indices: Value) -> Value:
    """Elements at indices along an axis, which is replaced by the axes of the indices."""
    before = walk.shape(x)
    size = before[axis]
    if isinstance(indices, Known) and indices.value.dtype.kind == "i":
        numbers = np.where(indices.value < 0, indices.value + size, indices.value)
        if numbers.size and not 0 <= int(numbers.min()) <= int(numbers.max()) < size:
            raise ReadError(f"{node.title}: an index is none of {size}.")
        name = walk.draft.fresh(f"{node.outputs[0]}/indices")
        places, count = walk.draft.constant(name, numbers.astype(np.int32)[..., None]), numbers.ndim
    else:
        given = integers(walk, node, indices, "int32")
        shape = walk.draft.shape(given)
        places = walk.draft.tensor(walk.draft.fresh(f"{given}/places"), (*shape, 1), None)
        walk.draft.node("reshape", (given,), places, {"shape": [*shape, 1]})
        count = len(shape)
    after = (*before[:axis], *walk.draft.shape(places)[:-1], *before[axis + 1 :])
    attributes = {"axis": axis, "places": list(range(axis, axis + count)), "wraps": True}
    if isinstance(x, Codes):
        entry = walk.draft.tensors[x.tensor]
        walk.draft.tensor(node.outputs[0], after, entry.grid, entry.dtype)
        return Codes(walk.draft.node("take", (x.tensor, places), node.outputs[0], attributes))
    source = walk.plain(walk.real(x))
    grid = walk.draft.grid(source)
    return Pending("take", node.outputs[0], after, (source, places), attributes, write=_write_take, grid=grid)


def _write_take(walk: Walk, value: Pending, name: str, grid: Grid, clamps: dict[str, str]) -> str:
    draft, source = walk.draft, value.inputs[0]
    same = draft.grid(source).same(grid)
    own = name if same and not clamps else draft.fresh(f"{name}/take")
    draft.tensor(own, value.shape, draft.grid(source))
    draft.node("take", value.inputs, own, dict(value.attributes))
    if same:
        return clamped(walk, own, name, grid, clamps)
    draft.tensor(name, value.shape, grid)
    return draft.node("rescale", (own,), name, {}, clamps)
