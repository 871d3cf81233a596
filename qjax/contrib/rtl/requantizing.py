"""The requantization of an accumulator as one product with a short factor, an addition, a shift and a clamp.

The rules of the runtimes multiply by 31 bits, or emulate float32. `emit.requantize_as_shift` finds a short form that
computes the same codes for every accumulator that can occur.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from qjax.contrib.rtl import words
from qjax.contrib.rtl.words import Word, constant
from qjax.export.emit.requantizations import line_within
from qjax.export.emit.requantize_as_shift import NEVER, Line
from qjax.numerics.calls import Named
from qjax.numerics.rules import PowerOfTwo

_BITS = (10, 14, 18, 31)
"""Bits of a factor, tried one after another, because each bit may cost an adder."""


def short(call: Named, inputs: Sequence[np.ndarray]) -> np.ndarray | None:
    """The result of a call of `numerics.requantize.rounded_codes` in this form; None if its rule has none."""
    rule, qmin, qmax = call.static
    acc: Any = inputs[0]
    rest = inputs[1:]
    if rule.constants is PowerOfTwo or not rule.monotone or len(rest) != len(rule.fields) + 1:
        return None
    if any(array.dtype == object for array in rest) or rest[-1].size != 1:
        return None
    *values, zero_point = rest
    shape = np.broadcast_shapes(*(value.shape for value in values))
    count = int(np.prod(shape))
    flat = {role: np.broadcast_to(value, shape).reshape(-1) for role, value in zip(rule.fields, values, strict=True)}
    flat["bias"] = np.zeros(count, np.int32)
    channels = np.broadcast_to(np.arange(count).reshape(shape), acc.shape)
    low, high = np.full(count, 2**62), np.full(count, -(2**62))
    for place, channel in np.ndenumerate(channels):
        low[channel], high[channel] = min(low[channel], acc[place].low), max(high[channel], acc[place].high)
    line = None
    for bits in _BITS:
        line = line_within(rule, flat, zero_point, (low, high), (qmin, qmax), bits)
        if line is None or int(np.max(abs(line.factor), initial=0)) < 1 << bits:
            break
    if line is None:
        return None
    result = np.empty(acc.shape, object)
    for place, channel in np.ndenumerate(channels):
        result[place] = _on_line(line, int(channel), acc[place])
    return result


def _on_line(line: Line, channel: int, acc: Word) -> Word:
    x, offset = acc, constant(int(line.offset[channel]))
    if line.raised is not None:
        for number in line.raised[:, channel].tolist():
            if number != NEVER and acc.low <= number <= acc.high:
                met = words.inverted(words.nonzero(words.sub(acc, constant(number))))
                x = words.add(x, met)
    if line.kink is not None and line.below is not None:
        below = words.less(x, constant(int(line.kink[channel])))
        offset = words.chosen(below, offset, constant(int(line.below[channel])))
    total = words.add(words.scaled(x, int(line.factor[channel])), offset)
    quotient = words.shifted_right(total, constant(line.shift))
    return words.clamped(constant(line.lowest), quotient, constant(line.highest))
