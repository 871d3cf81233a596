"""Operations without an operator in TFLite, as tables: qjax computes the result for every code, the file looks it up.

    y = f(x)    ->    GATHER(table, CAST(x) + 128)

The entries come from the operation's own kernel, so they round like the graph. The index is one operand of 8 or 16
bits, two operands of 8 bits combined to 16, or a sum over few codes. It is computed with CAST, MUL and ADD of int32 and
looked up by GATHER, which are exact everywhere.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from qjax import targets
from qjax.export.emit.tflite.draft import Value
from qjax.export.emit.tflite.moves import repeated
from qjax.export.emit.tflite.plain_integers import as_dtype, combined, halved, scanned, without
from qjax.export.emit.tflite.support import MICRO
from qjax.export.emit.tflite.writer import Writer, lowers
from qjax.graph import kernels
from qjax.graph.ir import Node
from qjax.numerics.elementary import Expression
from qjax.numerics.tables import GEMMLOWP_GRIDS, function_table
from qjax.ops.epilogue import finish
from qjax.support.errors import Unsupported

LARGEST = 2**18
"""Entries of a table, at most."""

_PER_CHANNEL = (
    "Without a table for every channel it has no form: use one factor for all channels, or a quantizer in front"
)


def unary(writer: Writer, node: Node) -> Value:
    """An operation on one tensor of codes, with constants that may differ along the trailing axes."""
    x = writer.input(node)
    info = np.iinfo(x.dtype)
    size = info.max - info.min + 1
    tail = _tail(writer, node)
    channels = math.prod(tail)
    if channels * size > LARGEST:
        raise Unsupported(f"an affine step with {channels} factors on codes of {x.dtype}", _PER_CHANNEL)
    codes = np.arange(info.min, info.max + 1, dtype=x.dtype).reshape(size, *(1,) * len(tail))
    given = np.broadcast_to(codes, (size, *tail))
    found = kernels.run_node(writer.graph, node, writer.prepared[node.name], [jnp.asarray(given)])
    # the entries of one channel follow those of the previous one
    table = np.moveaxis(np.asarray(found), 0, -1).reshape(-1)
    offsets = (np.arange(channels, dtype=np.int32) * size - info.min).reshape(tail or (1,))
    return _look_up(writer, node, _plus(writer, as_dtype(writer, x, "int32"), offsets), table)


@lowers("table")
def table(writer: Writer, node: Node) -> Value:
    """LOGISTIC or TANH if the target's own kernel computes the node's codes, else a lookup."""
    x, (dtype, quantization) = writer.input(node), writer.grid(node)
    expression = Expression.from_json(node.attributes["expression"])
    if _is_native(writer, node, expression.bare):
        assert expression.bare is not None
        result = writer.apply(expression.bare.upper(), [x], x.shape, x.free, dtype, quantization)
        return writer.bounded(node, result)
    info = np.iinfo(x.dtype)
    codes = jnp.arange(info.min, info.max + 1, dtype=x.dtype)
    held = kernels.run_node(writer.graph, node, writer.prepared[node.name], [codes])
    index = _plus(writer, as_dtype(writer, x, "int32"), np.asarray([-info.min], np.int32))
    return _look_up(writer, node, index, np.asarray(held))


def _is_native(writer: Writer, node: Node, name: str | None) -> bool:
    x, y = writer.graph.tensors[node.inputs[0]], writer.graph.tensors[node.output]
    if name not in GEMMLOWP_GRIDS or x.dtype != "int8" or y.dtype != "int8":
        return False
    assert name is not None
    assert x.quantization is not None
    assert y.quantization is not None
    scale, zero_point = np.float32(y.quantization.scale), int(np.asarray(y.quantization.zero_point))
    if (float(scale), zero_point) != GEMMLOWP_GRIDS[name] or (x.quantization.qmin, x.quantization.qmax) != (-128, 127):
        return False
    method = targets.get(writer.graph.target).tables
    x_grid = np.float32(x.quantization.scale), int(np.asarray(x.quantization.zero_point))
    own = _native_table(method, name, *x_grid, scale, zero_point)
    return np.array_equal(own, np.asarray(writer.graph.constant(node, "table")))


@functools.lru_cache(maxsize=256)
def _native_table(*arguments: Any) -> np.ndarray:
    """`function_table`, computed only once for the steps of a recurrent layer."""
    table = np.array(function_table(*arguments))
    table.flags.writeable = False
    return table


def binary(writer: Writer, node: Node) -> Value:
    """An operation on two tensors of 8-bit codes."""
    operands = [writer.input(node, 0), writer.input(node, 1)]
    if any(x.dtype != "int8" for x in operands) or math.prod(_tail(writer, node)) != 1:
        raise Unsupported(
            f"{node.op} that an affine step follows"
            + (", on codes of 16 bits" if operands[0].dtype != "int8" else ", with a factor per channel"),
            "No operator of TFLite computes it: put a quantizer between them, or the step on one of the operands",
        )
    codes = np.arange(-128, 128, dtype=np.int8)
    first, second = np.meshgrid(codes, codes, indexing="ij")
    given = [jnp.asarray(first), jnp.asarray(second)]
    table = np.asarray(kernels.run_node(writer.graph, node, _scalars(writer, node), given)).reshape(-1)
    shape = writer.shapes[node.output]
    free = operands[0].free | operands[1].free
    indices: list[Value] = []
    for x in operands:
        rank = len(shape) - len(x.shape)
        ranked = writer.reshape(x, (1,) * rank + x.shape, frozenset(axis + rank for axis in x.free))
        indices.append(as_dtype(writer, repeated(writer, ranked, shape, free), "int32"))
    rows = writer.moved("MUL", [indices[0], writer.integers([256])], shape, free, indices[0])
    both = writer.moved("ADD", [rows, indices[1]], shape, free, rows)
    return _look_up(writer, node, _plus(writer, both, np.asarray([128 * 257], np.int32)), table)


def summed(writer: Writer, node: Node) -> Value:
    """A sum over axes, with constants that may differ along the trailing axes of the result."""
    x = writer.input(node)
    axes = sorted(axis % len(x.shape) for axis in node.attributes["axes"])
    if x.free & set(axes):
        raise Unsupported("a sum over the batch", "Sum over the axes of one example")
    kept = [axis for axis in range(len(x.shape)) if axis not in axes]
    total, low, high = _centered(writer, writer.transpose(x, [*axes, *kept]), math.prod(x.shape[axis] for axis in axes))
    for axis in range(len(axes)):
        total = halved(writer, total, axis, "ADD")
    return _finished(writer, node, without(writer, total, range(len(axes))), low, high)


@lowers("cumulative_sum")
def cumulative_sum(writer: Writer, node: Node) -> Value:
    """Sums of int32 in log2(n) steps, then a table."""
    x = writer.input(node)
    total, low, high = _centered(writer, x, x.shape[node.attributes["axis"]])
    return _finished(writer, node, scanned(writer, node, total, "ADD", 0), min(low, 0), max(high, 0))


@lowers("number")
def number(writer: Writer, node: Node) -> Value:
    """A table of the integers whose codes are not an end of the output's range."""
    info = np.iinfo(np.int32)
    return _finished(writer, node, writer.input(node), info.min, info.max)


def _centered(writer: Writer, x: Value, count: int) -> tuple[Value, int, int]:
    """Codes minus their zero point, int32; and the range of a sum of that many."""
    assert x.quantization is not None
    low, high = (count * (bound - x.zero_point) for bound in (x.quantization.qmin, x.quantization.qmax))
    index = as_dtype(writer, x, "int32")
    return (_plus(writer, index, np.asarray([-x.zero_point], np.int32)) if x.zero_point else index), low, high


def _finished(writer: Writer, node: Node, total: Value, low: int, high: int) -> Value:
    """Exact int32 sums as codes, by a table of those that do not saturate for every channel."""
    tail = _tail(writer, node)
    facts, constants = kernels.attributes(writer.graph, node), writer.prepared[node.name]

    def codes(first: int, last: int) -> np.ndarray:
        """The codes of every sum, (size, *tail)."""
        sums = np.arange(first, last + 1, dtype=np.int64).astype(np.int32).reshape(-1, *(1,) * len(tail))
        given = jnp.asarray(np.broadcast_to(sums, (last - first + 1, *tail)))
        return np.asarray(finish([given], constants, facts))

    first, last = _distinct(codes, low, high)
    channels, size = math.prod(tail), last - first + 1
    if channels * size > LARGEST:
        raise Unsupported(
            f"a sum of {size} different values that is no average, or that {channels} factors follow",
            "No operator of TFLite computes it: divide by the number of elements, and put a quantizer after it",
        )
    if first > low:
        total = combined(writer, "MAXIMUM", [total, writer.integers([first])])
    if last < high:
        total = combined(writer, "MINIMUM", [total, writer.integers([last])])
    table = np.moveaxis(codes(first, last), 0, -1).reshape(-1)
    offsets = (np.arange(channels, dtype=np.int32) * size - first).reshape(tail or (1,))
    return _look_up(writer, node, _plus(writer, total, offsets), table)


def _distinct(codes: Callable[[int, int], np.ndarray], low: int, high: int) -> tuple[int, int]:
    """The sums of a monotone function, without those at each end that have the same code as the end."""
    found: list[int] = []
    for end, other in ((low, high), (high, low)):
        bound = codes(end, end)
        # bisect for the last sum, counted from this end, that still has the end's code
        same, different = end, other
        if np.array_equal(codes(other, other), bound):
            found.append(end)
            continue
        while abs(different - same) > 1:
            middle = (same + different) // 2
            if np.array_equal(codes(middle, middle), bound):
                same = middle
            else:
                different = middle
        found.append(same)
    return found[0], max(found[0], found[1])


def _tail(writer: Writer, node: Node) -> tuple[int, ...]:
    """The trailing axes of the result along which the node's constants differ."""
    roles = [role for role in node.constants if not role.startswith("clamp_")]
    return np.broadcast_shapes((), *(np.shape(writer.graph.constant(node, role)) for role in roles))


def _scalars(writer: Writer, node: Node) -> dict[str, np.ndarray]:
    return {role: np.asarray(value).reshape(()) for role, value in writer.prepared[node.name].items()}


def _plus(writer: Writer, index: Value, offsets: np.ndarray) -> Value:
    constant = writer.constant(offsets, "int32")
    return writer.moved("ADD", [index, constant], index.shape, index.free, index)


def _look_up(writer: Writer, node: Node, index: Value, table: np.ndarray) -> Value:
    dtype, quantization = writer.grid(node)
    if dtype == "int16" and writer.graph.target in MICRO:
        raise Unsupported(
            f"{node.op} that an affine step follows, on codes of 16 bits",
            "TFLite Micro looks up no tables of int16: put a quantizer between them, or use 8 bits",
        )
    held = writer.constant(table, dtype, quantization, f"{node.output}/table")
    return writer.apply("GATHER", [held, index], index.shape, index.free, dtype, quantization)
