"""Folds operators whose inputs are all constant, and Shape, with which exporters compute the shapes of reshapes.

    Shape(x) -> Gather(0) -> Concat(-1)    ->    the constant [8, -1]

The numbers are few, and no result is larger than `MAX_ELEMENTS` unless one of the operands is.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from qjax.contrib.importers.onnx.model import OnnxNode
from qjax.contrib.importers.onnx.tensors import MAX_RANK, type_name
from qjax.contrib.importers.onnx.values import Known, Value
from qjax.contrib.importers.onnx.walk import Walk, folds, handles
from qjax.export.read_errors import ReadError
from qjax.support.errors import Unsupported

Inputs = list[Value | None]
Numbers = np.ndarray

MAX_ELEMENTS = 2**22


@handles("Constant")
def _constant(walk: Walk, node: OnnxNode, inputs: Inputs) -> list[Value]:
    for key, value in node.attributes.items():
        if key == "value" and isinstance(value, Known):
            return [Known(value.value, node.outputs[0], value.stored)]
        if key in ("value_float", "value_floats"):
            return [Known(np.asarray(value, np.float32), node.outputs[0])]
        if key in ("value_int", "value_ints"):
            return [Known(np.asarray(value, np.int64), node.outputs[0])]
    raise Unsupported("contains no numbers")


@handles("Shape")
def _shape(walk: Walk, node: OnnxNode, inputs: Inputs) -> list[Value]:
    if len(inputs) != 1 or inputs[0] is None:
        raise ReadError(f"{node.title}: expected an input.")
    shape = walk.shape(inputs[0])
    end = node.get("end", len(shape))
    return [Known(np.asarray(shape[node.get("start", 0) : end], np.int64), node.outputs[0])]


@handles("Size")
def _size(walk: Walk, node: OnnxNode, inputs: Inputs) -> list[Value]:
    if len(inputs) != 1 or inputs[0] is None:
        raise ReadError(f"{node.title}: expected an input.")
    return [Known(np.asarray(math.prod(walk.shape(inputs[0])), np.int64), node.outputs[0])]


def _cast(node: OnnxNode, x: Numbers) -> Numbers:
    name = type_name(node.get("to", 0))
    if name not in ("float32", "float64", "float16", "int8", "uint8", "int16", "uint16", "int32", "int64", "bool"):
        raise Unsupported(f"casts constants to {name}")
    return x.astype(name)


def _axes(node: OnnxNode, rest: tuple[Numbers, ...]) -> tuple[int, ...] | None:
    axes = rest[0].reshape(-1).tolist() if rest else node.ints("axes")
    return None if axes is None else tuple(int(axis) for axis in axes)


def _slice(node: OnnxNode, x: Numbers, *rest: Numbers) -> Numbers:
    keys = ("starts", "ends", "axes", "steps")
    lists = [rest[i].reshape(-1).tolist() if i < len(rest) else node.ints(key) for i, key in enumerate(keys)]
    starts, ends = lists[0] or [], lists[1] or []
    index = [slice(None)] * x.ndim
    for position, (low, high) in enumerate(zip(starts, ends, strict=True)):
        axis = position if lists[2] is None else int(lists[2][position])
        step = 1 if lists[3] is None else int(lists[3][position])
        index[axis] = slice(low, None if high < -(2**31) else high, step)
    return x[tuple(index)]


def _reshape(node: OnnxNode, x: Numbers, *rest: Numbers) -> Numbers:
    wanted = rest[0].reshape(-1).tolist() if rest else node.ints("shape")
    kept = node.get("allowzero", 0) == 0
    return x.reshape([x.shape[i] if n == 0 and kept else n for i, n in enumerate(wanted or ())])


def _constant_of_shape(node: OnnxNode, shape: Numbers) -> Numbers:
    value = node.get("value", Known(np.zeros(1, np.float32)), Known).value
    sizes = [int(n) for n in shape.reshape(-1)]
    _bounded(node, sizes)
    return np.full(sizes, value.reshape(-1)[0])


def _range(node: OnnxNode, start: Numbers, limit: Numbers, delta: Numbers) -> Numbers:
    low, high, step = (n.reshape(()).item() for n in (start, limit, delta))
    if step == 0:
        raise Unsupported("counts in steps of 0")
    _bounded(node, [max(0, math.ceil((high - low) / step))])
    return np.arange(low, high, step).astype(start.dtype)


def _expand(node: OnnxNode, x: Numbers, shape: Numbers) -> Numbers:
    sizes = np.broadcast_shapes(x.shape, tuple(int(n) for n in shape.reshape(-1)))
    _bounded(node, sizes)
    return np.broadcast_to(x, sizes)


def _bounded(node: OnnxNode, sizes: Any) -> None:
    if len(sizes) > MAX_RANK or any(n < 0 for n in sizes) or math.prod(sizes) > MAX_ELEMENTS:
        raise ReadError(f"{node.title}: a constant of shape {list(sizes)[:MAX_RANK]} is too large.")


def _binary(function: Callable[..., Any]) -> Callable[..., Numbers]:
    def compute(node: OnnxNode, *values: Numbers) -> Numbers:
        shape = np.broadcast_shapes(*(value.shape for value in values))
        if math.prod(shape) > max(MAX_ELEMENTS, *(value.size for value in values)):
            raise ReadError(f"{node.title}: a constant of shape {list(shape)} is too large.")
        return np.asarray(function(*values))

    return compute


def _divide(a: Numbers, b: Numbers) -> Numbers:
    if a.dtype.kind == "f":
        return a / b
    if (b == 0).any():
        raise ValueError("division by zero")
    # The specification rounds toward zero.
    return (np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))).astype(a.dtype)


_FUNCTIONS: dict[str, Callable[..., Numbers]] = {
    "Cast": _cast,
    "Identity": lambda node, x: x,
    "Add": _binary(np.add),
    "Sub": _binary(np.subtract),
    "Mul": _binary(np.multiply),
    "Div": _binary(_divide),
    "Min": _binary(lambda *values: np.minimum.reduce(np.broadcast_arrays(*values))),
    "Max": _binary(lambda *values: np.maximum.reduce(np.broadcast_arrays(*values))),
    "Equal": _binary(np.equal),
    "Where": _binary(np.where),
    "Sqrt": lambda node, x: np.sqrt(x),
    "Reciprocal": lambda node, x: (1 / x).astype(x.dtype),
    "Neg": lambda node, x: -x,
    "Floor": lambda node, x: np.floor(x),
    "Ceil": lambda node, x: np.ceil(x),
    "Gather": lambda node, x, index: np.take(x, index.astype(np.int64), axis=node.get("axis", 0)),
    "Concat": lambda node, *values: np.concatenate(values, axis=node.get("axis", 0)),
    "Unsqueeze": lambda node, x, *rest: np.expand_dims(x, _axes(node, rest) or ()),
    "Squeeze": lambda node, x, *rest: np.squeeze(x, _axes(node, rest)),
    "Transpose": lambda node, x: np.transpose(x, node.ints("perm")),
    "Flatten": lambda node, x: x.reshape(math.prod(x.shape[: node.get("axis", 1)]), -1),
    "ReduceProd": lambda node, x, *rest: np.prod(
        x, axis=_axes(node, rest), keepdims=bool(node.get("keepdims", 1)), dtype=x.dtype
    ),
    "Slice": _slice,
    "Reshape": _reshape,
    "ConstantOfShape": _constant_of_shape,
    "Range": _range,
    "Expand": _expand,
}
_LARGE = {"Identity", "Cast", "Transpose", "Reshape", "Squeeze", "Unsqueeze", "Slice", "Flatten"}


@folds(*_FUNCTIONS)
def _fold(walk: Walk, node: OnnxNode, inputs: Inputs) -> list[Value]:
    known = [value for value in inputs if isinstance(value, Known)]
    if len(known) != len(inputs) or len(node.outputs) != 1:
        raise Unsupported("has no form in integers here")
    values = [value.value for value in known]
    if node.op in ("Gather", "Concat") and sum(value.size for value in values) > MAX_ELEMENTS:
        raise Unsupported("combines large constants; fold them first (onnxsim, onnxoptimizer)")
    try:
        with np.errstate(all="ignore"):
            found = np.asarray(_FUNCTIONS[node.op](node, *values))
    except (ValueError, IndexError, TypeError, OverflowError) as error:
        if isinstance(error, (ReadError, Unsupported)):
            raise
        raise ReadError(f"{node.title}: its constants do not match: {error}") from None
    if found.ndim > MAX_RANK or (found.size > MAX_ELEMENTS and node.op not in _LARGE):
        raise ReadError(f"{node.title}: a constant of shape {list(found.shape)} is too large.")
    if node.op in ("Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Slice", "Flatten"):
        return [Known(found, node.outputs[0], known[0].stored)]
    if any(value.stored for value in known) and node.op != "Cast":
        raise Unsupported("computes with constants below 8 bits")
    return [Known(found, node.outputs[0])]
