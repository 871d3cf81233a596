"""Packs codes of 1 to 16 bits inside of JAX programs, several to a byte.

    codes 1, 2, 3, 0 of 2 bits    ->    the byte 0b00111001
    codes of 6 bits               ->    the low 4 bits of all codes, then the other 2 bits of all codes

The first code is in the lowest bits. Codes of 9 to 16 bits take two bytes each.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np


def sizes_of(bits: int) -> tuple[int, ...]:
    """How the bits of a code are divided, lowest first: each part has a size of which a byte holds a whole number."""
    if bits > 8:
        return (16,)
    return tuple(size for size in (8, 4, 2, 1) if bits & size)


def to_bytes(codes: jax.Array, bits: int) -> jax.Array:
    """Codes from 0 to 2^bits - 1 of any shape as a vector of uint8, or of uint16 for more than 8 bits."""
    flat = codes.reshape(-1).astype(jnp.uint16 if bits > 8 else jnp.uint8)
    parts, low = [], 0
    for size in sizes_of(bits):
        part = flat if size >= 8 else (flat >> np.uint8(low)) & np.uint8(2**size - 1)
        parts.append(_packed(part, size))
        low += size
    return jnp.concatenate(parts)


def from_bytes(packed: jax.Array, bits: int, shape: tuple[int, ...]) -> jax.Array:
    """The codes that `to_bytes` packed, in this shape: uint8, or uint16 for more than 8 bits."""
    return joined(split(packed, bits, math.prod(shape)), bits, shape)


def split(packed: jax.Array, bits: int, count: int) -> list[jax.Array]:
    """The bytes of `count` codes, one vector for each of `sizes_of`."""
    ends = np.cumsum([-(-count // (8 // size)) if size < 8 else count for size in sizes_of(bits)])
    return jnp.split(packed, ends[:-1].tolist())


def joined(parts: Sequence[jax.Array], bits: int, shape: tuple[int, ...]) -> jax.Array:
    """Codes in this shape, from vectors as `split` returns them."""
    found, low = None, 0
    for part, size in zip(parts, sizes_of(bits), strict=True):
        codes = _unpacked(part, size, shape)
        found = codes if found is None else found | (codes << np.uint8(low))
        low += size
    assert found is not None
    return found


def _packed(codes: jax.Array, size: int) -> jax.Array:
    if size >= 8:
        return codes
    each = 8 // size
    rows = jnp.pad(codes, (0, -codes.size % each)).reshape(-1, each)
    return jnp.sum(rows << _shifts(size), axis=1, dtype=jnp.uint8)


def _unpacked(packed: jax.Array, size: int, shape: tuple[int, ...]) -> jax.Array:
    if size >= 8:
        return packed.reshape(shape)
    codes = (packed[:, None] >> _shifts(size)) & np.uint8(2**size - 1)
    return codes.reshape(-1)[: math.prod(shape)].reshape(shape)


def _shifts(size: int) -> np.ndarray:
    """Where each code of a byte begins."""
    return (np.arange(8 // size) * size).astype(np.uint8)[None]
