"""Counters of 63 bits in two uint32 words, because JAX may be configured without 64-bit integers."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

LIMIT = 2**63


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Counter:
    """Unsigned counts, `high * 2**32 + low` elementwise; both words are uint32 of one shape.

    A count that reaches `LIMIT` (2**63) stays at or above it and never wraps, so that `exceeded` detects it. At 10**9
    elements a second the limit is 292 years away.
    """

    high: Array
    low: Array


def zero_counter(shape: tuple[int, ...] = ()) -> Counter:
    """Counts of zero, of the given shape."""
    return Counter(jnp.zeros(shape, jnp.uint32), jnp.zeros(shape, jnp.uint32))


def add(counter: Counter, increment: Array) -> Counter:
    """Adds a uint32 `increment` of the counter's shape; exact below `LIMIT`."""
    low = counter.low + increment
    carry = (low < increment).astype(jnp.uint32)
    stuck = counter.high >= jnp.uint32(1 << 31)
    return Counter(jnp.where(stuck, counter.high, counter.high + carry), jnp.where(stuck, counter.low, low))


def scatter(counter: Counter, index: Array) -> Counter:
    """Move the count in row r, column j to column `index[r, j]`, and add counts that meet; exact.

    Args:
        counter: counts of shape (rows, columns), at most 2**16 columns.
        index: int32 (rows, columns), each in [0, columns).

    The four 16-bit limbs are added separately: 2**16 of them stay below 2**32, and the carries follow.
    """
    rows = jnp.arange(index.shape[0], dtype=jnp.int32).reshape(-1, 1)
    half, mask = jnp.uint32(16), jnp.uint32(0xFFFF)

    def total(limb: Array) -> Array:
        return jnp.zeros_like(limb).at[jnp.broadcast_to(rows, index.shape), index].add(limb)

    limb0, limb1 = total(counter.low & mask), total(counter.low >> half)
    limb2, limb3 = total(counter.high & mask), total(counter.high >> half)
    # Each total is below 2**32 - 2**16, so adding a carry of at most 2**16 - 1 cannot wrap.
    limb1 = limb1 + (limb0 >> half)
    limb2 = limb2 + (limb1 >> half)
    limb3 = limb3 + (limb2 >> half)
    return Counter((limb3 << half) | (limb2 & mask), (limb1 << half) | (limb0 & mask))


def to_host(counter: Counter) -> np.ndarray:
    """The counts as a numpy uint64 array; needs concrete values."""
    high = np.asarray(counter.high).astype(np.uint64)
    return (high << np.uint64(32)) | np.asarray(counter.low).astype(np.uint64)


def exceeded(counter: Counter) -> bool:
    """Whether any count reached `LIMIT`; needs concrete values."""
    return bool((to_host(counter) >= np.uint64(LIMIT)).any())
