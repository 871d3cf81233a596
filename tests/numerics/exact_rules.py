"""The published rules of requantization in unbounded integers, from the runtimes' own definitions.

A record is (accumulator, multiplier, shift) of Python integers; the scale is multiplier * 2^(shift - 31), or
multiplier * 2^-shift for TOSA.
"""

from fractions import Fraction
from functools import cache
from math import floor

import numpy as np

from tests.numerics.exact import ROUNDINGS, RULES, saturate32, wrap32


def wrap64(x: int) -> int:
    return (x + 2**63) % 2**64 - 2**63


def tvm(acc: int, multiplier: int, shift: int) -> int:
    if multiplier == 2**30:
        exponent = shift - 1
        if exponent > 0:
            return wrap32(acc << exponent)
        if exponent == 0:
            return acc
        if exponent == -32:
            return 0
        return wrap32(acc + 2 ** (-exponent - 1)) >> -exponent
    left, right = max(shift, 0), max(-shift, 0)
    product = wrap64(wrap64(acc << left) * multiplier)
    return wrap32(wrap64(product + 2 ** (right + 30)) >> (right + 31))


def tvm_tonearest(acc: int, multiplier: int, shift: int) -> int:
    p, t = acc * multiplier, 31 - shift
    return saturate32((p + (2 ** (t - 1) if p >= 0 else 2 ** (t - 1) - 1)) >> t)


def xnnpack_rndnu(acc: int, multiplier: int, shift: int) -> int:
    post = max(-shift, 1)
    high = (2 * saturate32(acc << (shift + post)) * multiplier) >> 32
    return (high + 2 ** (post - 1)) >> post


def int16x8(acc: int, multiplier: int, shift: int) -> int:
    reduced = (multiplier + 2**15) >> 16 if multiplier < 0x7FFF0000 else 0x7FFF
    return saturate32((acc * reduced + 2 ** (14 - shift)) >> (15 - shift))


def nvdla(acc: int, multiplier: int, shift: int) -> int:
    """Sign and magnitude, as AC_RND_INF rounds: a half goes up in magnitude."""
    product = acc * (multiplier // 2**16)
    magnitude = (2 * abs(product) + 2 ** (15 - shift)) // 2 ** (16 - shift)
    return saturate32(-magnitude if product < 0 else magnitude)


def tosa_single(value: int, multiplier: int, shift: int) -> int:
    return saturate32((value * multiplier + (1 << (shift - 1))) >> shift)


def tosa_double(value: int, multiplier: int, shift: int) -> int:
    nudge = 1 << (shift - 1)
    if shift > 31:
        nudge += 1 << 30 if value >= 0 else -(1 << 30)
    return saturate32((value * multiplier + nudge) >> shift)


def nemo(acc: int, multiplier: int, shift: int) -> int:
    return saturate32(floor(Fraction(acc * multiplier, 2**shift)))


PUBLISHED = {**RULES, "tvm": tvm, "tvm_tonearest": tvm_tonearest, "xnnpack_rndnu": xnnpack_rndnu}
"""Rules whose constants are a `Multiplier` of any shift."""


def ties_toward(direction: str):
    """The nearest integer; a tie goes toward zero ("zero") or down ("down")."""

    def rounding(q: Fraction) -> int:
        below = floor(q)
        twice = 2 * (q - below)
        up = twice > 1 or (twice == 1 and direction == "zero" and q < 0)
        return below + up

    return rounding


AP_ROUNDINGS = {
    "TRN": floor,
    "TRN_ZERO": int,
    "RND": ROUNDINGS["nearest_up"],
    "RND_CONV": round,
    "RND_ZERO": ties_toward("zero"),
    "RND_INF": ROUNDINGS["nearest_away"],
    "RND_MIN_INF": ties_toward("down"),
}


def ap_overflow(mode: str, code: int, zero_point: int, qmin: int, qmax: int) -> int:
    inside = max(qmin, min(qmax, code))
    if mode == "SAT_ZERO":
        return code if code == inside else zero_point
    if mode == "SAT_SYM":
        return max(-qmax, inside)
    if mode == "WRAP":
        signed, bits = qmin < 0, 1
        while not (-(2 ** (bits - 1)) * signed <= qmin and qmax < 2 ** (bits - signed)):
            bits += 1
        low = -(2 ** (bits - 1)) * signed
        return max(qmin, min(qmax, (code - low) % 2**bits + low))
    return inside


@cache
def records(count: int = 10**6) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """int32 accumulators, multipliers and shifts: every shift, exact ties and their neighbours, both ends of int32.

    With t = 31 - s, M = u 2^a and acc = v 2^(t-1-a) for odd u and v give acc * M = u v 2^(t-1), a tie.
    """
    rng = np.random.default_rng(20)
    shift = np.arange(count) % 62 - 31
    t = 31 - shift
    acc = rng.integers(-(2**31), 2**31, count) >> rng.integers(0, 31, count)
    multiplier = rng.integers(2**30, 2**31, count)
    kind = np.arange(count) // 62 % 8

    tie = kind < 4
    # for t = 62 the one tie is -2^31 * 2^30
    high = np.minimum(t - 1, 30)
    low = np.minimum(np.maximum(t - 1 - 30, 0), high)
    a = low + rng.integers(0, 2**16, count) % (high - low + 1)
    u = multiplier >> a | (a < 30)
    multiplier = np.where(tie, np.maximum(u << a, 2**30), multiplier)
    b = t - 1 - a
    v = (rng.integers(-(2**31), 2**31, count) >> np.maximum(b, rng.integers(0, 31, count))) | 1
    acc = np.where(tie, v << b, acc)
    acc += np.where(kind == 2, 1, 0) - np.where(kind == 3, 1, 0)

    ends = np.array([2**31 - 1, -(2**31), 2**31 - 2, -(2**31) + 1, 0, 1, -1, 2**30, -(2**30)])
    acc = np.where(kind == 4, ends[rng.integers(0, ends.size, count)], acc)
    special = np.array([2**30, 2**31 - 1, 2**30 + 1, 3 * 2**29, 0x7FFF0000, 0x7FFEFFFF, 2**31 - 2**15])
    multiplier = np.where((kind == 5) | (kind == 4), special[rng.integers(0, special.size, count)], multiplier)
    acc = np.clip(acc, -(2**31), 2**31 - 1)
    return acc.astype(np.int32), multiplier.astype(np.int32), shift.astype(np.int32)


@cache
def small_records() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every 8-bit accumulator with every 6-bit multiplier and every shift, 507,904 records."""
    grid = np.meshgrid(np.arange(-128, 128), np.arange(32, 64) << 25, np.arange(-31, 31), indexing="ij")
    acc, multiplier, shift = (v.ravel().astype(np.int32) for v in grid)
    return acc, multiplier, shift


def evaluate(rule, *columns) -> np.ndarray:
    """The rule on every record, in Python integers."""
    rows = zip(*(np.asarray(c).tolist() for c in columns), strict=True)
    return np.array([rule(*row) for row in rows], np.int64)
