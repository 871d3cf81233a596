"""QuantizeLinear, DequantizeLinear, and the operators on codes that replace a float operator between the two."""

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qjax.contrib.importers.onnx.close_quantizer import finish, real_pending
from qjax.contrib.importers.onnx.draft import Grid
from qjax.contrib.importers.onnx.model import OnnxNode
from qjax.contrib.importers.onnx.tensors import code_range, small_range, type_name
from qjax.contrib.importers.onnx.values import (
    Codes,
    FloatInput,
    Known,
    Pending,
    Real,
    Value,
    Weight,
    Wrapped,
)
from qjax.contrib.importers.onnx.walk import CODES, Walk, handler, handles
from qjax.export.onnx_ops import ON_CODES
from qjax.export.read_errors import SCALES, ReadError, usable
from qjax.numerics.affine import QParams, QSpec, quantize
from qjax.support.errors import Unsupported

_MICROSOFT = "com.microsoft"


@handles("DequantizeLinear")
@handles("DequantizeLinear", domain=_MICROSOFT)
def _dequantize_linear(walk: Walk, node: OnnxNode, inputs: list[Value | None]) -> list[Value]:
    x, scale, zero_point = _three(node, inputs)
    if node.get("block_size", 0):
        raise Unsupported("scales in blocks have no single integer sum; quantize per tensor or per channel")
    return [dequantized(walk, x, scale, zero_point, node.get("axis", 1))]


@handles("QuantizeLinear")
@handles("QuantizeLinear", domain=_MICROSOFT)
def _quantize_linear(walk: Walk, node: OnnxNode, inputs: list[Value | None]) -> list[Value]:
    x, scale, zero_point = _three(node, inputs)
    if node.get("block_size", 0):
        raise Unsupported("scales in blocks have no single integer sum; quantize per tensor or per channel")
    if node.get("precision", 0) not in (0, 1):
        raise Unsupported("divides in another precision than float32")
    kind = "uint8" if not node.get("output_dtype", 0) else type_name(node.get("output_dtype", 0))
    return [quantized(walk, x, scale, zero_point, kind, node.get("axis", 1), node.outputs[0])]


def _three(node: OnnxNode, inputs: list[Value | None]) -> tuple[Value, Value | None, Value | None]:
    if not 2 <= len(inputs) <= 3 or inputs[0] is None or len(node.outputs) != 1:
        raise ReadError(f"{node.title}: expected two or three inputs and one output.")
    return inputs[0], inputs[1], inputs[2] if len(inputs) == 3 else None


# ---------------------------------------------------------------------------- quantize and dequantize


def dequantized(walk: Walk, x: Value, scale: Value | None, zero_point: Value | None, axis: int) -> Value:
    """Dequantized codes."""
    if isinstance(x, Known):
        rank = x.value.ndim
        s, z, stored = parameters(scale, zero_point, x.type, rank=rank, axis=axis, size=x.value.shape)
        if stored not in (*CODES, "int4", "uint4", "int2", "uint2"):
            raise Unsupported(f"constant codes of type {stored}; expected at most 16 bits, or int32")
        return Weight(x.name, x.value, stored, s, z, None if s.ndim == 0 else axis % rank)
    if isinstance(x, Pending) and x.integers:
        raise Unsupported("dequantizes an int32 accumulator; QLinearMatMul and QLinearConv requantize it")
    if isinstance(x, Wrapped) and x.shifted:
        s, z, _ = parameters(scale, zero_point, x.type)
        step = 128 if x.type == "uint8" else -128
        name_grid(walk, x.tensor, np.float32(s), int(z) - step)
        x = moved_codes(walk, x.tensor, walk.draft.fresh(f"{x.tensor}/{x.type}"))
    if not isinstance(x, Codes):
        raise Unsupported("reads floats where codes are expected")
    entry = walk.draft.tensors[x.tensor]
    s, z, _ = parameters(scale, zero_point, entry.dtype)
    name_grid(walk, x.tensor, np.float32(s), int(z))
    return Real(x.tensor)


def moved_codes(walk: Walk, tensor: str, name: str) -> Codes:
    """Codes of int8 as uint8 or the other way round, on a grid whose zero point is shifted with them."""
    grid = walk.draft.grid(tensor)
    assert grid.scale is not None
    kind, step = ("uint8", 128) if grid.dtype == "int8" else ("int8", -128)
    other = Grid(kind, grid.scale, grid.zero_point + step)
    return Codes(finish(walk, real_pending(walk, Real(tensor), name), name, other))


def shifted(walk: Walk, x: Wrapped, number: Known, name: str) -> Value:
    """Codes after a Cast, plus half the range of their type."""
    half = 128 if x.type == "uint8" else -128
    if x.shifted or number.type != x.type or number.value.size != 1 or int(number.value.reshape(())) != half:
        raise Unsupported("casts codes or numbers")
    if walk.draft.grid(x.tensor).scale is not None:
        return moved_codes(walk, x.tensor, name)
    # The reader of the codes defines their quantization parameters.
    return dataclasses.replace(x, shifted=True)


def name_grid(walk: Walk, tensor: str, scale: np.float32, zero_point: int) -> None:
    """Set the quantization parameters of codes, or check that they equal the known ones."""
    grid = walk.draft.grid(tensor)
    if grid.dtype not in CODES[:4]:
        raise Unsupported(f"reads codes of {grid.dtype}; 8 or 16 bits are expected")
    if grid.scale is None:
        grid.scale, grid.zero_point = scale, zero_point
    elif (grid.scale, grid.zero_point) != (scale, zero_point):
        raise Unsupported(
            f"reads the codes {tensor!r} with scale {scale} and zero point {zero_point}, but they were quantized with "
            f"{grid.scale} and {grid.zero_point}"
        )


def quantized(
    walk: Walk, x: Value, scale: Value | None, zero_point: Value | None, kind: str, axis: int, name: str
) -> Value:
    """Codes of real numbers; kind: their type if no zero point defines it."""
    if isinstance(x, Known):
        return _constant(x, scale, zero_point, kind, axis, name)
    s, z, stored = parameters(scale, zero_point, kind)
    if stored not in CODES[:4]:
        raise Unsupported(f"returns codes of type {stored}; int8, uint8, int16 or uint16 are expected")
    grid = Grid(stored, np.float32(s), int(z))
    if isinstance(x, Pending) and x.op == "input":
        fed = quantized(walk, FloatInput(x.name, x.shape), scale, zero_point, kind, axis, x.name)
        assert isinstance(fed, Codes)
        x = x.replace(op="rescale", inputs=(fed.tensor,), grid=walk.draft.grid(fed.tensor), unchanged=True)
    if isinstance(x, FloatInput):
        if x.name in walk.order:
            held = walk.order[x.name]
            if not walk.draft.grid(held).same(grid):
                raise Unsupported(f"quantizes the input {x.name!r} a second time, to other codes")
            return Codes(held)
        walk.order[x.name] = walk.draft.tensor(name, x.shape, grid)
        return Codes(name)
    if isinstance(x, Real):
        if x.permutation is not None and walk.draft.grid(x.tensor).same(grid):
            # With unchanged quantization parameters the transpose of codes takes the quantizer's name.
            return Codes(walk.plain(dataclasses.replace(x, name=name)))
        x = real_pending(walk, x, name)
    elif isinstance(x, Weight):
        x = real_pending(walk, Real(walk.constant(x)), name)
    if not isinstance(x, Pending) or x.integers:
        raise Unsupported("quantizes codes or integers")
    return Codes(finish(walk, x, name, grid))


def _constant(x: Known, scale: Value | None, zero_point: Value | None, kind: str, axis: int, name: str) -> Known:
    """Codes of constant floats: weights that are stored unquantized."""
    if x.type not in ("float32", "float16"):
        raise Unsupported(f"quantizes a constant of type {x.type}")
    s, z, stored = parameters(scale, zero_point, kind, rank=x.value.ndim, axis=axis, size=x.value.shape)
    if stored not in ("int8", "uint8", "int16", "uint16", "int4", "uint4"):
        raise Unsupported(f"makes codes of type {stored} of a constant")
    bits = int(stored.lstrip("uint"))
    spec = QSpec(bits, signed=stored.startswith("int"), symmetric=False, narrow_range=False)
    if s.ndim:
        spec = dataclasses.replace(spec, axis=axis % x.value.ndim)
    codes = quantize(x.value.astype(np.float32), QParams(s, z, spec), quantization="division")
    return Known(np.asarray(codes), name, stored if small_range(stored) else "")


def parameters(
    scale: Value | None,
    zero_point: Value | None,
    kind: str,
    *,
    rank: int | None = None,
    axis: int = 1,
    size: tuple[int, ...] = (),
) -> tuple[NDArray[np.float32], NDArray[np.int32], str]:
    """Scale, zero point and the type of the codes; both () per tensor, or vectors along an axis of a constant.

    Args:
      rank, axis, size: of a constant, whose scales may vary along an axis; None: one scale for all.
    """
    if not isinstance(scale, Known) or not (zero_point is None or isinstance(zero_point, Known)):
        raise Unsupported("its scale or zero point is not a constant")
    if scale.type not in ("float32", "float16") or not scale.value.size:
        raise Unsupported(f"has a scale of type {scale.type}")
    s = scale.value.astype(np.float32)
    stored = kind if zero_point is None else zero_point.type
    z = np.zeros(s.shape, np.int32) if zero_point is None else np.asarray(zero_point.value)
    if stored.lstrip("u") not in ("int2", "int4", "int8", "int16", "int32"):
        raise Unsupported(f"has codes of type {stored}")
    if not usable(s):
        raise ReadError(f"{SCALES}, got {s.ravel()[:4]} ({scale.name!r}).")
    if s.size == 1 and z.size == 1:
        s, z = s.reshape(()), z.reshape(())
    elif rank is None:
        raise Unsupported(f"activations need one scale, got {s.size}")
    elif s.ndim != 1 or z.shape not in ((), (1,), s.shape) or not -rank <= axis < rank or s.size != size[axis]:
        raise Unsupported(f"has scales of shape {list(s.shape)} along axis {axis} of {list(size)}")
    low, high = code_range(stored)
    if z.size and (int(z.min()) < low or int(z.max()) > high):
        raise ReadError(f"expected zero points within [{low}, {high}], got {z.ravel()[:4]}.")
    return s, np.broadcast_to(z.astype(np.int32).reshape(()) if z.size == 1 else z.astype(np.int32), s.shape), stored


# ---------------------------------------------------------------------------- operators on codes


def _read_on_codes(walk: Walk, node: OnnxNode, inputs: list[Value | None]) -> list[Value]:
    """Read it as DequantizeLinear of the operands, the float operator, QuantizeLinear."""
    op = ON_CODES[node.domain, node.op]
    if op.variadic:
        if len(inputs) < 5 or len(inputs) % 3 != 2:
            raise ReadError(f"{node.title}: expected y's scale and zero point, and three inputs per operand.")
        named: dict[str, Value | None] = {"y_scale": inputs[0], "y_zero_point": inputs[1]}
        operands: list[Value | None] = [_operand(walk, node, inputs[i : i + 3], 0) for i in range(2, len(inputs), 3)]
    else:
        if not len(op.roles) - op.has_bias <= len(inputs) <= len(op.roles):
            raise ReadError(f"{node.title}: expected {len(op.roles)} inputs, got {len(inputs)}.")
        named = dict(zip(op.roles, inputs, strict=False))
        operands = []
        for role in op.operands:
            three = [named[role], named[f"{role}_scale"], named[f"{role}_zero_point"]]
            axis = 0 if op.real == "Conv" else -1
            if op.real == "Gemm":
                axis = 0 if node.get("transB", 0) else 1
            operands.append(_operand(walk, node, three, axis))
    bias = named.get("bias")
    if bias is not None:
        if not isinstance(bias, Known) or bias.value.dtype != np.int32:
            raise Unsupported("its bias is not a constant of int32")
        operands.append(bias)
    real = dataclasses.replace(node, op=op.real, domain="")
    walk.on_codes = True
    try:
        (result,) = handler(op.real)(walk, real, operands)
        return [quantized(walk, result, named["y_scale"], named["y_zero_point"], "uint8", 1, node.outputs[0])]
    finally:
        walk.on_codes = False


def _operand(walk: Walk, node: OnnxNode, three: list[Value | None], axis: int) -> Value:
    x, scale, zero_point = three
    if x is None:
        raise ReadError(f"{node.title}: an operand is missing.")
    return dequantized(walk, x, scale, zero_point, axis)


for _domain, _name in ON_CODES:
    handles(_name, domain=_domain)(_read_on_codes)


def integer_operand(walk: Walk, x: Value | None, zero_point: Value | None, axis: int) -> Any:
    """An operand of MatMulInteger or ConvInteger: with a scale of 1, unless a quantizer defined its own."""
    if isinstance(x, Known):
        one = Known(np.asarray(1, np.float32))
        if isinstance(zero_point, Known) and zero_point.value.size > 1:
            one = Known(np.ones(zero_point.value.shape, np.float32))
        return dequantized(walk, x, one, zero_point, axis)
    if not isinstance(x, Codes):
        raise Unsupported("reads floats where codes are expected")
    grid = walk.draft.grid(x.tensor)
    _, z, _ = parameters(Known(np.asarray(1, np.float32)), zero_point, grid.dtype)
    name_grid(walk, x.tensor, np.float32(1) if grid.scale is None else grid.scale, int(z))
    return Real(x.tensor)
