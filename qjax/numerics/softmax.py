"""Softmax of 8-bit codes over the last axis, as runtimes compute it.

| method | who | result |
| --- | --- | --- |
| `gemmlowp` | TFLite Micro; LiteRT's reference kernels: 32-bit fixed point | codes at 1/256, the lowest is 0 |
| `float32` | LiteRT's optimised kernels on x86, and its default, which has no XNNPACK kernel for codes | the same |
| `uint16` | the same on AArch64: exponentials of 16 bits | the same |
| `onnx` | ONNX Runtime, see `qlinear_softmax` | any scale and zero point |

The input's zero point cancels. `prepare` turns its scale into int32 constants on the host; from there on `softmax` uses
integers only, with the same bits in numpy and inside `jit`, and its axis may be batched by `vmap`.

TFLite's codes are int8 with the zero point -128 or, for the first two methods, uint8 with the zero point 0, as in old
files. `gemmlowp` also computes int16 from int8 codes, at 2^-16 with the zero point -32768.

The method `uint16`, where d is the difference to the greatest code:

    t_d = min(floor(double(float32(65535 expf(-s d))) + 1/2), 65535);  inv = float32(1 / float32(float32(sum t) / 256))
    y = MBQM(t_i, inv) - 128

(M, r) = quantize_multiplier(inv), and MBQM rounds twice: SRDHM(t, M), then a shift right by r with ties up (`neon`) in
whole blocks of 16 codes of the last axis, with ties away from zero (`double_round`) for the remaining codes of each
row. Source: PopulateSoftmaxUInt8LookupTable and SoftmaxInt8LUT of TFLite, compiled by clang for AArch64 only.
"""

from types import ModuleType
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from jax.typing import ArrayLike

from qjax.numerics import float32, libm, positive_sums, qlinear_softmax
from qjax.numerics._namespace import like_inputs, wide
from qjax.numerics.calls import are_names_kept, named
from qjax.numerics.fixed_point import (
    quantize_multiplier,
    rounding_divide_by_power_of_two,
    saturating_rounding_doubling_high_mul,
)
from qjax.numerics.gemmlowp_functions import exp_on_negative_values, leading_zeros, one_over_one_plus_x, product
from qjax.numerics.qlinear_softmax import Onnx
from qjax.numerics.rounding import Rounding, rounding_right_shift
from qjax.numerics.softfloat import Real

SoftmaxMethod = Literal["gemmlowp", "float32", "uint16", "onnx"]

SOFTMAX_METHODS: tuple[SoftmaxMethod, ...] = get_args(SoftmaxMethod)

_INTEGER_BITS = 5
"""Differences to the greatest input are Q5.26: numbers above -32."""
SUM_BITS = 12
"""The sum of exponentials is Q12.19."""
_MANY = 1024
"""From this many codes on, a table of 256 exponentials takes less time than one exponential for each code."""
_BLOCK = 16
"""Codes that one step of the AArch64 kernel processes."""


class Gemmlowp(NamedTuple):
    """Constants of the method `gemmlowp`, int32 scalars.

    Attributes:
      multiplier, shift: of the scale of a difference in Q5.26.
      least: differences below it count as minus infinity.
    """

    multiplier: Any
    shift: Any
    least: Any


class Table(NamedTuple):
    """Constants of the method `float32`: exp(-scale * d) for d = 0, ..., 255, as mantissa * 2^exponent, int32."""

    mantissa: Any
    exponent: Any


class Uint16(NamedTuple):
    """Constants of the method `uint16`: exp(-scale * d) for d = 0, ..., 255 in steps of 1/65535, int32."""

    powers: Any


def prepare(
    method: SoftmaxMethod,
    x_scale: float | np.floating,
    *,
    length: int | None = None,
    y_scale: float | np.floating = 2.0**-8,
    y_zero_point: int = -128,
) -> Gemmlowp | Table | Uint16 | Onnx:
    """The constants of a softmax of codes with this scale, a float32 number; beta is 1.

    Source: PreprocessSoftmaxScaling, CalculateInputRadius and PopulateSoftmaxLookupTable of TFLite.

    Args:
      method: who computes it.
      x_scale: of the codes.
      length: of a row; "onnx" needs it, the others take any.
      y_scale, y_zero_point: of the result, for "onnx".

    Raises:
      ValueError: an unknown method, a scale that is not finite and positive, or no length where it is needed.
    """
    if method not in SOFTMAX_METHODS:
        raise ValueError(f"softmax: expected a method among {', '.join(SOFTMAX_METHODS)}. Got {method!r}.")
    scale = np.float32(x_scale)
    if not (np.isfinite(scale) and scale > 0):
        raise ValueError(f"softmax: the input's scale must be finite and positive. Got {x_scale}.")
    if method == "onnx":
        if length is None:
            raise ValueError("softmax: the method 'onnx' needs the length of a row.")
        return qlinear_softmax.prepare(scale, length, np.float32(y_scale), y_zero_point)
    if method == "float32":
        steps = np.float32(-scale) * np.arange(256).astype(np.float32)
        return Table(*float32.of(libm.expf(steps)))
    if method == "uint16":
        return _prepare_uint16(scale)
    fraction = 31 - _INTEGER_BITS
    if scale >= 2.0 ** (_INTEGER_BITS - 1):
        # The next code has an exponential of e^-16 at most, so only the greatest codes remain.
        return Gemmlowp(np.int32(0), np.int32(0), np.int32(0))
    if scale <= 2.0**-fraction:
        raise ValueError(f"softmax: gemmlowp's kernel takes input scales above 2^-{fraction}. Got {x_scale}.")
    multiplier, shift = quantize_multiplier(Real.of(scale).scale_by_power_of_two(fraction))
    radius = (((1 << _INTEGER_BITS) - 1) << fraction) >> int(shift)
    return Gemmlowp(multiplier, shift, np.int32(-radius))


def softmax(codes: ArrayLike, constants: Gemmlowp | Table | Uint16 | Onnx, bits: int = 8) -> Any:
    """Codes of the softmax over the last axis: of TFLite at 1/256, int8 with zero point -128 or uint8 with 0.

    Args:
      codes: int8 or, but for `uint16`, uint8, (..., n) with n from 1 to 4095.
      constants: of `prepare`; they choose the method.
      bits: of the result. 16, of int8 codes by `gemmlowp` only: int16 at 2^-16 with the zero point -32768.

    Returns:
      Codes of the same shape, and the same dtype unless `bits` is 16: a numpy array for host inputs, a JAX array
      otherwise.

    Raises:
      TypeError: other codes.
      ValueError: another n, or other bits.
    """
    dtype = str(getattr(codes, "dtype", type(codes).__name__))
    if dtype != "int8" and (dtype != "uint8" or isinstance(constants, Uint16)):
        raise TypeError(f"softmax takes int8{'' if isinstance(constants, Uint16) else ' or uint8'} codes. Got {dtype}.")
    if bits != 8 and not (bits == 16 and dtype == "int8" and isinstance(constants, Gemmlowp)):
        raise ValueError(f"softmax has 8 bits or, by gemmlowp of int8 codes, 16. Got {bits} of {dtype}.")
    if np.ndim(codes) < 1 or not 1 <= np.shape(codes)[-1] < 1 << SUM_BITS:
        raise ValueError(
            f"softmax takes from 1 to {(1 << SUM_BITS) - 1} codes on its last axis, as their sum of exponentials is "
            f"a Q12.19 number. Got an array of shape {np.shape(codes)}."
        )
    xp = like_inputs(codes, *constants)
    values = xp.asarray(codes).astype(np.int32)
    if isinstance(constants, Onnx):
        most = np.int32(np.iinfo(dtype).max)
        return xp.minimum(qlinear_softmax.qlinear_softmax(values, constants), most).astype(dtype)
    match constants:
        case Gemmlowp():
            found = _gemmlowp(xp, values, constants, bits)
        case Table():
            found = _table(xp, _to_greatest(xp, values), constants)
        case Uint16():
            found = _uint16(xp, _to_greatest(xp, values), constants)
    dtype = "int16" if bits == 16 else dtype
    low, high = np.int32(np.iinfo(dtype).min), np.int32(np.iinfo(dtype).max)
    return xp.clip(found + low, low, high).astype(dtype)


def _to_greatest(xp: ModuleType, values: Any) -> Any:
    """Differences to the greatest code of the row."""
    return values - xp.max(values, axis=-1, keepdims=True)


def _gemmlowp(xp: ModuleType, values: Any, constants: Gemmlowp, bits: int) -> Any:
    """2^bits times the softmax, int32, from int32 codes.

    exp of each difference as Q0.31, their sum as Q12.19, its reciprocal by Newton's method, one product and one
    rounding, ties away from zero. Source: reference_ops::Softmax of TFLite (softmax.h). Where the sum reaches 512
    the last shift of 8 bits is 32, which gemmlowp does not allow (an assertion stops the program); here the quotient
    is 0.
    """
    given = tuple(xp.asarray(c) for c in constants)
    # a writer that knows the names has its own table; the size is no number if the batch is free
    by_table = not (isinstance(values.size, int) and values.size < _MANY) and not are_names_kept()
    inside, powers, terms = (_looked_up if by_table else gemmlowp_powers)(values, *given)
    total = xp.sum(terms, axis=-1, keepdims=True, dtype=np.int32)
    reciprocal, right = gemmlowp_reciprocal(total, bits)
    return gemmlowp_shares(reciprocal, powers, inside, right)


@named()
def gemmlowp_powers(values: Any, multiplier: Any, shift: Any, least: Any) -> tuple[Any, Any, Any]:
    """For int32 codes of 8 bits: which count, their exponentials as Q0.31, and these as Q12.19; 0 where none counts."""
    xp = like_inputs(values)
    inside, powers = exponentials(_to_greatest(xp, values), multiplier, shift, least)
    terms = xp.where(inside, rounding_divide_by_power_of_two(powers, SUM_BITS), np.int32(0))
    return inside, powers, terms


def exponentials(difference: Any, multiplier: Any, shift: Any, least: Any) -> tuple[Any, Any]:
    """For int32 differences to the greatest code: which count, and their exponentials as Q0.31."""
    xp = like_inputs(difference)
    inside = difference >= least
    scaled = product(xp.where(inside, difference, np.int32(0)) << shift, multiplier)
    return inside, exp_on_negative_values(scaled, _INTEGER_BITS)


def _looked_up(values: Any, multiplier: Any, shift: Any, least: Any) -> tuple[Any, Any, Any]:
    """As `gemmlowp_powers`, from a table of all differences, in which those that do not count are 0."""
    xp = like_inputs(values)
    inside, powers = exponentials(xp.asarray(-np.arange(256, dtype=np.int32)), multiplier, shift, least)
    # Mode "clip" is the form of a lookup that the emitters know. All differences lie within the table.
    found = xp.take(xp.where(inside, powers, np.int32(0)), -_to_greatest(xp, values), mode="clip")
    return np.bool_(True), found, rounding_divide_by_power_of_two(found, SUM_BITS)


@named(1)
def gemmlowp_reciprocal(total: Any, bits: int) -> tuple[Any, Any]:
    """For a sum of one or more exponentials as Q12.19: 2^bits divided by it, as Q0.31 and a right shift.

    The sum is (1 + x) * 2^(12 - headroom), with x in [0, 1) as Q0.31.
    """
    headroom = leading_zeros(total)
    mantissa = (total << headroom) & np.int32(2**31 - 1)
    right = np.int32(SUM_BITS + 31 - bits) - headroom
    return one_over_one_plus_x(mantissa), right


@named()
def gemmlowp_shares(reciprocal: Any, powers: Any, inside: Any, right: Any) -> Any:
    """Exponentials times the reciprocal, shifted to the right; 0 where a code does not count or a shift is above 31."""
    xp = like_inputs(powers)
    quotient = product(reciprocal, powers)
    rounded = rounding_divide_by_power_of_two(quotient, xp.minimum(right, np.int32(31)))
    return xp.where(inside & (right <= 31), rounded, np.int32(0))


def _table(xp: ModuleType, difference: Any, constants: Table) -> Any:
    """256 times the softmax, int32, from differences to the greatest code.

    float32(e_i * float32(1 / float32(sum * float32(1/256)))), the sum in float32 from left to right, rounded to an
    integer with ties away from zero. Source: optimized_ops::Softmax of TFLite for codes, on x86.
    """
    table = positive_sums.keys(float32.Float32(*(xp.asarray(c) for c in constants)))
    # Mode "clip" is the form of a lookup that the emitters know. All differences lie within the table.
    with wide(xp):
        terms = xp.take(table, -difference, mode="clip")
        total = positive_sums.numbers(positive_sums.total(xp.moveaxis(terms, -1, 0)))
    share = float32.multiply(total, float32.of(2.0**-8))
    inverse = float32.divide(float32.of(1.0), share)
    inverse = float32.Float32(*(xp.expand_dims(field, -1) for field in inverse))
    powers = positive_sums.numbers(positive_sums.fields(terms))
    return float32.to_int32(float32.multiply(powers, inverse), Rounding.NEAREST_AWAY)


def _prepare_uint16(scale: np.float32) -> Uint16:
    """The table of a softmax of codes with this scale."""
    powers = libm.expf(np.float32(-scale) * np.arange(256).astype(np.float32)) * np.float32(65535)
    nearest = np.floor(powers.astype(np.float64) + 0.5)
    return Uint16(np.minimum(nearest, 65535).astype(np.int32))


def _uint16(xp: ModuleType, difference: Any, constants: Uint16) -> Any:
    """256 times the softmax, int32, from differences to the greatest code, (..., n) with n below 2^15."""
    # Mode "clip" is the form of a lookup that the emitters know. All differences lie within the table.
    powers = xp.take(xp.asarray(constants.powers), -difference, mode="clip")
    total = float32.from_int32(xp.sum(powers, axis=-1, keepdims=True, dtype=np.int32))
    inverse = float32.of(float32.divide(float32.of(1.0), float32.multiply(total, float32.of(2.0**-8))))
    # The greatest code contributes 65535, so the sum lies in [2^16 - 1, 2^31) and inv = M 2^(s - 31) in (2^-23, 2^-7).
    multiplier, right = inverse.mantissa << np.int32(7), np.int32(-24) - inverse.exponent
    high = saturating_rounding_doubling_high_mul(powers, xp.broadcast_to(multiplier, powers.shape))
    right = xp.broadcast_to(right, powers.shape)
    whole = powers.shape[-1] - powers.shape[-1] % _BLOCK
    in_vectors = xp.arange(powers.shape[-1], dtype=np.int32) < np.int32(whole)
    up = rounding_right_shift(high, right, Rounding.NEAREST_UP)
    away = rounding_divide_by_power_of_two(high, right)
    return xp.where(xp.broadcast_to(in_vectors, powers.shape), up, away)
