"""Plain integers and booleans, which are not codes: masks, positions, comparisons.

CAST, ADD, SUB, MUL, MAXIMUM, MINIMUM, comparisons of int32 and LOGICAL_* are exact in every runtime. Comparisons of
codes are not, because kernels such as GREATER requantize both sides first; codes are therefore compared as int32.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from qjax.export.emit.tflite.draft import Value
from qjax.export.emit.tflite.moves import repeated
from qjax.export.emit.tflite.support import MICRO
from qjax.export.emit.tflite.writer import Writer, lowers
from qjax.graph.ir import Node
from qjax.support.errors import Unsupported

_BROADCASTS = 4
"""Every runtime broadcasts at least this many dimensions."""

_COMPARISONS = {
    "gt": "GREATER",
    "ge": "GREATER_EQUAL",
    "lt": "LESS",
    "le": "LESS_EQUAL",
    "eq": "EQUAL",
    "ne": "NOT_EQUAL",
}


def aligned(writer: Writer, operands: Sequence[Value], shape: Sequence[int]) -> tuple[list[Value], frozenset[int]]:
    """Operands in the result's rank, repeated if a runtime would not do it; and the axes that depend on the batch."""
    free = frozenset(axis + len(shape) - len(x.shape) for x in operands for axis in x.free)
    found: list[Value] = []
    for x in operands:
        first = len(shape) - len(x.shape)
        ranked = writer.reshape(x, (1,) * first + x.shape, frozenset(axis + first for axis in x.free))
        found.append(ranked if len(shape) <= _BROADCASTS else repeated(writer, ranked, shape, free))
    return found, free


def combined(writer: Writer, operator: str, operands: Sequence[Value], dtype: str | None = None) -> Value:
    """An elementwise operator on tensors of one dtype, which broadcast; dtype: of the result, if it is another."""
    shape = np.broadcast_shapes(*(x.shape for x in operands))
    held, free = aligned(writer, operands, shape)
    if dtype is None:
        return writer.moved(operator, held, shape, free, operands[0])
    return writer.apply(operator, held, shape, free, dtype, None)


def as_dtype(writer: Writer, x: Value, dtype: str) -> Value:
    """CAST to the same numbers; a boolean becomes 0 or 1, and a number becomes whether it is not 0."""
    if x.dtype == dtype:
        return x
    return writer.apply("CAST", [x], x.shape, x.free, dtype, None, inDataType=x.dtype, outDataType=dtype)


def as_codes(writer: Writer, node: Node, x: Value) -> Value:
    """Numbers that are codes of the node's output, with its dtype and grid."""
    dtype, quantization = writer.grid(node)
    kinds: dict[str, Any] = {"inDataType": x.dtype, "outDataType": dtype}
    return writer.apply("CAST", [x], x.shape, x.free, dtype, quantization, **kinds)


def negated(writer: Writer, x: Value) -> Value:
    """LOGICAL_NOT."""
    return writer.moved("LOGICAL_NOT", [x], x.shape, x.free, x)


def halved(writer: Writer, x: Value, axis: int, operator: str) -> Value:
    """Combine all elements along an axis by halves; the axis remains, with size 1.

    This is needed because TFLite Micro reduces codes of 8 bits only.
    """
    if axis in x.free or not x.shape[axis]:
        raise Unsupported("a reduction over the batch, or over nothing", "Reduce over the axes of one example")

    def part(start: int, size: int) -> Value:
        starts = [start if a == axis else 0 for a in range(len(x.shape))]
        return writer.slice(x, starts, [size if a == axis else n for a, n in enumerate(x.shape)])

    left: list[Value] = []
    while (count := x.shape[axis]) > 1:
        half = count // 2
        if count % 2:
            left.append(part(count - 1, 1))
        first, second = part(0, half), part(half, half)
        x = writer.moved(operator, [first, second], first.shape, first.free, first)
    for one in left:
        x = writer.moved(operator, [x, one], x.shape, x.free, x)
    return x


def without(writer: Writer, x: Value, axes: Sequence[int]) -> Value:
    """x without these axes of size 1."""
    kept = [axis for axis in range(len(x.shape)) if axis not in axes]
    free = frozenset(kept.index(axis) for axis in x.free)
    return writer.reshape(x, [x.shape[axis] for axis in kept], free)


def reduced(writer: Writer, x: Value, axes: Sequence[int], operator: str, elementwise: str) -> Value:
    """REDUCE_MAX and the like, or by halves if TFLite Micro has no such kernel."""
    if not axes:
        return x
    if writer.graph.target in MICRO and x.dtype not in ("int8", "bool"):
        for axis in axes:
            x = halved(writer, x, axis, elementwise)
        return without(writer, x, axes)
    if x.free & set(axes):
        writer.resizable = False
    kept = [axis for axis in range(len(x.shape)) if axis not in axes]
    free = frozenset(kept.index(axis) for axis in x.free if axis in kept)
    shape = [x.shape[axis] for axis in kept]
    return writer.moved(operator, [x, writer.integers(sorted(axes))], shape, free, x, keepDims=False)


def places(writer: Writer, size: int, axis: int, rank: int) -> Value:
    """0, 1, ... along an axis, int32."""
    return writer.constant(
        np.arange(size, dtype=np.int32).reshape([-1 if a == axis else 1 for a in range(rank)]), "int32"
    )


@lowers("compare")
def compare(writer: Writer, node: Node) -> Value:
    """GREATER and the like, of int32."""
    flowing = iter(range(len(node.inputs)))
    pair: list[Value] = []
    for role in ("left", "right"):
        if role in node.constants:
            pair.append(writer.constant(writer.graph.constant(node, role), "int32"))
        else:
            pair.append(as_dtype(writer, writer.input(node, next(flowing)), "int32"))
    return combined(writer, _COMPARISONS[node.attributes["function"]], pair, "bool")


@lowers("logic")
def logic(writer: Writer, node: Node) -> Value:
    """LOGICAL_*, arithmetic of int32, CAST and reductions."""
    function = node.attributes["function"]
    operands = [writer.input(node, index) for index in range(len(node.inputs))]
    x = operands[0]
    if function == "convert_element_type":
        return as_dtype(writer, x, writer.grid(node)[0])
    if "axes" in node.attributes:
        return _reduction(writer, x, function, [axis % len(x.shape) for axis in node.attributes["axes"]])
    if function in ("not", "neg"):
        if x.dtype == "bool":
            return negated(writer, x)
        return combined(writer, "SUB", [writer.integers([-1 if function == "not" else 0]), x])
    known = _LOGIC.get((function, x.dtype))
    if known is None:
        raise Unsupported(f"{function} of the bits of {x.dtype}", "No operator of TFLite computes it: use booleans")
    return combined(writer, known, operands, "bool" if x.dtype == "bool" else None)


_LOGIC = {
    ("and", "bool"): "LOGICAL_AND",
    ("min", "bool"): "LOGICAL_AND",
    ("mul", "bool"): "LOGICAL_AND",
    ("or", "bool"): "LOGICAL_OR",
    ("max", "bool"): "LOGICAL_OR",
    ("add", "bool"): "LOGICAL_OR",
    ("xor", "bool"): "NOT_EQUAL",
    ("add", "int32"): "ADD",
    ("sub", "int32"): "SUB",
    ("mul", "int32"): "MUL",
    ("max", "int32"): "MAXIMUM",
    ("min", "int32"): "MINIMUM",
}


def _reduction(writer: Writer, x: Value, function: str, axes: list[int]) -> Value:
    if x.dtype == "bool" and function != "reduce_sum":
        every = function in ("reduce_and", "reduce_min")
        found = reduced(writer, x if every else negated(writer, x), axes, "REDUCE_ALL", "LOGICAL_AND")
        return found if every else negated(writer, found)
    operators: dict[str, tuple[str, str]] = {
        "reduce_sum": ("SUM", "ADD"),
        "reduce_max": ("REDUCE_MAX", "MAXIMUM"),
        "reduce_min": ("REDUCE_MIN", "MINIMUM"),
    }
    if function not in operators:
        raise Unsupported(f"{function} of {x.dtype}", "No operator of TFLite computes it: use booleans")
    return reduced(writer, as_dtype(writer, x, "int32"), axes, *operators[function])


def first_greatest(writer: Writer, x: Value, axis: int) -> tuple[Value, Value]:
    """The greatest int32 along an axis, and its first index; the axis remains, with size 1."""
    size = x.shape[axis]
    greatest = halved(writer, x, axis, "MAXIMUM")
    differs = as_dtype(writer, combined(writer, "NOT_EQUAL", [x, greatest], "bool"), "int32")
    beyond = combined(writer, "MUL", [differs, writer.integers([size])])
    found = combined(writer, "ADD", [beyond, places(writer, size, axis, len(x.shape))])
    return greatest, halved(writer, found, axis, "MINIMUM")


@lowers("argument")
def argument(writer: Writer, node: Node) -> Value:
    """ARG_MAX, ARG_MIN of 8-bit codes; 16-bit codes become int32, which TFLite Micro compares by element."""
    x, axis = writer.input(node), node.attributes["axis"]
    greatest = node.attributes["function"] == "argmax"
    if x.dtype != "int8":
        x = as_dtype(writer, x, "int32")
        if writer.graph.target in MICRO:
            x = x if greatest else combined(writer, "MUL", [x, writer.integers([-1])])
            return without(writer, first_greatest(writer, x, axis)[1], [axis])
    shape = writer.shapes[node.output]
    free = frozenset(a - (a > axis) for a in x.free if a != axis)
    if axis in x.free:
        writer.resizable = False
    name = "ARG_MAX" if greatest else "ARG_MIN"
    return writer.apply(name, [x, writer.integers([axis])], shape, free, "int32", None, outputType="int32")


@lowers("top_k")
def top_k(writer: Writer, node: Node) -> Value:
    """TOPK_V2 over the last axis; TFLite Micro has none, so there the greatest is taken k times."""
    x, axis, k, index = writer.input(node), *(node.attributes[key] for key in ("axis", "k", "index"))
    if writer.graph.target in MICRO:
        return _top_k_by_one(writer, node, x)
    order = [a for a in range(len(x.shape)) if a != axis] + [axis]
    x = writer.transpose(x, order)
    shape = (*x.shape[:-1], k)
    dtype, quantization = ("int32", None) if index else (x.dtype, x.quantization)
    result = writer.apply(
        "TOPK_V2",
        [x, writer.constant(np.asarray(k, np.int32), "int32")],
        shape,
        x.free,
        dtype,
        quantization,
        other=(index, (x.dtype, x.quantization) if index else ("int32", None)),
    )
    return writer.transpose(result, [order.index(a) for a in range(len(order))])


def _top_k_by_one(writer: Writer, node: Node, x: Value) -> Value:
    axis, index = node.attributes["axis"], node.attributes["index"]
    x, found = as_dtype(writer, x, "int32"), list[Value]()
    for _ in range(node.attributes["k"]):
        pair = first_greatest(writer, x, axis)
        found.append(pair[index])
        own = places(writer, x.shape[axis], axis, len(x.shape))
        taken = as_dtype(writer, combined(writer, "EQUAL", [own, pair[1]], "bool"), "int32")
        # lower than every code, so it is not found again
        x = combined(writer, "ADD", [x, combined(writer, "MUL", [taken, writer.integers([-(2**20)])])])
    first = found[0]
    if len(found) > 1:
        shape = writer.shapes[node.output]
        first = writer.moved("CONCATENATION", found, shape, first.free, first, axis=axis)
    return first if index else as_codes(writer, node, first)


def scanned(writer: Writer, node: Node, x: Value, operator: str, neutral: int) -> Value:
    """Combine all elements up to each one, in log2(n) steps of shift and combine, as the node's kernel does."""
    axis, distance = node.attributes["axis"], 1
    if axis in x.free:
        raise Unsupported("a cumulative operation along the batch", "Use it along an axis of one example")
    # merge to three axes, because the pad operators take at most four
    shape, free = x.shape, x.free
    before = frozenset({0} if any(a < axis for a in free) else ())
    behind = frozenset({2} if any(a > axis for a in free) else ())
    flat = (math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :]))
    x = writer.reshape(x, flat, before | behind)
    while distance < flat[1]:
        pair = (-distance, distance) if node.attributes["reverse"] else (distance, -distance)
        shifted = writer.pad(x, [(0, 0), pair, (0, 0)], neutral)
        x = writer.moved(operator, [x, shifted], x.shape, x.free, x)
        distance *= 2
    return writer.reshape(x, shape, free)


@lowers("cumulative_extremum")
def cumulative_extremum(writer: Writer, node: Node) -> Value:
    """MAXIMUM or MINIMUM with the codes shifted by 1, 2, 4, ..."""
    x = writer.input(node)
    info, greatest = np.iinfo(x.dtype), node.attributes["function"] == "max"
    return scanned(writer, node, x, "MAXIMUM" if greatest else "MINIMUM", info.min if greatest else info.max)
