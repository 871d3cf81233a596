"""Products of channels-last codes with weights bit by bit, if both have two or three values; see `one_bit.h`.

This is for the layers of networks with binary or ternary activations and weights. With the codes a < b < c that can
occur and the weights u < v < w of a feature, each code and each weight is a sum of planes, which are 0 or 1:

    x = a + (b - a) [x >= b] + (c - b) [x >= c]

and likewise for a weight. So a sum of products is a sum over pairs of planes: a known factor times the number of bits
that both planes have set. The resulting integers are those of any other form. Where a window extends beyond the input,
the codes count as the lowest one, and the difference is added: the sum of the weights under each such tap, times a
factor.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from qjax.contrib.simd.tiles import Tiles, in_bytes
from qjax.export.emit.c.blocks import loop_head, nested
from qjax.export.emit.c.index import Index, flat
from qjax.export.emit.c.loops import Layer
from qjax.export.emit.c.values import Buffer, Register, Value
from qjax.export.emit.c.vectors import FEW
from qjax.export.emit.c.windows import MOST_LOCAL, Window, inside

MOST = FEW
"""The most values that the codes, and the weights of a feature, may have."""
_WORD = 64
_LANES = 8
"""Features in a block."""
_CHUNK = 64
"""Features whose sums are on the stack at the same time."""
_FEWEST = 32
"""With fewer products than this, converting them to bits takes longer than it saves."""
_PAIRS = 2
"""Up to this many pairs of a plane of codes and a plane of weights, this form always pays off."""
_MANY = 512
"""From this many products on, more pairs pay off with vectors."""


@dataclasses.dataclass(frozen=True)
class Planes:
    """Numbers as lowest + sum of steps[i] * [number >= least[i]]."""

    lowest: int
    least: tuple[int, ...]

    @classmethod
    def of(cls, values: Sequence[int]) -> "Planes":
        first, *others = sorted(set(values))
        return cls(first, tuple(others))

    @property
    def steps(self) -> tuple[int, ...]:
        """The differences between neighbouring values."""
        return tuple(b - a for a, b in zip((self.lowest, *self.least), self.least, strict=False))


def fits(window: Window, codes: tuple[int, ...] | None, *, wide: bool) -> bool:
    """Whether this form is possible and pays off.

    codes: those that the input can contain, if they are few. wide: whether the file has vectors of many codes.
    """
    features, *taps, channels = window.kernel.shape
    count = math.prod(taps) * channels
    if codes is None or len(codes) < 2 or window.groups > 1 or not in_bytes(window):
        return False
    if count < _FEWEST or features < _LANES or (_gathered(channels) and count > MOST_LOCAL // 2):
        return False
    if (len(codes) - 1) * 8 * _words(taps, channels) > MOST_LOCAL // 2:
        return False
    values = _values(window.kernel.reshape(features, -1))
    if values is None or not _within(values, window, codes):
        return False
    pairs = (len(codes) - 1) * (values.shape[1] - 1)
    return pairs <= _PAIRS or (wide and count >= _MANY)


def store(
    layer: Layer, target: Buffer, window: Window, epilogue: Callable[[Register], Value], codes: tuple[int, ...]
) -> None:
    """Writes the nest of loops. epilogue: from the sums, a register of the target's shape, to the codes."""
    _Nest(layer, target, window, epilogue, codes).write()


def _gathered(channels: int) -> bool:
    """Whether a window's codes are copied to one row first; otherwise every tap starts a new word."""
    return channels < _WORD


def _words(taps: Sequence[int], channels: int) -> int:
    count = math.prod(taps)
    return -(-count * channels // _WORD) if _gathered(channels) else count * -(-channels // _WORD)


def _values(rows: np.ndarray) -> np.ndarray | None:
    """The sorted values of every feature's weights, int64, the greatest repeated; None if they exceed `MOST`."""
    found = [np.unique(row).astype(np.int64) for row in rows]
    most = max(len(values) for values in found)
    if not 2 <= most <= MOST:
        return None
    return np.stack([np.pad(values, (0, most - len(values)), mode="edge") for values in found])


def _within(values: np.ndarray, window: Window, codes: tuple[int, ...]) -> bool:
    """Whether every partial sum of the planes fits 32 bits."""
    features = len(values)
    count = window.kernel.size // features
    planes = Planes.of(codes)
    totals = np.abs(window.kernel.reshape(features, -1).astype(np.int64)).sum(axis=1)
    of_weights = np.abs(values[:, 0]) + np.diff(values, axis=1).sum(axis=1)
    outside = abs(window.zero_point - planes.lowest)
    greatest = (abs(planes.lowest) + outside) * totals + sum(planes.steps) * of_weights * count
    return int(greatest.max()) < 2**31


class _Nest(Tiles[tuple[int, ...]]):
    helper = "one_bit"

    def plan(self) -> None:
        self.rows = self.window.kernel.reshape(self.features, -1)
        values = _values(self.rows)
        assert values is not None
        self.values = values
        self.planes = Planes.of(self.codes)
        self.lacking = self.window.zero_point - self.planes.lowest
        self.words = _words(self.taps, self.per_group)
        chunks = -(-self.features // _CHUNK)
        each = -(-self.features // (chunks * _LANES)) * _LANES
        self.each, self.shown = each, min(each, self.features)
        self.starts = [min(i * each, self.features - self.shown) for i in range(chunks)]

    def write(self) -> None:
        many, planes = len(self.planes.least), self.values.shape[1] - 1
        arrays = [f"uint64_t bits[{many * self.words}];", f"int32_t ones[{many}];"]
        if self._leaves():
            arrays.append(f"int32_t outside[{math.prod(self.taps)}];")
        filled = self.each_position(1, self._fill_bits)
        line = self.rows.shape[1] if _gathered(self.per_group) else 0
        outside = math.prod(self.taps) if self._leaves() else 0
        self.layer.local(8 * many * self.words + 4 * (self.each * (planes + 1) + many + outside) + line)
        size, several = planes * self.each, len(self.starts) > 1
        kernel = f"{self._kernel()} + chunk * {size * self.words}" if several else self._kernel()
        first = self.least("chunk", len(self.starts), self.each, self.starts[-1]) if several else "0"
        start = f"{self.planes.lowest} * {self._number('total', self.rows.astype(np.int64).sum(axis=1))}"
        sums = [
            f"int32_t counts[{size}], acc[{self.each}];",
            f"const int32_t c0 = {first};",
            *nested([loop_head("i", self.shown)], [f"acc[i] = {start};"]),
        ]
        for p, step in enumerate(self.planes.steps):
            bits = f"bits + {p * self.words}" if p else "bits"
            sums.append(f"qjax_common({bits}, {self.words}, {kernel}, {size // _LANES}, counts);")
            sums += nested([loop_head("i", self.shown)], [f"acc[i] += {step} * ({self._of_weights(p)});"])
        if self._leaves():
            lacks = f"acc[i] += {self._under_taps()}[outside[t] * {self.features} + c0 + i];"
            sums += nested(["for (int32_t t = 0; t < many; t++) {", loop_head("i", self.shown)], [lacks])
        sums += nested(["{"], self.by_epilogue("acc", "first", "c0", self.shown))
        chunks = nested([loop_head("chunk", len(self.starts))] if several else ["{"], sums)
        count = ["int32_t many = 0;"] if self._leaves() else []
        self.layer.root.add(*self.tiled(1, [*arrays, *count, *filled, *chunks]))

    # ------------------------------------------------------------------ codes

    def padding(self) -> str:
        """Codes whose bits are all 0."""
        window = self.window
        return self.table("padding", np.full(window.x.shape[-1], self.planes.lowest, np.dtype(window.x.dtype)))

    def _leaves(self) -> bool:
        """Whether a window may extend beyond the input and the code there is not the lowest one."""
        outer = [Index.variable(f"o{axis}", size) for axis, size in enumerate(self.sizes)]
        ends = (tuple(Index({}, k * (size - 1)) for size in self.taps) for k in (0, 1))
        return self.lacking != 0 and any(inside(self.window, outer, end)[0] for end in ends)

    def _fill_bits(self, outer: list[Index]) -> list[str]:
        """Writes `bits` and `ones` of a position; `outside`: the taps that lie outside of the input."""
        lines: list[str] = []
        heads, tap = self.tap_loops()
        tests, _ = inside(self.window, outer, tap)
        if self._leaves():
            number = flat(tap, tuple(self.taps))
            lines += nested([*heads, f"if (!({' && '.join(tests)})) {{"], [f"outside[many++] = {number};"])
        function, count = f"qjax_plane_{self.suffix}", self.rows.shape[1]
        if _gathered(self.per_group):
            lines.append(f"{self.kind} line[{count}];")
            lines += self.copied(outer, lambda place, source, codes: [f"memcpy(line + {place}, {source}, {codes});"])
            for p, least in enumerate(self.planes.least):
                bits = f"bits + {p * self.words}" if p else "bits"
                lines.append(f"ones[{p}] = {function}(line, {count}, {least}, {bits});")
            return lines
        place = flat((*tap, Index()), (*self.taps, -(-self.per_group // _WORD)))
        one = [f"const {self.kind} *const codes = {self.codes_under(outer, tap)};"]
        for p, least in enumerate(self.planes.least):
            lines.append(f"ones[{p}] = 0;")
            bits = f"bits + {place + p * self.words}"
            one.append(f"ones[{p}] += {function}(codes, {self.per_group}, {least}, {bits});")
        return [*lines, *nested(heads, one)]

    # ------------------------------------------------------------------ weights

    def _kernel(self) -> str:
        """The planes of all weights: (chunk, plane, block of eight features, word, feature)."""
        planes = self.values.shape[1] - 1
        least = self.values[:, 1:]
        # a repeated value has the step 0, so its bits do not matter
        masks = self.rows[:, None, :] >= least[:, :, None]
        taps = math.prod(self.taps)
        if not _gathered(self.per_group):
            spare = -self.per_group % _WORD
            masks = np.pad(masks.reshape(self.features, planes, taps, -1), ((0, 0), (0, 0), (0, 0), (0, spare)))
            masks = masks.reshape(self.features, planes, -1)
        masks = np.pad(masks, ((0, self.each - self.shown), (0, 0), (0, self.words * _WORD - masks.shape[2])))
        words = np.packbits(masks, axis=2, bitorder="little").view("<u8").astype(np.uint64)
        chunks = np.stack([words[start : start + self.each] for start in self.starts])
        laid = chunks.reshape(len(self.starts), -1, _LANES, planes, self.words).transpose(0, 3, 1, 4, 2)
        return self.table("kernel", np.ascontiguousarray(laid), weights=True)

    def _of_weights(self, plane: int) -> str:
        """What a plane of codes contributes to a feature."""
        terms = [_times(self._number("lowest", self.values[:, 0]), f"ones[{plane}]")]
        for index, step in enumerate(np.diff(self.values, axis=1).T):
            count = f"counts[{index * self.each} + i]" if index else "counts[i]"
            terms.append(_times(self._number(f"step{index}", step), count))
        return " + ".join(terms)

    def _under_taps(self) -> str:
        """The difference for a tap outside of the input, by tap and feature, in the fewest bytes."""
        taps = self.rows.reshape(self.features, -1, self.per_group).sum(axis=2, dtype=np.int64).T * self.lacking
        small = bool((np.abs(taps) < 2**15).all())
        return self.table("outside", np.ascontiguousarray(taps).astype(np.int16 if small else np.int32))

    def _number(self, role: str, values: np.ndarray) -> str:
        """A number of feature c0 + i: one that all features share, or an entry of a table."""
        if (values == values[0]).all():
            return str(int(values[0]))
        return f"{self.table(role, values.astype(np.int32))}[c0 + i]"


def _times(number: str, factor: str) -> str:
    return factor if number == "1" else f"{number} * {factor}"


__all__ = ["MOST", "fits", "store"]
