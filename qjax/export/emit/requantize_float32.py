"""A requantization rule as one product in float32, as its runtime computes it, if it has the same codes as its line.

    code = clamp(round(float32(acc + bias) * scale) + zero point), ties to even

Every step is one operation of IEEE 754. The rule's line is exact on all accumulators that can occur (see
`requantize_as_shift`). Both are monotone, so they are equal on all of them if they are equal on both sides of every
point where the line's code changes. A rule without a line is compared at the points where codes begin.
"""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from qjax.export.emit.requantize_as_shift import NEVER, Codes, Integers, Line, Span, thresholds

_MOST = 2.0**21
"""A bound of the product, so that adding and subtracting 1.5 * 2^23 rounds it."""


@dataclasses.dataclass(frozen=True)
class Scaled:
    """bias: int64, scale: float32, per channel."""

    bias: Integers
    scale: NDArray[np.float32]
    zero_point: int
    lowest: int
    highest: int

    def codes(self, acc: Integers) -> Integers:
        """The codes of accumulators of shape (n, channels)."""
        return self._clamped((acc + self.bias).astype(np.float32) * self.scale)

    def _clamped(self, product: NDArray[np.float32]) -> Integers:
        return np.clip(np.rint(product).astype(np.int64) + self.zero_point, self.lowest, self.highest)

    def _holds(self, low: Integers, high: Integers) -> bool:
        """Whether it is monotone on all accumulators between two, per channel, and can be rounded by an addition."""
        greatest = np.maximum(abs(low + self.bias), abs(high + self.bias)).max(initial=0)
        fits = greatest < 2**31 and float(greatest) * float(self.scale.max(initial=0)) < _MOST
        return bool(fits and np.all(self.scale > 0))

    def is_rule(self, codes: Codes, span: Span) -> bool:
        """Whether it has the codes of a monotone function on all accumulators of a span."""
        if not self._holds(span.low, span.high):
            return False

        def own(acc: Integers, channels: np.ndarray) -> Integers:
            return self._clamped((acc + self.bias[channels]).astype(np.float32) * self.scale[channels])

        first, second = (thresholds(function, span, self.lowest, self.highest) for function in (own, codes))
        return np.array_equal(first, second)

    def is_line(self, line: Line, low: Integers, high: Integers) -> bool:
        """Whether it has the line's codes on all accumulators between two, per channel."""
        if not np.all(line.factor >= 0) or not self._holds(low, high):
            return False
        places = np.clip(changes(line), low, high)
        places = np.concatenate([places, low[None], high[None]])
        return np.array_equal(self.codes(places), line.codes(places))


def changes(line: Line) -> Integers:
    """Accumulators of shape (n, channels): both sides of every point where a line's code changes."""
    steps = np.arange(line.lowest + 1, line.highest + 1, dtype=np.int64)[:, None] << np.int64(line.shift)
    offsets = [line.offset] if line.below is None else [line.offset, line.below]
    # if the factor is 0, no accumulator changes the code, so any point will do
    flat, factor = line.factor == 0, np.where(line.factor == 0, 1, line.factor)
    found = [np.where(flat, 0, -((offset - steps) // factor)) for offset in offsets]
    if line.kink is not None:
        found.append(line.kink[None])
    # a raised accumulator has the code of the next one, so that code begins one earlier
    near = [place + more for place in found for more in (-2, -1, 0, 1)]
    if line.raised is not None:
        raised = np.where(line.raised == NEVER, found[0][:1], line.raised)
        near += [raised + more for more in (-1, 0, 1)]
    return np.concatenate(near)
