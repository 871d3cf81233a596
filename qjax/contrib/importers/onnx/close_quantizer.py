"""Turns an operation on real numbers and its QuantizeLinear into nodes of the graph.

    Conv, Relu, QuantizeLinear    ->    conv with an int32 bias, a clamp and the output's grid

The nodes get their structure, codes, biases, counts and clamps here; `qjax.assign.retarget` adds the rule or the
formula of a target, with its constants.
"""

import dataclasses
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qjax import ops
from qjax.contrib.importers.onnx.draft import Grid
from qjax.contrib.importers.onnx.tensors import code_range
from qjax.contrib.importers.onnx.values import Known, Move, Pending, Real, Weight
from qjax.contrib.importers.onnx.walk import Walk
from qjax.export.read_errors import ReadError
from qjax.graph.ir import Quantization
from qjax.numerics.softfloat import Real as Exact
from qjax.ops.channels import result_to_weight, trailing, weight_to_result
from qjax.ops.epilogue import Affine, fold_weighted, scale_codes
from qjax.support.errors import Unsupported

ACCUMULATOR = (-(2**30), 2**30 - 1)
"""The codes of an int32 output: a kernel under jit cannot clamp to more."""


def finish(walk: Walk, value: Pending, name: str, grid: Grid) -> str:
    """Write the nodes of an operation whose result has the parameters `grid`; returns the tensor `name`."""
    reasons = (*value.floats, *unfused(walk, value, grid))
    if value.op not in FLOAT_FORMULAS:
        walk.in_float(name, reasons)
    moves = list(value.moves)
    first = value.name
    if value.unchanged and moves and walk.draft.grid(value.inputs[0]).same(grid) and not _bounds(value, grid):
        return _write_moves(walk, value.inputs[0], moves, name, grid)
    if value.keepdims is not None and not _drops(value):
        moves.insert(0, Move("reshape", {"shape": list(value.keepdims)}, value.keepdims, value.name))
        first = walk.draft.fresh(f"{value.name}/{value.op}")
    elif value.keepdims is not None:
        moves = moves[1:]
    own = walk.name_for(first) if moves else name
    if value.op in FLOAT_FORMULAS and reasons:
        walk.in_formula.add(own)
    return _write_moves(walk, _operation(walk, value, own, grid), moves, name, grid)


def _write_moves(walk: Walk, source: str, moves: list[Move], name: str, grid: Grid) -> str:
    for index, move in enumerate(moves):
        own = name if index == len(moves) - 1 else walk.name_for(move.name)
        walk.draft.tensor(own, move.shape, grid)
        source = walk.draft.node(move.op, (source,), own, move.attributes)
    return source


def _drops(value: Pending) -> bool:
    """Whether the first move undoes the axes of size 1."""
    if not value.moves:
        return False
    move = value.moves[0]
    return ops.get(move.op).keeps_order(move.attributes) and move.shape == value.shape


def _operation(walk: Walk, value: Pending, name: str, grid: Grid) -> str:
    draft = walk.draft
    constants = _clamps(walk, value, name, grid)
    if value.write is not None:
        return value.write(walk, value, name, grid, constants)
    attributes = dict(value.attributes)
    if value.kernel is not None:
        value = _in_layout(walk, value, name)
        attributes = dict(value.attributes)
        roles = _weighted(walk, value, name, grid)
        draft.tensor(name, value.shape, grid)
        return draft.node(value.op, value.inputs, name, attributes, {**roles, **constants})
    if value.steps:
        raise Unsupported(f"the steps after {value.name!r} (a factor or an offset) have no form in integers here")
    if value.unchanged:
        (source,) = value.inputs
        if not constants:
            walk.options["session.disable_double_qdq_remover"] = "1"
        # QuantizeLinear directly after DequantizeLinear, with the same parameters: at most a clamp remains.
        if draft.grid(source).same(grid) and constants:
            draft.tensor(name, value.shape, grid)
            return draft.node("clamp", value.inputs, name, {}, constants)
    if value.count is not None:
        constants["count"] = draft.constant(f"{name}/count", value.count)
    draft.tensor(name, value.shape, grid)
    return draft.node(value.op, value.inputs, name, attributes, constants)


def _bounds(value: Pending, grid: Grid) -> dict[str, int]:
    """The bounds of a clamp as codes, if they are narrower than the range of the codes."""
    low, high = code_range(grid.dtype)
    found: dict[str, int] = {}
    if value.low is not None and grid.code(value.low) > low:
        found["clamp_min"] = grid.code(value.low)
    if value.high is not None and grid.code(value.high) < high:
        found["clamp_max"] = grid.code(value.high)
    return found


def _clamps(walk: Walk, value: Pending, name: str, grid: Grid) -> dict[str, str]:
    bounds = _bounds(value, grid)
    return {role: walk.draft.constant(f"{name}/{role}", np.asarray(code, np.int32)) for role, code in bounds.items()}


# ---------------------------------------------------------------------------- products with weights


def _in_layout(walk: Walk, value: Pending, name: str) -> Pending:
    """A convolution whose kernel has its axes in the order that qjax's own metadata requires."""
    layout = walk.hints.layouts.get(name)
    if layout is None or value.kernel is None or value.product is None or not value.product.is_convolution:
        return value
    if sorted(layout) != list(range(value.kernel.codes.ndim)):
        raise ReadError(f"the model's metadata 'qjax': {layout} is no order of the kernel's axes of {name!r}.")
    weight = value.kernel
    order = [layout.index(axis) for axis in range(len(layout))]
    axis = None if weight.axis is None else layout[weight.axis]
    kernel = dataclasses.replace(weight, codes=weight.codes.transpose(order), axis=axis)
    channels = [[r, layout[w]] for r, w in value.attributes["channels"]]
    return value.replace(kernel=kernel, attributes={**value.attributes, "rhs_layout": layout, "channels": channels})


def _weighted(walk: Walk, value: Pending, name: str, grid: Grid) -> dict[str, str]:
    assert value.kernel is not None
    weight, attributes = value.kernel, value.attributes
    channels, rank = attributes["channels"], attributes["rank"]
    s_x = np.asarray(_scale(walk, value.inputs[0]))
    codes, quantization = centred(weight, walk.pairs)
    if quantization.axes and quantization.axes[0] not in [w for _, w in channels]:
        raise Unsupported(
            f"the weight {weight.name!r} has different scales along axis {quantization.axes[0]}, which is summed"
        )
    full = quantization.scale.reshape([n if a in quantization.axes else 1 for a, n in enumerate(codes.shape)])
    s_w = weight_to_result(full, channels, rank)
    steps = value.steps
    bias = np.zeros(np.shape(s_w), np.int32)
    if isinstance(value.bias, Known) and value.bias.value.dtype != np.int32 and steps:
        steps = (("add", value.bias.value.astype(np.float32)), *steps)
    elif value.bias is not None:
        bias = _bias(value.bias, s_x, s_w, value)
    if steps:
        if bias.any():
            steps = (("add", (bias.astype(np.float64) * s_x * s_w).astype(np.float32)), *steps)
        affine = Affine.identity()
        for kind, number in steps:
            real = Exact.of(trailing(np.asarray(number, np.float32)))
            affine = affine.times(real) if kind == "mul" else affine.plus(real)
        if np.asarray(grid.scale).size != 1 or quantization.qmin < -quantization.qmax:
            # A negative factor changes the sign of the codes.
            codes, quantization = codes.astype(np.int16), dataclasses.replace(quantization, qmax=-quantization.qmin)
        folded = fold_weighted(s_x, s_w, np.asarray(grid.scale), affine)
        codes = scale_codes(codes, result_to_weight(np.asarray(folded.factor), channels, rank, codes.ndim))
        scale = np.asarray(folded.weight_scale)
        bias = np.asarray(folded.bias)
        quantization = _rescaled(quantization, scale, channels, rank, codes.ndim)
    kernel = walk.draft.constant(weight.name or f"{name}/kernel", codes, quantization)
    held = value.bias.name if value.bias is not None and not steps else ""
    return {"kernel": kernel, "bias": walk.draft.constant(held or f"{name}/bias", bias)}


def _rescaled(
    quantization: Quantization, scale: np.ndarray, channels: Any, rank: int, weight_rank: int
) -> Quantization:
    axes = tuple(sorted(w for _, w in channels)) if scale.size > 1 else ()
    full = np.asarray(result_to_weight(scale, channels, rank, weight_rank))
    scale = full.reshape(tuple(full.shape[axis] for axis in axes))
    return dataclasses.replace(quantization, scale=scale, zero_point=np.zeros(scale.shape, np.int32), axes=axes)


def _bias(bias: Known | Weight, s_x: np.ndarray, s_w: np.ndarray, value: Pending) -> NDArray[np.int32]:
    """The bias in steps of the accumulator, in the shape of a vector of the result."""
    rank = value.attributes["rank"]
    codes = bias.value if isinstance(bias, Known) else bias.codes
    axis = value.channel_axis
    if math.prod(codes.shape) != max(codes.shape, default=1) or codes.size not in (1, value.shape[axis]):
        raise Unsupported(f"a bias of shape {list(codes.shape)}: one number per channel is expected")
    shape = [1] * rank
    shape[axis] = codes.size

    def vector(numbers: np.ndarray) -> np.ndarray:
        return trailing(numbers.reshape(shape))

    if isinstance(bias, Known) and codes.dtype == np.int32:
        return vector(codes)
    step = (s_x * s_w).astype(np.float32)
    if isinstance(bias, Weight):
        scale = bias.scale if bias.axis is None else vector(bias.scale)
        if bias.stored != "int32" or bias.zero_point.any():
            raise Unsupported(
                f"the bias {bias.name!r} has codes of type {bias.stored}: expected int32 without a zero point"
            )
        # The runtime ignores the bias's scale and adds its codes. A very different scale means another model, so refuse
        # it.
        if not np.allclose(scale, step, rtol=1e-4, atol=0):
            raise Unsupported(
                f"the bias {bias.name!r} has the scale {scale.ravel()[:1]}; that of the input times that of the weight "
                f"is {step.ravel()[:1]}"
            )
        return vector(codes)
    # ONNX Runtime quantizes a float bias like this, each step in float32.
    numbers = np.rint(vector(codes).astype(np.float32) / step)
    if not (np.abs(numbers) < 2.0**31).all():
        raise Unsupported(f"the bias {bias.name!r} is beyond int32 in steps of the accumulator")
    return numbers.astype(np.int32)


def centred(weight: Weight, pairs: bool) -> tuple[np.ndarray, Quantization]:
    """Codes minus their zero points, as int8 if they fit, and their quantization parameters.

    pairs: whether the target sums products of uint8 and int8 in int16 pairs; this does not apply to uint8 weights.
    """
    if weight.codes.dtype.name not in ("int8", "uint8", "int16", "uint16"):
        raise Unsupported(f"the weight {weight.name!r} has codes of type {weight.stored}")
    axes = () if weight.axis is None else (weight.axis,)
    low, high = code_range(weight.stored)
    zero = weight.zero_point
    shape = [n if a in axes else 1 for a, n in enumerate(weight.codes.shape)]
    codes = weight.codes.astype(np.int32) - zero.reshape(shape if axes else ())
    low, high = low - int(zero.max()), high - int(zero.min())
    least, greatest = (int(codes.min()), int(codes.max())) if codes.size else (0, 0)
    unsigned = weight.stored.startswith("u")
    dtype = "int16"
    if least >= -128 and greatest <= 127 and not (pairs and unsigned):
        dtype, low, high = "int8", max(low, -128), min(high, 127)
    elif least < -(2**15) or greatest >= 2**15:
        raise Unsupported(f"the weight {weight.name!r} minus its zero point does not fit 16 bits")
    else:
        low, high = max(low, -(2**15)), min(high, 2**15 - 1)
    zeros = np.zeros(np.shape(weight.scale), np.int32)
    return codes.astype(dtype), Quantization(weight.scale, zeros, low, high, axes)


def _scale(walk: Walk, tensor: str) -> np.float32:
    return np.float32(walk.draft.grid(tensor).quantization.scale)


# ---------------------------------------------------------------------------- accumulators as outputs


def accumulator(walk: Walk, value: Pending, name: str) -> str:
    """The int32 tensor of a product of codes: its grid has the accumulator's own step."""
    scales = [walk.draft.grid(tensor).quantization.scale for tensor in value.inputs]
    step = np.float32(1)
    for scale in scales:
        step = np.float32(step * np.float32(scale))
    if value.moves:
        raise Unsupported("reshapes or transposes an int32 accumulator, which only an output can be")
    grid = Grid("int32", step)
    zero = np.asarray(0, np.int32)
    grid._quantization = Quantization(np.asarray(step), zero, *ACCUMULATOR)  # pyright: ignore[reportPrivateUsage]
    roles = _weighted(walk, value, name, grid) if value.kernel is not None else {}
    walk.draft.tensor(name, value.shape, grid)
    return walk.draft.node(value.op, value.inputs, name, dict(value.attributes), roles)


# ---------------------------------------------------------------------------- what the runtime fuses

FLOAT_FORMULAS = {
    "add": "onnx_float_add",
    "multiply": "onnx_float_multiply",
    "window_sum": "onnx_float_average_pool",
}
"""What ONNX Runtime computes element by element if it fuses nothing: formulas with its bits."""

_PROPAGATED = ("Reshape", "Transpose", "MaxPool", "Slice", "Squeeze", "Unsqueeze", "Identity", "Dropout", "")
"""The operators past which its optimizer moves QuantizeLinear and DequantizeLinear."""


def in_between(walk: Walk, value: Pending) -> list[str]:
    """The moves that keep the optimizer from fusing what is on both sides of them."""
    known = _PROPAGATED if walk.model.opset >= 12 else tuple(by for by in _PROPAGATED if by != "MaxPool")
    return [f"{move.by} {move.name!r} has no quantizers of its own" for move in value.moves if move.by not in known]


def unfused(walk: Walk, value: Pending, grid: Grid) -> list[str]:
    """Why ONNX Runtime does not compute an operation on codes."""
    # Where ONNX Runtime fuses nothing, products and means add floats in an order that it chooses.
    adds = value.product is not None or value.is_mean or value.fails is not None
    found = [] if value.fails is None else value.fails(walk, value, grid)
    if not (adds or value.op in FLOAT_FORMULAS) or value.attributes.get("subtract"):
        return []
    inputs = [walk.draft.grid(tensor).dtype for tensor in value.inputs]
    if value.kernel is not None and inputs[0] == "uint8" and value.kernel.stored == "int8" and not walk.pairs:
        walk.options["session.x64quantprecision"] = "1"
    if walk.on_codes:
        return found
    if "int8" in inputs:
        walk.options["session.qdqisint8allowed"] = "1"
    found += in_between(walk, value)
    found += [walk.loose[tensor] for tensor in value.inputs if tensor in walk.loose]
    if value.kernel is not None:
        if value.kernel.stored not in ("int8", "uint8"):
            found.append(f"its weight has {value.kernel.stored} codes")
        elif inputs[0] == "int8" and value.kernel.stored != "int8":
            found.append("int8 codes are multiplied by a weight of uint8")
        if value.steps:
            found.append("a factor or an offset follows it")
    if any(kind not in ("int8", "uint8") for kind in (*inputs, grid.dtype)):
        found.append(f"its codes are {', '.join(sorted({*inputs, grid.dtype}))}")
    elif inputs[0] != grid.dtype or (value.product is None and any(kind != grid.dtype for kind in inputs)):
        found.append(f"codes of {', '.join(sorted(set(inputs)))} become {grid.dtype}")
    if _bounds(value, grid):
        found.append("a clamp within the range of the codes follows it")
    chain = (value.name, *value.names, *(move.name for move in value.moves))
    shared = [name for name in chain if walk.readers.get(name, 0) > 1]
    if shared:
        found.append(f"{shared[0]!r} has other readers than its quantizer")
    return found


def real_pending(walk: Walk, value: Real, name: str) -> Pending:
    """A value on a grid as an operation that does not change anything yet."""
    source = walk.plain(value)
    return Pending("rescale", name, walk.draft.shape(source), (source,), grid=walk.draft.grid(source), unchanged=True)
