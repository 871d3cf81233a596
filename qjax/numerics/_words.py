"""Words of 64 bits: the unsigned integer steps under `Real`, written for numpy and `jax.numpy` alike."""

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from qjax.numerics.rounding import Rounding

_U = np.uint64
# dtype -> (unsigned integer of the same width, mantissa bits stored, exponent bits)
FLOAT_FORMATS = {
    "float16": ("uint16", 10, 5),
    "bfloat16": ("uint16", 7, 8),
    "float32": ("uint32", 23, 8),
    "float64": ("uint64", 52, 11),
}


def unpack_float(xp: ModuleType, x: Any, unsigned: str, stored: int, exponent_bits: int) -> tuple[Any, Any, Any]:
    """Sign, mantissa (below 2^53) and exponent of finite floats, read from their bits; 0 has mantissa 0.

    A float operation would do for normal numbers only: XLA may flush subnormal ones to zero.
    """
    if xp is jnp:
        bits = jax.lax.bitcast_convert_type(x, jnp.dtype(unsigned)).astype(_U)
    else:
        bits = x.view(unsigned).astype(_U)
        if not np.all(np.isfinite(x)):
            raise ValueError("a Real must be finite. Got NaN or infinity.")
    field = (bits >> _U(stored)) & _U((1 << exponent_bits) - 1)
    fraction = bits & _U((1 << stored) - 1)
    normal = field != 0
    mantissa = xp.where(normal, fraction | _U(1 << stored), fraction)
    bias = (1 << (exponent_bits - 1)) - 1
    exponent = xp.maximum(field, _U(1)).astype(np.int32) - np.int32(bias + stored)
    sign = xp.where((bits >> _U(stored + exponent_bits)) != 0, np.int32(-1), np.int32(1))
    return sign, mantissa, exponent


def normalized(xp: ModuleType, m: Any) -> tuple[Any, Any]:
    """The word shifted left until its top bit is set, and by how much (int32); meaningless for 0."""
    if xp is jnp:
        # This is one instruction, whereas the steps below would be most of what the exact forward compiles.
        zeros = jnp.minimum(jax.lax.clz(m), _U(63))
        return m << zeros, zeros.astype(np.int32)
    lifted = xp.zeros(np.shape(m), np.int32)
    for step in (32, 16, 8, 4, 2, 1):
        small = m < _U(1 << (64 - step))
        m = xp.where(small, m << _U(step), m)
        lifted = xp.where(small, lifted + np.int32(step), lifted)
    return m, lifted


def round_off(
    xp: ModuleType, m: Any, shift: ArrayLike, rounding: Rounding = Rounding.NEAREST_EVEN, sign: Any = None
) -> Any:
    """The magnitude m / 2^shift of a number of the given sign, rounded; m below 2^64 and shift in [0, 63]."""
    q = m >> shift
    rest = m - (q << shift)
    # for a shift of 0 the rest is 0, below any `half`
    half = _U(1) << (xp.maximum(shift, _U(1)) - _U(1))
    match rounding:
        case Rounding.NEAREST_EVEN:
            up = rest > half - (q & _U(1))
        case Rounding.NEAREST_AWAY:
            up = rest >= half
        case Rounding.NEAREST_UP:
            up = rest > half - (sign > 0).astype(_U)
        case Rounding.TOWARD_ZERO:
            return q
        case Rounding.FLOOR:
            up = (rest > 0) & (sign < 0)
        case Rounding.CEIL:
            up = (rest > 0) & (sign > 0)
        case Rounding.STOCHASTIC:
            raise ValueError(
                "a Real can only be rounded deterministically. Got 'stochastic'; use round_float or requantize."
            )
    return q + up.astype(_U)


def sticky_right_shift(xp: ModuleType, m: Any, shift: ArrayLike) -> Any:
    """The word m >> shift, with the last bit set where a set bit was shifted out; shift in [0, 63]."""
    q = m >> shift
    return q | ((q << shift) != m).astype(_U)


def multiply_wide(a: Any, b: Any) -> tuple[Any, Any]:
    """The high and the low word of the product of two uint64 below 2^53, by 32-bit limbs."""
    mask = _U(0xFFFFFFFF)
    a1, a0, b1, b0 = a >> _U(32), a & mask, b >> _U(32), b & mask
    low = a0 * b0
    # a1 and b1 are below 2^21, so the sum of the middle terms and the carry stays below 2^54
    middle = a1 * b0 + a0 * b1 + (low >> _U(32))
    return a1 * b1 + (middle >> _U(32)), (middle << _U(32)) | (low & mask)


def repeat(xp: ModuleType, times: int, step: Any, state: Any) -> Any:
    """Apply `step` to `state` a number of times: a loop of the trace, or of Python on the host."""
    if xp is jnp:
        return jax.lax.fori_loop(0, times, lambda _, s: step(s), state)
    for _ in range(times):
        state = step(state)
    return state
