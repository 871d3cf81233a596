"""Requantizes in 32 bits, for processors that multiply two words and return the high one.

The line (see `requantize_as_shift`) is computed by the high word of a product:

    code = clamp((highword(((acc + first) << up) * factor) + offset) >> shift)

The high word of a product rounds down, so that both steps together round down once. Therefore this is a line too, whose
offset is first * factor + offset * 2^(32 - up). `first` and `offset` are chosen within what the line's codes allow, and
the result is then compared with the line on both sides of every point where its code changes.
"""

import dataclasses

import numpy as np

from qjax.export.emit.requantize_as_shift import Integers, Line
from qjax.export.emit.requantize_float32 import changes

_FIRSTS = 256
"""How many numbers are tried as `first`: those that fit a byte."""
_TRIES = 4
"""How many numbers are tried as `up`."""
_WORD = 32
_NEAR = 12
"""Other factors are searched within this many bits of the first ones."""


@dataclasses.dataclass(frozen=True)
class HighWords:
    """Per channel, int64. kink, below: the offset below `kink`; None if one offset is enough for all sums."""

    first: Integers
    factor: Integers
    offset: Integers
    kink: Integers | None
    below: Integers | None
    up: int
    shift: int
    lowest: int
    highest: int

    def codes(self, acc: Integers) -> Integers:
        """The codes of accumulators of shape (n, channels)."""
        sums = acc + self.first
        offset = self.offset
        if self.kink is not None and self.below is not None:
            offset = np.where(sums < self.kink, self.below, offset)
        high = ((sums << np.int64(self.up)) * self.factor) >> np.int64(_WORD)
        return np.clip((high + offset) >> np.int64(self.shift), self.lowest, self.highest)

    def fits(self, low: Integers, high: Integers) -> bool:
        """Whether every number fits 32 bits, for accumulators in [low, high]."""
        sums = np.stack([low, high]) + self.first
        products = ((sums << np.int64(self.up)) * self.factor) >> np.int64(_WORD)
        offsets = np.stack([self.offset, self.offset if self.below is None else self.below])
        numbers = [sums << np.int64(self.up), offsets, products + offsets.min(0), products + offsets.max(0)]
        return all(x.min(initial=0) >= -(2**31) and x.max(initial=0) < 2**31 for x in numbers)


def high_words(line: Line, low: Integers, high: Integers) -> HighWords | None:
    """The line in this form, for accumulators in [low, high] per channel; None if there is none.

    low, high: int64, of less than 32 bits.
    """
    if line.raised is not None or line.factor.min(initial=0) < 0 or line.factor.max(initial=0) >= 2**31:
        return None
    more = 31 - int(line.factor.max(initial=1)).bit_length()
    if (line.product + 1) << more >= 2**62:
        return None
    # the codes of a channel whose factor is 0 change nowhere, except at the kink
    places = changes(dataclasses.replace(line, factor=np.maximum(line.factor, 1)))
    acc = np.concatenate([np.clip(places, low, high), low[None], high[None]])
    codes = line.codes(acc)
    factor, shift = line.factor << np.int64(more), line.shift + more
    problem = _Problem(line, acc, codes, shift)
    greatest = int(np.maximum(abs(low), abs(high)).max(initial=1)) + _FIRSTS
    most = min(31 - greatest.bit_length(), _WORD - shift + 31)
    for up in range(most, max(most - _TRIES, -1, _WORD - shift - 1), -1):
        found = problem.fitted(factor, up)
        if found is None:
            factor = problem.widened(factor)
            found = problem.fitted(factor, up)
        if found is not None and found.fits(low, high) and np.array_equal(found.codes(acc), codes):
            return found
    return None


@dataclasses.dataclass(frozen=True)
class _Problem:
    """The codes that accumulators of shape (n, channels) must become, by a shift of the whole product."""

    line: Line
    acc: Integers
    codes: Integers
    shift: int

    def sides(self, factor: Integers) -> list[tuple[Integers, Integers]]:
        """For the sums from the kink on, then for those below: the lowest and the highest offset with the same codes.

        A range without one of its ends is as wide as a code.
        """
        line, free, code = self.line, np.int64(2**62), np.int64(1) << np.int64(self.shift)
        kinks = [] if line.kink is None else [line.kink]
        owns = [self.acc >= kink for kink in kinks] + [self.acc < kink for kink in kinks] or [np.True_]
        rest = (self.codes << np.int64(self.shift)) - self.acc * factor
        found: list[tuple[Integers, Integers]] = []
        for own in owns:
            least = np.where(own & (self.codes > line.lowest), rest, -free).max(0)
            most = np.where(own & (self.codes < line.highest), rest + code - 1, free).min(0)
            least = np.where(least == -free, np.where(most == free, 0, most - code), least)
            found.append((least, np.where(most == free, least + code, most)))
        return found

    def widened(self, factor: Integers) -> Integers:
        """The nearby factors with most room for an offset. The room is concave, so thirds find its maximum."""
        low = np.maximum(factor - (factor >> np.int64(_NEAR)), 0)
        high = np.minimum(factor + (factor >> np.int64(_NEAR)), 2**31 - 1)
        while np.any(high - low > 2):
            third = (high - low) // 3
            first, second = low + third, high - third
            rooms = [np.minimum.reduce([b - a for a, b in self.sides(x)]) for x in (first, second)]
            rising = rooms[0] < rooms[1]
            low, high = np.where(rising, first, low), np.where(rising, high, second)
        return (low + high) // 2

    def fitted(self, factor: Integers, up: int) -> HighWords | None:
        """The first numbers with an offset in every range; None if a channel has none."""
        one = np.int64(1) << np.int64(_WORD - up)
        firsts = np.arange(_FIRSTS, dtype=np.int64)[:, None]
        sides = self.sides(factor)
        # after first * factor is subtracted, an offset must be a multiple of `one`; use the highest
        found = [(most - firsts * factor) // one for _, most in sides]
        good = np.all([x * one >= a - firsts * factor for x, (a, _) in zip(found, sides, strict=True)], axis=0)
        if not good.any(0).all():
            return None
        first, line = good.argmax(0), self.line
        offset, *below = (x[first, np.arange(factor.size)] for x in found)
        kink = None if line.kink is None else line.kink + first
        shift, bounds = self.shift + up - _WORD, (line.lowest, line.highest)
        return HighWords(first, factor, offset, kink, below[0] if below else None, up, shift, *bounds)
