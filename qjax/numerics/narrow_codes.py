"""Packs codes of two and four bits, several to a byte, inside of JAX programs.

    codes 1, 2, 3, 0 of 2 bits    ->    the byte 0b00111001

The layout is that of artifacts: the first code is in the lowest bits. Wider codes take one or two bytes each.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

WIDTHS = (2, 4, 8, 16)
"""Bits that one code can take."""


def width_of(bits: int) -> int:
    """The bits that a code of `bits` bits occupies in memory."""
    return next(width for width in WIDTHS if width >= bits)


def to_bytes(codes: jax.Array, width: int) -> jax.Array:
    """Codes from 0 to 2^width - 1 of any shape as a vector of uint8, or of uint16 for 16 bits."""
    flat = codes.reshape(-1).astype(jnp.uint16 if width == 16 else jnp.uint8)
    if width >= 8:
        return flat
    each = 8 // width
    rows = jnp.pad(flat, (0, -flat.size % each)).reshape(-1, each)
    return jnp.sum(rows << _shifts(width), axis=1, dtype=jnp.uint8)


def from_bytes(packed: jax.Array, width: int, shape: tuple[int, ...]) -> jax.Array:
    """The codes that `to_bytes` packed, in this shape: uint8, or uint16 for 16 bits."""
    if width >= 8:
        return packed.reshape(shape)
    codes = (packed[:, None] >> _shifts(width)) & np.uint8(2**width - 1)
    return codes.reshape(-1)[: math.prod(shape)].reshape(shape)


def _shifts(width: int) -> np.ndarray:
    """Where each code of a byte begins."""
    return (np.arange(8 // width) * width).astype(np.uint8)[None]
