"""Operations that no operator of TFLite computes, as tables: every possible code is computed here, and looked up there.

The table's entries come from the operation's own kernel, so they round as the graph does. One operand of 8 or 16 bits
is an index by itself, two of 8 bits are one of 16, a sum over few codes is one of its range. The index is computed with
CAST, MUL and ADD of int32 and looked up by GATHER, all exact everywhere.
"""

import math

import jax.numpy as jnp
import numpy as np

from qjax.export import interpreter
from qjax.export.emit.tflite.moves import repeated
from qjax.export.emit.tflite.problems import Unsupported
from qjax.export.emit.tflite.support import MICRO
from qjax.export.emit.tflite.writer import Value, Writer
from qjax.export.ir import Node
from qjax.ops.epilogue import finish

LARGEST = 2**18
"""Entries of a table, at most."""

_PER_CHANNEL = (
    "Without a table for every channel it has no form: use one factor for all channels, or a quantizer before"
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
    found = interpreter.run_node(writer.graph, node, writer.prepared[node.name], [jnp.asarray(given)])
    # channel after channel
    table = np.moveaxis(np.asarray(found), 0, -1).reshape(-1)
    offsets = (np.arange(channels, dtype=np.int32) * size - info.min).reshape(tail or (1,))
    return _looked_up(writer, node, _plus(writer, _index(writer, x), offsets), table)


def binary(writer: Writer, node: Node) -> Value:
    """An operation on two tensors of 8-bit codes."""
    operands = [writer.input(node, 0), writer.input(node, 1)]
    if any(x.dtype != "int8" for x in operands) or math.prod(_tail(writer, node)) != 1:
        raise Unsupported(
            f"{node.op} with an affine step behind it"
            + (", on codes of 16 bits" if operands[0].dtype != "int8" else ", with a factor per channel"),
            "No operator of TFLite computes it: put a quantizer between them, or the step on one of the operands",
        )
    codes = np.arange(-128, 128, dtype=np.int8)
    first, second = np.meshgrid(codes, codes, indexing="ij")
    given = [jnp.asarray(first), jnp.asarray(second)]
    table = np.asarray(interpreter.run_node(writer.graph, node, _scalars(writer, node), given)).reshape(-1)
    shape = writer.shapes[node.output]
    free = operands[0].free | operands[1].free
    indices: list[Value] = []
    for x in operands:
        rank = len(shape) - len(x.shape)
        ranked = writer.reshape(x, (1,) * rank + x.shape, frozenset(axis + rank for axis in x.free))
        indices.append(_index(writer, repeated(writer, ranked, shape, free)))
    rows = writer.moved("MUL", [indices[0], writer.integers([256])], shape, free, indices[0])
    both = writer.moved("ADD", [rows, indices[1]], shape, free, rows)
    return _looked_up(writer, node, _plus(writer, both, np.asarray([128 * 257], np.int32)), table)


def summed(writer: Writer, node: Node) -> Value:
    """A sum over axes, with constants that may differ along the trailing axes of the result."""
    x = writer.input(node)
    axes = sorted(axis % len(x.shape) for axis in node.attributes["axes"])
    if x.free & set(axes):
        raise Unsupported("a sum over the batch", "Sum over the axes of one example")
    count = math.prod(x.shape[axis] for axis in axes)
    assert x.quantization is not None
    low, high = (count * (bound - x.zero_point) for bound in (x.quantization.qmin, x.quantization.qmax))
    tail = _tail(writer, node)
    channels, size = math.prod(tail), high - low + 1
    if channels * size > LARGEST:
        raise Unsupported(
            f"a sum over {count} codes that is no average of them, or with {channels} factors behind it",
            "No operator of TFLite computes it: divide by the number of elements, and put a quantizer behind",
        )
    sums = np.arange(low, high + 1, dtype=np.int32).reshape(size, *(1,) * len(tail))
    facts = interpreter.attributes(writer.graph, node)
    given = jnp.asarray(np.broadcast_to(sums, (size, *tail)))
    found = finish([given], writer.prepared[node.name], facts)
    table = np.moveaxis(np.asarray(found), 0, -1).reshape(-1)
    kept = [axis for axis in range(len(x.shape)) if axis not in axes]
    free = frozenset(kept.index(axis) for axis in x.free)
    index = _index(writer, writer.transpose(x, [*axes, *kept]))
    rows = writer.reshape(index, (count, *index.shape[len(axes) :]), frozenset(1 + axis for axis in free))
    total = writer.reshape(_added(writer, rows), [x.shape[axis] for axis in kept], free)
    offsets = (np.arange(channels, dtype=np.int32) * size - low - count * x.zero_point).reshape(tail or (1,))
    return _looked_up(writer, node, _plus(writer, total, offsets), table)


def _added(writer: Writer, rows: Value) -> Value:
    """The sum over the first axis, by halves: TFLite Micro has no SUM of int32."""
    left: list[Value] = []
    while (count := rows.shape[0]) > 1:
        half, rest = count // 2, rows.shape[1:]
        zeros = (0,) * len(rest)
        if count % 2:
            left.append(writer.slice(rows, (count - 1, *zeros), (1, *rest)))
        first, second = (writer.slice(rows, (start, *zeros), (half, *rest)) for start in (0, half))
        rows = writer.moved("ADD", [first, second], first.shape, first.free, first)
    for one in left:
        rows = writer.moved("ADD", [rows, one], rows.shape, rows.free, rows)
    return rows


def _tail(writer: Writer, node: Node) -> tuple[int, ...]:
    """The trailing axes of the result along which the node's constants differ."""
    roles = [role for role in node.constants if not role.startswith("clamp_")]
    return np.broadcast_shapes((), *(np.shape(writer.graph.constant(node, role)) for role in roles))


def _scalars(writer: Writer, node: Node) -> dict[str, np.ndarray]:
    return {role: np.asarray(value).reshape(()) for role, value in writer.prepared[node.name].items()}


def _index(writer: Writer, x: Value) -> Value:
    kinds = {"inDataType": x.dtype, "outDataType": "int32"}
    return writer.apply("CAST", [x], x.shape, x.free, "int32", None, **kinds)


def _plus(writer: Writer, index: Value, offsets: np.ndarray) -> Value:
    constant = writer.constant(offsets, "int32")
    return writer.moved("ADD", [index, constant], index.shape, index.free, index)


def _looked_up(writer: Writer, node: Node, index: Value, table: np.ndarray) -> Value:
    dtype, quantization = writer.grid(node)
    if dtype == "int16" and writer.graph.target in MICRO:
        raise Unsupported(
            f"{node.op} with an affine step behind it, on codes of 16 bits",
            "TFLite Micro looks up no tables of int16: put a quantizer between them, or use 8 bits",
        )
    held = writer.constant(table, dtype, quantization, f"{node.output}/table")
    return writer.apply("GATHER", [held, index], index.shape, index.free, dtype, quantization)
