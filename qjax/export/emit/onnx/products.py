"""Matrix products and convolutions of integers: MatMulInteger, ConvInteger, and MatMul of int32 for wider operands.

Operands of int8 become uint8, by adding 128 to the codes and to the zero point, because ONNX Runtime's kernels for two
signed operands are five times as slow on x86. Weights stay int8 in MatMulInteger, which is faster still, only if every
CPU computes it correctly. On x86 without VNNI, ONNX Runtime multiplies unsigned by signed bytes with vpmaddubsw, whose
pairs of products saturate to int16. With equal signedness products are exact everywhere.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from qjax.export.emit.onnx.builder import Builder, parameters
from qjax.export.emit.onnx.views import NeedsBatch, View, Views
from qjax.numerics.accumulator import PAIR_MAX, PAIR_MIN


def dot(t: Views, lhs: View, rhs: View, numbers: Any, zero_points: Sequence[str] = ()) -> View:
    """`lax.dot_general` with an int32 result; zero_points: of both operands, scalars of their dtype, if there are any.

    The result's axes are the batch axes, those left of lhs, those left of rhs.
    """
    (lc, rc), (lb, rb) = numbers
    left = [axis for axis in range(len(lhs.shape)) if axis not in (*lc, *lb)]
    right = [axis for axis in range(len(rhs.shape)) if axis not in (*rc, *rb)]
    sizes = [
        [view.shape[axis] for axis in axes]
        for view, axes in ((lhs, lb), (lhs, left), (lhs, lc), (rhs, rc), (rhs, right))
    ]
    batch, m, k, _, n = sizes
    if any(t.is_free(size) for size in k):
        raise NeedsBatch
    a = t.materialized(lhs, (*lb, *left, *lc))
    b = t.materialized(rhs, (*rb, *rc, *right))
    # ONNX's MatMul takes one matrix on the right and any number of leading axes on the left
    plain = len(k) == 1 and len(n) == 1 and ((not batch and len(m) > 0) or len(m) == 1)
    if not plain:
        if len(m) != 1 or len(k) != 1:
            a = t.reshaped(a, (*batch, math.prod(m), math.prod(k)))
        if len(n) != 1 or len(k) != 1:
            b = t.reshaped(b, (*batch, math.prod(k), math.prod(n)))
    if lhs.dtype == rhs.dtype == "int8" and not zero_points:
        middle = t.builder.constant(np.uint8(128))
        name = t.builder.op("MatMulInteger", raised(t.builder, a), raised(t.builder, b), middle, middle)
    elif {lhs.dtype, rhs.dtype} <= {"int8", "uint8"} and (lhs.dtype == rhs.dtype or zero_points):
        name = t.builder.op("MatMulInteger", a, b, *zero_points)
    else:
        name = t.builder.op("MatMul", *(t.builder.cast(x, "int32") for x in (a, b)))
    shape = (*batch, *m, *n)
    if not plain and (len(m) != 1 or len(n) != 1):
        name = t.reshaped(name, shape)
    return View.full(name, "int32", shape)


def dot_general(t: Views, params: Any, x: Sequence[View]) -> View:
    """The primitive, for operands of one dtype, as `ops.accumulate.dot` prepares them."""
    kind = np.dtype(params["preferred_element_type"] or x[0].dtype).name
    if kind != "int32" or any(view.dtype not in ("int8", "int32") for view in x):
        raise ValueError(
            f"ONNX: no form for a matrix product of {x[0].dtype} by {x[1].dtype} to {kind}; expected int8 or int32 "
            "to int32."
        )
    lhs, rhs = x if x[0].dtype == x[1].dtype else [t.cast(view, "int32") for view in x]
    return dot(t, lhs, rhs, params["dimension_numbers"])


def raised(b: Builder, codes: str) -> str:
    """Codes of int8 plus 128, as uint8; both the cast and the addition wrap around."""
    return b.op("Add", b.cast(codes, "uint8"), b.constant(np.uint8(128)))


def unsigned(t: Views, x: View) -> View:
    """The view with codes of int8 plus 128, as uint8."""
    return dataclasses.replace(x, name=raised(t.builder, x.name), dtype="uint8") if x.dtype == "int8" else x


def never_saturates(kernel: np.ndarray, summed: Sequence[int], greatest: int) -> bool:
    """Whether the products of two weights with uint8 codes, up to the greatest, always fit int16 together.

    The order of the products is arbitrary, so the two greatest weights of an output count as neighbours, and the two
    lowest.
    """
    kept = [axis for axis in range(kernel.ndim) if axis not in summed]
    rows = np.sort(kernel.astype(np.int64).transpose((*kept, *summed)).reshape(-1, _count(kernel.shape, summed)))
    if not rows.size:
        return True
    ends = rows[:, -2:].clip(min=0).sum(1).max(), rows[:, :2].clip(max=0).sum(1).min()
    return greatest * int(ends[0]) <= PAIR_MAX and greatest * int(ends[1]) >= PAIR_MIN


def _count(shape: Sequence[int], axes: Sequence[int]) -> int:
    return math.prod(shape[axis] for axis in axes)


def conv(b: Builder, x: str, kernel: str, x_zero_point: str, zero_point: str, attributes: dict[str, Any]) -> str:
    """ConvInteger of channels-first operands; the padding is the code of zero, x_zero_point. attributes: its own."""
    return b.op("ConvInteger", x, kernel, x_zero_point, zero_point, **parameters(attributes))
