"""The block formats of llama.cpp's GGUF files: integer codes in blocks of 32, with a float16 scale for each block.

    value = code * scale                                 q4_0, q5_0, q8_0
    value = code * scale + minimum                       q4_1, q5_1

| format | codes | scale | minimum |
| --- | --- | --- | --- |
| `q4_0` | -8 to 7 | the element of greatest magnitude / -8 | - |
| `q5_0` | -16 to 15 | the element of greatest magnitude / -16 | - |
| `q8_0` | -127 to 127 | greatest magnitude / 127 | - |
| `q4_1` | 0 to 15 | (greatest - least) / 15 | least |
| `q5_1` | 0 to 31 | (greatest - least) / 31 | least |

Codes are computed with the scale before it is rounded to float16: `trunc(x / scale + 8.5) - 8` for `q4_0`, and so on;
`q8_0` rounds to nearest, ties away from zero. The reciprocal of the scale is rounded once and multiplied, as in the
functions `quantize_row_*_ref` of ggml's `ggml-quants.c`, whose codes these are where the C compiler fuses no product
with a sum (x86-64). A product of a code and a scale has at most 19 bits, so a value is rounded at most once.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.numerics.dynamic import divided
from qjax.numerics.quotient import quotient
from qjax.numerics.rounding import Rounding, round_float
from qjax.numerics.unfused import unfused

BLOCK = 32
"""How many consecutive weights have one scale."""


@dataclasses.dataclass(frozen=True)
class BlockFormat:
    """One format.

    bits: of a code. lowest: the lowest code. qmax: the greatest magnitude of a code. has_minimum: whether values have
    an offset. encode: float32 blocks along the last axis -> float32 codes, scales and minimums before float16.
    """

    bits: int
    lowest: int
    qmax: int
    has_minimum: bool
    encode: Callable[[jax.Array], tuple[jax.Array, ...]]


def _by_greatest(bits: int) -> BlockFormat:
    low = -(2 ** (bits - 1))

    def encode(x: jax.Array) -> tuple[jax.Array, ...]:
        at = jnp.argmax(jnp.abs(x), -1, keepdims=True)
        scale = jnp.take_along_axis(x, at, -1) * np.float32(1 / low)
        steps = unfused(x * _reciprocal(scale)) + np.float32(0.5 - low)
        return jnp.clip(jnp.trunc(steps), 0, 2**bits - 1) + np.float32(low), scale

    return BlockFormat(bits, low, -low, False, encode)


def _by_range(bits: int) -> BlockFormat:
    top = 2**bits - 1

    def encode(x: jax.Array) -> tuple[jax.Array, ...]:
        low = jnp.min(x, -1, keepdims=True)
        scale = divided(jnp.max(x, -1, keepdims=True) - low, np.float32(top))
        steps = unfused((x - low) * _reciprocal(scale)) + np.float32(0.5)
        return jnp.clip(jnp.trunc(steps), 0, top), scale, low

    return BlockFormat(bits, 0, top, True, encode)


def _by_magnitude(x: jax.Array) -> tuple[jax.Array, ...]:
    scale = divided(jnp.max(jnp.abs(x), -1, keepdims=True), np.float32(127))
    return round_float(unfused(x * _reciprocal(scale)), Rounding.NEAREST_AWAY), scale


BLOCK_FORMATS = {
    "q4_0": _by_greatest(4),
    "q4_1": _by_range(4),
    "q5_0": _by_greatest(5),
    "q5_1": _by_range(5),
    "q8_0": BlockFormat(8, -128, 128, False, _by_magnitude),
}


def encode_blocks(view: jax.Array, format: BlockFormat) -> list[jax.Array]:
    """The int8 codes of float32 blocks along the last axis, and per block a float32 scale and, if any, a minimum.

    Scales and minimums are numbers that float16 represents, with size 1 along the last axis. Weights whose scale
    exceeds 65504 get the scale infinity, as in ggml.
    """
    codes, *rest = format.encode(view)
    return [codes.astype(jnp.int8), *(to_float16_grid(part) for part in rest)]


def decode_blocks(codes: jax.Array, scale: jax.Array, minimum: jax.Array | None = None) -> jax.Array:
    """float32 values of codes, scales and minimums of one shape."""
    value = unfused(codes.astype(jnp.float32) * scale)
    return value if minimum is None else value + minimum


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


def _reciprocal(scale: jax.Array) -> jax.Array:
    """1 / scale; 0 where the scale is 0, or so small that its reciprocal is no finite float32."""
    usable = jnp.abs(scale) >= np.float32(2.0**-126)
    found = quotient(jnp.ones_like(scale), jnp.where(usable, scale, jnp.ones_like(scale)))
    return jnp.where(usable, found, jnp.zeros_like(scale))
