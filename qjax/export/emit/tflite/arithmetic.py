"""Additions, products, averages and pools: operators if the node has a formula of the runtime, else tables."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from qjax.export.emit.tflite import tables
from qjax.export.emit.tflite.draft import Value
from qjax.export.emit.tflite.moves import padded, repeated
from qjax.export.emit.tflite.writer import Writer, lowers
from qjax.export.tflite_schema import layouts
from qjax.graph import kernels
from qjax.graph.ir import Node
from qjax.ops import formulas
from qjax.ops.formulas.joined_axes import joined_axes
from qjax.ops.windows import inside, product_of_axes
from qjax.support.errors import Unsupported


@lowers("add")
def add(writer: Writer, node: Node) -> Value:
    """ADD, SUB."""
    operator = "SUB" if node.attributes["subtract"] else "ADD"
    # False: scales of int16 tensors need not be powers of two
    return _binary(writer, node, operator, potScaleInt16=False)


@lowers("multiply")
def multiply(writer: Writer, node: Node) -> Value:
    """MUL."""
    return _binary(writer, node, "MUL")


def _binary(writer: Writer, node: Node, operator: str, **options: Any) -> Value:
    if "formula" not in node.attributes:
        return tables.binary(writer, node)
    shape, dtype, quantization = writer.shapes[node.output], *writer.grid(node)
    operands = [writer.input(node, 0), writer.input(node, 1)]
    free = operands[0].free | operands[1].free
    for index, x in enumerate(operands):
        if x.dtype != dtype:
            raise Unsupported(
                f"{node.op} of {x.dtype} to {dtype}",
                "TFLite's kernels have one width: use the same bits for inputs and output",
            )
        operands[index] = writer.reshape(x, (1,) * (len(shape) - len(x.shape)) + x.shape, _shift_axes(x, len(shape)))
    joined: Sequence[range] = [range(axis, axis + 1) for axis in range(len(shape))]
    if len(shape) > _MOST_AXES and _moves(operands[0]) != _moves(operands[1]):
        joined = joined_axes(*(_moves(x) for x in operands))
        operands = [_merge_axes(writer, x, joined) for x in operands]
        if len(joined) > _MOST_AXES and _is_pointwise(writer, node):
            inner = [math.prod(shape[axis] for axis in group) for group in joined]
            operands = [repeated(writer, x, inner, _groups(free, joined)) for x in operands]
        elif len(joined) > _MOST_LITERT:
            raise Unsupported(
                f"{node.op} of operands that repeat in turn along {len(joined)} axes",
                f"LiteRT has {_MOST_LITERT}, and rounds differently after BROADCAST_TO: repeat one with "
                "jnp.broadcast_to",
            )
    activation = writer.activation(node)
    inner = [math.prod(shape[axis] for axis in group) for group in joined]
    result = writer.apply(
        operator,
        operands,
        inner,
        _groups(free, joined),
        dtype,
        quantization,
        fusedActivationFunction=activation,
        **options,
    )
    return writer.bounded(node, writer.reshape(result, shape, free), activation)


_MOST_AXES = 4
"""The number of axes of repeated operands: the loops of TFLite Micro and of older LiteRT have four."""
_MOST_LITERT = 6


def _is_pointwise(writer: Writer, node: Node) -> bool:
    """Whether the codes are the same if operands are repeated beforehand."""
    constants = kernels.constants_of(writer.graph, node)
    return formulas.get(node.attributes["formula"]).is_pointwise(kernels.attributes(writer.graph, node), constants)


def _shift_axes(x: Value, rank: int) -> frozenset[int]:
    return frozenset(axis + rank - len(x.shape) for axis in x.free)


def _moves(x: Value) -> list[bool]:
    """Whether an operand has several elements along each axis, for some batch size."""
    return [size != 1 or axis in x.free for axis, size in enumerate(x.shape)]


def _merge_axes(writer: Writer, x: Value, groups: Sequence[range]) -> Value:
    """A RESHAPE that merges each group of axes to one."""
    shape = [math.prod(x.shape[axis] for axis in group) for group in groups]
    return writer.reshape(x, shape, _groups(x.free, groups))


def _groups(axes: frozenset[int], groups: Sequence[range]) -> frozenset[int]:
    """The groups that contain these axes."""
    return frozenset(index for index, group in enumerate(groups) if axes & set(group))


@lowers("rescale")
def rescale(writer: Writer, node: Node) -> Value:
    """QUANTIZE from codes to codes."""
    if "formula" not in node.attributes:
        return tables.unary(writer, node)
    x, (dtype, quantization) = writer.input(node), writer.grid(node)
    result = writer.apply("QUANTIZE", [x], x.shape, x.free, dtype, quantization)
    return writer.bounded(node, result)


@lowers("sum")
def mean(writer: Writer, node: Node) -> Value:
    """MEAN with keep_dims, without which the optimised kernels take another path and round differently."""
    if "formula" not in node.attributes:
        return tables.summed(writer, node)
    x, (dtype, quantization) = writer.input(node), writer.grid(node)
    axes = sorted(axis % len(x.shape) for axis in node.attributes["axes"])
    if x.free & set(axes):
        writer.resizable = False
    shape = [1 if axis in axes else size for axis, size in enumerate(x.shape)]
    free = frozenset(axis for axis in x.free if axis not in axes)
    kept = [axis for axis in range(len(x.shape)) if axis not in axes]
    result = writer.apply("MEAN", [x, writer.integers(axes)], shape, free, dtype, quantization, keepDims=True)
    result = writer.bounded(node, result)
    return writer.reshape(result, [x.shape[axis] for axis in kept], frozenset(kept.index(axis) for axis in free))


@lowers("window_sum")
def average_pool(writer: Writer, node: Node) -> Value:
    """AVERAGE_POOL_2D; padding that counts is first added around the input."""
    if "formula" not in node.attributes:
        raise Unsupported(
            "a sum over windows that is no average of them, or that another step follows",
            "No operator of TFLite computes it: divide by the window's size, and put a quantizer after it",
        )
    x, (dtype, quantization) = writer.input(node), writer.grid(node)
    if node.attributes["formula"] != "tflite_average_pool":
        raise Unsupported(
            "an average over windows whose output has another grid than its input",
            "AVERAGE_POOL_2D needs one grid: let the input and the output share a quantizer",
        )
    pool = _Pool(writer, node, x)
    count = np.asarray(writer.graph.constant(node, "count"))
    padding = pool.padding
    if count.ndim == 0 and int(count) == math.prod(pool.window):
        # padding counts, as zeros
        x = padded(writer, pool.x, [(0, 0), *padding, (0, 0)], pool.x.zero_point)
        name = "VALID"
    else:
        x, name = pool.x, "SAME"
        inside = pool.inside()
        if not pool.is_same() or not np.array_equal(np.broadcast_to(np.squeeze(count), inside.shape), inside):
            raise Unsupported(
                f"an average over windows of {pool.window} with padding {padding} and counts that TFLite does not have",
                'Use padding="SAME" or "VALID", or count_include_pad=True',
            )
    activation = writer.activation(node)
    result = writer.apply(
        "AVERAGE_POOL_2D",
        [x],
        pool.shape,
        x.free,
        dtype,
        quantization,
        fusedActivationFunction=activation,
        **pool.options(name),
    )
    return pool.back(writer.bounded(node, result, activation))


@lowers("max_pool")
def max_pool(writer: Writer, node: Node) -> Value:
    """MAX_POOL_2D; padding that SAME does not express is added with the lowest code."""
    pool = _Pool(writer, node, writer.input(node))
    quantization = pool.x.quantization
    assert quantization is not None
    x, name = pool.x, "VALID"
    if any(map(any, pool.padding)):
        if pool.is_same():
            name = "SAME"
        else:
            x = padded(writer, x, [(0, 0), *pool.padding, (0, 0)], quantization.qmin)
    result = writer.moved("MAX_POOL_2D", [x], pool.shape, x.free, x, **pool.options(name))
    return pool.back(result)


class _Pool:
    """A window over one or two neighbouring axes, in the form of NHWC.

    x: the input in that form. window, strides, padding: of height and width. shape: of the result.
    """

    def __init__(self, writer: Writer, node: Node, x: Value) -> None:
        attributes = node.attributes
        rank = len(x.shape)
        moved = [
            axis
            for axis in range(rank)
            if attributes["window"][axis] != 1 or attributes["strides"][axis] != 1 or any(attributes["padding"][axis])
        ]
        dilated = any(n != 1 for n in (*attributes["base_dilation"], *attributes["window_dilation"]))
        if dilated or len(moved) > 2:
            raise Unsupported(
                "a window with gaps" if dilated else f"a window over {len(moved)} axes",
                "TFLite pools over height and width without gaps: use several pools, or slices",
            )
        moved = moved or [0]
        first, second = (moved[0], moved[-1]) if len(moved) == 2 else (None, moved[0])
        self.writer, self.node = writer, node
        # merge the axes before, between and after the window's axes to one axis each
        self.order = [axis for axis in range(rank) if axis not in moved]
        before = [axis for axis in self.order if axis < (second if first is None else first)]
        behind = [axis for axis in self.order if axis not in before]
        self.order = [*before, *([] if first is None else [first]), second, *behind]
        y = writer.shapes[node.output]

        def nhwc(shape: Sequence[int]) -> tuple[int, ...]:
            height = 1 if first is None else shape[first]
            return (math.prod(shape[a] for a in before), height, shape[second], math.prod(shape[a] for a in behind))

        def pick(values: Sequence[Any], missing: Any) -> list[Any]:
            return [missing if first is None else values[first], values[second]]

        turned = writer.transpose(x, self.order)
        free = frozenset(
            0 if axis in before else 3 if axis in behind else 2 if axis == second else 1 for axis in x.free
        )
        self.x = writer.reshape(turned, nhwc(x.shape), free)
        self.shape = nhwc(y)
        self.window = pick(attributes["window"], 1)
        self.strides = pick(attributes["strides"], 1)
        self.padding = pick([list(pair) for pair in attributes["padding"]], [0, 0])

    def is_same(self) -> bool:
        """Whether the padding is TFLite's SAME."""
        return not self.x.free & {1, 2} and all(
            tuple(self.padding[d]) == layouts.same_padding(self.x.shape[d + 1], self.window[d], self.strides[d])
            for d in range(2)
        )

    def inside(self) -> np.ndarray:
        """How many elements that are no padding each window covers: (height, width)."""
        sides = zip(self.x.shape[1:3], self.shape[1:3], self.window, self.strides, self.padding, strict=True)
        return np.squeeze(
            product_of_axes(
                inside(size, places, window=n, stride=stride, low=low) for size, places, n, stride, (low, _) in sides
            )
        )

    def options(self, padding: str) -> dict[str, Any]:
        """The operator's options."""
        return {
            "padding": padding,
            "strideH": self.strides[0],
            "strideW": self.strides[1],
            "filterHeight": self.window[0],
            "filterWidth": self.window[1],
        }

    def back(self, result: Value) -> Value:
        """The result with the axes of the graph."""
        y = self.writer.shapes[self.node.output]
        shape = self.writer.graph.tensors[self.node.output].shape
        free = frozenset(axis for axis, size in enumerate(shape) if size is None)
        turned = self.writer.reshape(
            result, [y[axis] for axis in self.order], frozenset(self.order.index(axis) for axis in free)
        )
        return self.writer.transpose(turned, [self.order.index(axis) for axis in range(len(y))])
