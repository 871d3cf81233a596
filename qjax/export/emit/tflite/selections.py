"""Choices by masks and by indices: SELECT_V2, MAXIMUM and MINIMUM of two tensors, GATHER."""

import math

import numpy as np

from qjax.export.emit.tflite.draft import Value
from qjax.export.emit.tflite.moves import padded
from qjax.export.emit.tflite.plain_integers import aligned, as_dtype, combined, negated, reduced
from qjax.export.emit.tflite.support import MICRO
from qjax.export.emit.tflite.writer import Writer, lowers
from qjax.graph.ir import Node
from qjax.support.errors import Unsupported


@lowers("select")
def select(writer: Writer, node: Node) -> Value:
    """SELECT_V2; for booleans LOGICAL_*, and in TFLite Micro, which has none of int32, products with the mask."""
    mask, *flowing = (writer.input(node, index) for index in range(len(node.inputs)))
    cases = iter(flowing)
    off, on = (_code(writer, node, role) if role in node.constants else next(cases) for role in ("off", "on"))
    return _write_choice(writer, node, mask, off, on)


@lowers("choose")
def choose(writer: Writer, node: Node) -> Value:
    """SELECT_V2 of two constants."""
    low, high = writer.bounds(node)
    off, on = (_code(writer, node, role, low, high) for role in ("off", "on"))
    return _write_choice(writer, node, writer.input(node), off, on)


def _code(writer: Writer, node: Node, role: str, low: int | None = None, high: int | None = None) -> Value:
    """Constant codes on the grid of the output, within bounds."""
    dtype, quantization = writer.grid(node)
    held = np.asarray(writer.graph.constant(node, role))
    held = held if low is None else np.clip(held, low, high)
    return writer.constant(held.astype(dtype), dtype, quantization)


def _write_choice(writer: Writer, node: Node, mask: Value, off: Value, on: Value) -> Value:
    if on.dtype == "bool":
        yes = combined(writer, "LOGICAL_AND", [mask, on])
        return combined(writer, "LOGICAL_OR", [yes, combined(writer, "LOGICAL_AND", [negated(writer, mask), off])])
    if on.dtype == "int32" and writer.graph.target in MICRO:
        yes, no = (as_dtype(writer, m, "int32") for m in (mask, negated(writer, mask)))
        return combined(writer, "ADD", [combined(writer, "MUL", [on, yes]), combined(writer, "MUL", [off, no])])
    shape, (dtype, quantization) = writer.shapes[node.output], writer.grid(node)
    operands, free = aligned(writer, [mask, on, off], shape)
    return writer.apply("SELECT_V2", operands, shape, free, dtype, quantization)


@lowers("extremum")
def extremum(writer: Writer, node: Node) -> Value:
    """MAXIMUM or MINIMUM of tensors on one grid."""
    operands = [writer.input(node, index) for index in range(len(node.inputs))]
    if "value" in node.constants:
        operands.append(_code(writer, node, "value"))
    return combined(writer, "MAXIMUM" if node.attributes["function"] == "max" else "MINIMUM", operands)


@lowers("max")
def reduce_max(writer: Writer, node: Node) -> Value:
    """REDUCE_MAX."""
    return _reduced(writer, node, "REDUCE_MAX", "MAXIMUM")


@lowers("min")
def reduce_min(writer: Writer, node: Node) -> Value:
    """REDUCE_MIN."""
    return _reduced(writer, node, "REDUCE_MIN", "MINIMUM")


def _reduced(writer: Writer, node: Node, operator: str, elementwise: str) -> Value:
    x = writer.input(node)
    axes = sorted(axis % len(x.shape) for axis in node.attributes["axes"])
    return reduced(writer, x, axes, operator, elementwise)


@lowers("pad_value")
def pad_value(writer: Writer, node: Node) -> Value:
    """PADV2; codes between codes through RESHAPE."""
    x, padding = writer.input(node), node.attributes["padding"]
    if "number" in node.attributes:
        raise Unsupported("padding of integers", "Pad them before the call")
    fill = int(np.asarray(writer.graph.constant(node, "value")).reshape(()))
    for axis, (_, _, interior) in enumerate(padding):
        x = writer.dilate(x, axis, interior + 1, fill)
    return padded(writer, x, [(low, high) for low, high, _ in padding], fill)


def _clipped(writer: Writer, node: Node, size: int) -> Value:
    """The indices without their last axis, clipped to an axis of that size, because GATHER does not clip."""
    known = writer.graph.tensors[node.inputs[1]].value
    x = writer.input(node, 1)
    x = writer.reshape(x, x.shape[:-1], x.free)
    if known is not None and np.all((np.asarray(known) >= 0) & (np.asarray(known) < size)):
        return x
    return in_range(writer, node, x, size)


def in_range(writer: Writer, node: Node, x: Value, size: int) -> Value:
    """int32 indices of an axis of that size: negative ones wrapped if the node requires it, and all of them clipped."""
    if node.attributes.get("wraps", False):
        # -1 for negative indices, else 0
        below = combined(writer, "MAXIMUM", [x, writer.integers([-1])])
        below = combined(writer, "MINIMUM", [below, writer.integers([0])])
        x = combined(writer, "ADD", [x, combined(writer, "MUL", [below, writer.integers([-size])])])
    x = combined(writer, "MAXIMUM", [x, writer.integers([0])])
    return combined(writer, "MINIMUM", [x, writer.integers([size - 1])])


@lowers("embed")
def embed(writer: Writer, node: Node) -> Value:
    """GATHER of rows; indices out of range are clipped first, as in the graph, because GATHER does not clip."""
    kernel = np.asarray(writer.graph.constant(node, "kernel"))
    indices = clipped = in_range(writer, node, writer.input(node), kernel.shape[0])
    dtype, quantization = writer.grid(node)
    table = writer.constant(kernel, dtype, quantization, node.constants["kernel"])
    return writer.apply("GATHER", [table, clipped], writer.shapes[node.output], indices.free, dtype, quantization)


def _gathered(
    writer: Writer, node: Node, x: Value, indices: Value, shape: list[int], free: frozenset[int], axis: int, batch: int
) -> Value:
    own = x.dtype
    if writer.graph.target in MICRO:
        if own not in ("int8", "bool"):
            raise Unsupported(
                f"{node.op} of {own}", "TFLite Micro gathers 8 bits only: use slices, or activations of 8 bits"
            )
        x = as_dtype(writer, x, "int8") if own == "bool" else x
    found = writer.moved("GATHER", [x, indices], shape, free, x, axis=axis, batchDims=batch)
    return as_dtype(writer, found, own) if own == "bool" else found


@lowers("take")
def take(writer: Writer, node: Node) -> Value:
    """GATHER along an axis."""
    x, axis, at = writer.input(node), node.attributes["axis"], node.attributes["places"]
    indices = _clipped(writer, node, x.shape[axis])
    if axis in x.free:
        writer.resizable = False
    count = len(indices.shape)
    shape = [*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]]
    free = frozenset(a if a < axis else a + count - 1 for a in x.free if a != axis)
    free |= frozenset(axis + a for a in indices.free)
    found = _gathered(writer, node, x, indices, shape, free, axis, 0)
    rest = [a for a in range(len(shape)) if a not in at]
    source = {place: axis + i for i, place in enumerate(at)}
    others = [a for a in range(len(shape)) if not axis <= a < axis + count]
    source |= dict(zip(rest, others, strict=True))
    return writer.transpose(found, [source[a] for a in range(len(shape))])


@lowers("take_along")
def take_along(writer: Writer, node: Node) -> Value:
    """GATHER with batch_dims: the axes that both share, in front and merged."""
    x, attributes = writer.input(node), node.attributes
    axis, operand, own, at = (attributes[key] for key in ("axis", "operand", "indices", "places"))
    indices = _clipped(writer, node, x.shape[axis])
    rest = [a for a in range(len(x.shape)) if a not in operand and a != axis]
    chosen = [a for a in range(len(indices.shape)) if a not in own]
    turned = writer.transpose(x, [*operand, axis, *rest])
    wanted = writer.transpose(indices, [*own, *chosen])
    batch = [x.shape[a] for a in operand]
    sizes, others = [indices.shape[a] for a in chosen], [x.shape[a] for a in rest]
    if x.free & {axis, *rest} or indices.free & set(chosen):
        writer.resizable = False
    free = frozenset({0} if x.free & set(operand) or indices.free & set(own) else ())
    values = writer.reshape(turned, (math.prod(batch), x.shape[axis], math.prod(others)), free)
    rows = writer.reshape(wanted, (math.prod(batch), math.prod(sizes)), free)
    flat = [math.prod(batch), math.prod(sizes), math.prod(others)]
    found = _gathered(writer, node, values, rows, flat, free, 1, 1)
    shape, front = [*batch, *sizes, *others], [*own, *chosen]
    following = frozenset(i for i, a in enumerate(operand) if a in x.free)
    found = writer.reshape(found, shape, following)
    targets = [at[a] for a in front] + [a for a in range(len(shape)) if a not in at]
    return writer.transpose(found, [targets.index(a) for a in range(len(shape))])


@lowers("squared_difference")
def squared_difference(writer: Writer, node: Node) -> Value:
    """SQUARED_DIFFERENCE."""
    if node.attributes["method"] == "exact":
        raise Unsupported(
            "the square of a difference of codes other than int8", "Use 8 bits for both inputs and the output"
        )
    shape, (dtype, quantization) = writer.shapes[node.output], writer.grid(node)
    operands, free = aligned(writer, [writer.input(node, index) for index in (0, 1)], shape)
    found = writer.apply("SQUARED_DIFFERENCE", operands, shape, free, dtype, quantization)
    return writer.bounded(node, found)
