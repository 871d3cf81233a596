"""Writes the nodes of a graph that are operations of ONNX Runtime on codes; each function returns whether it could.

A function returns False if the runtime has no kernel on codes for the node (another dtype of the result, unsupported
axes). The node is then written as a function of integers.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from qjax.export.emit.onnx.codes import CODES, Operand, Runtime, fits
from qjax.export.emit.onnx.codes_writer import CodesWriter
from qjax.export.emit.onnx.functions import softmax, table
from qjax.export.emit.onnx.views import View
from qjax.export.emit.onnx.weights import bias_of, weight_of
from qjax.graph.ir import Node
from qjax.ops.formulas.requantized import scaled
from qjax.ops.windows import inside, product_of_axes

_MAX_PLACES = 2**24

Written = Callable[[CodesWriter, Node], bool]


def _inputs(w: CodesWriter, node: Node) -> list[View]:
    return [w.value(name) for name in node.inputs]


def _flat(w: CodesWriter, name: str, order: Sequence[int], shape: Sequence[int]) -> Operand | None:
    """A tensor with its axes in that order, in another shape; None if two sizes are free."""
    view = w.in_order(w.value(name), tuple(order))
    if tuple(shape) == view.stored:
        return w.operand(name, view)
    dims = w.dims(shape)
    if dims is None or 0 in dims:
        return None
    target = w.shape(dims)
    # one for all readers, so that it has only one unsigned form
    key = (view.name, target)
    if key not in w.flat:
        w.flat[key] = w.add("Reshape", [view.name, target], w.fresh(f"{view.name}/flat"))
    return Operand(w.flat[key], w.scale(name), w.zero_point(name))


# ---------------------------------------------------------------------------- products with weights


def _conv(w: CodesWriter, node: Node) -> bool:
    known = node.attributes
    lhs, rhs, out = (known[f"{side}_layout"] for side in ("lhs", "rhs", "out"))
    inside = all(n >= 0 for pair in known["padding"] for n in pair)
    plain = all(n == 1 for n in known["lhs_dilation"]) and inside and 1 <= len(known["strides"]) <= 3
    if known["rule"] != w.runtime.rule or not plain or not fits(w.graph, node) or known.get("permutation") is not None:
        return False
    if known["channels"] != [[out[1], rhs[0]]]:
        return False
    kernel = w.graph.tensors[node.constants["kernel"]]
    shape = [n for n in kernel.shape if n is not None]
    ordered = [shape[axis] for axis in rhs]
    weight = w.runtime.weight_of(w, node, tuple(rhs), ordered, (rhs[0],), 0)
    bias = None if weight is None else w.runtime.bias_of(w, node, weight, tuple(out), (out[1],), (ordered[0],))
    if weight is None or bias is None:
        return False
    x = w.in_order(w.value(node.inputs[0]), tuple(lhs))
    return w.write(
        node,
        out,
        "Conv",
        [w.factor(node.inputs[0], w.operand(node.inputs[0], x)), weight],
        bias,
        unsigned=w.moves_to_unsigned(node),
        kernel_shape=ordered[2:],
        strides=list(known["strides"]),
        dilations=list(known["rhs_dilation"]),
        pads=[pair[side] for side in (0, 1) for pair in known["padding"]],
        group=known["groups"],
    )


def _dot(w: CodesWriter, node: Node) -> bool:
    if node.attributes["weight"] is None:
        return _matmul(w, node)
    known = node.attributes
    if known["rule"] != w.runtime.rule or known["weight"] != 1 or known["lhs_batch"] or not fits(w.graph, node):
        return False
    shape, kernel = w.sizes(node.inputs[0]), w.sizes(node.constants["kernel"])
    lc, rc = known["lhs_contracting"], known["rhs_contracting"]
    left = [axis for axis in range(len(shape)) if axis not in lc]
    free = [axis for axis in range(len(kernel)) if axis not in rc]
    m, k, n = (math.prod(sizes[axis] for axis in axes) for sizes, axes in ((shape, left), (shape, lc), (kernel, free)))
    rank = len(left) + len(free)
    result = [shape[axis] for axis in left] + [kernel[axis] for axis in free]
    order = _raw_order(known["permutation"], rank)
    back = None if rank == 2 and len(left) == 1 else w.dims(result)
    if not k * n or (back is None and not (rank == 2 and len(left) == 1)):
        return False
    if back is not None and (0 in back or w.dims([m, k]) is None):
        return False
    weight = w.runtime.weight_of(w, node, (*rc, *free), [k, n], tuple(free), 1)
    sizes = tuple(kernel[axis] for axis in free)
    bias = None if weight is None else w.runtime.bias_of(w, node, weight, order, order[len(left) :], sizes)
    x = None if bias is None else _flat(w, node.inputs[0], (*left, *lc), (m, k))
    if weight is None or bias is None or x is None:
        return False
    # Gemm rather than MatMul: the runtime fuses its bias, and int8 codes, without a session option
    x = w.factor(node.inputs[0], x)
    return w.write(node, order, "Gemm", [x, weight], bias, back, unsigned=w.moves_to_unsigned(node))


def _raw_order(permutation: Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """For each axis of `lax.dot_general`, the axis of the result."""
    if permutation is None:
        return tuple(range(rank))
    return tuple(list(permutation).index(axis) for axis in range(rank))


def _matmul(w: CodesWriter, node: Node) -> bool:
    known = node.attributes
    if known.get("formula") != "float32/f32" or not fits(w.graph, node):
        return False
    shapes = [w.sizes(name) for name in node.inputs]
    summed, batch = ([known[f"{side}_{kind}"] for side in ("lhs", "rhs")] for kind in ("contracting", "batch"))
    free = [
        [axis for axis in range(len(shape)) if axis not in (*summed[i], *batch[i])] for i, shape in enumerate(shapes)
    ]

    def axes(first: int) -> list[tuple[int, ...]]:
        """The orders of the axes of MatMul's first operand and of its second."""
        second = 1 - first
        return [(*batch[first], *free[first], *summed[first]), (*batch[second], *summed[second], *free[second])]

    # sums are exact, so the operands may be exchanged to move fewer codes
    moved = [
        sum(_count_moved_codes(w, node.inputs[i], order) for i, order in zip((side, 1 - side), axes(side), strict=True))
        for side in (0, 1)
    ]
    first = int(moved[1] < moved[0])
    second = 1 - first
    counts = [[math.prod(shapes[i][a] for a in part[i]) for part in (free, summed)] for i in (0, 1)]
    leading = [shapes[0][a] for a in batch[0]]
    sizes = [[*leading, *counts[first]], [*leading, *counts[second][::-1]]]
    result = [*leading, *(shapes[i][a] for i in (first, second) for a in free[i])]
    raw = _raw_order(known["permutation"], len(result))
    parts = {0: raw[len(leading) : len(leading) + len(free[0])], 1: raw[len(leading) + len(free[0]) :]}
    order = (*raw[: len(leading)], *parts[first], *parts[second])
    plain = len(free[0]) == len(free[1]) == 1
    back = None if plain else w.dims(result)
    if 0 in (*result, *sizes[0]) or (back is None and not plain) or any(w.dims(s) is None for s in sizes):
        return False
    names = [node.inputs[first], node.inputs[second]]
    operands = [_flat(w, *given) for given in zip(names, axes(first), sizes, strict=True)]
    if operands[0] is None or operands[1] is None:
        return False
    if "factor" in known:
        # the graph's first operand, wherever it is in MatMul
        quantization = w.graph.tensors[node.inputs[0]].quantization
        assert quantization is not None
        scale = scaled(np.asarray(quantization.scale, np.float32).reshape(()), known["factor"])
        of = operands[first]
        assert of is not None
        operands[first] = dataclasses.replace(of, scale=w.stored(f"{node.output}/scaled", scale))
    factors = [w.factor(name, x) for name, x in zip(names, operands, strict=True) if x is not None]
    return w.write(node, order, "MatMul", factors, None, back, unsigned=w.moves_to_unsigned(node))


def _count_moved_codes(w: CodesWriter, name: str, order: Sequence[int]) -> int:
    """How many codes a Transpose to an axis order moves; axes of size 1 do not count."""
    sizes = w.sizes(name)
    stored, wanted = ([axis for axis in axes if sizes[axis] != 1] for axes in (w.value(name).axes, order))
    return 0 if stored == wanted else math.prod(sizes)


# ---------------------------------------------------------------------------- operations without weights


def _common(w: CodesWriter, node: Node) -> tuple[list[Operand], tuple[int, ...]]:
    """The operands in one axis order: the first that is not the graph's own."""
    views = _inputs(w, node)
    plain = tuple(range(len(views[0].axes)))
    order = next((view.axes for view in views if view.axes != plain), plain)
    return [w.operand(n, w.in_order(v, order)) for n, v in zip(node.inputs, views, strict=True)], order


def _add(w: CodesWriter, node: Node) -> bool:
    formula = node.attributes.get("formula", "")
    if formula == "onnx_float_add":
        if not fits(w.graph, node, wide=True):
            return False
        operands, order = _common(w, node)
        return w.write(node, order, "Sub" if node.attributes.get("subtract") else "Add", operands)
    if (
        formula != w.runtime.formulas["add"]
        or not fits(w.graph, node)
        or (formula == "onnx_add" and _exchanges(w, node))
    ):
        return False
    operands, order = _common(w, node)
    return w.write(node, order, "Add", operands)


def _exchanges(w: CodesWriter, node: Node) -> bool:
    """Whether the kernel of QLinearAdd exchanges its operands, which it does if the left one is a single element."""
    left, right = (
        math.prod(1 if w.free is not None and n % w.free == 0 else n for n in w.sizes(name)) for name in node.inputs
    )
    return left == 1 and w.sizes(node.inputs[0]) != w.sizes(node.inputs[1]) and (right != 1 or w.free is not None)


def _multiply(w: CodesWriter, node: Node) -> bool:
    if node.attributes.get("formula", "") != w.runtime.formulas["multiply"] or not fits(w.graph, node):
        return False
    operands, order = _common(w, node)
    return w.write(node, order, "Mul", operands)


def _rescale(w: CodesWriter, node: Node) -> bool:
    if node.attributes.get("formula", "") != w.runtime.formulas["rescale"] or not fits(w.graph, node, wide=True):
        return False
    (view,) = _inputs(w, node)
    return w.write(node, view.axes, None, [w.operand(node.inputs[0], view)])


def _mean(w: CodesWriter, node: Node) -> bool:
    """Write an average over axes as one over the last two, of an image with one channel per remaining element."""
    if node.attributes.get("formula", "") != w.runtime.formulas["mean"] or not fits(w.graph, node):
        return False
    (name,) = node.inputs
    sizes, view = w.sizes(name), w.value(name)
    summed = sorted(node.attributes["axes"])
    kept = [axis for axis in range(len(sizes)) if axis not in summed]
    # channels-first images already have the right order
    order = (*kept, *summed)
    place = tuple(kept.index(axis) for axis in kept)
    if len(kept) > 1 and sorted(view.axes[: len(kept)]) == kept:
        order, place = view.axes, tuple(kept.index(axis) for axis in view.axes[: len(kept)])
    first = sizes[order[0]] if kept else 1
    shape = (first, math.prod(sizes[a] for a in kept if a != order[0]), math.prod(sizes[a] for a in summed), 1)
    if len(kept) == 2 and len(summed) in (1, 2, 3):
        shape = tuple(sizes[axis] for axis in order)
    back = w.dims([sizes[a] for a in order[: len(kept)]])
    if 0 in sizes or back is None or w.dims(shape) is None:
        return False
    x = _flat(w, name, order, shape)
    return x is not None and w.write(node, place, "GlobalAveragePool", [x], None, back)


# ---------------------------------------------------------------------------- windows


def channels_first(view: View, known: Any) -> tuple[int, ...] | None:
    """An axis order in which the window does not cover the first two axes; the stored order, if it qualifies."""

    def alone(axis: int) -> bool:
        return known["window"][axis] == known["strides"][axis] == 1 and list(known["padding"][axis]) == [0, 0]

    rank = len(view.axes)
    if not 3 <= rank <= 5 or any(n != 1 for n in known["base_dilation"]):
        return None
    last = (0, rank - 1, *range(1, rank - 1))
    for order in (view.axes, tuple(range(rank)), last):
        if alone(order[0]) and alone(order[1]):
            return order
    return None


def _pool(known: Any, order: Sequence[int]) -> dict[str, Any]:
    spatial = order[2:]
    pads = [known["padding"][axis] for axis in spatial]
    return {
        "kernel_shape": [known["window"][axis] for axis in spatial],
        "strides": [known["strides"][axis] for axis in spatial],
        "pads": [pair[side] for side in (0, 1) for pair in pads],
    }


def _within(known: Any) -> bool:
    """Whether no window consists of padding only."""
    rows = zip(known["padding"], known["window"], known["window_dilation"], strict=True)
    return all(min(pair) >= 0 and max(pair) < (k - 1) * d + 1 for pair, k, d in rows)


def _average_pool(w: CodesWriter, node: Node) -> bool:
    known = node.attributes
    (view,) = _inputs(w, node)
    order = channels_first(view, known)
    plain = known.get("formula", "") == w.runtime.formulas["average_pool"] and all(
        n == 1 for n in known["window_dilation"]
    )
    if order is None or not plain or not _within(known) or not fits(w.graph, node) or "count" not in node.constants:
        return False
    count = np.asarray(w.graph.constant(node, "count"))
    whole = math.prod(known["window"])
    padded = any(n for pair in known["padding"] for n in pair)
    include = 1 if padded and count.size == 1 and int(count.reshape(())) == whole else 0
    if not include and not _counts(w, node, count):
        return False
    x = w.operand(node.inputs[0], w.in_order(view, order))
    return w.write(node, order, "AveragePool", [x], count_include_pad=include, **_pool(known, order))


def _counts(w: CodesWriter, node: Node, count: np.ndarray) -> bool:
    """Whether every average counts the elements of its window that lie inside of the image."""
    known, sizes = node.attributes, w.sizes(node.inputs[0])
    if math.prod(n for n, k in zip(w.sizes(node.output), known["window"], strict=True) if k > 1) > _MAX_PLACES:
        return False
    rows = zip(known["window"], known["strides"], known["padding"], sizes, w.sizes(node.output), strict=True)
    found = product_of_axes(
        inside(size, places, window=window, stride=stride, low=low) if window > 1 else np.ones(1, np.int64)
        for window, stride, (low, _), size, places in rows
    )
    try:
        return bool(np.array_equal(np.broadcast_to(count, found.shape), found))
    except ValueError:
        return False


def _max_pool(w: CodesWriter, node: Node) -> bool:
    """MaxPool, which exists for codes of 8 bits; its padding is lower than every code."""
    known = node.attributes
    (view,) = _inputs(w, node)
    order = channels_first(view, known)
    tensor = w.graph.tensors[node.output]
    if order is None or not _within(known) or tensor.dtype not in CODES:
        return False
    x = w.in_order(view, order)
    name = w.place(node.output, order)
    dilations = [known["window_dilation"][axis] for axis in order[2:]]
    codes = w.unsigned_of(x.name)
    result = name if codes is None else w.fresh(f"{node.output}/unsigned")
    w.add("MaxPool", [codes or x.name], result, name=node.name, dilations=dilations, **_pool(known, order))
    if codes is not None:
        w.lower(result, name)
    w.placed(node.output, View.full(name, tensor.dtype, w.sizes(node.output), order))
    return True


OPERATIONS: dict[str, Written] = {
    "conv": _conv,
    "dot": _dot,
    "add": _add,
    "multiply": _multiply,
    "rescale": _rescale,
    "sum": _mean,
    "window_sum": _average_pool,
    "max_pool": _max_pool,
    "table": table,
    "softmax": softmax,
}

ONNXRUNTIME = Runtime(
    OPERATIONS,
    "float32",
    {
        "add": "onnx_add",
        "multiply": "onnx_multiply",
        "rescale": "onnx_rescale",
        "mean": "onnx_global_average",
        "average_pool": "onnx_average_pool",
    },
    weight_of,
    bias_of,
)
