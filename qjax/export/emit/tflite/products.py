"""Products with weights and of activations: FULLY_CONNECTED, CONV_2D, DEPTHWISE_CONV_2D, BATCH_MATMUL."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qjax.export.emit.tflite.draft import Value
from qjax.export.emit.tflite.moves import padded
from qjax.export.emit.tflite.support import MICRO
from qjax.export.emit.tflite.writer import Writer, lowers
from qjax.export.tflite_schema import layouts
from qjax.export.tflite_schema.file import Scales
from qjax.graph.ir import Node, Tensor
from qjax.support.errors import Unsupported

_ASYMMETRIC = "weights with a zero point"
_CURE_ASYMMETRIC = "TFLite's kernels take symmetric weights: use weights=QSpec(symmetric=True)"
_ROWS = ("tflite_arm_gemm",)
"""Rules that round differently if the output is a single row of channels."""
_NOT_GROUPED = ("neon", "ruy", "tflite_arm_gemm")
"""Rules of LiteRT's optimised kernels, which leave convolutions of several groups to the reference kernels."""
_CHANNELS = ("tflite_depthwise_neon", "tflite_arm_depthwise", "tflite_arm_depthwise_3x3")
"""Rules that differ between channels, which must be the last axis."""


@lowers("dot")
def dot(writer: Writer, node: Node) -> Value:
    """A product of any rank as a matrix product: transpose, RESHAPE, the product, RESHAPE, transpose."""
    return _matmul(writer, node) if node.attributes["weight"] is None else _fully_connected(writer, node)


def _fully_connected(writer: Writer, node: Node) -> Value:
    x, attributes = writer.input(node), node.attributes
    kernel = _kernel_of(writer, node)
    weight = attributes["weight"]
    own, other = ("lhs", "rhs") if weight == 1 else ("rhs", "lhs")
    if attributes[f"{own}_batch"]:
        raise Unsupported(
            "a product with weights that differ along an axis of the activations",
            "TFLite has no such layer: compute it as a grouped convolution, or as one Dense per part",
        )
    summed, weights_summed = attributes[f"{own}_contracting"], attributes[f"{other}_contracting"]
    order = sorted(range(len(summed)), key=lambda i: summed[i])
    free = layouts.free_axes(len(x.shape), summed, ())
    kept = layouts.free_axes(kernel.value.ndim, weights_summed, ())
    x = writer.transpose(x, [*free, *(summed[i] for i in order)])
    lead, sizes = x.shape[: len(free)], [kernel.value.shape[axis] for axis in kept]
    if len(summed) != 1 or len(lead) != 1:
        # flatten to one row per product, like the runtimes
        rows = frozenset({0} if x.free else ())
        flat = writer.reshape(x, (math.prod(lead), math.prod(x.shape[len(free) :])), rows)
    else:
        flat = x
    matrix = layouts.matrix(kernel.value, [weights_summed[i] for i in order])
    result = _weighted(writer, node, "FULLY_CONNECTED", flat, matrix, 0, (flat.shape[0], matrix.shape[0]))
    last = attributes["permutation"] is None and weight == 1 and len(kept) == 1
    if attributes["rule"] in _ROWS and not last:
        _refuse_order(attributes["rule"])
    result = writer.reshape(result, (*lead, *sizes), x.free)
    permutation = list(range(len(lead) + len(sizes)))
    if weight == 0:
        permutation = [*permutation[len(lead) :], *permutation[: len(lead)]]
    if attributes["permutation"] is not None:
        permutation = [permutation[axis] for axis in attributes["permutation"]]
    return writer.transpose(result, permutation)


def _matmul(writer: Writer, node: Node) -> Value:
    attributes = node.attributes
    if "formula" not in attributes:
        raise Unsupported(
            "a product of activations that an affine step follows",
            "No operator of TFLite computes it. LiteRT's targets take a number as a factor; otherwise put a quantizer "
            "between them, or the step in front of the product",
        )
    operands: list[Value] = []
    kept: list[list[int]] = []
    batches: list[int] = []
    for index, side in enumerate(("lhs", "rhs")):
        value = writer.input(node, index)
        batch, summed = attributes[f"{side}_batch"], attributes[f"{side}_contracting"]
        free = layouts.free_axes(len(value.shape), summed, batch)
        kept.append([value.shape[axis] for axis in free])
        order = [*batch, *free, *summed] if index == 0 else [*batch, *summed, *free]
        batches = [value.shape[axis] for axis in batch]
        moved = writer.transpose(value, order)
        sizes = [math.prod(batches), math.prod(kept[-1]), math.prod(value.shape[axis] for axis in summed)]
        shape = sizes if index == 0 else [sizes[0], sizes[2], sizes[1]]
        places = {
            0 if axis < len(batch) else 1 if (axis < len(batch) + len(free)) == (index == 0) else 2
            for axis in moved.free
        }
        operands.append(writer.reshape(moved, shape, frozenset(places)))
    x, w = operands
    if writer.graph.target in MICRO and x.dtype != w.dtype:
        raise Unsupported(
            f"a product of activations of {x.dtype} and {w.dtype}, which {writer.graph.target!r} refuses",
            "Give both the same bits, or convert for one of LiteRT's targets",
        )
    dtype, quantization = writer.grid(node)
    shape = (x.shape[0], x.shape[1], w.shape[2])
    free = frozenset(x.free & {0, 1}) | frozenset(w.free & {0, 2})
    result = writer.apply("BATCH_MATMUL", [x, w], shape, free, dtype, quantization)
    result = writer.bounded(node, result)
    last = [*batches, *kept[0], *kept[1]]
    following = _free_of(writer, node)
    permutation = attributes["permutation"]
    if permutation is None:
        return writer.reshape(result, last, following)
    back = frozenset(permutation[axis] for axis in following)
    return writer.transpose(writer.reshape(result, last, back), permutation)


@lowers("conv")
def conv(writer: Writer, node: Node) -> Value:
    """CONV_2D or DEPTHWISE_CONV_2D on NHWC; one spatial dimension is a height of 1."""
    attributes = node.attributes
    spatial = len(attributes["lhs_layout"]) - 2
    if spatial not in (1, 2):
        raise Unsupported(
            f"a convolution over {spatial} dimensions", "TFLite has no integers for it: use one or two dimensions"
        )
    kernel = _kernel_of(writer, node)
    lhs, out = attributes["lhs_layout"], attributes["out_layout"]
    channels_last = out[1] == len(out) - 1
    if attributes["rule"] in _CHANNELS and not channels_last:
        _refuse_order(attributes["rule"])
    x = writer.transpose(writer.input(node), [lhs[0], *lhs[2:], lhs[1]])
    padding = [list(pair) for pair in attributes["padding"]]
    strides, dilation = list(attributes["strides"]), list(attributes["rhs_dilation"])
    between = list(attributes["lhs_dilation"])
    if spatial == 1:
        x = writer.reshape(x, (x.shape[0], 1, *x.shape[1:]), frozenset(axis + (axis > 0) for axis in x.free))
        padding, strides, dilation, between = [[0, 0], *padding], [1, *strides], [1, *dilation], [1, *between]
    stored = layouts.ohwi(kernel.value, attributes["rhs_layout"])
    for axis, step in enumerate(between):
        x = writer.dilate(x, axis + 1, step, x.zero_point)
    x, name = surrounded(writer, x, padding, stored.shape[1:3], strides, dilation)
    groups, features = attributes["groups"], stored.shape[0]
    options: dict[str, Any] = {
        "padding": name,
        "strideH": strides[0],
        "strideW": strides[1],
        "dilationHFactor": dilation[0],
        "dilationWFactor": dilation[1],
    }
    shape = writer.shapes[node.output]
    sizes = [shape[axis] for axis in out[2:]]
    nhwc = (x.shape[0], *([1] if spatial == 1 else []), *sizes, features)
    if groups > 1 and stored.shape[3] == 1:
        options["depthMultiplier"] = features // groups
        result = _weighted(writer, node, "DEPTHWISE_CONV_2D", x, layouts.depthwise(stored), 3, nhwc, **options)
    elif groups > 1 and attributes["rule"] in _NOT_GROUPED:
        result = _by_group(writer, node, x, stored, nhwc, options)
    else:
        result = _weighted(writer, node, "CONV_2D", x, stored, 0, nhwc, grouped=groups > 1, **options)
    if spatial == 1:
        result = writer.reshape(result, (nhwc[0], *nhwc[2:]), frozenset(max(axis - 1, 0) for axis in result.free))
    order = [0] * len(out)
    for source, place in enumerate((out[0], *out[2:], out[1])):
        order[place] = source
    return writer.transpose(result, order)


def _by_group(
    writer: Writer, node: Node, x: Value, stored: np.ndarray, shape: Sequence[int], options: Mapping[str, Any]
) -> Value:
    """One CONV_2D per group, whose results are concatenated."""
    groups = node.attributes["groups"]
    width, features = stored.shape[3], stored.shape[0] // groups
    if node.attributes["rule"] == "tflite_arm_gemm" and features < 4:
        raise Unsupported(
            "a convolution with groups of fewer than 4 channels",
            "LiteRT on ARM rounds those differently: use wider groups",
        )
    parts: list[Value] = []
    for group in range(groups):
        channels = slice(group * features, (group + 1) * features)
        part = writer.slice(x, (0, 0, 0, group * width), (*x.shape[:3], width))
        narrow = (*shape[:3], features)
        parts.append(_weighted(writer, node, "CONV_2D", part, stored, 0, narrow, channels, **options))
    free = parts[0].free
    return writer.moved("CONCATENATION", parts, shape, free, parts[0], axis=3)


def surrounded(
    writer: Writer,
    x: Value,
    padding: Sequence[Sequence[int]],
    window: Sequence[int],
    strides: Sequence[int],
    dilation: Sequence[int],
) -> tuple[Value, str]:
    """The input with the padding that the operator's own modes do not express, and the mode for the rest."""
    if not any(map(any, padding)):
        return x, "VALID"
    if all(
        tuple(padding[d]) == layouts.same_padding(x.shape[d + 1], window[d], strides[d], dilation[d])
        and (d + 1) not in x.free
        for d in range(2)
    ):
        return x, "SAME"
    zero = 0 if x.quantization is None else x.zero_point
    return padded(writer, x, [(0, 0), *padding, (0, 0)], zero), "VALID"


def _weighted(
    writer: Writer,
    node: Node,
    operator: str,
    x: Value,
    stored: np.ndarray,
    axis: int,
    shape: Sequence[int],
    channels: slice | None = None,
    **options: Any,
) -> Value:
    """The operator with its kernel in the file's layout, bias and clamp; channels: of CONV_2D, those to compute."""
    tensor = writer.graph.tensors[node.constants["kernel"]]
    assert tensor.quantization is not None
    w_scale = np.asarray(tensor.quantization.scale, np.float32).reshape(-1)
    packed = writer.packs(operator, tensor, stored.shape[-1])
    chosen = slice(None) if channels is None else channels
    if channels is not None:
        stored = stored[channels]
    w_scale = w_scale if w_scale.size == 1 else w_scale[chosen]
    kernel = writer.weights("kernel", node, stored, Scales(w_scale, 0, axis), "int4" if packed else "int8")
    try:
        bias = layouts.channel_vector(writer.graph.constant(node, "bias"), node.attributes, np.asarray(tensor.value))
    except ValueError:
        raise Unsupported(
            "its bias differs along other axes than the channels",
            "TFLite has one bias per channel: add the rest as a separate operation, after a quantizer",
        ) from None
    assert x.quantization is not None
    wide = "int64" if x.dtype == "int16" else "int32"
    scale = np.float32(np.asarray(x.quantization.scale)) * w_scale
    held = writer.weights("bias", node, bias[chosen].astype(wide), Scales(scale), wide)
    dtype, quantization = writer.grid(node)
    activation = writer.activation(node)
    result = writer.apply(
        operator,
        [x, kernel, held],
        shape,
        frozenset(axis for axis in x.free if axis < len(shape) - 1),
        dtype,
        quantization,
        fusedActivationFunction=activation,
        **options,
    )
    return writer.bounded(node, result, activation)


def _kernel_of(writer: Writer, node: Node) -> Any:
    tensor: Tensor = writer.graph.tensors[node.constants["kernel"]]
    assert tensor.value is not None
    assert tensor.quantization is not None
    if tensor.dtype != "int8" or np.any(np.asarray(tensor.quantization.zero_point)):
        raise Unsupported(_ASYMMETRIC if tensor.dtype == "int16" else f"weights of {tensor.dtype}", _CURE_ASYMMETRIC)
    x, y = (writer.graph.tensors[name].dtype for name in (node.inputs[0], node.output))
    if x != y:
        raise Unsupported(
            f"a product with input codes of {x} and output codes of {y}",
            "TFLite's kernels have one width for both: give both quantizers the same number of bits",
        )
    return tensor


def _refuse_order(rule: str) -> None:
    raise Unsupported(
        f"the rule {rule!r} rounds by the position on the last axis, which is not the channels' here",
        "Keep channels on the last axis (NHWC, and no transposition right after the product)",
    )


def _free_of(writer: Writer, node: Node) -> frozenset[int]:
    shape = writer.graph.tensors[node.output].shape
    return frozenset(axis for axis, size in enumerate(shape) if size is None)
