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
    """Apply `neon` to as many channels as fill vectors of 8, and `double_round` to the last C mod 8.

    A channel is a position on the last axis of acc, and C is the length of that axis. This is the one rule that needs
    an accumulator with the channels last; a scalar counts as one channel.

    Source: the optimised DEPTHWISE_CONV_2D for int8 of LiteRT 2.3.0 on x86. Its loop of NEON instructions, which x86
    emulates, leaves the last channels to portable code.
    """
    channels = acc.shape[-1] if acc.ndim else 1
    whole = np.int32(channels - channels % LANES)
    if whole == channels:
        return neon(acc, m, call)
    if whole == 0:
        return double_round(acc, m, call)
    channel = jax.lax.broadcasted_iota(jnp.int32, acc.shape, acc.ndim - 1)
    return jnp.where(channel < whole, neon(acc, m, call), double_round(acc, m, call))
