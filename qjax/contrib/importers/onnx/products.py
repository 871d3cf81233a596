"""Products: Conv, MatMul, Gemm, and those whose result stays int32."""

import dataclasses
from typing import Any

import numpy as np

from qjax.contrib.importers.onnx.model import OnnxNode
from qjax.contrib.importers.onnx.quantizers import integer_operand
from qjax.contrib.importers.onnx.values import Codes, FloatInput, Known, Pending, Real, Value, Weight, Wrapped
from qjax.contrib.importers.onnx.walk import Walk, handles
from qjax.contrib.importers.onnx.windows import window_of
from qjax.export.read_errors import ReadError
from qjax.ops.windows import convolution, with_kernel
from qjax.support.errors import Unsupported

Inputs = list[Value | None]


@handles("Conv")
def _conv(walk: Walk, node: OnnxNode, inputs: Inputs) -> list[Value]:
    if not 2 <= len(inputs) <= 3 or inputs[0] is None or inputs[1] is None:
        raise ReadError(f"{node.title}: expected two or three inputs.")
    x, w = walk.real(inputs[0]), inputs[1]
    if not isinstance(w, Weight):
        raise Unsupported("its kernel is not a constant of codes behind DequantizeLinear")
    shape, rank = walk.shape(x), w.codes.ndim
    groups = node.get("group", 1)
    if (
        rank < 3
        or len(shape) != rank
        or groups < 1
        or shape[1] != w.codes.shape[1] * groups
        or w.codes.shape[0] % groups
    ):
        raise ReadError(
            f"{node.title}: a kernel of shape {list(w.codes.shape)} in {groups} groups does not fit an input of shape "
            f"{list(shape)}."
        )
    if w.axis not in (None, 0):
        raise Unsupported("its kernel has scales along another axis than its output channels")
    window = window_of(node, shape[2:], w.codes.shape[2:])
    axes = list(range(rank))
    layouts = (x.permutation or axes, axes, axes)
    attributes = with_kernel(
        convolution(window.strides, window.padding, rhs_dilation=window.dilations, groups=groups, layouts=layouts)
    )
    result = (shape[0], w.codes.shape[0], *window.sizes)
    return [Pending("conv", node.outputs[0], result, (x.tensor,), attributes, w, _bias(inputs, 2))]


def _bias(inputs: Inputs, index: int) -> Known | Weight | None:
    value = inputs[index] if len(inputs) > index else None
    if value is None or isinstance(value, (Known, Weight)):
        return value
    raise Unsupported("its bias is not a constant")


@handles("MatMul")
def _matmul(walk: Walk, node: OnnxNode, inputs: Inputs) -> list[Value]:
    if len(inputs) != 2:
        raise ReadError(f"{node.title}: expected two inputs.")
    return [_product(walk, node, inputs[0], inputs[1])]


@handles("Gemm")
def _gemm(walk: Walk, node: OnnxNode, inputs: Inputs) -> list[Value]:
    if not 2 <= len(inputs) <= 3:
        raise ReadError(f"{node.title}: expected two or three inputs.")
    bias = _bias(inputs, 2)
    if node.get("alpha", 1.0, float) != 1 or (bias is not None and node.get("beta", 1.0, float) != 1):
        raise Unsupported("has factors alpha or beta other than 1")
    if node.get("transA", 0):
        raise Unsupported("transposes its left operand; put a Transpose in front of it")
    right = inputs[1]
    if node.get("transB", 0):
        if not isinstance(right, Weight) or right.codes.ndim != 2:
            raise Unsupported("transposes its right operand; put a Transpose in front of it")
        axis = None if right.axis is None else 1 - right.axis
        right = dataclasses.replace(right, codes=right.codes.T, axis=axis)
    found = _product(walk, node, inputs[0], right)
    if len(found.shape) != 2:
        raise ReadError(f"{node.title}: expected matrices, got a result of shape {list(found.shape)}.")
    if bias is not None and found.attributes["weight"] != 1:
        raise Unsupported("adds a bias to a product without a constant right operand")
    return [found.replace(bias=bias)]


def _product(walk: Walk, node: OnnxNode, left: Value | None, right: Value | None) -> Pending:
    if left is None or right is None:
        raise ReadError(f"{node.title}: expected two inputs.")
    weight = 1 if isinstance(right, Weight) else 0 if isinstance(left, Weight) else None
    operands = [value if index == weight else walk.real(value) for index, value in enumerate((left, right))]
    (a, b) = (tuple(walk.shape(value)) for value in operands)
    if len(a) < 2 or len(b) < 2:
        raise Unsupported("multiplies a vector; reshape it to a matrix")
    if a[-1] != b[-2]:
        raise ReadError(f"{node.title}: {list(a)} and {list(b)} cannot be multiplied.")
    batch: list[int] = []
    permutation: list[int] | None = None
    if len(a) > 2 and len(b) > 2:
        if a[:-2] != b[:-2]:
            raise Unsupported(f"broadcasts {list(a)} against {list(b)}; expand the smaller one")
        batch = list(range(len(a) - 2))
    elif len(b) > 2:
        # lax.dot_general returns the axes (M, batch of b, N).
        permutation = [*range(1, len(b) - 1), 0, len(b) - 1]
    rank = max(len(a), len(b))
    shape = (*(a if len(a) == rank else b)[:-2], a[-2], b[-1])
    channels: list[list[int]] = []
    if weight is not None:
        (own, last) = (b, rank - 1) if weight == 1 else (a, rank - 2)
        free = len(own) - 1 if weight == 1 else len(own) - 2
        channels = [[axis, axis] for axis in batch] + [[last, free]]
        if len(own) > 2 and not batch:
            channels = [[axis, axis] for axis in range(len(own) - 2)] + [[last, free]]
    attributes: dict[str, Any] = {
        "lhs_contracting": [len(a) - 1],
        "rhs_contracting": [len(b) - 2],
        "lhs_batch": batch,
        "rhs_batch": batch,
        "weight": weight,
        "channels": channels,
        "rank": rank,
        "permutation": permutation,
    }
    inputs = tuple(walk.plain(value) for value in operands if not isinstance(value, Weight))  # pyright: ignore[reportArgumentType]
    kernel = operands[weight] if weight is not None else None
    return Pending("dot", node.outputs[0], shape, inputs, attributes, kernel if isinstance(kernel, Weight) else None)


@handles("MatMulInteger", "ConvInteger")
def _integer(walk: Walk, node: OnnxNode, inputs: Inputs) -> list[Value]:
    if not 2 <= len(inputs) <= 4:
        raise ReadError(f"{node.title}: expected two to four inputs.")
    points = [inputs[i] if len(inputs) > i else None for i in (2, 3)]
    axis = 0 if node.op == "ConvInteger" else -1
    left = integer_operand(walk, inputs[0], points[0], -2)
    right = integer_operand(walk, inputs[1], points[1], axis)
    real = dataclasses.replace(node, op=node.op.removesuffix("Integer"))
    (found,) = (_conv if node.op == "ConvInteger" else _matmul)(walk, real, [left, right])
    assert isinstance(found, Pending)
    return [found.replace(integers=True)]


@handles("Cast")
def _cast(walk: Walk, node: OnnxNode, inputs: Inputs) -> list[Value]:
    if len(inputs) != 1 or inputs[0] is None:
        raise ReadError(f"{node.title}: expected one input.")
    x, to = inputs[0], node.get("to", 0)
    if isinstance(x, Pending) and x.integers and to in (1, 10):
        return [x.replace(integers=False, cast=True, floats=(*x.floats, "the accumulator becomes a float"))]
    if isinstance(x, Codes):
        # Indices remain integers.
        if to in (6, 7) and walk.draft.tensors[x.tensor].grid is None:
            return [x]
        kinds = {"int8": (2, "uint8"), "uint8": (3, "int8")}
        if walk.draft.tensors[x.tensor].grid is not None:
            number, kind = kinds.get(walk.draft.tensors[x.tensor].dtype, (0, ""))
            if to == number:
                return [Wrapped(x.tensor, kind)]
    elif isinstance(x, (Real, FloatInput, Weight, Pending)) and to == 1:
        return [x]
    raise Unsupported("casts codes or numbers")


def scaled(value: Pending, factor: np.ndarray, s_x: np.float32) -> Pending:
    """A product of codes after a Cast, times the scale of its accumulator."""
    assert value.kernel is not None
    weight = value.kernel
    scale = (factor.astype(np.float32).reshape(-1) / s_x).astype(np.float32)
    if scale.size == 1:
        axis, scale = None, scale.reshape(())
    else:
        axis = value.attributes["channels"][-1][1]
        if scale.size != weight.codes.shape[axis]:
            raise Unsupported("multiplies by factors that are not one per channel")
    zero = weight.zero_point
    zero = np.broadcast_to(zero, scale.shape) if zero.size == 1 or scale.ndim else zero
    if weight.zero_point.size > 1 and scale.size == 1:
        axis, scale = weight.axis, np.broadcast_to(scale, weight.zero_point.shape)
        zero = weight.zero_point
    kernel = dataclasses.replace(weight, scale=scale, zero_point=np.asarray(zero), axis=axis)
    return value.replace(kernel=kernel, cast=False)
