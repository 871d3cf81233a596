"""Operators that move codes: reshapes, transposes, slices, pads, maxima, lookups. They commute with quantizers.

On codes each becomes a node at once. After DequantizeLinear it waits for QuantizeLinear and then has its name. A
transpose may instead become part of the layout of its neighbour.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from qjax import ops
from qjax.contrib.importers.onnx.close_quantizer import real_pending
from qjax.contrib.importers.onnx.model import OnnxNode
from qjax.contrib.importers.onnx.values import Codes, FloatInput, Known, Move, Pending, Real, Value, Weight
from qjax.contrib.importers.onnx.walk import Walk, handles
from qjax.export.read_errors import ReadError
from qjax.support.errors import Unsupported

Inputs = list[Value | None]


def moved(walk: Walk, node: OnnxNode, x: Value, op: str, attributes: dict[str, Any], shape: Sequence[int]) -> Value:
    """The result of a node that moves codes."""
    move = Move(op, attributes, tuple(shape), node.outputs[0], node.op)
    if isinstance(x, Codes):
        return _move_codes(walk, x, move)
    if isinstance(x, Real):
        x = real_pending(walk, x, node.outputs[0])
    if isinstance(x, FloatInput):
        x = Pending("input", x.name, x.shape)
    if not isinstance(x, Pending):
        raise Unsupported("works on a constant")
    return x.replace(moves=(*x.moves, move))


def _move_codes(walk: Walk, x: Codes, move: Move) -> Codes:
    entry = walk.draft.tensors[x.tensor]
    if entry.grid is None and move.filling != "none":
        raise Unsupported("works on indices where codes are expected")
    walk.draft.tensor(move.name, move.shape, entry.grid, entry.dtype)
    return Codes(walk.draft.node(move.op, (x.tensor,), move.name, move.attributes))


def first(node: OnnxNode, inputs: Inputs) -> Value:
    """The first input, which must exist."""
    if not inputs or inputs[0] is None:
        raise ReadError(f"{node.title}: expected an input.")
    return inputs[0]


def known_ints(node: OnnxNode, inputs: Inputs, index: int, key: str | None = None) -> list[int] | None:
    """Whole numbers that newer opsets take as an input and older ones as an attribute."""
    value = inputs[index] if len(inputs) > index else None
    if value is None:
        return node.ints(key) if key is not None else None
    if not isinstance(value, Known) or value.value.dtype.kind != "i" or value.value.ndim > 1 or value.value.size > 64:
        raise Unsupported(f"its input {index} is not a short constant list of whole numbers")
    return [int(n) for n in value.value.reshape(-1)]


def axis_of(node: OnnxNode, axis: int, rank: int) -> int:
    """A possibly negative axis as a position."""
    if not -rank <= axis < rank:
        raise ReadError(f"{node.title}: axis {axis} does not exist, there are {rank} axes.")
    return axis % rank


@handles("Identity", "Dropout")
def _identity(walk: Walk, node: OnnxNode, inputs: Inputs) -> list[Value]:
    training = inputs[2] if len(inputs) > 2 else None
    if training is not None and not (isinstance(training, Known) and not training.value.any()):
        raise Unsupported("drops elements (training mode)")
    if len(node.outputs) > 1 and node.outputs[1]:
        raise Unsupported("returns a mask")
    return [first(node, inputs)]


@handles("Reshape")
def _reshape(walk: Walk, node: OnnxNode, inputs: Inputs) -> list[Value]:
    x, wanted = first(node, inputs), known_ints(node, inputs, 1, "shape")
    if wanted is None:
        raise Unsupported("has no shape")
    before = walk.shape(x)
    keeps = node.get("allowzero", 0) == 0
    shape = [before[i] if n == 0 and keeps and i < len(before) else n for i, n in enumerate(wanted)]
    return [_reshaped(walk, node, x, shape)]


def _reshaped(walk: Walk, node: OnnxNode, x: Value, shape: list[int]) -> Value:
    size = math.prod(walk.shape(x))
    rest = math.prod(n for n in shape if n != -1)
    if shape.count(-1) == 1 and rest and size % rest == 0:
        shape = [size // rest if n == -1 else n for n in shape]
    if any(n < 0 for n in shape) or math.prod(shape) != size:
        raise ReadError(f"{node.title}: {list(walk.shape(x))} cannot be reshaped to {shape}.")
    if isinstance(x, Weight):
        if x.axis is not None:
            raise Unsupported(f"reshapes the constant {x.name!r}, which has a scale per channel")
        return dataclasses.replace(x, codes=x.codes.reshape(shape))
    return moved(walk, node, x, "reshape", {"shape": shape}, shape)


@handles("Flatten")
def _flatten(walk: Walk, node: OnnxNode, inputs: Inputs) -> list[Value]:
    x = first(node, inputs)
    shape = walk.shape(x)
    axis = node.get("axis", 1)
    axis = len(shape) if axis == len(shape) else axis_of(node, axis, len(shape))
    return [_reshaped(walk, node, x, [math.prod(shape[:axis]), math.prod(shape[axis:])])]


@handles("Squeeze")
def _squeeze(walk: Walk, node: OnnxNode, inputs: Inputs) -> list[Value]:
    x, axes = first(node, inputs), known_ints(node, inputs, 1, "axes")
    shape = walk.shape(x)
    chosen = [i for i, n in enumerate(shape) if n == 1]
    if axes is not None:
        chosen = [axis_of(node, axis, len(shape)) for axis in axes]
    if any(shape[axis] != 1 for axis in chosen):
        raise ReadError(f"{node.title}: an axis of {list(shape)} that is not 1 cannot be dropped.")
    return [_reshaped(walk, node, x, [n for i, n in enumerate(shape) if i not in chosen])]


@handles("Unsqueeze")
def _unsqueeze(walk: Walk, node: OnnxNode, inputs: Inputs) -> list[Value]:
    x, axes = first(node, inputs), known_ints(node, inputs, 1, "axes")
    before = list(walk.shape(x))
    rank = len(before) + len(axes or ())
    chosen = {axis_of(node, axis, rank) for axis in axes or ()}
    if rank - len(chosen) != len(before):
        raise ReadError(f"{node.title}: an axis is listed twice.")
    rest = iter(before)
    return [_reshaped(walk, node, x, [1 if i in chosen else next(rest) for i in range(rank)])]


@handles("Transpose")
def _transpose(walk: Walk, node: OnnxNode, inputs: Inputs) -> list[Value]:
    x = first(node, inputs)
    shape = walk.shape(x)
    order = node.ints("perm") or list(range(len(shape)))[::-1]
    if sorted(order) != list(range(len(shape))):
        raise ReadError(f"{node.title}: {order} is no order of {len(shape)} axes.")
    name = node.outputs[0]
    if isinstance(x, Weight):
        axis = None if x.axis is None else order.index(x.axis)
        return [dataclasses.replace(x, codes=x.codes.transpose(order), axis=axis)]
    if isinstance(x, Real):
        before = x.permutation or tuple(range(len(shape)))
        total = tuple(before[axis] for axis in order)
        return [Real(x.tensor, None if total == tuple(range(len(shape))) else total, name)]
    if isinstance(x, Pending):
        absorbed = _absorb_transpose(x, order)
        if absorbed is not None:
            return [absorbed]
    return [moved(walk, node, x, "transpose", {"permutation": order}, [shape[axis] for axis in order])]


def _absorb_transpose(x: Pending, order: list[int]) -> Pending | None:
    """The operation with its result's axes in another order, if its layout can express that."""
    last = x.moves[-1] if x.moves else None
    before = ops.get(last.op).permutation(last.attributes) if last is not None else None
    if before is not None:
        total = [before[axis] for axis in order]
        if total == sorted(total):
            return x.replace(moves=x.moves[:-1])
        return None
    if x.moves or x.keepdims is not None or x.integers or x.steps or x.product is None:
        return None
    return x.replace(attributes=x.product.transposed(x.attributes, order), shape=tuple(x.shape[axis] for axis in order))


@handles("Slice")
def _slice(walk: Walk, node: OnnxNode, inputs: Inputs) -> list[Value]:
    x = first(node, inputs)
    shape = walk.shape(x)
    starts, ends = known_ints(node, inputs, 1, "starts"), known_ints(node, inputs, 2, "ends")
    if starts is None or ends is None or len(starts) != len(ends):
        raise Unsupported("has no starts or no ends")
    axes = known_ints(node, inputs, 3, "axes") or list(range(len(starts)))
    steps = known_ints(node, inputs, 4) or [1] * len(starts)
    if not len(axes) == len(steps) == len(starts):
        raise ReadError(f"{node.title}: expected as many starts as ends, axes and steps.")
    start, limit, strides = [0] * len(shape), list(shape), [1] * len(shape)
    reversed_: list[int] = []
    for axis, low, high, step in zip(axes, starts, ends, steps, strict=True):
        axis = axis_of(node, axis, len(shape))
        if step == 0:
            raise ReadError(f"{node.title}: counts in steps of 0.")
        low, high, _ = slice(low, high, step).indices(shape[axis])
        if step < 0:
            # Reverse the axis and count from its other end: position p becomes n - 1 - p.
            reversed_.append(axis)
            low, high, step = shape[axis] - 1 - low, shape[axis] - 1 - high, -step
        start[axis], limit[axis], strides[axis] = low, max(low, high), step
    if reversed_:
        inner = dataclasses.replace(node, outputs=(walk.draft.fresh(f"{node.outputs[0]}/reversed"),))
        x = moved(walk, inner, x, "reverse", {"axes": sorted(reversed_)}, shape)
    after = [-(-(stop - low) // step) for low, stop, step in zip(start, limit, strides, strict=True)]
    attributes = {"start": start, "limit": limit, "strides": strides}
    return [moved(walk, node, x, "slice", attributes, after)]


@handles("Split")
def _split(walk: Walk, node: OnnxNode, inputs: Inputs) -> list[Value]:
    x = first(node, inputs)
    shape = walk.shape(x)
    axis = axis_of(node, node.get("axis", 0), len(shape))
    sizes, count = known_ints(node, inputs, 1, "split"), len(node.outputs)
    if sizes is None:
        each = -(-shape[axis] // count)
        sizes = [max(0, min(each, shape[axis] - index * each)) for index in range(count)]
    if len(sizes) != count or sum(sizes) != shape[axis] or min(sizes) < 0:
        raise ReadError(f"{node.title}: {sizes} are no {count} parts of {shape[axis]}.")
    outputs: list[Value] = []
    for index, (name, size) in enumerate(zip(node.outputs, sizes, strict=True)):
        attributes: dict[str, Any] = {"sizes": sizes, "axis": axis, **({"index": index} if count > 1 else {})}
        part = dataclasses.replace(node, outputs=(name,))
        outputs.append(
            moved(walk, part, x, "split", attributes, [size if a == axis else n for a, n in enumerate(shape)])
        )
    return outputs


@handles("Pad")
def _pad(walk: Walk, node: OnnxNode, inputs: Inputs) -> list[Value]:
    x = first(node, inputs)
    shape = walk.shape(x)
    if node.get("mode", "constant", str) != "constant":
        raise Unsupported("pads with copies; only zeros are read")
    pads = known_ints(node, inputs, 1, "pads")
    axes = known_ints(node, inputs, 3) or list(range(len(shape)))
    if pads is None or len(pads) != 2 * len(axes):
        raise ReadError(f"{node.title}: expected two sizes per axis.")
    value: Any = node.get("value", 0.0, float)
    if len(inputs) > 2 and inputs[2] is not None:
        if isinstance(inputs[2], Weight):
            weight = inputs[2]
            value = float((weight.codes.astype(np.int32) - weight.zero_point).reshape(()))
        elif isinstance(inputs[2], Known) and inputs[2].value.size == 1:
            value = float(inputs[2].value.reshape(()))
        else:
            raise Unsupported("pads with a number that is not constant")
    if isinstance(x, Codes):
        grid = walk.draft.grid(x.tensor)
        if grid.scale is None and value == 0 and grid.dtype.startswith("int"):
            grid.scale, grid.zero_point = np.float32(1), 0
        if grid.scale is None or value != grid.zero_point:
            raise Unsupported(f"pads codes with {value}, which is not their code of zero")
    elif value != 0:
        raise Unsupported(f"pads with {value}; only zeros are read")
    config = [[0, 0, 0] for _ in shape]
    for position, axis in enumerate(axes):
        config[axis_of(node, axis, len(shape))][:2] = pads[position], pads[position + len(axes)]
    after = [n + low + high for n, (low, high, _) in zip(shape, config, strict=True)]
    return [moved(walk, node, x, "pad", {"padding": config, "lowest": False}, after)]


@handles("Expand")
def _expand(walk: Walk, node: OnnxNode, inputs: Inputs) -> list[Value]:
    x, wanted = first(node, inputs), known_ints(node, inputs, 1)
    before = walk.shape(x)
    try:
        shape = np.broadcast_shapes(before, tuple(wanted or ()))
    except ValueError:
        raise ReadError(f"{node.title}: {list(before)} does not broadcast to {wanted}.") from None
    dimensions = list(range(len(shape) - len(before), len(shape)))
    return [moved(walk, node, x, "broadcast", {"shape": list(shape), "dimensions": dimensions}, shape)]


@handles("ReduceMax", "ReduceMin")
def _reduce_max(walk: Walk, node: OnnxNode, inputs: Inputs) -> list[Value]:
    x = first(node, inputs)
    shape = walk.shape(x)
    axes = known_ints(node, inputs, 1, "axes") or list(range(len(shape)))
    chosen = sorted(axis_of(node, axis, len(shape)) for axis in axes)
    return [_maximum(walk, node, x, chosen, node.get("keepdims", 1) != 0)]


@handles("GlobalMaxPool")
def _global_max(walk: Walk, node: OnnxNode, inputs: Inputs) -> list[Value]:
    x = first(node, inputs)
    return [_maximum(walk, node, x, list(range(2, len(walk.shape(x)))), True)]


def _maximum(walk: Walk, node: OnnxNode, x: Value, axes: list[int], keep: bool) -> Value:
    shape, op = walk.shape(x), "min" if node.op == "ReduceMin" else "max"
    reduced = [n for a, n in enumerate(shape) if a not in axes]
    if not keep:
        return moved(walk, node, x, op, {"axes": axes}, reduced)
    inner = dataclasses.replace(node, outputs=(walk.draft.fresh(f"{node.outputs[0]}/{op}"),))
    kept = [1 if a in axes else n for a, n in enumerate(shape)]
    return moved(walk, node, moved(walk, inner, x, op, {"axes": axes}, reduced), "reshape", {"shape": kept}, kept)
