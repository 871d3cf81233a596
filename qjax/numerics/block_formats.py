"""The block formats of llama.cpp's GGUF files: integer codes in blocks of 32, with a float16 scale for each block.

The K formats, whose scales are integers, are in `k_formats`. Here are the others:

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
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from qjax.numerics.dynamic import divided
from qjax.numerics.float16 import to_float16_grid
from qjax.numerics.k_formats import WHOLE, encode_affine, encode_symmetric
from qjax.numerics.quotient import quotient
from qjax.numerics.rounding import Rounding, round_float
from qjax.numerics.unfused import unfused

BLOCK = 32
"""How many consecutive weights have one scale in the formats that are no K formats."""


@dataclasses.dataclass(frozen=True)
class BlockFormat:
    """One format.

    bits: of a code. lowest: the lowest code. qmax: the greatest magnitude of a code. has_minimum: whether values have
    an offset. encode: float32 blocks along the last axis -> int8 codes and what is stored, see `encode_blocks`. block:
    how many consecutive weights have one scale. whole: how many the file stores together.
    """

    bits: int
    lowest: int
    qmax: int
    has_minimum: bool
    encode: Callable[[jax.Array], Sequence[jax.Array]]
    block: int = BLOCK
    whole: int = BLOCK

    @property
    def has_integer_scales(self) -> bool:
        """Whether it is a K format."""
        return self.whole != self.block


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


def _searched(bits: int, block: int, *, has_minimum: bool) -> BlockFormat:
    """A K format."""
    low = 0 if has_minimum else -(2 ** (bits - 1))
    encode = partial(encode_affine if has_minimum else encode_symmetric, bits=bits)
    return BlockFormat(bits, low, -low or 2**bits - 1, has_minimum, encode, block, WHOLE)


BLOCK_FORMATS = {
    "q4_0": _by_greatest(4),
    "q4_1": _by_range(4),
    "q5_0": _by_greatest(5),
    "q5_1": _by_range(5),
    "q8_0": BlockFormat(8, -128, 128, False, _by_magnitude),
    "q2_k": _searched(2, 16, has_minimum=True),
    "q3_k": _searched(3, 16, has_minimum=False),
    "q4_k": _searched(4, 32, has_minimum=True),
    "q5_k": _searched(5, 32, has_minimum=True),
    "q6_k": _searched(6, 16, has_minimum=False),
}


def encode_blocks(view: jax.Array, format: BlockFormat) -> list[jax.Array]:
    """The int8 codes of float32 weights (..., blocks, size of a block), and what the file stores beside them.

    Returns:
      codes: of the shape of `view`. Then float32 scales (..., blocks) and, if any, minimums of that shape; both are
      numbers that float16 represents. K formats have instead: d float32 (..., blocks of 256), int8 scales (...,
      blocks), and, if any, dmin and minimums in these shapes. Weights whose scale exceeds 65504 get the scale infinity,
      as in ggml.
    """
    codes, *rest = format.encode(view)
    if format.has_integer_scales:
        return [codes, *rest]
    return [codes.astype(jnp.int8), *(to_float16_grid(part)[..., 0] for part in rest)]


def scales_and_minimums(stored: Sequence[jax.Array], format: BlockFormat, axis: int = -1) -> list[jax.Array]:
    """float32 scales of blocks, and minimums if the format has them, from what a file stores.

    stored: the results of `encode_blocks` without the codes. axis: along which blocks run.
    """
    if not format.has_integer_scales:
        return list(stored)
    each = format.whole // format.block
    spread = [jnp.repeat(part, each, axis) for part in stored[::2]]
    products = [unfused(d * own.astype(jnp.float32)) for d, own in zip(spread, stored[1::2], strict=True)]
    return [products[0], *(-low for low in products[1:])]


def decode_blocks(codes: jax.Array, scale: jax.Array, minimum: jax.Array | None = None) -> jax.Array:
    """float32 values of codes, scales and minimums of one shape."""
    value = unfused(codes.astype(jnp.float32) * scale)
    return value if minimum is None else value + minimum


def _reciprocal(scale: jax.Array) -> jax.Array:
    """1 / scale; 0 where the scale is 0, or so small that its reciprocal is no finite float32."""
    usable = jnp.abs(scale) >= np.float32(2.0**-126)
    found = quotient(jnp.ones_like(scale), jnp.where(usable, scale, jnp.ones_like(scale)))
    return jnp.where(usable, found, jnp.zeros_like(scale))
