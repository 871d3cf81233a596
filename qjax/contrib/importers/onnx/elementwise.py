"""Additions, products, clamps, affine steps, averages and concatenation: the operators between two quantizers."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qjax.contrib.importers.onnx.close_quantizer import real_pending
from qjax.contrib.importers.onnx.draft import Grid
from qjax.contrib.importers.onnx.model import OnnxNode
from qjax.contrib.importers.onnx.moves import axis_of, first, known_ints, moved
from qjax.contrib.importers.onnx.products import scaled
from qjax.contrib.importers.onnx.quantizers import shifted
from qjax.contrib.importers.onnx.values import Codes, FloatInput, Known, Move, Pending, Real, Value, Weight, Wrapped
from qjax.contrib.importers.onnx.walk import Walk, handles
from qjax.contrib.importers.onnx.windows import window_of
from qjax.export.read_errors import ReadError
from qjax.ops.windows import inside, pool, product_of_axes
from qjax.support.errors import Unsupported

Inputs = list[Value | None]

MAX_COUNTS = 2**24


def _two(node: OnnxNode, inputs: Inputs) -> tuple[Value, Value]:
    if len(inputs) != 2 or inputs[0] is None or inputs[1] is None:
        raise ReadError(f"{node.title}: expected two inputs.")
    return inputs[0], inputs[1]


@handles("Add", "Sub")
def _add(walk: Walk, node: OnnxNode, inputs: Inputs) -> list[Value]:
    a, b = _two(node, inputs)
    minus = node.op == "Sub"
    if isinstance(a, Wrapped) and isinstance(b, Known) and not minus:
        return [shifted(walk, a, b, node.outputs[0])]
    if isinstance(b, Known) and isinstance(a, Pending):
        return [_offset(walk, node, a, -_numbers(b) if minus else _numbers(b), b.name)]
    if isinstance(a, Known) and isinstance(b, Pending) and not minus:
        return [_offset(walk, node, b, _numbers(a), a.name)]
    return [_elementwise(walk, node, a, b, "add", {"subtract": minus})]


@handles("Mul")
def _mul(walk: Walk, node: OnnxNode, inputs: Inputs) -> list[Value]:
    a, b = _two(node, inputs)
    if isinstance(a, Known) and isinstance(b, Pending):
        a, b = b, a
    if isinstance(b, Known) and isinstance(a, Pending):
        if a.cast:
            grid = walk.draft.grid(a.inputs[0])
            return [scaled(a, _numbers(b), np.float32(1) if grid.scale is None else grid.scale)]
        return [_step(walk, a, "mul", _numbers(b))]
    return [_elementwise(walk, node, a, b, "multiply", {})]


def _numbers(value: Known) -> NDArray[np.float32]:
    if value.type not in ("float32", "float16", "float64"):
        raise Unsupported(f"adds or multiplies a constant of type {value.type}")
    return value.value.astype(np.float32)


def _offset(walk: Walk, node: OnnxNode, value: Pending, number: NDArray[np.float32], name: str) -> Pending:
    if value.kernel is not None and value.bias is None and not value.steps and not value.moves and value.low is None:
        axis = value.channel_axis
        if value.high is None and number.shape and _varies_along(number, axis, value.shape):
            return value.replace(bias=Known(number.reshape(-1), name), floats=(*value.floats, "adds a float bias"))
    return _step(walk, value, "add", number)


def _varies_along(number: np.ndarray, axis: int, shape: tuple[int, ...]) -> bool:
    """Whether numbers vary along one axis of a shape, and only along that one."""
    full = (1,) * (len(shape) - number.ndim) + number.shape
    return all(n == (shape[a] if a == axis else 1) for a, n in enumerate(full))


def _step(walk: Walk, value: Pending, kind: str, number: NDArray[np.float32]) -> Pending:
    if value.cast or value.integers or value.moves or value.low is not None or value.high is not None:
        raise Unsupported(f"an affine step after a clamp or a reshape of {value.name!r} has no form in integers here")
    if value.kernel is None:
        raise Unsupported(f"it combines a float constant with {value.name!r}, which is no product with weights")
    try:
        fits = np.broadcast_shapes(number.shape, value.shape) == value.shape
    except ValueError:
        fits = False
    axis = value.channel_axis
    if not fits or (number.size > 1 and not _varies_along(number, axis, value.shape)):
        raise Unsupported("its constant is not one number per channel")
    return value.replace(steps=(*value.steps, (kind, number)))


@handles("BatchNormalization")
def _batch_norm(walk: Walk, node: OnnxNode, inputs: Inputs) -> list[Value]:
    x, rest = first(node, inputs), inputs[1:]
    if len(rest) != 4 or node.get("training_mode", 0) or not isinstance(x, Pending):
        raise Unsupported("only folds after a product with weights, in inference mode")
    numbers = [value.value.astype(np.float64) for value in rest if isinstance(value, Known)]
    channels = x.shape[1] if len(x.shape) > 1 else 0
    if len(numbers) != 4 or any(n.shape != (channels,) for n in numbers):
        raise Unsupported("its parameters are not four constant vectors of one number per channel")
    gamma, beta, mean, variance = numbers
    if not (variance >= 0).all():
        raise ReadError(f"{node.title}: a variance is negative.")
    factor = gamma / np.sqrt(variance + node.get("epsilon", 1e-5, float))
    shape = (-1, *(1,) * (len(x.shape) - 2))
    scaled_ = _step(walk, x, "mul", factor.astype(np.float32).reshape(shape))
    return [_step(walk, scaled_, "add", (beta - mean * factor).astype(np.float32).reshape(shape))]


def _elementwise(walk: Walk, node: OnnxNode, a: Value, b: Value, op: str, attributes: dict[str, Any]) -> Pending:
    left, right = walk.real(a, "its left operand"), walk.real(b, "its right operand")
    if left.permutation is not None and left.permutation == right.permutation:
        # Both operands have the same transpose, so compute first and transpose the result.
        inner = _pair(walk, node, Real(left.tensor), Real(right.tensor), op, attributes)
        order = left.permutation
        shape = tuple(inner.shape[axis] for axis in order)
        return inner.replace(moves=(Move("transpose", {"permutation": list(order)}, shape, node.outputs[0]),))
    return _pair(walk, node, left, right, op, attributes)


def _pair(walk: Walk, node: OnnxNode, left: Real, right: Real, op: str, attributes: dict[str, Any]) -> Pending:
    names = [walk.plain(left), walk.plain(right)]
    shapes = [walk.draft.shape(name) for name in names]
    try:
        shape = np.broadcast_shapes(*shapes)
    except ValueError:
        raise ReadError(f"{node.title}: {list(shapes[0])} and {list(shapes[1])} do not broadcast.") from None
    if node.op == "Add" and math.prod(shapes[0]) == 1 != math.prod(shapes[1]):
        # The runtime's kernel swaps the operands if the left one has a single element.
        names, shapes = names[::-1], shapes[::-1]
    in_rank = tuple(aligned(walk, name, len(shape)) for name in names)
    return Pending(op, node.outputs[0], tuple(shape), in_rank, attributes)


def aligned(walk: Walk, name: str, rank: int) -> str:
    """The tensor with leading axes of size 1, because the graph's operations need operands of one rank."""
    shape, draft = walk.draft.shape(name), walk.draft
    if len(shape) == rank:
        return name
    full = (1,) * (rank - len(shape)) + shape
    entry = draft.tensors[name]
    if entry.value is not None:
        return draft.constant(draft.fresh(f"{name}/aligned"), entry.value.reshape(full), None, entry.grid)
    reshaped = draft.tensor(draft.fresh(f"{name}/aligned"), full, entry.grid, entry.dtype)
    return draft.node("reshape", (name,), reshaped, {"shape": list(full)})


# ---------------------------------------------------------------------------- clamps


@handles("Relu")
def _relu(walk: Walk, node: OnnxNode, inputs: Inputs) -> list[Value]:
    return [_clamped(walk, node, first(node, inputs), 0.0, None)]


@handles("Clip")
def _clip(walk: Walk, node: OnnxNode, inputs: Inputs) -> list[Value]:
    bounds: list[float | None] = []
    for index, key in ((1, "min"), (2, "max")):
        value = inputs[index] if len(inputs) > index else None
        if value is None:
            bounds.append(node.get(key, None, float))
        elif isinstance(value, Known) and value.value.size == 1 and value.value.dtype.kind == "f":
            bounds.append(float(value.value.reshape(())))
        elif isinstance(value, Weight) and value.codes.size == 1 and value.axis is None:
            code = np.float32(int(value.codes.reshape(())) - int(value.zero_point))
            bounds.append(float(code * np.float32(value.scale)))
        else:
            raise Unsupported("its bounds are not constant numbers")
    low, high = bounds
    if any(bound is not None and math.isnan(bound) for bound in bounds) or (low or 0) > (high or math.inf):
        raise Unsupported(f"clips to [{low}, {high}]")
    return [_clamped(walk, node, first(node, inputs), low, high)]


def _clamped(walk: Walk, node: OnnxNode, x: Value, low: float | None, high: float | None) -> Value:
    if isinstance(x, FloatInput):
        x = Pending("input", x.name, x.shape)
    if isinstance(x, (Real, Weight)):
        x = real_pending(walk, walk.real(x), node.outputs[0])
    if isinstance(x, Codes) or not isinstance(x, Pending) or x.integers or x.cast:
        raise Unsupported("clamps codes or integers; expected it between DequantizeLinear and QuantizeLinear")
    zero = (low is None or low <= 0) and (high is None or high >= 0)
    if not zero and any(move.filling == "zero" for move in x.moves):
        raise Unsupported("clamps padding to another number than zero")
    # min(max(x, a), b): if the bounds cross, the later one decides.
    lows = [bound for bound in (x.low, low) if bound is not None]
    highs = [bound for bound in (x.high, high) if bound is not None]
    found_low, found_high = max(lows, default=None), min(highs, default=None)
    if found_low is not None and found_high is not None and found_low > found_high:
        raise Unsupported("this clip excludes every value that the previous clip allows")
    if x.name == x.last_name and not x.moves and x.op != "input":
        return x.replace(low=found_low, high=found_high, name=node.outputs[0], names=(*x.names, x.name))
    return x.replace(low=found_low, high=found_high, names=(*x.names, node.outputs[0]))


# ---------------------------------------------------------------------------- windows


@handles("MaxPool")
def _max_pool(walk: Walk, node: OnnxNode, inputs: Inputs) -> list[Value]:
    x = first(node, inputs)
    if len(node.outputs) > 1 and node.outputs[1]:
        raise Unsupported("returns indices")
    attributes, shape, order = _pool(walk, node, x)
    if order is None:
        return [moved(walk, node, x, "max_pool", attributes, shape)]
    assert isinstance(x, Real)
    pooled = moved(walk, node, Real(x.tensor), "max_pool", attributes, shape)
    after = [shape[axis] for axis in order]
    return [moved(walk, node, pooled, "transpose", {"permutation": list(order)}, after)]


def _pool(walk: Walk, node: OnnxNode, x: Value) -> tuple[dict[str, Any], tuple[int, ...], tuple[int, ...] | None]:
    """Attributes and shape of a pool over the tensor as it is stored, and the transpose that follows it."""
    shape = walk.shape(x)
    if len(shape) < 3:
        raise ReadError(f"{node.title}: expected at least three axes, got {list(shape)}.")
    window = window_of(node, shape[2:])
    if any(
        max(pair) >= (k - 1) * d + 1 for pair, k, d in zip(window.padding, window.shape, window.dilations, strict=True)
    ):
        raise Unsupported("pads by a whole window")
    rows = pool(
        [1, 1, *window.shape],
        [1, 1, *window.strides],
        [[0, 0], [0, 0], *window.padding],
        window_dilation=[1, 1, *window.dilations],
    )
    after = [*shape[:2], *window.sizes]
    order = x.permutation if isinstance(x, Real) else None
    if order is not None:
        back = [order.index(axis) for axis in range(len(shape))]
        rows = {key: [row[axis] for axis in back] for key, row in rows.items()}
        after = [after[axis] for axis in back]
    return rows, tuple(after), order


@handles("AveragePool")
def _average_pool(walk: Walk, node: OnnxNode, inputs: Inputs) -> list[Value]:
    x = walk.real(first(node, inputs))
    attributes, shape, order = _pool(walk, node, x)
    logical = walk.shape(x)
    window = window_of(node, logical[2:])
    count = np.asarray(math.prod(window.shape), np.int32)
    if any(pair != [0, 0] for pair in window.padding) and not node.get("count_include_pad", 0):
        if math.prod(window.sizes) > MAX_COUNTS or max(logical[2:]) > MAX_COUNTS:
            raise ReadError(f"{node.title}: an average of {window.sizes} places is too large.")
        rows = zip(
            logical[2:], window.sizes, window.shape, window.strides, window.padding, window.dilations, strict=True
        )
        counts = product_of_axes(
            inside(size, places, window=k, stride=stride, low=low, dilation=dilation)
            for size, places, k, stride, (low, _), dilation in rows
        )
        if (counts <= 0).any():
            raise Unsupported("has windows that consist of padding only")
        if counts.min() == counts.max():
            count = np.asarray(counts.max(), np.int32)
        else:
            full = counts.reshape(1, 1, *counts.shape)
            back = range(full.ndim) if order is None else [order.index(axis) for axis in range(full.ndim)]
            count = np.ascontiguousarray(full.transpose(list(back))).astype(np.int32)
    found = Pending("window_sum", node.outputs[0], shape, (x.tensor,), attributes, count=count)
    if order is None:
        return [found]
    after = tuple(shape[axis] for axis in order)
    return [found.replace(moves=(Move("transpose", {"permutation": list(order)}, after, node.outputs[0]),))]


@handles("GlobalAveragePool")
def _global_average(walk: Walk, node: OnnxNode, inputs: Inputs) -> list[Value]:
    x = walk.real(first(node, inputs))
    return [_mean(walk, node, x, list(range(2, len(walk.shape(x)))), True, ())]


@handles("ReduceMean")
def _reduce_mean(walk: Walk, node: OnnxNode, inputs: Inputs) -> list[Value]:
    x = walk.real(first(node, inputs))
    rank = len(walk.shape(x))
    axes = known_ints(node, inputs, 1, "axes")
    if not axes and node.get("noop_with_empty_axes", 0):
        return [x]
    chosen = sorted(axis_of(node, axis, rank) for axis in axes or range(rank))
    why = "ReduceMean adds in floats, in an order of its own; GlobalAveragePool is computed on codes"
    return [_mean(walk, node, x, chosen, node.get("keepdims", 1) != 0, (why,))]


def _mean(walk: Walk, node: OnnxNode, x: Real, axes: list[int], keep: bool, floats: tuple[str, ...]) -> Pending:
    shape = walk.shape(x)
    source = x.tensor
    rest = [axis for axis in range(len(shape)) if axis not in axes]
    summed = list(axes)
    if x.permutation is not None:
        kept = [x.permutation[axis] for axis in rest]
        if kept == sorted(kept):
            summed = sorted(x.permutation[axis] for axis in axes)
        else:
            source = walk.plain(x)
    count = math.prod(shape[axis] for axis in axes)
    if not 0 < count < 2**31:
        raise ReadError(f"{node.title}: an average of {count} elements.")
    result = tuple(shape[axis] for axis in rest)
    whole = tuple(1 if axis in axes else n for axis, n in enumerate(shape)) if keep else None
    attributes = {"axes": summed}
    return Pending(
        "sum", node.outputs[0], result, (source,), attributes,
        count=np.asarray(count, np.int32), floats=floats, keepdims=whole,
    )  # fmt: skip


@handles("Concat")
def _concat(walk: Walk, node: OnnxNode, inputs: Inputs) -> list[Value]:
    if any(value is None for value in inputs) or "axis" not in node.attributes:
        raise ReadError(f"{node.title}: expected operands and an axis.")
    if all(isinstance(value, Codes) for value in inputs):
        return [_concatenate_codes(walk, node, [value for value in inputs if isinstance(value, Codes)])]
    parts = tuple(walk.real(value, f"its input {index}") for index, value in enumerate(inputs))
    shapes = [walk.shape(part) for part in parts]
    axis, shape = _concatenated(node, shapes)
    grids = [walk.draft.grid(part.tensor) for part in parts]
    shared = grids[0] if all(grid.same(grids[0]) for grid in grids) else None
    attributes = {"axis": axis}
    return [
        Pending("concatenate", node.outputs[0], shape, (), attributes, parts=parts, write=_side_by_side, grid=shared)
    ]


def _side_by_side(walk: Walk, value: Pending, name: str, grid: Grid, clamps: dict[str, str]) -> str:
    """Concatenated codes, each requantized to the output's parameters first if it has others."""
    draft = walk.draft
    inputs: list[str] = []
    for index, part in enumerate(value.parts):
        source = walk.plain(part)
        if not draft.grid(source).same(grid):
            rescaled = draft.tensor(draft.fresh(f"{name}/input{index}"), draft.shape(source), grid)
            source = draft.node("rescale", (source,), rescaled, {})
        inputs.append(source)
    if not clamps:
        draft.tensor(name, value.shape, grid)
        return draft.node("concatenate", tuple(inputs), name, value.attributes)
    joined = draft.tensor(draft.fresh(f"{name}/joined"), value.shape, grid)
    draft.node("concatenate", tuple(inputs), joined, value.attributes)
    draft.tensor(name, value.shape, grid)
    return draft.node("clamp", (joined,), name, {}, clamps)


def _concatenate_codes(walk: Walk, node: OnnxNode, values: list[Codes]) -> Codes:
    """Concatenated codes, unchanged, which must have the same quantization parameters."""
    draft = walk.draft
    grids = [draft.grid(value.tensor) for value in values]
    known = next((grid for grid in grids if grid.scale is not None), None)
    if known is None:
        raise Unsupported("concatenates codes whose scale and zero point no quantizer defines")
    for value, grid in zip(values, grids, strict=True):
        if grid.scale is None:
            grid.scale, grid.zero_point = known.scale, known.zero_point
        if not grid.same(known):
            raise Unsupported(
                f"concatenates codes of two grids ({value.tensor!r} has another scale or zero point than the first)"
            )
    axis, shape = _concatenated(node, [draft.shape(value.tensor) for value in values])
    draft.tensor(node.outputs[0], shape, known)
    inputs = tuple(value.tensor for value in values)
    return Codes(draft.node("concatenate", inputs, node.outputs[0], {"axis": axis}))


def _concatenated(node: OnnxNode, shapes: list[tuple[int, ...]]) -> tuple[int, tuple[int, ...]]:
    rank = len(shapes[0])
    axis = axis_of(node, node.get("axis", 0), rank)
    rests = {(len(shape), *shape[:axis], *shape[axis + 1 :]) for shape in shapes}
    if len(rests) != 1:
        raise ReadError(f"{node.title}: {[list(shape) for shape in shapes]} cannot be concatenated.")
    total = sum(shape[axis] for shape in shapes)
    return axis, tuple(total if a == axis else n for a, n in enumerate(shapes[0]))
