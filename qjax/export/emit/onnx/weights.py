"""Weights and biases in the form that ONNX Runtime's kernels need.

Activations are unsigned. Weights are unsigned too, except if no pair of products can exceed int16, if the user asserts
that the CPU has VNNI, and under the target that models saturating pairs. On x86 without VNNI, products of uint8 and
int8 saturate in pairs; with VNNI they are the fastest.
"""

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from qjax.export import document
from qjax.export.emit.onnx import products, tensors
from qjax.export.emit.onnx.builder import element_type
from qjax.export.emit.onnx.codes import Bias, Operand
from qjax.export.emit.onnx.codes_writer import CodesWriter
from qjax.graph.ir import Node, Quantization


def weight_of(
    w: CodesWriter, node: Node, order: Sequence[int], shape: Sequence[int], channels: Sequence[int], axis: int
) -> Operand | None:
    """A node's kernel as an operand, or None if its codes do not fit 8 bits.

    Args:
      order, shape: the order of the tensor's axes in the file, and the shape that they get. channels: the axes that may
        have their own scales. axis: the axis of `shape` that they become.
    """
    name = node.constants["kernel"]
    tensor = w.graph.tensors[name]
    grid = tensor.quantization
    if grid is None or not set(grid.axes) <= set(channels) or np.any(np.asarray(grid.zero_point)):
        return None
    codes = np.asarray(tensor.value).astype(np.int32)
    signed = _are_signed(w, node, codes, channels)
    small = tensors.narrow_type(tensor) is not None
    low, high = ((-8, 7) if small else (-128, 127)) if signed else ((0, 15) if small else (0, 255))
    least, greatest = (int(codes.min()), int(codes.max())) if codes.size else (0, 0)
    middle = low + (high - low + 1) // 2
    offset = middle if low <= least + middle and greatest + middle <= high else low - least
    if greatest + offset > high or offset > high or offset < low:
        return None
    kind = np.int8 if signed else np.uint8
    stored: Any = kind if not small else ml_dtypes.int4 if signed else ml_dtypes.uint4
    laid = (codes + offset).transpose(order).reshape(shape)
    proto = numpy_helper.from_array(np.ascontiguousarray(laid).astype(stored), name)
    tensors.put(proto, {**document.of_tensor(tensor, order), "offset": offset})
    held = held_as(w, name, proto)
    scale = kernel_scale(grid, codes.shape, channels)
    along = axis if grid.axes else None
    if small:
        held = w.cast(held, element_type(kind))
    zero_point = np.full(scale.shape, offset, kind)
    return Operand(held, w.stored(f"{name}/scale", scale), w.stored(f"{name}/zero_point", zero_point), along)


def kernel_scale(grid: Quantization, sizes: Sequence[int], channels: Sequence[int]) -> NDArray[np.float32]:
    """A kernel's only scale, or one for each of its channels. sizes: of the kernel. channels: axes of it."""
    scale = np.asarray(grid.scale, np.float32)
    if not grid.axes:
        return scale.reshape(())
    # the scale has the order of the tensor's axes; bring it to the order of `channels`
    spread = scale.reshape([n if a in grid.axes else 1 for a, n in enumerate(sizes)])
    rest = [a for a in range(len(sizes)) if a not in channels]
    full = [sizes[a] for a in channels]
    spread = spread.transpose((*channels, *rest)).reshape(
        [n if a in grid.axes else 1 for a, n in zip(channels, full, strict=True)]
    )
    return np.broadcast_to(spread, full).reshape(-1)


def _are_signed(w: CodesWriter, node: Node, codes: NDArray[np.int32], channels: Sequence[int]) -> bool:
    dtype = w.graph.tensors[node.inputs[0]].dtype
    if w.plain:
        return dtype == "int8" or (w.pairs and w.graph.tensors[node.constants["kernel"]].dtype == "int8")
    if w.pairs and dtype == "uint8":
        return w.graph.tensors[node.constants["kernel"]].dtype == "int8"
    _, greatest, _ = w.range(node.inputs[0])
    summed = [axis for axis in range(codes.ndim) if axis not in channels]
    return w.vnni or products.never_saturates(codes, summed, greatest + (128 if dtype == "int8" else 0))


def bias_of(
    w: CodesWriter, node: Node, weight: Operand, order: Sequence[int], channels: Sequence[int], sizes: Sequence[int]
) -> Bias | None:
    """A node's bias, one int32 per channel; None if it varies along other axes.

    order: for each axis of the file's result, the axis of the graph's. channels: the axes of the graph's result that
    are the weight's channels; sizes: those of the weight's.
    """
    name = node.constants["bias"]
    tensor = w.graph.tensors[name]
    value = np.asarray(tensor.value, np.int32)
    vector = channel_vector(value, len(order), channels, sizes)
    if vector is None:
        return None
    proto = numpy_helper.from_array(np.ascontiguousarray(vector), name)
    if np.array_equal(vector, value.reshape(-1)):
        tensors.put(proto, document.of_tensor(tensor))
    held = held_as(w, name, proto)
    s_x = w.graph.tensors[node.inputs[0]].quantization
    assert s_x is not None
    s_w = numpy_helper.to_array(w.initializers[weight.scale])
    step = np.asarray(s_x.scale, np.float32).reshape(()) * s_w
    return Bias(held, w.stored(f"{held}/scale", step), None if weight.axis is None else 0)


def channel_vector(
    value: NDArray[Any], rank: int, channels: Sequence[int], sizes: Sequence[int]
) -> NDArray[Any] | None:
    """Numbers that broadcast against a result of that rank, as one per channel; None if they vary along other axes.

    channels, sizes: as those of `bias_of`.
    """
    full = value.reshape((1,) * (rank - value.ndim) + value.shape)
    if any(n != 1 for axis, n in enumerate(full.shape) if axis not in channels):
        return None
    rest = [axis for axis in range(rank) if axis not in channels]
    row = full.transpose((*channels, *rest)).reshape([full.shape[axis] for axis in channels])
    return np.broadcast_to(row, tuple(sizes)).reshape(-1)


def held_as(w: CodesWriter, name: str, proto: onnx.TensorProto) -> str:
    """The name of an initializer in the file: its own, unless other nodes read the tensor too.

    Nodes that store it in the same way, such as the steps of a recurrent layer, read one initializer.
    """
    if w.readers[name] > 1 or name in w.data:
        key = name, proto.SerializeToString(deterministic=True)
        if key in w.shared:
            return w.shared[key]
        proto.name = w.shared[key] = w.fresh(f"{name}/weight")
        if name in w.holders or not proto.metadata_props:
            del proto.metadata_props[:]
        else:
            w.holders[name] = proto.name
    w.initializers[proto.name] = proto
    return proto.name
