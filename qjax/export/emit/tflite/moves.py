"""Writes operations that move or select codes, and clamps. Their scale and zero point do not change."""

import math
from collections.abc import Sequence

from qjax.export.emit.tflite.draft import Value
from qjax.export.emit.tflite.writer import Writer, lowers
from qjax.graph.ir import Node
from qjax.support.errors import Unsupported


@lowers("reshape")
def reshape(writer: Writer, node: Node) -> Value:
    """RESHAPE."""
    x = writer.input(node)
    return writer.reshape(x, writer.shapes[node.output], _free(writer, node))


@lowers("cast")
def cast(writer: Writer, node: Node) -> Value:
    """Nothing happens; the writer adds a copy if the graph names the result."""
    return writer.input(node)


@lowers("transpose")
def transpose(writer: Writer, node: Node) -> Value:
    """TRANSPOSE."""
    return writer.transpose(writer.input(node), node.attributes["permutation"])


@lowers("concatenate")
def concatenate(writer: Writer, node: Node) -> Value:
    """CONCATENATION."""
    parts = [writer.input(node, index) for index in range(len(node.inputs))]
    if len(parts) == 1:
        return parts[0]
    free = frozenset[int]().union(*(part.free for part in parts))
    axis = node.attributes["axis"]
    if axis in free:
        writer.resizable = False
    shape = writer.shapes[node.output]
    # Parts broadcast against each other: repeat each one to the full shape along all other axes.
    parts = [
        repeated(writer, part, [part.shape[a] if a == axis else n for a, n in enumerate(shape)], free) for part in parts
    ]
    return writer.moved("CONCATENATION", parts, shape, free, parts[0], axis=axis)


@lowers("pad")
def pad(writer: Writer, node: Node) -> Value:
    """PAD with the zero point or PADV2 with the lowest code; codes between codes through RESHAPE."""
    x = writer.input(node)
    assert x.quantization is not None
    fill = x.quantization.qmin if node.attributes["lowest"] else x.zero_point
    padding = node.attributes["padding"]
    for axis, (_, _, interior) in enumerate(padding):
        x = writer.dilate(x, axis, interior + 1, fill)
    return padded(writer, x, [(low, high) for low, high, _ in padding], fill)


def padded(writer: Writer, x: Value, padding: Sequence[Sequence[int]], fill: int) -> Value:
    """`Writer.pad` for any number of dimensions: neighbours that are not padded are merged."""
    if len(x.shape) <= 4 or not any(map(any, padding)):
        return writer.pad(x, padding, fill)
    groups: list[list[int]] = []
    for axis, pair in enumerate(padding):
        if groups and not any(pair) and not any(padding[groups[-1][-1]]):
            groups[-1].append(axis)
        else:
            groups.append([axis])
    if len(groups) > 4:
        raise Unsupported(f"padding of {len(x.shape)} dimensions", "Pad fewer axes at once, or reshape first")
    free = frozenset(i for i, group in enumerate(groups) if any(axis in x.free for axis in group))
    merged = writer.reshape(x, [math.prod(x.shape[axis] for axis in group) for group in groups], free)
    done = writer.pad(merged, [padding[group[0]] for group in groups], fill)
    shape = [size + low + high for size, (low, high) in zip(x.shape, padding, strict=True)]
    return writer.reshape(done, shape, x.free)


@lowers("slice")
def slice_(writer: Writer, node: Node) -> Value:
    """SLICE, or STRIDED_SLICE if codes are skipped."""
    x = writer.input(node)
    start, strides = node.attributes["start"], node.attributes["strides"]
    limit = [size if end is None else end for end, size in zip(node.attributes["limit"], x.shape, strict=True)]
    if all(stride == 1 for stride in strides):
        return writer.slice(x, start, [b - a for a, b in zip(start, limit, strict=True)])
    return strided(writer, x, start, limit, strides)


def strided(
    writer: Writer, x: Value, start: Sequence[int], limit: Sequence[int | None], strides: Sequence[int]
) -> Value:
    """STRIDED_SLICE; a limit of None is the end in the stride's direction."""
    if len(x.shape) > 5:
        raise Unsupported(f"a strided slice of {len(x.shape)} dimensions", "TFLite has at most 5: reshape first")
    ends = [
        (0 if step < 0 else size) if end is None else end
        for end, size, step in zip(limit, x.shape, strides, strict=True)
    ]
    mask = sum(
        1 << axis
        for axis, (end, size) in enumerate(zip(limit, x.shape, strict=True))
        if end is None or (strides[axis] > 0 and end == size)
    )
    shape = [
        -(-((size if end is None else end) - first) // step) if step > 0 else size
        for first, end, step, size in zip(start, limit, strides, x.shape, strict=True)
    ]
    if any(start[axis] > 0 or not mask >> axis & 1 for axis in x.free):
        writer.resizable = False
    vectors = [writer.integers(list(numbers)) for numbers in (start, ends, strides)]
    return writer.moved("STRIDED_SLICE", [x, *vectors], shape, x.free, x, endMask=mask)


@lowers("split")
def split(writer: Writer, node: Node) -> Value:
    """SLICE: the graph has one node per part."""
    x = writer.input(node)
    sizes, axis, index = node.attributes["sizes"], node.attributes["axis"], node.attributes.get("index", 0)
    starts = [sum(sizes[:index]) if a == axis else 0 for a in range(len(x.shape))]
    return writer.slice(x, starts, [sizes[index] if a == axis else size for a, size in enumerate(x.shape)])


@lowers("reverse")
def reverse(writer: Writer, node: Node) -> Value:
    """STRIDED_SLICE backwards, which every runtime has (TFLite Micro has no REVERSE_V2)."""
    x = writer.input(node)
    axes = [axis for axis in node.attributes["axes"] if x.shape[axis] > 1 or axis in x.free]
    if not axes:
        return x
    backwards = [-1 if axis in axes else 1 for axis in range(len(x.shape))]
    return strided(writer, x, [-1 if step < 0 else 0 for step in backwards], [None] * len(x.shape), backwards)


@lowers("broadcast")
def broadcast(writer: Writer, node: Node) -> Value:
    """RESHAPE to the rank, then BROADCAST_TO."""
    x = writer.input(node)
    shape, dimensions = writer.shapes[node.output], node.attributes["dimensions"]
    ones = [1] * len(shape)
    for axis, place in enumerate(dimensions):
        ones[place] = x.shape[axis]
    x = writer.reshape(x, ones, frozenset(dimensions[axis] for axis in x.free))
    return repeated(writer, x, shape, _free(writer, node))


@lowers("fill")
def fill(writer: Writer, node: Node) -> Value:
    """The constant, with BROADCAST_TO the batch size."""
    value = writer.constant(writer.graph.constant(node, "value"), *writer.grid(node))
    return repeated(writer, value, writer.shapes[node.output], _free(writer, node))


def repeated(writer: Writer, x: Value, shape: Sequence[int], free: frozenset[int]) -> Value:
    """BROADCAST_TO a shape of the same rank."""
    if tuple(shape) == x.shape:
        return x
    if len(shape) > 5:
        raise Unsupported(f"a broadcast to {len(shape)} dimensions", "TFLite Micro has at most 5: reshape first")
    if free:
        writer.resizable = False
    return writer.moved("BROADCAST_TO", [x, writer.integers(list(shape))], shape, free, x)


@lowers("resize_bilinear")
def resize_bilinear(writer: Writer, node: Node) -> Value:
    """RESIZE_BILINEAR, which resizes the two middle axes of an image on the same grid."""
    x, attributes = writer.input(node), node.attributes
    if attributes["method"] == "exact" or len(x.shape) != 4 or attributes["axes"] != [1, 2]:
        raise Unsupported(
            "a bilinear resize to another grid, or of other axes", "Let input and output share a quantizer, in NHWC"
        )
    chosen = {"alignCorners": attributes["align_corners"], "halfPixelCenters": attributes["half_pixel_centers"]}
    operands = [x, writer.integers(attributes["size"])]
    return writer.bounded(
        node, writer.moved("RESIZE_BILINEAR", operands, writer.shapes[node.output], x.free, x, **chosen)
    )


@lowers("clamp")
def clamp(writer: Writer, node: Node) -> Value:
    """MAXIMUM and MINIMUM with a constant on the same grid."""
    return writer.bounded(node, writer.input(node))


def _free(writer: Writer, node: Node) -> frozenset[int]:
    shape = writer.graph.tensors[node.output].shape
    return frozenset(axis for axis, size in enumerate(shape) if size is None)
