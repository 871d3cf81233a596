"""The rules of runtimes that requantize in floating point, each float operation done in integers.

All round e to float32 once (`float64_away`: to float64) and convert the accumulator to a float. They differ in where
they add the zero point, in the result of an overflowing conversion, and in how they round the product.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from qjax.numerics import float32
from qjax.numerics._namespace import host_or_trace, traced, wide
from qjax.numerics.float32 import Float32
from qjax.numerics.rules.multiplier import check_int32, saturated
from qjax.numerics.rules.registry import Call, registered
from qjax.numerics.softfloat import Real


class Float32WithBias(NamedTuple):
    """A float32 scale and a float32 bias in steps of the accumulator, each as a `Float32`.

    Attributes:
      mantissa: int32, of the scale.
      exponent: int32, of the scale.
      bias_mantissa: int32.
      bias_exponent: int32.
    """

    mantissa: Any
    exponent: Any
    bias_mantissa: Any
    bias_exponent: Any


class Float64(NamedTuple):
    """A nonnegative double, (mantissa_high * 2^31 + mantissa_low) * 2^exponent.

    Attributes:
      mantissa_high: int32, in [2^21, 2^22), or 0 for zero.
      mantissa_low: int32, in [0, 2^31).
      exponent: int32.
    """

    mantissa_high: Any
    mantissa_low: Any
    exponent: Any


def float32_scale(effective_scale: Any) -> Float32:
    """The float32 nearest to an effective scale, 0 for a negative one in a trace.

    Raises:
      ValueError: on the host, a scale that is negative or beyond float32.
    """
    e = float32.of(_checked(effective_scale))
    positive = e.mantissa > 0
    xp = host_or_trace(positive)
    return Float32(*(xp.where(positive, v, np.int32(0)) for v in e))


def float32_scale_and_bias(effective_scale: Any, bias: ArrayLike = 0.0) -> Float32WithBias:
    """The scale and the bias as float32.

    Args:
      effective_scale: as for every rule.
      bias: in steps of the accumulator, of either sign: a float32 array, a `Float32`, or a `Real`, which is
        rounded. PyTorch's is b / (s_x * s_w), with product and quotient each rounded to float32.
    """
    return Float32WithBias(*float32_scale(effective_scale), *float32.of(bias))


def float64_scale(effective_scale: Any) -> Float64:
    """The effective scale as a double in int32 words."""
    e = _checked(effective_scale)
    xp = host_or_trace(e.sign)
    with wide(xp):
        words = e.mantissa >> np.uint64(31), e.mantissa & np.uint64(2**31 - 1), e.exponent
        return Float64(*(xp.where(e.sign > 0, v.astype(np.int32), np.int32(0)) for v in words))


def _checked(effective_scale: Any) -> Real:
    e = Real.of(effective_scale)
    if not traced(e.sign) and np.any(np.asarray(e.sign) < 0):
        raise ValueError(f"an effective scale must be at least 0. Got {np.min(e.to_float64())}; scales are positive.")
    return e


def _check_float32(e: Float32) -> None:
    check_int32(e)
    m, exponent = np.asarray(e.mantissa), np.asarray(e.exponent)
    if np.any((m < 0) | (m > 2**24) | (exponent < -149) | (exponent > 104)):
        raise ValueError(
            "a float32 scale must have its mantissa in [0, 2^24] and its exponent in [-149, 104]. Got mantissas "
            f"from {m.min()} to {m.max()}, exponents from {exponent.min()} to {exponent.max()}; use float32.of."
        )


def check_with_bias(c: Float32WithBias) -> None:
    """Raise a TypeError or ValueError for constants, on the host, that are no float32 numbers."""
    check_int32(c)
    _check_float32(Float32(c.mantissa, c.exponent))
    m, exponent = np.asarray(c.bias_mantissa), np.asarray(c.bias_exponent)
    if np.any((np.abs(m.astype(np.int64)) > 2**24) | (exponent < -149) | (exponent > 104)):
        raise ValueError(
            "a float32 bias must have its mantissa in [-2^24, 2^24] and its exponent in [-149, 104]. Got mantissas "
            f"from {m.min()} to {m.max()}, exponents from {exponent.min()} to {exponent.max()}; use float32.of."
        )


def _check_float64(e: Float64) -> None:
    check_int32(e)
    high, low, exponent = (np.asarray(v) for v in e)
    normal = (high >= 2**21) & (high < 2**22) & (low >= 0)
    if not np.all((normal | ((high == 0) & (low == 0))) & (np.abs(exponent.astype(np.int64)) < 2**20)):
        raise ValueError(
            "a double must have mantissa_high in [2^21, 2^22) and mantissa_low in [0, 2^31), or both 0. Got "
            f"mantissa_high from {high.min()} to {high.max()}, mantissa_low from {low.min()} to {low.max()}, "
            f"exponents from {exponent.min()} to {exponent.max()}; use get_rule('float64_away').prepare(scale)."
        )


_float32 = partial(registered, prepare=float32_scale, constants=Float32, check=_check_float32, monotone=True)


def part_of(constants: Any, name: str) -> Float32:
    """The number in the fields name_mantissa and name_exponent."""
    return Float32(getattr(constants, f"{name}_mantissa"), getattr(constants, f"{name}_exponent"))


def real_of(number: Float32) -> Real:
    """The number as a `Real`."""
    return Real.of(number.mantissa).scale_by_power_of_two(number.exponent)


def bias_in_steps(c: Float32WithBias, step: Real) -> Real:
    """The real bias, from constants that store it in steps of the accumulator."""
    return real_of(part_of(c, "bias")) * step


def _product(acc: jax.Array, e: Float32) -> Float32:
    return float32.multiply(float32.from_int32(acc), e)


@_float32("float32")
def float32_(acc: jax.Array, e: Float32, call: Call) -> jax.Array:
    """F32: rint(float(acc) * e), each operation rounded to float32; the zero point is added as an integer.

    The conversion to int32 saturates. The runtimes clamp before it, or use an instruction that saturates.

    Sources: XNNPACK's fp32 requantization, ONNX Runtime's QLinearMatMul and QLinearConv, QNNPACK on ARM.
    """
    return float32.to_int32(_product(acc, e))


@_float32("float32_x86")
def float32_x86(acc: jax.Array, e: Float32, call: Call) -> jax.Array:
    """F32 on x86, where a product of 2^31 or more converts to -2^31 and so becomes the lowest code.

    Sources: FBGEMM without bias and QNNPACK on x86. Their instruction CVTPS2DQ returns the "integer indefinite" for
    numbers that int32 cannot hold, and they clamp only afterwards.
    """
    return float32.to_int32(_product(acc, e), overflow="indefinite")


@_float32("float32_zero_point_inside", finishes=True)
def float32_zero_point_inside(acc: jax.Array, e: Float32, call: Call) -> jax.Array:
    """F32z: rint(float(acc) * e + float(zero_point)), the product and the sum each rounded to float32.

    The zero point is added before the rounding, so the direction of a tie depends on the zero point's parity.

    Sources: oneDNN's convolution and inner product, ONNX's ReferenceEvaluator.
    """
    zero_point = float32.from_int32(call.zero_point)
    return clamped(float32.to_int32(float32.add(_product(acc, e), zero_point)), call)


@_float32("float32_zero_point_fma", finishes=True)
def float32_zero_point_fma(acc: jax.Array, e: Float32, call: Call) -> jax.Array:
    """F32z with product and sum rounded only once: rint(fma(float(acc), e, float(zero_point)))."""
    zero_point = float32.from_int32(call.zero_point)
    return clamped(float32.to_int32(float32.fma(float32.from_int32(acc), e, zero_point)), call)


@registered(
    "float32_bias",
    prepare=float32_scale_and_bias,
    constants=Float32WithBias,
    check=check_with_bias,
    bias="real",
    real_bias=bias_in_steps,
    monotone=True,
)
def float32_bias(acc: jax.Array, c: Float32WithBias, call: Call) -> jax.Array:
    """F32 with a float32 bias: rint((float(acc) + bias) * e), which overflows in the same way as `float32_x86`.

    The bias is b / (s_x s_w) and is never rounded to an integer. Source: FBGEMM's ReQuantizeOutput with a float bias,
    which PyTorch's fbgemm engine uses.
    """
    biased = float32.add(float32.from_int32(acc), Float32(c.bias_mantissa, c.bias_exponent))
    return float32.to_int32(float32.multiply(biased, Float32(c.mantissa, c.exponent)), overflow="indefinite")


@registered("float64_away", prepare=float64_scale, constants=Float64, check=_check_float64, monotone=True)
def float64_away(acc: jax.Array, e: Float64, call: Call) -> jax.Array:
    """F64A: C's round(double(acc) * e), ties away from zero, with the product first rounded to a double.

    A result beyond int32 saturates. Source: LiteRT's reference FULLY_CONNECTED.

    The product |acc| * mantissa has at most 84 bits, which are held as T * 2^31 + R. The code drops `drop` of them, 31
    at most, so that 53 remain.
    """
    a = jnp.abs(acc.astype(jnp.int64))
    low = a * e.mantissa_low.astype(jnp.int64)
    top = a * e.mantissa_high.astype(jnp.int64) + (low >> np.int64(31))
    rest = low & np.int64(2**31 - 1)
    # the mantissa has 53 bits: the top has at least 22 where it is not 0
    drop = jnp.maximum(np.int64(64 - 22) - jax.lax.clz(top), np.int64(0))
    q = (top << (np.int64(31) - drop)) | (rest >> drop)
    lost = rest - ((rest >> drop) << drop)
    half = (np.int64(1) << drop) >> np.int64(1)
    # for drop = 0 nothing is lost, and `half` is 0
    q = q + ((lost > half) | ((lost == half) & (drop > 0) & ((q & np.int64(1)) != 0))).astype(jnp.int64)
    # q has 53 bits: 9 to the left of them, any shift by 55 or more to the right rounds to 0
    t = -(e.exponent.astype(jnp.int64) + drop)
    q = q << jnp.clip(-t, np.int64(0), np.int64(9))
    t = jnp.clip(t, np.int64(0), np.int64(55))
    q = (q + ((np.int64(1) << t) >> np.int64(1))) >> t
    return saturated(jnp.where(acc < 0, -q, q))


def clamped(y: jax.Array, call: Call) -> jax.Array:
    """The codes, for a rule that adds the zero point and clamps itself."""
    return jnp.minimum(jnp.maximum(y, np.int32(call.qmin)), np.int32(call.qmax))
