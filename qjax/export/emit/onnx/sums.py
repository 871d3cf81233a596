"""Shorter forms of the requantization of a sum, if they are proven to be the same.

It is R((factor * acc + offset) / 2^shift) + zero_point, clamped to the codes. Two forms are shorter:

- in float64, Round(acc * m + b) with m = factor / 2^shift and b = offset / 2^shift. m is exact, because a factor has at
  most 31 bits. The product and the sum round to 53 bits.
- in int64, floor((factor * acc + offset') / 2^shift), with half of 2^shift in the offset. It rounds every tie up.

All are monotone functions of acc with few values. Two of them are therefore equal on all accumulators if they are equal
on both sides of every point where the first goes from one code to the next, and at both ends. These points are
computed, and both forms are evaluated there.
"""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from qjax.export.emit.bounds import Range
from qjax.numerics.rounding import Rounding, right_shift_with_headroom

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

_MOST_CODES = 2**10
"""Codes of 16 bits change at too many points."""
_ROUNDINGS = (Rounding.NEAREST_EVEN, Rounding.NEAREST_UP, Rounding.NEAREST_AWAY, Rounding.FLOOR)


@dataclasses.dataclass(frozen=True)
class Sum:
    """The integer form, per channel in one vector of int64; zero_point, and the bounds of the codes, for all."""

    factor: Integers
    offset: Integers
    shift: Integers
    zero_point: int
    rounding: Rounding
    lowest: int
    highest: int

    def codes(self, acc: Integers) -> Integers:
        """The codes of accumulators of shape (n, channels), by the kernel's own arithmetic."""
        total = acc * self.factor + self.offset
        shift = np.broadcast_to(self.shift, total.shape)
        return np.clip(
            right_shift_with_headroom(np, total, shift, self.rounding) + self.zero_point, self.lowest, self.highest
        )

    def places(self, low: int, high: int) -> Integers:
        """Accumulators of shape (n, channels): both sides of every point where the code changes, and the ends."""
        steps = np.arange(self.lowest + 1, self.highest + 1, dtype=np.int64)[:, None] - self.zero_point
        # the lowest sum that becomes at least a given code
        half = np.int64(0) if self.rounding is Rounding.FLOOR else np.int64(1)
        least = (steps << self.shift) - ((half << self.shift) >> np.int64(1))
        # a tie rounds up only to an even code, or only to one above 0; a shift of 0 has no ties
        if self.rounding is Rounding.NEAREST_EVEN:
            least = least + ((steps & 1) & np.minimum(self.shift, 1))
        elif self.rounding is Rounding.NEAREST_AWAY:
            least = least + ((steps <= 0) & np.minimum(self.shift, 1))
        missing = least - self.offset
        factor = np.where(self.factor == 0, 1, self.factor)
        # rising: the lowest accumulator that reaches it; falling: the highest
        there = np.where(factor > 0, -(-missing // factor), missing // factor)
        ends = np.full((1, self.factor.size), low), np.full((1, self.factor.size), high)
        return np.clip(np.concatenate([there, there - 1, there + 1, *ends]), low, high)


@dataclasses.dataclass(frozen=True)
class Doubles:
    """code = clamp(round(acc * slope + start) + after); round is "Round" (ties to even) or "Floor"."""

    slope: Floats
    start: Floats
    after: int
    operator: str

    def codes(self, acc: Integers, form: Sum) -> Integers:
        """The codes of accumulators of shape (n, channels)."""
        whole = np.rint if self.operator == "Round" else np.floor
        found = whole(acc.astype(np.float64) * self.slope + self.start) + self.after
        return np.clip(found, form.lowest, form.highest).astype(np.int64)


def has_few_codes(form: Sum) -> bool:
    """Whether the points where the code changes can be computed."""
    return form.highest - form.lowest < _MOST_CODES and form.rounding in _ROUNDINGS


def floored(form: Sum, acc: Range) -> Sum | None:
    """The form with a floor and the zero point in its offset that has the same codes; None if there is none."""
    if not has_few_codes(form):
        return None
    places = form.places(*acc)
    wanted = form.codes(places)
    half = (np.int64(0 if form.rounding is Rounding.FLOOR else 1) << form.shift) >> np.int64(1)
    offset = form.offset + half + (np.int64(form.zero_point) << form.shift)
    # a tie that rounds down is one less
    for less in (0, 1):
        tried = dataclasses.replace(form, offset=offset - less, zero_point=0, rounding=Rounding.FLOOR)
        if np.array_equal(tried.codes(places), wanted):
            return tried
    return None


def exact(form: Sum, acc: Range) -> Doubles | None:
    """The float64 form with the same codes for every accumulator in a range; None if there is none."""
    if not has_few_codes(form):
        return None
    places = form.places(*acc)
    wanted = form.codes(places)
    slope, start = (np.ldexp(x.astype(np.float64), -form.shift.astype(np.int32)) for x in (form.factor, form.offset))
    whole = "Round" if form.rounding is Rounding.NEAREST_EVEN else "Floor"
    if form.rounding in (Rounding.NEAREST_UP, Rounding.NEAREST_AWAY):
        start = start + 0.5
    # the zero point may be part of the start, but an odd one would round ties the other way
    for tried in (Doubles(slope, start + form.zero_point, 0, whole), Doubles(slope, start, form.zero_point, whole)):
        if np.array_equal(tried.codes(places, form), wanted):
            return tried
    return None
