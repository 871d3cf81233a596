"""Finds one multiplication and one shift that compute exactly the codes of a requantization rule.

A rule is a monotone function of the accumulator, with few values: the codes of the output. Code c begins at the
threshold T_c, the lowest accumulator that becomes c or more. Let L(a) = floor((factor * a + offset) / 2^shift). Then L,
clamped to the codes, is the rule on every accumulator in [low, high] if and only if, for every code c above the lowest,

    L(T_c) >= c  where T_c <= high,  and  L(T_c - 1) < c  where T_c > low.

These are linear conditions on factor and offset. The thresholds come from the rule's own kernel, so nothing here knows
how a rule rounds.

- A rule that rounds negative accumulators differently (gemmlowp's two roundings) has two offsets, one for each side of
  a `kink`.
- A rule that computes in float32 treats a few accumulators near a tie like the tie. These are `raised` by one.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Codes = Callable[[Integers, Integers], Integers]
"""(accumulators, the channel of each) -> codes; monotone in the accumulator."""

_BLOCK = 8192
_SMALL_BLOCK = 256
"""How many accumulators `Codes` gets at once: one of two numbers, because its program is traced for each."""
_MARGIN = 4
"""How far from a straight line a threshold is searched first."""
_BENT = 6
"""By how many accumulators the first and the last threshold may deviate from a line's, including a kink."""
_BITS = 62
_SPARE_BITS = 16
_FREE = 2**61
"""An offset without a bound."""
_MOST_RAISED = 32
"""Accumulators of a channel, at most. A rule in float32, written in integers, takes more operations than that."""
NEVER = -(2**31)
"""A value that no accumulator has."""


@dataclasses.dataclass(frozen=True)
class Line:
    """code = clamp(floor((factor * acc + (offset if acc >= kink else below)) / 2^shift), lowest, highest).

    Per channel, int64. kink, below: None if one offset is enough for all accumulators. raised: (n, channels)
    accumulators that are replaced by the next one, or NEVER; None for none. least, most: of the quotient, before the
    clamp. product: the greatest magnitude of factor * acc, with and without an offset.
    """

    factor: Integers
    offset: Integers
    shift: int
    lowest: int
    highest: int
    least: int
    most: int
    product: int
    kink: Integers | None = None
    below: Integers | None = None
    raised: Integers | None = None

    def codes(self, acc: Integers) -> Integers:
        """The codes of accumulators of shape (n, channels)."""
        x = acc if self.raised is None else acc + (acc[:, None] == self.raised[None]).any(1)
        offset = self.offset
        if self.kink is not None and self.below is not None:
            offset = np.where(x < self.kink, self.below, offset)
        return np.clip((self.factor * x + offset) >> np.int64(self.shift), self.lowest, self.highest)


@dataclasses.dataclass(frozen=True)
class Span:
    """The accumulators that can occur, by channel, both ends included; and where the rule's operand changes sign."""

    low: Integers
    high: Integers
    kink: Integers


@dataclasses.dataclass(frozen=True)
class _Problem:
    """The thresholds by code and channel, the codes that begin there, and where a factor for 2^shift is searched."""

    found: Integers
    steps: Integers
    span: Span
    shift: int
    low: Integers
    high: Integers
    guess: Integers

    @property
    def one(self) -> np.int64:
        """2^shift."""
        return np.int64(1) << np.int64(self.shift)


def fit(codes: Codes, span: Span, lowest: int, highest: int, *, bits: int | None = None) -> Line | None:
    """The line of a monotone function of the accumulator with values in [lowest, highest], or None if there is none.

    bits: of a preferred factor, not counting its sign. A factor of more bits is used if no other fits.
    """
    found = thresholds(codes, span, lowest, highest)
    steps = np.arange(lowest + 1, highest + 1, dtype=np.int64)[:, None]
    inner = (found > span.low) & (found <= span.high)
    first = np.where(inner, found, _FREE).min(0, initial=_FREE)
    last = np.where(inner, found, -_FREE).max(0, initial=-_FREE)
    count = inner.sum(0)
    reach = np.where(count > 1, last - first, 1)
    slope = np.where(count > 1, (count - 1) / np.maximum(reach, 1), 1 / (span.high - span.low + 1))
    # the quotient at the ends of the span, beyond the codes
    greatest = np.max(2 * slope * np.maximum(abs(span.low), abs(span.high)), initial=1.0) + 2.0 * max(-lowest, highest)
    free = _BITS - int(greatest).bit_length() - 1
    enough = 2 * int(np.max(reach, initial=1)).bit_length() + _SPARE_BITS
    last_shift = min(free, enough)
    # in 32 bits there is seldom room for the factor, so this is a first attempt if there may be
    narrow = 31 - int(greatest).bit_length() - 1
    shifts = [narrow] if narrow >= int(np.max(reach, initial=1)).bit_length() else []
    if bits is not None:
        steepest = float(np.max(slope, initial=0.0)) * (1 + 2.0**-8)
        short = bits - math.ceil(math.log2(steepest)) if steepest else 0
        shifts += [short] if narrow < short < last_shift else []
    for shift in (*shifts, last_shift):
        if shift < 1:
            continue
        problem = _problem(found, steps, span, shift, (count, reach))
        factor, sides = _solve(problem, kinked=False)
        (least, most) = sides[0]
        if np.all(least <= most):
            return _line(problem, factor, [_middle(least, most)], None)
        if shift == narrow:
            continue
        bent, sides = _solve(problem, kinked=True)
        if all(np.all(least <= most) for least, most in sides):
            return _line(problem, bent, [_middle(*side) for side in sides], None)
        offset = np.where(least <= most, _middle(least, most), most)
        raised = _raised(problem, factor, offset)
        if raised is not None:
            return _line(problem, factor, [offset], raised)
    return None


def _problem(found: Integers, steps: Integers, span: Span, shift: int, line: tuple[Any, Any]) -> _Problem:
    one = np.int64(1) << np.int64(shift)
    count, reach = line
    several = count > 1
    wide = (count - 1) * one
    low = np.where(several, wide // (reach + _BENT), 0)
    high = np.where(several, wide // np.maximum(reach - _BENT, 1) + 1, one // (span.high - span.low + 1))
    guess = np.where(several, wide // np.maximum(reach, 1), low)
    return _Problem(found, steps, span, shift, low, np.maximum(low, high), guess)


def thresholds(codes: Codes, span: Span, lowest: int, highest: int) -> Integers:
    """By code above the lowest and channel: the lowest accumulator in [low, high + 1] that becomes it or more."""
    channels = np.arange(span.low.size)
    ends = np.stack([evaluated(codes, end, channels) for end in (span.low, span.high)])
    # the first and the last code that begin inside of the span; a straight line approximates those in between
    wanted = np.stack([ends[0] + 1, ends[1]])
    low, high = np.broadcast_to(span.low, wanted.shape), np.broadcast_to(span.high + 1, wanted.shape)
    first, last = _search(codes, wanted, low, high)
    steps = np.arange(lowest + 1, highest + 1, dtype=np.int64)[:, None]
    between = np.maximum(ends[1] - ends[0] - 1, 1)
    guess = first + (steps - ends[0] - 1) * (last - first) // between
    low = np.clip(guess - _MARGIN, span.low - 1, span.high + 1)
    high = np.clip(guess + _MARGIN, span.low - 1, span.high + 1)
    inside = (steps > ends[0]) & (steps <= ends[1])
    low = np.where(inside & _below(codes, low, steps, span), low, span.low)
    high = np.where(inside & ~_below(codes, high, steps, span), high, span.high + 1)
    found = np.where(steps <= ends[0], span.low, span.high + 1)
    rows, columns = np.nonzero(inside)
    if rows.size:
        found[rows, columns] = _search(
            codes, (steps + 0 * low)[rows, columns], low[rows, columns], high[rows, columns], columns
        )
    return found


def _below(codes: Codes, acc: Integers, steps: Integers, span: Span) -> NDArray[np.bool_]:
    """Whether an accumulator becomes less than a code; one below the span does, one above does not."""
    channels = np.broadcast_to(np.arange(span.low.size), acc.shape)
    got = evaluated(codes, np.clip(acc, span.low, span.high).reshape(-1), channels.reshape(-1)).reshape(acc.shape)
    return ((got < steps) | (acc < span.low)) & (acc <= span.high)


def _search(
    codes: Codes, wanted: Integers, low: Integers, high: Integers, channels: np.ndarray | None = None
) -> Integers:
    """The lowest accumulator in [low, high] that becomes the wanted code or more; `high` itself is not evaluated."""
    shape = wanted.shape
    if channels is None:
        channels = np.broadcast_to(np.arange(shape[-1]), shape)
    wanted, low, high, channels = (np.array(x).reshape(-1) for x in (wanted, low, high, channels))
    parts = max(2, _BLOCK // max(wanted.size, 1))
    while True:
        open_ = np.nonzero(high > low)[0]
        if not open_.size:
            return low.reshape(shape)
        size = high[open_] - low[open_]
        cut = np.arange(1, parts, dtype=np.int64)[:, None]
        # probes in [low, high - 1], ascending
        probes = low[open_] + np.minimum(cut * -(-size // parts), size) - 1
        got = evaluated(codes, probes.reshape(-1), np.broadcast_to(channels[open_], probes.shape).reshape(-1)).reshape(
            probes.shape
        )
        reached = got >= wanted[open_]
        index = np.where(reached.any(0), reached.argmax(0), parts - 1)
        column = np.arange(open_.size)
        high[open_] = np.where(index < parts - 1, probes[np.minimum(index, parts - 2), column], high[open_])
        low[open_] = np.where(index > 0, probes[np.maximum(index - 1, 0), column] + 1, low[open_])


def evaluated(codes: Codes, acc: Integers, channels: np.ndarray) -> Integers:
    """The codes, computed in blocks of one of two sizes, because each size is traced once."""
    size = acc.size
    block = _SMALL_BLOCK if size <= _SMALL_BLOCK else _BLOCK
    padded = -(-size // block) * block
    acc, channels = (np.concatenate([x, np.full(padded - size, x[-1])]) if size else x for x in (acc, channels))
    parts = [codes(acc[i : i + block], channels[i : i + block]) for i in range(0, padded, block)]
    return np.concatenate([np.asarray(part, np.int64) for part in parts])[:size] if parts else acc.astype(np.int64)


def _offsets(
    found: Integers, steps: Integers, low: Integers, high: Integers, one: np.int64, factor: Integers
) -> tuple[Integers, Integers]:
    """The lowest and the highest offset that a factor allows on the accumulators in [low, high]."""
    limit = np.int64(2 * _FREE)
    least = np.where(found <= high, steps * one - np.maximum(found, low) * factor, -limit).max(0, initial=-limit)
    most = np.where(found > low, steps * one - 1 - np.minimum(found - 1, high) * factor, limit).min(0, initial=limit)
    # a side without accumulators allows every offset
    empty = low > high
    return np.where(empty, -limit, least), np.where(empty, limit, most)


def _solve(problem: "_Problem", kinked: bool) -> tuple[Integers, list[tuple[Integers, Integers]]]:
    """(factor, [(lowest, highest offset)] of each side); the lowest exceeds the highest if nothing fits.

    The room between the two offsets is a concave function of the factor, so a ternary search finds its maximum.
    """
    found, steps, span, one = problem.found, problem.steps, problem.span, problem.one
    kink = np.clip(span.kink, span.low, span.high + 1)
    sides = [(span.low, kink - 1), (kink, span.high)] if kinked else [(span.low, span.high)]

    def room(factor: Integers, at: np.ndarray) -> Integers:
        widths: list[Integers] = []
        for low, high in sides:
            least, most = _offsets(found[:, at], steps, low[at], high[at], one, factor)
            widths.append(most - least)
        return np.minimum.reduce(widths)

    low, high, factor = problem.low.copy(), problem.high.copy(), problem.guess.copy()
    best = room(factor, np.arange(factor.size))
    left = np.nonzero(best < 0)[0]
    while left.size:
        a, b = low[left], high[left]
        third = (b - a) // 3
        first, second = a + third, b - third
        rooms = room(first, left), room(second, left)
        for tried, width in zip((first, second), rooms, strict=True):
            better = width > best[left]
            factor[left] = np.where(better, tried, factor[left])
            best[left] = np.where(better, width, best[left])
        # neither is a factor, so the maximum lies strictly above the first or strictly below the second
        rising = rooms[0] < rooms[1]
        low[left] = np.where(rising, first + 1, a)
        high[left] = np.where(rising, b, second - 1)
        left = left[(best[left] < 0) & (low[left] <= high[left])]
    return factor, [_offsets(found, steps, *side, one, factor) for side in sides]


def _middle(least: Integers, most: Integers) -> Integers:
    """An offset in the middle of what is allowed; the other bound if one is missing, and 0 if both are."""
    open_ = (least <= -_FREE) | (most >= _FREE)
    return np.where(open_, np.where(least > -_FREE, least, np.where(most < _FREE, most, 0)), (least + most) // 2)


def _raised(problem: "_Problem", factor: Integers, offset: Integers) -> Integers | None:
    """The accumulators, padded to one number per channel, with the code of the next one; None if they are too many."""
    found, span = problem.found, problem.span
    late = (found <= span.high) & (np.maximum(found, span.low) * factor + offset < problem.steps * problem.one)
    most = int(late.sum(0).max(initial=0))
    if most > _MOST_RAISED:
        return None
    order = np.argsort(~late, axis=0, kind="stable")[:most]
    at = np.take_along_axis(np.maximum(found, span.low), order, 0)
    there = np.take_along_axis(late, order, 0)
    code = problem.steps[0, 0] - 1 + (found[None] <= at[:, None]).sum(1)
    lowest, highest = problem.steps[0, 0] - 1, problem.steps[-1, 0]
    line = np.clip((factor * (at + 1) + offset) >> np.int64(problem.shift), lowest, highest)
    return np.where(there, at, NEVER) if np.array_equal(code[there], line[there]) else None


def _line(problem: "_Problem", factor: Integers, offsets: Sequence[Integers], raised: Integers | None) -> Line | None:
    """The line, if none of its numbers exceeds 62 bits and its quotients fit 31."""
    span, shift = problem.span, problem.shift
    ends = [factor.astype(object) * end.astype(object) for end in (span.low, span.high + 1)]
    both = [np.concatenate([end + offset.astype(object) for end in ends]) for offset in offsets]
    least, most = min(int(min(part)) for part in both), max(int(max(part)) for part in both)
    product = max(abs(least), abs(most), *(int(max(abs(end))) for end in ends))
    if product >= 2**62 or max(most >> shift, -(least >> shift)) >= 2**30:
        return None
    bounds = int(problem.steps[0, 0]) - 1, int(problem.steps[-1, 0]), least >> shift, most >> shift
    line = Line(factor, offsets[-1], shift, *bounds, product, raised=raised)
    return line if len(offsets) == 1 else dataclasses.replace(line, kink=span.kink, below=offsets[0])
