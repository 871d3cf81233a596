"""A rule that depends on the channel: TFLite's optimised depthwise convolution, which is vectorised in part.

Notation as in `classic`.
"""

import jax
import jax.numpy as jnp
import numpy as np

from qjax.numerics.fixed_point import Multiplier
from qjax.numerics.rules.classic import double_round, neon
from qjax.numerics.rules.multiplier import fixed_point
from qjax.numerics.rules.registry import Call

LANES = 8
"""Channels that the vectorised loop completes at once."""


@fixed_point("tflite_depthwise_neon")
def tflite_depthwise_neon(acc: jax.Array, m: Multiplier, call: Call) -> jax.Array:
    """The rule `neon` for as many channels as fill vectors of 8, `double_round` for the last C mod 8.

    The channel is the position on the last axis of acc, C its length: this is the one rule that asks for an
    accumulator in channels last (a scalar is one channel). Source: the optimised DEPTHWISE_CONV_2D for int8, whose
    loop of NEON instructions (on x86 through their emulation) leaves a tail to portable code; LiteRT 2.3.0 on x86.
    """
    channels = acc.shape[-1] if acc.ndim else 1
    whole = np.int32(channels - channels % LANES)
    if whole == channels:
        return neon(acc, m, call)
    if whole == 0:
        return double_round(acc, m, call)
    channel = jax.lax.broadcasted_iota(jnp.int32, acc.shape, acc.ndim - 1)
    return jnp.where(channel < whole, neon(acc, m, call), double_round(acc, m, call))
