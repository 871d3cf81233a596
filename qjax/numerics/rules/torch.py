"""PyTorch's quantized kernels on x86: float32 steps that begin at the scales, and a bias that stays a float.

Given scales s_x, s_w, s_y and a float32 bias b, with every operation in float32 and p = s_x * s_w:

| rule | before rint | bias | e |
| --- | --- | --- | --- |
| `torch_fbgemm` | (acc + b') * e | one scale: fma(b, 1 / p, acc); per channel: acc + b / p | p / s_y |
| `torch_qnnpack` | float(acc + b') * e | b' = int32(rint(b * (1 / p))) | p * (1 / s_y) |
| `torch_onednn` | (acc * p' + b) * (1 / s_y) + z_y | a real number | p' = s_x' * s_w' |
| `torch_onednn_conv` | the same | the same | p' = s_x' * s_w |

with s' = 1 / (1 / s), which equals s up to its last bit: PyTorch passes reciprocals to oneDNN, which inverts them
again. FBGEMM's multiply-add is GCC's contraction of a product and a sum. The first two add the zero point after
rounding, and results beyond int32 become its lowest number; oneDNN saturates.

Measured with torch 2.13.0, CPU, AVX2: 0 of 16 million outputs of linear and 0 of 1.6 million of conv2d (also depthwise
and grouped) differ per engine, among them accumulators that the bias cancels, for which the forms above differ.
"""

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.typing import ArrayLike

from qjax.numerics import float32
from qjax.numerics._namespace import host_or_trace
from qjax.numerics.float32 import Float32
from qjax.numerics.rules.floating import (
    Float32WithBias,
    bias_in_steps,
    check_with_bias,
    clamped,
    float32_scale,
    float32_scale_and_bias,
    part_of,
    real_of,
)
from qjax.numerics.rules.registry import Call, registered
from qjax.numerics.softfloat import Real


class Fbgemm(NamedTuple):
    """FBGEMM's constants, each number as a `Float32`; all int32.

    Attributes:
      mantissa: of the effective scale.
      exponent: likewise.
      addend_mantissa: of the number for which addend * step is the bias in steps of the accumulator.
      addend_exponent: likewise.
      step_mantissa: 1 / p if the weights have one scale, else 1.
      step_exponent: likewise.
    """

    mantissa: Any
    exponent: Any
    addend_mantissa: Any
    addend_exponent: Any
    step_mantissa: Any
    step_exponent: Any


class Onednn(NamedTuple):
    """oneDNN's constants, each number as a `Float32`; all int32.

    Attributes:
      mantissa: of the scale of the accumulator.
      exponent: likewise.
      addend_mantissa: of the bias, a real number.
      addend_exponent: likewise.
      share_mantissa: of 1 / s_y.
      share_exponent: likewise.
    """

    mantissa: Any
    exponent: Any
    addend_mantissa: Any
    addend_exponent: Any
    share_mantissa: Any
    share_exponent: Any


def _one() -> Float32:
    return float32.of(1.0)


def fields_of(*numbers: Float32) -> list[Any]:
    """The mantissas and exponents of numbers, all of one shape."""
    fields = [field for number in numbers for field in number]
    xp = host_or_trace(*fields)
    shape = np.broadcast_shapes(*(np.shape(field) for field in fields))
    return [xp.broadcast_to(xp.asarray(field), shape) for field in fields]


def reciprocal(x: Float32) -> Float32:
    """The number 1 / x, rounded once."""
    return float32.divide(_one(), x)


def _twice_inverted(x: ArrayLike) -> Float32:
    return reciprocal(reciprocal(float32.of(x)))


def _fbgemm(effective_scale: Any, bias: ArrayLike = 0.0) -> Fbgemm:
    """bias: in steps of the accumulator."""
    return Fbgemm(*fields_of(float32_scale(effective_scale), float32.of(bias), _one()))


def _fbgemm_of_scales(s_x: ArrayLike, s_w: ArrayLike, s_y: ArrayLike, bias: ArrayLike, per_channel: bool) -> Fbgemm:
    p, b = float32.multiply(float32.of(s_x), float32.of(s_w)), float32.of(bias)
    e = float32.divide(p, float32.of(s_y))
    return Fbgemm(*fields_of(e, *((float32.divide(b, p), _one()) if per_channel else (b, reciprocal(p)))))


def _qnnpack_of_scales(
    s_x: ArrayLike, s_w: ArrayLike, s_y: ArrayLike, bias: ArrayLike, per_channel: bool
) -> Float32WithBias:
    p = float32.multiply(float32.of(s_x), float32.of(s_w))
    e = float32.multiply(p, reciprocal(float32.of(s_y)))
    steps = float32.to_int32(float32.multiply(float32.of(bias), reciprocal(p)))
    # an integer with 24 bits, or the greatest int32, which `to_int32` restores
    return Float32WithBias(*fields_of(e, float32.from_int32(steps)))


def onednn(effective_scale: Any, bias: ArrayLike = 0.0) -> Onednn:
    """bias: in steps of the accumulator."""
    e = float32_scale(effective_scale)
    return Onednn(*fields_of(e, float32.multiply(float32.of(bias), e), _one()))


def _onednn_of_scales(s_x: ArrayLike, s_w: ArrayLike, s_y: ArrayLike, bias: ArrayLike, per_channel: bool) -> Onednn:
    p = float32.multiply(_twice_inverted(s_x), _twice_inverted(s_w))
    return Onednn(*fields_of(p, float32.of(bias), reciprocal(float32.of(s_y))))


def _onednn_conv_of_scales(
    s_x: ArrayLike, s_w: ArrayLike, s_y: ArrayLike, bias: ArrayLike, per_channel: bool
) -> Onednn:
    p = float32.multiply(_twice_inverted(s_x), float32.of(s_w))
    return Onednn(*fields_of(p, float32.of(bias), reciprocal(float32.of(s_y))))


def _fbgemm_bias(c: Fbgemm, step: Real) -> Real:
    addend, factor = real_of(part_of(c, "addend")), real_of(part_of(c, "step"))
    # A step of 1 means that the addend is in steps of the accumulator. Otherwise it is a real number.
    return Real.where(factor == Real.of(1), addend * step, addend)


def onednn_bias(c: Onednn, step: Real) -> Real:
    """The real bias, from constants that store it unchanged."""
    return real_of(part_of(c, "addend"))


def check_steps(c: Any) -> None:
    """Raise a TypeError or ValueError for constants, on the host, that are no float32 numbers."""
    for factor in ("step", "share"):
        if f"{factor}_mantissa" in c._fields:
            check_with_bias(Float32WithBias(*part_of(c, factor), *part_of(c, "addend")))
    check_with_bias(Float32WithBias(c.mantissa, c.exponent, *part_of(c, "addend")))


@registered(
    "torch_fbgemm",
    prepare=_fbgemm,
    of_scales=_fbgemm_of_scales,
    constants=Fbgemm,
    check=check_steps,
    bias="real",
    real_bias=_fbgemm_bias,
    monotone=True,
)
def torch_fbgemm(acc: jax.Array, c: Fbgemm, call: Call) -> jax.Array:
    """Compute rint(fma(addend, step, float(acc)) * e); a result beyond int32 becomes the lowest code.

    Source: FBGEMM's requantizeOutputProcessingAvx2 and requantize_ with a float bias, as PyTorch's engines fbgemm and
    x86 call them.
    """
    biased = float32.fma(part_of(c, "addend"), part_of(c, "step"), float32.from_int32(acc))
    return float32.to_int32(float32.multiply(biased, Float32(c.mantissa, c.exponent)), overflow="indefinite")


@registered(
    "torch_qnnpack",
    prepare=float32_scale_and_bias,
    of_scales=_qnnpack_of_scales,
    constants=Float32WithBias,
    check=check_with_bias,
    bias="integer",
    real_bias=bias_in_steps,
    monotone=True,
)
def torch_qnnpack(acc: jax.Array, c: Float32WithBias, call: Call) -> jax.Array:
    """Compute rint(float(acc + bias) * e), where the integer bias wraps in int32.

    A result beyond int32 becomes the lowest code. Source: PyTorch's QNNPACK, q8gemm, q8conv and q8dwconv on x86.
    """
    value = float32.from_int32(acc + float32.to_int32(part_of(c, "bias")))
    return float32.to_int32(float32.multiply(value, Float32(c.mantissa, c.exponent)), overflow="indefinite")


def _onednn_apply(acc: jax.Array, c: Onednn, call: Call) -> jax.Array:
    """Compute rint((float(acc) * p + addend) * share + zero_point), with every operation rounded to float32.

    Source: oneDNN's int8 matmul and convolution on AVX2, as PyTorch's engine onednn calls them.
    """
    real = float32.multiply(float32.from_int32(acc), Float32(c.mantissa, c.exponent))
    real = float32.add(real, part_of(c, "addend"))
    steps = float32.add(float32.multiply(real, part_of(c, "share")), float32.from_int32(call.zero_point))
    return clamped(float32.to_int32(steps), call)


for _name, _of_scales in (("torch_onednn", _onednn_of_scales), ("torch_onednn_conv", _onednn_conv_of_scales)):
    registered(
        _name,
        prepare=onednn,
        of_scales=_of_scales,
        constants=Onednn,
        check=check_steps,
        bias="real",
        real_bias=onednn_bias,
        finishes=True,
        monotone=True,
    )(_onednn_apply)
