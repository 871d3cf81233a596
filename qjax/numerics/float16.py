"""Rounds float32 numbers to those that float16 represents."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.numerics.rounding import Rounding, round_float
from qjax.numerics.unfused import unfused


def to_float16_grid(x: jax.Array) -> jax.Array:
    """float32 numbers rounded to float16 (nearest, ties to even, subnormals too), still in float32.

    A cast to float16 and back would do, but XLA may drop such a pair of casts.
    """
    exponent = ((lax.bitcast_convert_type(x, jnp.int32) >> 23) & np.int32(255)) - np.int32(127)
    last = jnp.clip(exponent, np.int32(-14), np.int32(15)) - np.int32(10)
    unit = lax.bitcast_convert_type((last + np.int32(127)) << 23, jnp.float32)
    per_unit = lax.bitcast_convert_type((np.int32(127) - last) << 23, jnp.float32)
    rounded = unfused(round_float(unfused(x * per_unit), Rounding.NEAREST_EVEN) * unit)
    return jnp.where(jnp.abs(rounded) > np.float32(65504), jnp.sign(x) * np.float32(np.inf), rounded)
