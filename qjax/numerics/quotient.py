"""The IEEE quotient of float32 numbers on every platform.

XLA divides with one rounding on CPUs. For NVIDIA's GPUs it uses an approximation that is off by up to two units in the
last place (`div.full.f32` of the PTX ISA): on an H200 with jax 0.11.2, codes and zero points differed from the CPU's.
So on other platforms the quotient is an estimate, which its exact remainder corrects.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.numerics.calls import traced_once

_FRACTION, _IMPLICIT = np.int32(0x007FFFFF), np.int32(0x00800000)
_ONE = np.int32(0x3F800000)
_SIGN = np.int32(-(2**31))
_FIELDS = np.int32(255)
_OFF = 4
"""An estimate is corrected by at most this many units."""

_FEW = 2**16
"""Up to this size an array is written and read again faster than it is computed twice."""

Divide = Callable[[jax.Array, jax.Array], jax.Array]


@traced_once()
def quotient(a: jax.Array, b: jax.Array) -> jax.Array:
    """float32 arrays of one shape -> a / b, rounded once to nearest, ties to even.

    Except on CPUs, subnormal operands and quotients may be off: there it is the platform's own quotient.
    """
    # the CPU's is the default, because writers of files read the branch for no platform in particular
    return lax.platform_dependent(a, b, cuda=_elsewhere, rocm=_elsewhere, tpu=_elsewhere, default=lax.div)


def reciprocal(x: jax.Array) -> jax.Array:
    """float32 `1 / x`, rounded once to nearest."""
    return quotient(jnp.ones_like(x), x)


def corrected(a: jax.Array, b: jax.Array, divide: Divide = lax.div) -> jax.Array:
    """The quotient from an estimate that is off by up to four units in the last place.

    With the 24-bit mantissas x and y, q = floor(x 2^k / y) for k = 23, or 24 if x is below y. The remainder x 2^k - q y
    of an estimate q is below 5 y < 2^27 in magnitude, so 32-bit words that wrap compute it exactly. A quotient of two
    24-bit numbers never lies halfway between two of 24 bits.

    divide: float32 division of numbers in [1, 4) by numbers in [1, 2).
    """
    left, right = (lax.bitcast_convert_type(x, jnp.int32) for x in (a, b))
    x, y = (bits & _FRACTION | _IMPLICIT for bits in (left, right))
    below = (x < y).astype(jnp.int32)
    # in [1, 2), or a few units outside
    numerator = (left & _FRACTION) | (_ONE + (below << 23))
    estimate = divide(*(lax.bitcast_convert_type(bits, jnp.float32) for bits in (numerator, right & _FRACTION | _ONE)))
    q = lax.clamp(_IMPLICIT, lax.bitcast_convert_type(estimate, jnp.int32) - _ONE + _IMPLICIT, np.int32(2 * _IMPLICIT))
    rest = (x << (np.int32(23) + below)) - q * y
    for _ in range(_OFF):
        more = (rest >= y).astype(jnp.int32) - (rest < np.int32(0)).astype(jnp.int32)
        q, rest = q + more, rest - more * y
    q = q + (rest + rest > y).astype(jnp.int32)
    fields = [(bits >> np.int32(23)) & _FIELDS for bits in (left, right)]
    field = fields[0] - fields[1] + np.int32(127) - below
    # q may be 2^24: the carry runs into the exponent
    bits = (lax.clamp(np.int32(1), field, np.int32(254)) << np.int32(23)) + q - _IMPLICIT
    found = lax.bitcast_convert_type(bits | ((left ^ right) & _SIGN), jnp.float32)
    normal = (field >= np.int32(1)) & (field < _FIELDS)
    for own in fields:
        normal = normal & (own > np.int32(0)) & (own < _FIELDS)
    return lax.select(normal, found, divide(a, b))


@traced_once()
def _elsewhere(a: jax.Array, b: jax.Array) -> jax.Array:
    """`corrected`; for small arrays, such as scales, as a separate computation.

    XLA for GPUs weighs each of its fifty operations against every reader. Fused with them, a training step of one
    transformer block took 121 s to compile; separated from its readers it took 41 s.
    """
    # an exported function has symbolic sizes
    size: Any = math.prod(a.shape)
    if not isinstance(size, int) or size > _FEW:
        return corrected(a, b)
    # one array for each barrier: so writers of files can read this branch too
    a, b = (lax.optimization_barrier(x) for x in (a, b))
    return lax.optimization_barrier(corrected(a, b))
