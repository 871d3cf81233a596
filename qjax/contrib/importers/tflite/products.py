"""Products with weights and of activations: FULLY_CONNECTED, CONV_2D, DEPTHWISE_CONV_2D, TRANSPOSE_CONV, BATCH_MATMUL.

Kernels get the layouts that a conversion uses: (in, out) and (height, width, in, out).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from qjax.contrib.importers.tflite.clamps import clamps
from qjax.contrib.importers.tflite.kernels import CONV, DEPTHWISE, GROUPED, MIXED, SINGLE, TRANSPOSED, mark_of_bias
from qjax.contrib.importers.tflite.values import FLOATS, Codes, bad, code_range, scales, volume
from qjax.contrib.importers.tflite.walk import Walk, reads
from qjax.export.tflite_schema.enums import PADDINGS, TENSOR_TYPES
from qjax.export.tflite_schema.layouts import same_padding
from qjax.export.tflite_schema.model import FileTensor, Operator
from qjax.graph.ir import Quantization
from qjax.ops.windows import convolution, with_kernel
from qjax.support.errors import Unsupported

MAX_PADDING = 4096
"""Rows or columns that SAME may add, besides four times the existing ones: no kernel needs more."""


@reads("FULLY_CONNECTED", ignores=("asymmetric",))
def fully_connected(walk: Walk, operator: Operator) -> None:
    """Rows of the input, whatever its rank, times a matrix (out, in)."""
    if operator.options["format"]:
        raise Unsupported("its weights are shuffled", "Convert the model again without that option")
    x, stored = walk.codes_of(operator, 0), walk.operand(operator, 1)
    if len(stored.shape) != 2 or not volume(stored.shape):
        raise bad(operator, f"weights of shape {stored.shape}")
    features, depth = stored.shape
    codes, grid = _kernel(walk, operator, x, 0)
    if volume(x.shape) % depth:
        raise bad(operator, f"an input of {x.shape}, weights of {stored.shape}")
    keep = bool(operator.options["keep_dims"])
    if keep and (not x.shape or x.shape[-1] != depth):
        raise bad(operator, f"an input of {x.shape}, weights of {stored.shape}")
    rows = x.shape[:-1] if keep else (volume(x.shape) // depth,)
    x = walk.reshaped(x, (*rows, depth), f"{walk.name_of(operator)}/input")
    rank = len(x.shape)
    attributes = {
        "lhs_contracting": [rank - 1],
        "rhs_contracting": [0],
        "lhs_batch": [],
        "rhs_batch": [],
        "weight": 1,
        "channels": [[rank - 1, 1]],
        "rank": rank,
        "permutation": None,
    }
    kernel = codes.T, _move_channel_axis(grid, 1)
    _weighted(walk, operator, "dot", x, kernel, (*rows, features), attributes, 2)


@reads("CONV_2D", "DEPTHWISE_CONV_2D")
def conv(walk: Walk, operator: Operator) -> None:
    """A convolution of NHWC; in groups if its kernel has fewer input channels than the input."""
    x, stored = walk.codes_of(operator, 0), walk.operand(operator, 1)
    _require_ranks(operator, x, stored)
    depthwise = operator.name == "DEPTHWISE_CONV_2D"
    codes, grid = _kernel(walk, operator, x, 3 if depthwise else 0)
    # (1, height, width, out) and (out, height, width, in)
    codes = codes.transpose(1, 2, 0, 3) if depthwise else codes.transpose(1, 2, 3, 0)
    height, width, into, features = codes.shape
    channels = x.shape[3]
    groups = channels if depthwise else channels // max(into, 1)
    if groups * into != channels or features % max(groups, 1) or not codes.size or (depthwise and into != 1):
        raise bad(operator, f"an input of {x.shape}, weights of {stored.shape}")
    if depthwise and operator.options["multiplier"] != features // channels:
        raise Unsupported(
            f"its depth_multiplier is {operator.options['multiplier']}, and its weights have {features} channels for "
            f"{channels} of the input",
            "TFLite Micro computes with the former, LiteRT with the latter: make the file with both equal",
        )
    strides, dilation = strides_of(operator), dilation_of(operator)
    padding, sizes = windows(operator, x.shape[1:3], (height, width), strides, dilation)
    if x.dtype == "uint8":
        walk.marks[walk.name_of(operator)] = DEPTHWISE if depthwise else CONV
    elif depthwise and groups == 1 and features > 1:
        walk.marks[walk.name_of(operator)] = SINGLE
    elif not depthwise and groups > 1:
        walk.marks[walk.name_of(operator)] = GROUPED
    attributes = with_kernel(convolution(strides, padding, rhs_dilation=dilation, groups=groups))
    _weighted(
        walk, operator, "conv", x, (codes, _move_channel_axis(grid, 3)), (x.shape[0], *sizes, features), attributes, 2
    )


@reads("TRANSPOSE_CONV")
def transpose_conv(walk: Walk, operator: Operator) -> None:
    """A convolution of the input with zeros between its codes, and the kernel rotated by 180 degrees."""
    shape = _size_of_result(walk, operator)
    x, stored = walk.codes_of(operator, 2), walk.operand(operator, 1)
    _require_ranks(operator, x, stored)
    codes, grid = _kernel(walk, operator, x, 0)
    turned = codes[:, ::-1, ::-1].transpose(1, 2, 3, 0)
    strides = strides_of(operator)
    if len(shape) != 4 or x.shape[3] != codes.shape[3] or shape[3] != codes.shape[0] or not codes.size:
        raise bad(operator, f"an input of {x.shape}, weights of {stored.shape}, an output of {shape}")
    padding: list[list[int]] = []
    for axis in range(2):
        size, window, stride = x.shape[axis + 1], codes.shape[axis + 1], strides[axis]
        out = shape[axis + 1]
        same = padding_of(operator) == "SAME"
        expected = -(-out // stride) if same else max(-(-(out - window + 1) // stride), 0)
        if size != expected or out < 1:
            raise bad(operator, f"{size} rows or columns in, {out} out")
        before = same_padding(out, window, stride)[0] if same else 0
        low = window - 1 - before
        padding.append([low, out + window - 1 - low - ((size - 1) * stride + 1)])
    if x.dtype in ("int8", "uint8"):
        walk.marks[walk.name_of(operator)] = TRANSPOSED if x.dtype == "int8" else CONV
    attributes = with_kernel(convolution([1, 1], padding, lhs_dilation=strides))
    kernel = np.ascontiguousarray(turned), _move_channel_axis(grid, 3)
    _weighted(walk, operator, "conv", x, kernel, (x.shape[0], *shape[1:]), attributes, 3)


def _size_of_result(walk: Walk, operator: Operator) -> list[int]:
    """The shape as a constant; if it is an input of the model, the shape that the file states for the result."""
    if walk.operand(operator, 0).index in walk.model.inputs:
        stated = walk.output(operator)
        if stated.shaped != "yes":
            raise Unsupported(f"the file has no shape of {stated.name!r}", "Give its shape operand as a constant")
        return list(stated.shape)
    return [int(n) for n in walk.numbers(operator, 0).reshape(-1)]


@reads("BATCH_MATMUL", ignores=("asymmetric",))
def batch_matmul(walk: Walk, operator: Operator) -> None:
    """A product of two tensors of codes over their last axes."""
    _require_one_scale(walk, operator)
    x, w = walk.codes_of(operator, 0), walk.codes_of(operator, 1)
    adjoint = operator.options["adj_x"], operator.options["adj_y"]
    rank = len(x.shape)
    if rank != len(w.shape) or rank < 2 or x.shape[:-2] != w.shape[:-2]:
        raise Unsupported(
            f"a product of {x.shape} and {w.shape}", "Repeat the smaller one with BROADCAST_TO when you make the file"
        )
    summed = (rank - 2 if adjoint[0] else rank - 1, rank - 1 if adjoint[1] else rank - 2)
    kept = (2 * rank - 3 - summed[0], 2 * rank - 3 - summed[1])
    if x.shape[summed[0]] != w.shape[summed[1]]:
        raise bad(operator, f"a product of {x.shape} and {w.shape}")
    name, _ = walk.result(operator, (*x.shape[:-2], x.shape[kept[0]], w.shape[kept[1]]))
    if x.dtype != w.dtype:
        walk.marks[name] = MIXED
    attributes = {
        "lhs_contracting": [summed[0]],
        "rhs_contracting": [summed[1]],
        "lhs_batch": list(range(rank - 2)),
        "rhs_batch": list(range(rank - 2)),
        "weight": None,
        "channels": [],
        "rank": rank,
        "permutation": None,
    }
    walk.node("dot", [x, w], name, attributes)


def _require_one_scale(walk: Walk, operator: Operator) -> None:
    """Check for one scale: LiteRT's kernels of codes only read one; with several it is 0, and so is every product."""
    for place in (0, 1):
        tensor = walk.operand(operator, place)
        if tensor.scale.size > 1:
            raise Unsupported(
                f"{tensor.name!r} has {tensor.scale.size} scales, where its kernels in LiteRT read one scale and make "
                "zeros of every input",
                "Give it one scale, or use FULLY_CONNECTED, whose weights may have a scale for each output channel",
            )


def _weighted(
    walk: Walk,
    operator: Operator,
    op: str,
    x: Codes,
    kernel: tuple[np.ndarray, Quantization],
    shape: Sequence[int],
    attributes: dict[str, Any],
    bias: int,
) -> None:
    """The node of a product with weights; bias: its index among the operands."""
    codes, grid = kernel
    name, y = walk.result(operator, shape)
    if walk.output(operator).dtype != x.dtype:
        raise Unsupported(
            f"codes of {x.dtype} become {walk.output(operator).dtype}",
            "Use the same number of bits for input and output",
        )
    constants = {
        "kernel": walk.held(operator, 1, np.ascontiguousarray(codes), grid),
        "bias": _bias(walk, operator, bias, x, shape[-1], name),
    }
    types = _types_of_sums(walk, operator, bias)
    mark = mark_of_bias(operator.name, *types, attributes.get("groups", 1)) if x.dtype == "int16" else None
    if mark is not None:
        walk.marks[name] = mark
    constants |= clamps(walk, operator, name, y)
    walk.node(op, [x], name, attributes, constants)


def _types_of_sums(walk: Walk, operator: Operator, place: int) -> tuple[str, str]:
    """The type of the bias, and the one that the options state for it; "" if there is none."""
    number = operator.options.get("bias_type", 0)
    if not 0 <= number < len(TENSOR_TYPES):
        raise bad(operator, f"a quantized_bias_type with the number {number}")
    bias = walk.operand(operator, place).dtype if walk.has(operator, place) else ""
    # float32 is the schema's default, and no bias of codes has it
    return bias, TENSOR_TYPES[number] if number else ""


def _bias(walk: Walk, operator: Operator, place: int, x: Codes, features: int, name: str) -> str:
    if not walk.has(operator, place):
        return walk.constant(f"{name}/bias", np.zeros(features, np.int32))
    tensor = walk.operand(operator, place)
    # The kernels of 8 bits would read the halves of an int64 as two biases.
    taken = ("int32", "int64") if x.dtype == "int16" else ("int32",)
    if tensor.span is None or tensor.dtype not in taken:
        raise Unsupported(f"its bias {tensor.name!r} is {tensor.dtype}, no constant of {' or '.join(taken)}", FLOATS)
    if tensor.size != features or tensor.zero_point.any():
        raise bad(operator, f"a bias of shape {tensor.shape}")
    value = walk.array(tensor).reshape(-1)
    if value.size and (int(value.min()) < -(2**31) or int(value.max()) >= 2**31):
        raise Unsupported(f"its bias {tensor.name!r} needs more than 32 bits", "Use a model of 8 bits")
    return walk.held(operator, place, value.astype(np.int32))


def _kernel(walk: Walk, operator: Operator, x: Codes, channels: int) -> tuple[np.ndarray, Quantization]:
    """The kernel in the file's layout, with its zero point subtracted; channels: the axis that may have scales."""
    tensor = walk.operand(operator, 1)
    low, high = code_range(tensor) if tensor.dtype in ("int4", "int8", "uint8") else (0, 0)
    if low == high or tensor.span is None:
        raise Unsupported(f"its weights {tensor.name!r} are no constant of 8 or 4 bits", FLOATS)
    if not tensor.scale.size:
        raise Unsupported(f"its weights {tensor.name!r} have no scale", FLOATS)
    scale, zero_point = scales(tensor, low, high)
    if scale.size > 1 and (tensor.axis != channels or scale.size != tensor.shape[channels]):
        raise Unsupported(
            f"its weights {tensor.name!r} have {scale.size} scales along axis {tensor.axis}",
            "Its kernel has one scale, or one for each of its output channels",
        )
    offset = int(zero_point[0])
    if (zero_point != offset).any() or (offset and tensor.dtype != "uint8"):
        raise Unsupported(f"its signed weights {tensor.name!r} have a zero point", "Its kernel takes it as 0")
    if (tensor.dtype == "uint8") != (x.dtype == "uint8"):
        raise Unsupported(
            f"weights of {tensor.dtype} are multiplied by codes of {x.dtype}", "No kernel of the runtime does this"
        )
    codes = walk.array(tensor)
    low, high = low - offset, high - offset
    if tensor.dtype == "uint8":
        fits = low >= -128 and high <= 127
        codes = (codes.astype(np.int32) - offset).astype(np.int8 if fits else np.int16)
    elif not (codes == low).any():
        # The lowest code does not occur, because converters write symmetric weights with as many codes below zero as
        # above.
        low = low + 1
    one = scale.size == 1
    axes = () if one else (channels,)
    held = scale[0] if one else scale
    return codes, Quantization(np.asarray(held), np.zeros(np.shape(held), np.int32), low, high, axes)


def _move_channel_axis(grid: Quantization, axis: int) -> Quantization:
    """The grid of a kernel whose channels moved to another axis."""
    return Quantization(grid.scale, grid.zero_point, grid.qmin, grid.qmax, (axis,) if grid.axes else ())


def _require_ranks(operator: Operator, x: Codes, kernel: FileTensor) -> None:
    if len(x.shape) != 4 or len(kernel.shape) != 4:
        raise bad(operator, f"an input of {x.shape}, weights of {kernel.shape}")


def strides_of(operator: Operator) -> list[int]:
    """(height, width)."""
    found = [operator.options["stride_h"], operator.options["stride_w"]]
    if min(found) < 1:
        raise bad(operator, f"strides of {found}")
    return found


def padding_of(operator: Operator) -> str:
    """SAME or VALID."""
    number = operator.options["padding"]
    if not 0 <= number < len(PADDINGS):
        raise bad(operator, f"padding number {number}")
    return PADDINGS[number]


def dilation_of(operator: Operator) -> list[int]:
    """(height, width)."""
    found = [operator.options["dilation_h"], operator.options["dilation_w"]]
    if min(found) < 1:
        raise bad(operator, f"dilation of {found}")
    return found


def windows(
    operator: Operator, sizes: Sequence[int], window: Sequence[int], strides: Sequence[int], dilation: Sequence[int]
) -> tuple[list[list[int]], list[int]]:
    """The padding of height and width, and the sizes of the result."""
    same = padding_of(operator) == "SAME"
    padding: list[list[int]] = []
    out: list[int] = []
    for size, n, stride, step in zip(sizes, window, strides, dilation, strict=True):
        pair = list(same_padding(size, n, stride, step)) if same else [0, 0]
        if sum(pair) > MAX_PADDING + 4 * size:
            raise Unsupported(f"a window of {n} on {size} rows or columns", "Use a window that fits the image")
        covered = size + sum(pair) - (n - 1) * step
        if covered < 1 or size < 1:
            raise bad(operator, f"a window of {n} on {size} rows or columns")
        padding.append(pair)
        out.append((covered - 1) // stride + 1)
    return padding, out
