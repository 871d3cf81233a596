"""IEEE binary64 arithmetic inside a trace, on bit patterns: the processor's own, protected from the compiler.

A pattern is a uint64 array without -0, infinity and NaN. On processors with binary64 arithmetic the operations are the
hardware's, because formulas in integers take a hundred instructions each and would be most of what XLA compiles for the
exact forward. XLA may rewrite float arithmetic, so every result passes through its bits, where -0 becomes 0. No
arithmetic commutes with that, so XLA fuses no product into a sum and merges no two constants. XLA may compute a
quotient as a product with a reciprocal, so the quotient is only an estimate, which its exact remainder corrects.

Results below the normal numbers are 0; beyond the greatest number they are meaningless.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from qjax.numerics.fence import apart

_U = np.uint64
_NEGATIVE = _U(1 << 63)
_FRACTION = _U((1 << 52) - 1)
_EXPONENT = _U(2047 << 52)
_IMPLICIT = _U(1 << 52)
_BIAS = 1075
"""The bias of the exponent field, for numbers written mantissa * 2^exponent with a mantissa in [2^52, 2^53)."""

Pattern = jax.Array
Integers = Callable[..., Pattern]


def pack(xp: ModuleType, sign: Any, mantissa: Any, exponent: Any) -> Any:
    """The pattern of sign * mantissa * 2^exponent in canonical form; out of range it is 0 or the greatest."""
    field = exponent.astype(np.int32) + np.int32(_BIAS)
    bits = (mantissa & _FRACTION) | (xp.clip(field, np.int32(1), np.int32(2046)).astype(_U) << _U(52))
    bits = xp.where(field > np.int32(2046), _U((2047 << 52) - 1), bits)
    bits = xp.where(sign < np.int32(0), bits | _NEGATIVE, bits)
    return xp.where((sign == np.int32(0)) | (field < np.int32(1)), _U(0), bits)


def sign(bits: Pattern) -> jax.Array:
    """-1, 0 or 1, int32."""
    return jnp.where(bits == _U(0), np.int32(0), jnp.where(bits >= _NEGATIVE, np.int32(-1), np.int32(1)))


def mantissa(bits: Pattern) -> jax.Array:
    """0, or in [2^52, 2^53), uint64."""
    return jnp.where(bits == _U(0), _U(0), (bits & _FRACTION) | _IMPLICIT)


def exponent(bits: Pattern) -> jax.Array:
    """The power of two by which the mantissa is multiplied, int32; it is 0 for the number 0."""
    return jnp.where(bits == _U(0), np.int32(0), _field(bits) - np.int32(_BIAS))


def unpack(bits: Pattern) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sign, mantissa and exponent in canonical form."""
    return sign(bits), mantissa(bits), exponent(bits)


def of_float32(x: ArrayLike) -> Pattern:
    """The pattern of finite float32 numbers, exact; by integers, because XLA may flush subnormal floats to zero."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    # 0 for a normal number
    lift = jnp.maximum(lax.clz(magnitude), np.uint32(8)) - np.uint32(8)
    fraction = (magnitude << lift) & np.uint32(0x007FFFFF)
    field = jnp.maximum(magnitude >> np.uint32(23), np.uint32(1)) + np.uint32(1023 - 127) - lift
    pattern = (field.astype(_U) << _U(52)) | (fraction.astype(_U) << _U(29))
    sign = (bits >> np.uint32(31)).astype(_U) << _U(63)
    return jnp.where(magnitude == np.uint32(0), _U(0), pattern | sign)


def of_integer(x: Any) -> Pattern:
    """The pattern of int32, uint32 or smaller integers, exact."""
    negative = x < np.asarray(0, x.dtype)
    wide = x.astype(jnp.int64)
    magnitude = jnp.where(negative, -wide, wide).astype(jnp.uint32)
    lift = lax.clz(magnitude).astype(_U)
    # the implicit bit adds the final 1 to the exponent
    pattern = (magnitude.astype(_U) << (lift + _U(21))) + ((_U(1022 + 31) - lift) << _U(52))
    sign = negative.astype(_U) << _U(63)
    return jnp.where(magnitude == np.uint32(0), _U(0), pattern | sign)


def add(a: Pattern, b: Pattern, integers: Integers) -> Pattern:
    """The sum, rounded once."""
    return _either(lambda a, b: _pattern(_number(a) + _number(b)), integers, a, b)


def multiply(a: Pattern, b: Pattern, integers: Integers) -> Pattern:
    """The product, rounded once."""
    return _either(lambda a, b: _pattern(_number(a) * _number(b)), integers, a, b)


def divide(a: Pattern, b: Pattern, integers: Integers) -> Pattern:
    """The quotient, rounded once; of a division by zero, a meaningless finite number."""
    return _either(lambda a, b: _once(_divide, a, b), integers, a, b)


def sqrt(a: Pattern, integers: Integers) -> Pattern:
    """The square root, rounded once; for a negative number the negated root of its magnitude."""

    def native(a: Pattern) -> Pattern:
        sign = a & _NEGATIVE
        return jnp.where(a == _U(0), _U(0), _pattern(jnp.sqrt(_number(a ^ sign))) | sign)

    return _either(native, integers, a)


def negated(bits: Pattern) -> Pattern:
    """The number with the opposite sign."""
    return jnp.where(bits == _U(0), bits, bits ^ _NEGATIVE)


def magnitude(bits: Pattern) -> Pattern:
    """The number without its sign."""
    return bits & ~_NEGATIVE


def scaled(bits: Pattern, k: Any) -> Pattern:
    """The number times 2^k, k int32; what is out of range becomes 0 or a number near the greatest."""
    field = _field(bits) + jnp.clip(k, np.int32(-(2**20)), np.int32(2**20))
    moved = (bits & ~_EXPONENT) | (jnp.clip(field, np.int32(1), np.int32(2046)).astype(_U) << _U(52))
    return jnp.where((bits == _U(0)) | (field < np.int32(1)), _U(0), moved)


def ordered(bits: Pattern) -> jax.Array:
    """int64 numbers that are ordered like the numbers of the patterns."""
    magnitude = (bits & ~_NEGATIVE).astype(jnp.int64)
    return jnp.where(bits >= _NEGATIVE, -magnitude, magnitude)


def alive(bits: Pattern) -> jax.Array:
    """Always true, but the compiler cannot prove it: a pattern is never -0."""
    return bits.reshape(-1)[0] != _NEGATIVE


def _either(native: Integers, integers: Integers, *operands: Pattern) -> Pattern:
    # TPUs have no binary64
    return lax.platform_dependent(*operands, tpu=integers, default=native)


def _once(compute: Integers, *operands: Pattern) -> Pattern:
    """Compile the computation separately: it is long, and XLA would copy it into each of its readers."""
    if operands[0].size == 0:
        return compute(*operands)
    return apart(alive(operands[0]), compute, *operands)


def _divide(a: Pattern, b: Pattern) -> Pattern:
    """Divide mantissas: q = floor(x / y) with x = a 2^53 (or 2^52), from the estimate q' and x - q' y.

    The estimate is off by a few units, so x - q' y is less than 2^60 in magnitude, and 64-bit words that wrap compute
    it exactly. A quotient of two 53-bit numbers never lies halfway between two of 53 bits.
    """
    negative = (a ^ b) & _NEGATIVE
    zero = a == _U(0)
    x, y = (a & _FRACTION) | _IMPLICIT, (b & _FRACTION) | _IMPLICIT
    below = (x < y).astype(_U)
    one = _U(1023 << 52)
    # In [1, 2) however XLA computes the quotient, or one ulp below 1.
    estimate = _number((x & _FRACTION) | (one + (below << _U(52)))) / _number((y & _FRACTION) | one)
    q = (estimate * np.float64(2.0**52)).astype(jnp.int64).astype(_U)
    rest = ((x << (_U(52) + below)) - q * y).astype(jnp.int64)
    y = y.astype(jnp.int64)
    for _ in range(2):
        low, high = rest < np.int64(0), rest >= y
        q = q + high.astype(_U) - low.astype(_U)
        rest = rest + jnp.where(low, y, np.int64(0)) - jnp.where(high, y, np.int64(0))
    q = q + (rest + rest > y).astype(_U)
    # q may be 2^53: the carry runs into the exponent
    field = _field(a) - _field(b) + np.int32(1022) - below.astype(jnp.int32)
    bits = q + (jnp.clip(field, np.int32(0), np.int32(2045)).astype(_U) << _U(52))
    return jnp.where(zero | (field < np.int32(0)), _U(0), bits | negative)


def _field(bits: Pattern) -> jax.Array:
    return ((bits >> _U(52)) & _U(2047)).astype(jnp.int32)


def _number(bits: Pattern) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float64)


def _pattern(x: jax.Array) -> Pattern:
    bits = lax.bitcast_convert_type(x, _U)
    return jnp.where(bits == _NEGATIVE, _U(0), bits)
