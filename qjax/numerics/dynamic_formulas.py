"""How runtimes quantize rows at run time, and how they turn sums into floats: named formulas.

A target chooses one of LiteRT's, and `Dynamic(arithmetic=...)` that of llama.cpp.

| formula | runtime | codes of a row | a sum becomes a float |
| --- | --- | --- | --- |
| "onnx" | ONNX Runtime, and qjax if no runtime is named | see `numerics.dynamic` | `sum * (s_x * s_w)` |
| "tflite" | LiteRT's own kernels, reference and optimised | see `tflite_qparams` | `sum * (s_x * s_w)` |
| "xnnpack" | XNNPACK, LiteRT's default | see `xnnpack_qparams` | `(sum * s_x) * s_w` |
| "ggml_avx2" | llama.cpp on x86-64 with AVX2 | see `ggml_codes` | see `of_lanes` |

All arithmetic is float32, and each step is rounded once. LiteRT's formulas compute int8 codes in [-128, 127].

Sources: LiteRT's `fully_connected.cc` and `portable_tensor_utils.cc`; XNNPACK's `quantization.h` and its microkernels
`f32-qs8-vcvt`, `qd8-f32-qc8w-gemm` and `qd8-f32-qb4w-gemm`; `quantize_row_q8_1`, `ggml_vec_dot_q4_1_q8_1` and their
like in ggml's `ggml-cpu/arch/x86/quants.c` (in llama-cpp-python 0.3.36).
"""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.numerics.float16 import to_float16_grid
from qjax.numerics.fused import fused_multiply_add
from qjax.numerics.qspec import QSpec
from qjax.numerics.quotient import quotient
from qjax.numerics.rounding import Rounding, round_float
from qjax.numerics.unfused import unfused

DynamicFormula = Literal["onnx", "tflite", "xnnpack", "ggml_avx2"]
DYNAMIC_FORMULAS: tuple[DynamicFormula, ...] = ("onnx", "tflite", "xnnpack")
"""Those that a target can have."""
LANES = 8
"""The floats of an AVX register."""

_LOW, _HIGH, _SPAN, _ONE, _ZERO = (np.float32(n) for n in (-128, 127, 255, 1, 0))
_UNSIGNED = np.int32(128)


def unsupported(formula: DynamicFormula, activations: QSpec, weights: QSpec) -> str | None:
    """What about a product's codes the formula does not support, with a cure; None if it supports them."""
    if formula == "onnx":
        return None
    if activations.bits != 8:
        return f"activations of {activations.bits} bits, but LiteRT's have 8: use activations=QSpec(bits=8)"
    if weights.group_size is not None and formula == "tflite":
        return (
            "weights in groups, whose arithmetic in LiteRT's own kernels is not known: use the target 'tflite_xnnpack'"
        )
    if formula == "tflite":
        if weights.qmin < -127:
            return "weights with the code -128, whose products overflow in LiteRT's kernels: use narrow_range=True"
        return None
    if activations.symmetric:
        return "symmetric activations, but XNNPACK's have a zero point: use activations=QSpec(bits=8, symmetric=False)"
    if weights.group_size is not None and (weights.bits > 4 or weights.group_size % 32):
        return (
            f"weights of {weights.bits} bits in groups of {weights.group_size}, but XNNPACK's have 4 bits and groups "
            "of 32, 64, 96, ...: use weights=QSpec(bits=4, axis=-1, group_size=32)"
        )
    return None


def row_codes(
    x: jax.Array, symmetric: bool, reduced: Sequence[int], formula: DynamicFormula
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """int8 codes of a tensor under LiteRT's formulas, with their scales and zero points.

    Rows must be finite, because the runtimes do not define their result for others.

    Args:
      x: float32. symmetric: codes with the zero point 0. reduced: the axes that share a scale. formula: "tflite" or
        "xnnpack".

    Returns:
      codes: int8, of x's shape. scale: float32, zero_point: int32, both in the shape of the other axes.
    """
    kept = tuple(axis for axis in range(x.ndim) if axis not in reduced)
    if formula == "xnnpack":
        factor, scale, zero_point = xnnpack_qparams(x, reduced)
    else:
        factor, scale, zero_point = tflite_qparams(x, symmetric, reduced)
    # Broadcast explicitly, because jnp decides by which sizes are 1.
    factors, zeros = (lax.broadcast_in_dim(v, x.shape, kept) for v in (factor, zero_point))
    rounding = Rounding.NEAREST_EVEN if formula == "xnnpack" else Rounding.NEAREST_AWAY
    steps = round_float(unfused(x * factors), rounding)
    least = np.float32(-127) if symmetric and formula == "tflite" else _LOW
    zero = zeros.astype(jnp.float32)
    codes = jnp.clip(steps, least - zero, _HIGH - zero) + zero
    # NaN has no code, so use an integer on which every machine agrees
    codes = jnp.where(jnp.isnan(codes), jnp.zeros_like(codes), codes)
    return codes.astype(jnp.int32).astype(jnp.int8), scale, zero_point


def tflite_qparams(x: jax.Array, symmetric: bool, reduced: Sequence[int]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The factor of x, the scale and the zero point of each row, as LiteRT's own kernels compute them.

    Symmetric: `range = max|x|`, `scale = range / 127`, the factor `127 / range`. Otherwise the range is widened to
    contain 0; `scale = (hi - lo) / 255`, the factor `1 / scale`. The zero point is computed from the end of the range
    that rounds better, ties away from zero.
    """
    axes = tuple(reduced)
    if symmetric:
        largest = jnp.max(jnp.abs(x), axes)
        nothing = largest == _ZERO
        scale = jnp.where(nothing, _ONE, _quotient(largest, _HIGH))
        factor = jnp.where(nothing, _ZERO, _quotient(_HIGH, largest))
        return factor, scale, jnp.zeros_like(scale, jnp.int32)
    lo, hi = _range(x, axes)
    nothing = lo == hi
    scale = jnp.where(nothing, _ONE, _quotient(hi - lo, _SPAN))
    below, above = _quotient(lo, scale), _quotient(hi, scale)
    better = (-_LOW + jnp.abs(below)) < (_HIGH + jnp.abs(above))
    zero_point = round_float(jnp.where(better, _LOW - below, _HIGH - above), Rounding.NEAREST_AWAY)
    zero_point = jnp.where(nothing, _ZERO, jnp.clip(zero_point, _LOW, _HIGH))
    return _quotient(_ONE, scale), scale, _integer(zero_point)


def xnnpack_qparams(x: jax.Array, reduced: Sequence[int]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The same as XNNPACK computes them.

    The factor is `255 / (hi - lo)` with the range widened to contain 0, and the scale is its reciprocal. The zero point
    is computed from the end of the range that rounds better, ties to even.
    """
    lo, hi = _range(x, tuple(reduced))
    factor = jnp.where(lo == hi, _ONE, _quotient(_SPAN, hi - lo))
    below, above = unfused(lo * factor), unfused(hi * factor)
    better = (_LOW + below) + (_HIGH + above) > _ZERO
    zero_point = jnp.clip(jnp.where(better, _LOW - below, _HIGH - above), _LOW, _HIGH)
    return factor, _quotient(_ONE, factor), _integer(round_float(zero_point, Rounding.NEAREST_EVEN))


def ggml_codes(x: jax.Array, reduced: Sequence[int]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """int8 codes as ggml computes them with AVX: nearest(x * (127 / d)), where d = max|x|, ties to even.

    Args:
      x: float32. reduced: the axes that share a scale.

    Returns:
      codes: int8, of x's shape. scale: float16(d / 127) and sums: float16(d / 127 * the sum of the codes), both in
      float32 and in the shape of the other axes. Products read the sums if the weight has minimums.
    """
    axes = tuple(reduced)
    kept = tuple(axis for axis in range(x.ndim) if axis not in reduced)
    largest = jnp.max(jnp.abs(x), axes)
    factor = jnp.where(largest == _ZERO, _ZERO, _quotient(_HIGH, largest))
    codes = round_float(unfused(x * lax.broadcast_in_dim(factor, x.shape, kept)), Rounding.NEAREST_EVEN)
    # NaN has no code, so use an integer on which every machine agrees
    codes = jnp.where(jnp.isnan(codes), jnp.zeros_like(codes), jnp.clip(codes, _LOW, _HIGH)).astype(jnp.int32)
    scale = _quotient(largest, _HIGH)
    sums = to_float16_grid(unfused(scale * jnp.sum(codes, axes).astype(jnp.float32)))
    return codes.astype(jnp.int8), to_float16_grid(scale), sums


def of_lanes(lanes: jax.Array) -> jax.Array:
    """The sum of 8 lanes (8, ...), as ggml's `hsum_float_8` adds them.

    A lane sums 4 neighbouring products of each block of 32 in int32, and adds the terms of the blocks by fused
    multiply-adds: `lane = fma(s_x * s_w, float32(sum), lane)`. Minimums of the weight, times the sums of `ggml_codes`,
    have a total of their own, which is added last.
    """
    four = lanes[4:] + lanes[:4]
    two = four[:2] + four[2:]
    return unfused(two[0] + two[1])


def of_sums(acc: jax.Array, of_x: jax.Array, of_weight: jax.Array, formula: DynamicFormula) -> jax.Array:
    """Floats from int32 sums. acc, of_x, of_weight (float32 scales): of one shape."""
    sums = acc.astype(jnp.float32)
    if formula == "xnnpack":
        return unfused(unfused(sums * of_x) * of_weight)
    return unfused(sums * unfused(of_x * of_weight))


def terms_of_group(
    acc: jax.Array,
    some: jax.Array,
    scale: jax.Array,
    of_x: jax.Array,
    zero: jax.Array,
    x_sum: jax.Array | None = None,
    minimum: jax.Array | None = None,
    *,
    formula: DynamicFormula,
    size: int,
) -> list[jax.Array]:
    """The float terms of one group, in the order in which they are added; the arguments are an entry of `Groups`."""
    terms = [of_sums(acc - zero * some, of_x, scale, formula)]
    if x_sum is not None and minimum is not None:
        terms.append(of_sums(x_sum - zero * np.int32(size), of_x, minimum, formula))
    return terms


@dataclasses.dataclass(frozen=True, eq=False)
class Groups:
    """What a sum over groups is made of: an entry for each group, all of the result's shape.

    accs: int32 sums of products of codes. sums: int32 sums of the codes of weights. scales: float32, see
    `grouped_scales`. of_x: float32 scales of the activation. zeros: its int32 zero points. minimums: float32, and
    x_sums: int32 sums of the codes of x, for weights that have minimums.
    """

    accs: Sequence[jax.Array]
    sums: Sequence[jax.Array]
    scales: Sequence[jax.Array]
    of_x: Sequence[jax.Array]
    zeros: Sequence[jax.Array]
    minimums: Sequence[jax.Array] = ()
    x_sums: Sequence[jax.Array] = ()


def of_groups(groups: Groups, formula: DynamicFormula, size: int) -> jax.Array:
    """Floats from the sums of groups, in their order.

    Under "xnnpack" 128 is added to codes and zero points here. The zero point's contribution is subtracted from all
    groups first, and each product is fused with its addition, as in XNNPACK's kernels for AVX512-VNNI. There a row has
    one scale, and weights have no minimums.

    Args:
      groups: the sums. size: the number of weights in a group.
    """
    accs, sums, scales, of_x, zeros = groups.accs, groups.sums, groups.scales, groups.of_x, groups.zeros
    if formula != "xnnpack":
        alone = list(zip(groups.x_sums, groups.minimums, strict=True)) or [()] * len(accs)
        rows = zip(accs, sums, scales, of_x, zeros, alone, strict=True)
        terms = [term for *row, rest in rows for term in terms_of_group(*row, *rest, formula=formula, size=size)]
        # XLA does not reorder additions that are written one by one
        return unfused(functools.reduce(operator.add, terms))
    weights = unfused(sums[0].astype(jnp.float32) * scales[0])
    for some, scale in zip(sums[1:], scales[1:], strict=True):
        weights = weights + unfused(some.astype(jnp.float32) * scale)
    total = -unfused(weights * (zeros[0] + _UNSIGNED).astype(jnp.float32))
    for acc, some, scale in zip(accs, sums, scales, strict=True):
        whole = (acc + _UNSIGNED * some).astype(jnp.float32)
        # With sums of 16 bits and scales of 8 bits float32 represents the product exactly, so there is nothing to fuse.
        short = size * 255 * 8 <= 2**16
        total = total + unfused(whole * scale) if short else fused_multiply_add(whole, scale, total)
    return unfused(total * of_x[0])


def grouped_scales(scale: jax.Array) -> jax.Array:
    """The scales of groups as XNNPACK stores them: rounded to bfloat16."""
    return scale.astype(jnp.bfloat16).astype(jnp.float32)


def _range(x: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    return jnp.minimum(jnp.min(x, axes), _ZERO), jnp.maximum(jnp.max(x, axes), _ZERO)


def _quotient(a: jax.Array | np.float32, b: jax.Array | np.float32) -> jax.Array:
    """The IEEE quotient. See `numerics.dynamic.divided`: XLA must not know that the divisor is a constant."""
    varying = a if isinstance(a, jax.Array) else b
    assert isinstance(varying, jax.Array)
    number = varying == varying
    return quotient(jnp.where(number, a, varying), jnp.where(number, b, varying))


def _integer(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.isnan(x), jnp.zeros_like(x), x).astype(jnp.int32)
