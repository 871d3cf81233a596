"""float32 arithmetic in integers: the bits of IEEE binary32, however XLA rewrites float operations.

Some runtimes requantize, add and average in float32. XLA may fuse such a chain into multiply-adds, merge its constants
and flush subnormal numbers, so the chain is computed here on mantissas and exponents: each function rounds once, to
nearest with ties to even, and has the same bits in numpy on the host and inside `jit`.

A number is mantissa * 2^exponent with |mantissa| <= 2^24 and exponent >= -149. Every finite float32 can be written so,
including subnormal ones, and the mantissa need not be normalized, which saves a step per operation. There is no NaN, no
signed zero and no infinity: a result of 2^128 and more keeps its exponent; `to_bits` makes it an infinity, and
`to_int32` overflows, as it does for an infinity.

Not to be confused with `Real`, which is binary64 for constants; this one is made for activations: few operations,
elementwise, fused by XLA. Operands broadcast by numpy's rules.
"""

from types import ModuleType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from qjax.numerics._namespace import like_inputs, wide
from qjax.numerics.rounding import Rounding, right_shift_with_headroom
from qjax.numerics.softfloat import Real

_I32, _I64 = np.int32, np.int64
_BITS = 24
_LEAST = -149
"""The exponent of the smallest subnormal number."""
_INT32_MIN, _INT32_MAX = -(2**31), 2**31 - 1

Overflow = Literal["saturate", "indefinite"]


class Float32(NamedTuple):
    """An array of float32 numbers, mantissa * 2^exponent.

    Attributes:
      mantissa: int32, |mantissa| <= 2^24. What `of` makes is canonical: 0 with exponent 0, or |mantissa| in
        [2^23, 2^24), or less than that with exponent -149 (a subnormal number).
      exponent: int32 of the same shape, at least -149.
    """

    mantissa: Any
    exponent: Any


def of(x: Any) -> Float32:
    """The float32 numbers of x, in canonical form.

    Args:
      x: a float32 array, taken bit by bit; a `Real` or Python float, rounded to float32; or a `Float32`, which is
        only normalized.

    Raises:
      TypeError: an array of another dtype.
      ValueError: NaN or infinity on the host; in a trace they give a meaningless number.
    """
    if isinstance(x, Float32):
        return of_bits(to_bits(x))
    if isinstance(x, float | Real):
        x = Real.of(x).to_float32()
    dtype = str(getattr(x, "dtype", type(x).__name__))
    if dtype != "float32":
        raise TypeError(f"expected a float32 array, a Real or a Python float. Got {dtype}; convert it first.")
    if like_inputs(x) is jnp:
        return of_bits(jax.lax.bitcast_convert_type(x, jnp.int32))
    if not np.all(np.isfinite(x)):
        raise ValueError("float32 numbers must be finite. Got NaN or infinity.")
    return of_bits(np.asarray(x).view(np.int32))


def of_bits(bits: Any) -> Float32:
    """The float32 numbers with these bits, int32; both zeros become 0."""
    xp = like_inputs(bits)
    bits = xp.asarray(bits)
    field = (bits >> _I32(23)) & _I32(0xFF)
    fraction = bits & _I32(0x7FFFFF)
    magnitude = xp.where(field != 0, fraction | _I32(1 << 23), fraction)
    exponent = xp.where(magnitude == 0, _I32(0), xp.maximum(field, _I32(1)) + _I32(_LEAST - 1))
    return Float32(xp.where(bits < 0, -magnitude, magnitude), exponent)


def to_bits(a: Float32) -> Any:
    """The int32 whose bits are those of the float32: +0 for 0, infinity from 2^128 on."""
    xp, (a,) = _aligned(a)
    with wide(xp):
        magnitude = xp.abs(a.mantissa)
        lift = _I32(_BITS) - bit_length(xp, magnitude)
        # Shift up as far as the exponent allows: to 24 bits, or to a multiple of 2^-149.
        lift = xp.minimum(lift, a.exponent - _I32(_LEAST))
        # A mantissa of 2^24 is one bit too long.
        normal = xp.where(lift < 0, magnitude >> _I32(1), magnitude << xp.maximum(lift, _I32(0)))
        field = xp.minimum(a.exponent - lift - _I32(_LEAST), _I32(254))
        # the leading bit of a normal mantissa adds 1 to the field
        bits = (field << _I32(23)) + normal
        bits = xp.where(a.exponent - lift > 104, _I32(0x7F800000), bits)
        bits = xp.where(magnitude == 0, _I32(0), bits)
        return xp.where(a.mantissa < 0, bits | _I32(_INT32_MIN), bits)


def to_array(a: Float32) -> Any:
    """The numbers as a float32 array: numpy for host inputs, a JAX array where one of the fields is."""
    bits = to_bits(a)
    if like_inputs(bits) is jnp:
        return jax.lax.bitcast_convert_type(bits, jnp.float32)
    return np.asarray(bits).view(np.float32)


def from_int32(x: Any) -> Float32:
    """The float32 nearest to an int32, ties to even: C's (float)x, CVTDQ2PS, SCVTF."""
    xp = like_inputs(x)
    with wide(xp):
        x = xp.asarray(x).astype(_I64)
        return _rounded(xp, x, xp.zeros(x.shape, _I32))


def negative(a: Float32) -> Float32:
    """The number -a; exact."""
    return Float32(-a.mantissa, a.exponent)


def multiply(a: Float32, b: Float32) -> Float32:
    """The product a * b, rounded once."""
    xp, (a, b) = _aligned(a, b)
    with wide(xp):
        return _rounded(xp, _wide_mantissa(a) * _wide_mantissa(b), a.exponent + b.exponent)


def add(a: Float32, b: Float32) -> Float32:
    """The sum a + b, rounded once."""
    xp, (a, b) = _aligned(a, b)
    with wide(xp):
        ea, eb = _exponents(xp, a.mantissa, a.exponent, b.mantissa, b.exponent)
        # Shift the operand with the greater exponent up as far as there is room, and the other one down by the rest. If
        # bits are lost, the sum has more than 30 bits, and they lie far below the rounding.
        up_a, up_b = (xp.clip(d, _I32(0), _I32(36)) for d in (ea - eb, eb - ea))
        ma, mb = _wide_mantissa(a) << up_a.astype(_I64), _wide_mantissa(b) << up_b.astype(_I64)
        return _sum(xp, ma, ea - up_a, mb, eb - up_b)


def subtract(a: Float32, b: Float32) -> Float32:
    """The difference a - b, rounded once."""
    return add(a, negative(b))


def fma(a: Float32, b: Float32, c: Float32) -> Float32:
    """The fused multiply-add a * b + c, rounded once: the product is exact."""
    xp, (a, b, c) = _aligned(a, b, c)
    with wide(xp):
        # Bring the 48 bits of the product and the 24 of c to the top of 60 bits. A shift down by up to 12 then loses no
        # bit. For larger shifts at most one leading bit can cancel.
        mp, ep = _to_top(xp, _wide_mantissa(a) * _wide_mantissa(b), a.exponent + b.exponent)
        mc, ec = _to_top(xp, _wide_mantissa(c), c.exponent)
        ep, ec = _exponents(xp, mp, ep, mc, ec)
        return _sum(xp, mp, ep, mc, ec)


def divide(a: Float32, b: Float32) -> Float32:
    """The quotient a / b, rounded once.

    Raises:
      ZeroDivisionError: a zero divisor on the host. In a trace the quotient there is a meaningless number.
    """
    xp, (a, b) = _aligned(a, b)
    if xp is np and np.any(np.asarray(b.mantissa) == 0):
        raise ZeroDivisionError("division of a float32 by zero.")
    with wide(xp):
        (ma, ea), (mb, eb) = (_to_top(xp, _wide_mantissa(v), v.exponent) for v in (a, b))
        # 60 bits divided by 24: a quotient of 36 or 37 bits, and the remainder as a sticky bit.
        dividend, divisor = xp.abs(ma), xp.maximum(xp.abs(mb) >> _I64(36), _I64(1))
        q = dividend // divisor
        q = q | (q * divisor != dividend).astype(_I64)
        return _rounded(xp, xp.where((ma < 0) ^ (mb < 0), -q, q), ea - eb - _I32(36))


def to_int32(a: Float32, rounding: Rounding = Rounding.NEAREST_EVEN, overflow: Overflow = "saturate") -> Any:
    """The nearest integer by `rounding` (not stochastic), as int32.

    Args:
      a: the numbers.
      rounding: NEAREST_EVEN is rint (CVTPS2DQ, FCVTNS), NEAREST_AWAY C's round, TOWARD_ZERO a C cast.
      overflow: what becomes of a rounded value outside of int32. "saturate": the nearest int32 (ARM, and every
        runtime that clamps before it converts). "indefinite": -2^31 on both sides (x86's CVTPS2DQ).

    Returns:
      int32 of the broadcast shape.
    """
    xp, (a,) = _aligned(a)
    with wide(xp):
        m, e = _wide_mantissa(a), a.exponent.astype(_I64)
        # Any left shift by 32 or more leaves the range of int32. After any right shift by 26 or more less than 1/2
        # remains.
        m = m << xp.clip(e, _I64(0), _I64(36))
        y = right_shift_with_headroom(xp, m, xp.clip(-e, _I64(0), _I64(36)), rounding)
        if overflow == "indefinite":
            outside = (y < _I64(_INT32_MIN)) | (y > _I64(_INT32_MAX))
            return xp.where(outside, _I64(_INT32_MIN), y).astype(_I32)
        return xp.minimum(xp.maximum(y, _I64(_INT32_MIN)), _I64(_INT32_MAX)).astype(_I32)


def less(a: Float32, b: Float32) -> Any:
    """Boolean: where a < b."""
    xp, (a, b) = _aligned(a, b)
    with wide(xp):
        return _order(xp, to_bits(a)) < _order(xp, to_bits(b))


def where(condition: Any, a: Float32, b: Float32) -> Float32:
    """The numbers of a where the condition holds, of b elsewhere."""
    xp, (a, b) = _aligned(a, b)
    xp = like_inputs(condition, a.mantissa)
    return Float32(*(xp.where(condition, p, q) for p, q in zip(a, b, strict=True)))


def maximum(a: Float32, b: Float32) -> Float32:
    """The greater of the two, elementwise."""
    return where(less(a, b), b, a)


def minimum(a: Float32, b: Float32) -> Float32:
    """The smaller of the two, elementwise."""
    return where(less(b, a), b, a)


def _aligned(*numbers: Float32) -> tuple[Any, list[Float32]]:
    """The namespace of the operands, and these broadcast to one shape in it."""
    xp = like_inputs(*(field for number in numbers for field in number))
    shape = jnp.broadcast_shapes(*(np.shape(field) for number in numbers for field in number))
    return xp, [Float32(*(xp.broadcast_to(xp.asarray(f), shape).astype(_I32) for f in n)) for n in numbers]


def _wide_mantissa(a: Float32) -> Any:
    return a.mantissa.astype(_I64)


def bit_length(xp: ModuleType, magnitude: Any) -> Any:
    """How many bits a nonnegative integer has, int32; 0 for 0."""
    width = 8 * magnitude.dtype.itemsize
    if xp is jnp:
        return _I32(width) - jax.lax.clz(magnitude).astype(_I32)
    for step in (1, 2, 4, 8, 16, 32)[: width.bit_length() - 1]:
        magnitude = magnitude | (magnitude >> magnitude.dtype.type(step))
    return np.bitwise_count(magnitude).astype(_I32)


def _rounded(xp: ModuleType, m: Any, e: Any) -> Float32:
    """The float32 nearest to m * 2^e, ties to even, for int64 m with |m| < 2^61.

    The last bit of an m of 27 bits or more may represent whatever was lost below it (a sticky bit).
    """
    surplus = bit_length(xp, xp.abs(m)) - _I32(_BITS)
    shift = xp.clip(xp.maximum(surplus, _I32(_LEAST) - e), _I32(0), _I32(62))
    # a shift of 62 already rounds every m to 0
    mantissa = right_shift_with_headroom(xp, m, shift.astype(_I64), Rounding.NEAREST_EVEN).astype(_I32)
    # e + shift may still lie below -149 for a zero
    return Float32(mantissa, xp.maximum(e + shift, _I32(_LEAST)))


def _exponents(xp: ModuleType, ma: Any, ea: Any, mb: Any, eb: Any) -> tuple[Any, Any]:
    """The exponents of two summands, where a zero takes that of the other."""
    return xp.where(ma == 0, eb, ea), xp.where(mb == 0, ea, eb)


def _sum(xp: ModuleType, ma: Any, ea: Any, mb: Any, eb: Any) -> Float32:
    """The float32 of ma * 2^ea + mb * 2^eb: the summand of the smaller exponent is shifted down, with a sticky bit."""
    e = xp.maximum(ea, eb)
    return _rounded(xp, _sticky(xp, ma, e - ea) + _sticky(xp, mb, e - eb), e)


def _sticky(xp: ModuleType, m: Any, shift: ArrayLike) -> Any:
    """The floor of m / 2^shift, made odd where a set bit was shifted out: on the right side of every tie."""
    shift = xp.minimum(shift, _I32(62)).astype(_I64)
    q = m >> shift
    return q | ((q << shift) != m).astype(_I64)


def _to_top(xp: ModuleType, m: Any, e: Any) -> tuple[Any, Any]:
    """The same number with 60 bits of mantissa; 0 stays 0."""
    lift = _I32(60) - bit_length(xp, xp.abs(m))
    return m << lift.astype(_I64), e - lift


def _order(xp: ModuleType, bits: Any) -> Any:
    """Integers in the order of the float32 numbers with these bits."""
    return xp.where(bits < 0, _I32(_INT32_MIN) - bits, bits)
