"""Records (accumulator, multiplier, shift) that tell one rule of requantization from another.

They are the same on every machine and with every version of numpy: the pseudorandom part is SplitMix64 (Steele, Lea and
Flood 2014), not numpy's generators, so that answers may be stored without the questions.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

MULTIPLIERS = (2**30, 2**31 - 1, 2**30 + 1, 3 * 2**29, 5 * 2**28, 1518500250)
"""Both ends, few significant bits (which make ties), and round(2^30 * sqrt(2))."""

SHIFTS = tuple(range(-31, 31))


class Records(NamedTuple):
    """int32 arrays of one length: the result is acc * multiplier * 2^(shift - 31), rounded."""

    acc: np.ndarray
    multiplier: np.ndarray
    shift: np.ndarray


def splitmix64(count: int, seed: int) -> np.ndarray:
    """`count` pseudorandom uint64."""
    gamma = 0x9E3779B97F4A7C15
    z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(gamma) + np.uint64(seed * gamma % 2**64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def edge_accumulators() -> np.ndarray:
    """Zero, both ends, and 1, 3 and 5 times each power of two, one less and one more, of either sign."""
    values = {0, 2**31 - 1, 2**31 - 2, -(2**31), -(2**31) + 1}
    for k in range(31):
        values |= {sign * (m * 2**k + d) for sign in (1, -1) for m in (1, 3, 5) for d in (-1, 0, 1)}
    return np.array(sorted(v for v in values if -(2**31) <= v < 2**31), np.int32)


def edges(shifts: Sequence[int] = SHIFTS, multipliers: Sequence[int] = MULTIPLIERS) -> Records:
    """Every edge accumulator under every multiplier and shift: 517 * 62 records for each multiplier."""
    grid = np.meshgrid(edge_accumulators(), np.array(multipliers), np.array(shifts), indexing="ij")
    return Records(*(a.ravel().astype(np.int32) for a in grid))


def random(count: int, shifts: Sequence[int] = SHIFTS, seed: int = 0) -> Records:
    """`count` records for each shift: accumulators of 1 to 32 bits, multipliers of 31 bits."""
    total = count * len(shifts)
    words = splitmix64(2 * total, seed)
    acc = words[:total].astype(np.int64) >> (np.int64(32) + (words[total:] >> np.uint64(59)).astype(np.int64))
    multiplier = np.int64(2**30) + (words[total:] & np.uint64(2**30 - 1)).astype(np.int64)
    return Records(acc.astype(np.int32), multiplier.astype(np.int32), np.repeat(np.array(shifts, np.int32), count))


def near_ties(count: int, shifts: Sequence[int] = range(-29, 0), seed: int = 1) -> Records:
    """`count` records for each negative shift whose result lies within a step of the accumulator from k + 1/2.

    There two roundings and one disagree: acc is round((k + 1/2) 2^(31-s) / M) or a neighbour.
    """
    if not all(-31 <= s < 0 for s in shifts):
        raise ValueError(f"near_ties needs negative shifts, -31 to -1. Got {min(shifts)} to {max(shifts)}.")
    shift = np.repeat(np.array(shifts, np.int64), count)
    words = splitmix64(3 * len(shift), seed).reshape(3, -1)
    multiplier = np.int64(2**30) + (words[0] & np.uint64(2**30 - 1)).astype(np.int64)
    limit = np.int64(1) << np.maximum(29 + shift, 0)
    k = (words[1] >> np.uint64(1)).astype(np.int64) % (2 * limit) - limit
    # acc = numerator / M with |numerator| <= 2^61, so twice the numerator plus M still fits 64 bits.
    numerator = (2 * k + 1) << (30 - shift)
    nearest = (2 * numerator + multiplier) // (2 * multiplier)
    acc = nearest + (words[2] % np.uint64(3)).astype(np.int64) - 1
    return Records(*(a.astype(np.int32) for a in (np.clip(acc, -(2**31), 2**31 - 1), multiplier, shift)))


def concatenate(*parts: Records) -> Records:
    """One set of records out of several."""
    return Records(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def all_records() -> Records:
    """The 395,436 records with which a rule is compared with real instructions: edges, random ones, near ties."""
    return concatenate(edges(), random(2000), near_ties(2728))
