"""Products of channels-last codes of 8 bits with weights for a Cortex-M, by the functions of `cortex_m.h`.

A patch contains the codes under the windows of two positions, and the weights of a feature are consecutive, so that one
function serves all dense layers and convolutions. A depthwise convolution needs no patch, because its channels are
multiplied by their own weights in place. The constants take as much memory as those of plain loops.
"""

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from qjax.contrib.simd.tiles import Tiles, in_bytes
from qjax.export.emit.c import weights
from qjax.export.emit.c.blocks import loop_head, nested
from qjax.export.emit.c.index import Index, flat
from qjax.export.emit.c.loops import Layer
from qjax.export.emit.c.scalar import limits
from qjax.export.emit.c.values import Buffer, Register, Value
from qjax.export.emit.c.windows import MOST_LOCAL, Window, inside
from qjax.export.emit.requantizations import Finish
from qjax.export.emit.requantize_mulhi import HighWords, high_words

_QUAD = 4
"""Codes that one step adds, and features that are computed together from a patch of one position."""
_VECTOR = 16
"""Codes in the longest vector."""
_CHANNELS = 8
"""Channels that a depthwise convolution sums together."""
_MOST_SUMS = 64
"""Sums of a position that are stored until their requantization."""
_POINTER = 4


def fits(window: Window) -> bool:
    """Whether this file can write the product. It cannot if weights of 4 and 2 bits are packed."""
    features, *taps, per_group = window.kernel.shape
    if not in_bytes(window) or weights.bits_of(window.kernel) in weights.PACKED:
        return False
    if window.groups == 1:
        return _patch_bytes(1, math.prod(taps) * per_group) <= MOST_LOCAL
    depthwise = window.groups == features == window.x.shape[-1] and features >= _CHANNELS
    # two products with weights of at most 127 fit 16 bits
    return depthwise and window.kernel.min() >= -127 and _POINTER * math.prod(taps) <= MOST_LOCAL


def store(
    layer: Layer, target: Buffer, window: Window, epilogue: Callable[[Register], Value], finish: Finish | None
) -> None:
    """Writes the nest of loops.

    epilogue: from the sums to the codes, if `finish` is None or has no form in 32 bits.
    """
    nest = _Nest(layer, target, window, epilogue, _codes_of(finish, window, target.dtype))
    if window.groups > 1:
        nest.by_channel()
    else:
        nest.by_product()


def _patch_bytes(own: int, size: int) -> int:
    """The size of the patch in the worst case: two bytes per code, or as many codes as fill vectors."""
    return own * max(2 * (size + -size % _QUAD), size + -size % _VECTOR)


def _codes_of(finish: Finish | None, window: Window, dtype: str) -> HighWords | None:
    features = window.kernel.shape[0]
    if finish is None or finish.line is None or dtype not in ("int8", "uint8"):
        return None
    if math.prod(finish.shape) not in (1, features):
        return None
    least, most = limits(window.x.dtype)
    kernel = window.kernel.reshape(features, -1).astype(np.int64)
    ends = np.minimum(kernel * least, kernel * most), np.maximum(kernel * least, kernel * most)
    low, high = (end.sum(axis=1) for end in ends)
    line = finish.line
    wide = {
        field.name: np.broadcast_to(value, (*value.shape[:-1], features))
        for field in dataclasses.fields(line)
        if isinstance(value := getattr(line, field.name), np.ndarray)
    }
    return high_words(dataclasses.replace(line, **wide), low, high)


class _Nest(Tiles[HighWords | None]):
    helper = "cortex_m"

    def plan(self) -> None:
        self.count = math.prod(self.taps) * self.per_group

    # ------------------------------------------------------------------ products

    def by_product(self) -> None:
        """Writes a product whose features share their codes."""
        size = self.count
        own = 2 if self.positions > 1 and _patch_bytes(2, size) <= MOST_LOCAL else 1
        padded = max(self.features, 2 if own == 2 else _QUAD)
        rows = np.pad(self.window.kernel.reshape(self.features, size), ((0, padded - self.features), (0, 0)))
        # functions read whole vectors, and so beyond the end of the last row
        kernel = self._kernel(np.pad(rows.reshape(-1), (0, -size % _VECTOR)))
        start, chunk = self._start(padded), self._chunk(padded, _QUAD)
        filled = self.each_position(own, lambda outer: self._fill_patch(outer, own))
        call = f"qjax_sums{own}_{self.suffix}(patch, {kernel} + c0 * {size}, {size}, {start} + c0, {chunk}, acc);"
        body = [call]
        for p in range(own):
            body += self._write_codes(f"acc + {p * chunk}" if p else "acc", f"(first + {p})" if p else "first", chunk)
        arrays = [f"int32_t patch[QJAX_PATCH({own}, {size})];", f"int32_t acc[{own * chunk}];"]
        self.layer.local(_patch_bytes(own, size) + 4 * own * chunk + (0 if self._in_fours else size + _VECTOR))
        if size % _VECTOR:
            arrays.append("memset(patch, 0, sizeof patch);")
        self._done([*arrays, *self.tiled(own, [*filled, *self._chunks(padded, chunk, body)])])

    @property
    def _in_fours(self) -> bool:
        return self.per_group % _QUAD == 0

    def _fill_patch(self, outer: list[Index], own: int) -> list[str]:
        """The lines that fill the patch with the codes of the position `p`."""
        size = self.count
        fill = f"qjax_fill_{self.suffix}"

        def put(place: Index, source: str, codes: int) -> list[str]:
            return [f"{fill}(QJAX_PLACE(patch, {own}, p, {place}, {size}), {own}, {source}, {codes});"]

        def gather(place: Index, source: str, codes: int) -> list[str]:
            return [f"memcpy(line + {place}, {source}, {codes});"]

        if self._in_fours:
            return self.copied(outer, put)
        whole = size + -size % _QUAD
        zeros = [f"line[{rest}] = 0;" for rest in range(size, whole)]
        patch = f"patch, {own}, p, {size}"
        return [
            f"QJAX_LINE({self.kind}, line, {patch});",
            *self.copied(outer, gather),
            *zeros,
            f"QJAX_SPREAD_{self.suffix}({patch}, line);",
        ]

    # ------------------------------------------------------------------ channels

    def by_channel(self) -> None:
        """Writes a depthwise convolution, in which every channel has its own codes."""
        taps = math.prod(self.taps)
        kernel = self._kernel(np.ascontiguousarray(self.window.kernel.reshape(self.features, taps).T))
        start, chunk = self._start(self.features), self._chunk(self.features, _CHANNELS)
        self.layer.local(_POINTER * taps + 4 * chunk)

        def point(outer: list[Index]) -> list[str]:
            heads, tap = self.tap_loops()
            row = f"rows[{flat(tap, tuple(self.taps))}]"
            ends = (tuple(Index({}, k * (size - 1)) for size in self.taps) for k in (0, 1))
            tests = list(dict.fromkeys(test for end in ends for test in inside(self.window, outer, end)[0]))
            any_place = nested(heads, [f"{row} = {self.codes_under(outer, tap)};"])
            if not tests:
                return any_place
            # usually all taps lie inside the input
            _, there = inside(self.window, outer, tap)
            within = nested(heads, [f"{row} = {self.window.x.name} + {there};"])
            head = f"if ({' && '.join(tests)}) {{"
            return [head, *(f"    {x}" for x in within), "} else {", *(f"    {x}" for x in any_place), "}"]

        given = f"rows, {taps}, c0, {kernel} + c0, {self.features}, {start} + c0, {chunk}, acc"
        body = [f"qjax_channels_{self.suffix}({given});", *self._write_codes("acc", "first", chunk)]
        chunks = self._chunks(self.features, chunk, body)
        arrays = [f"const {self.kind} *rows[{taps}];", f"int32_t acc[{chunk}];"]
        self._done([*arrays, *self.tiled(1, [*self.each_position(1, point), *chunks])])

    # ------------------------------------------------------------------ parts

    def _done(self, lines: list[str]) -> None:
        self.layer.root.add(*nested(["{"], lines))

    def _kernel(self, codes: np.ndarray) -> str:
        return self.table("kernel", codes.astype(np.int8), weights=True)

    def _start(self, padded: int) -> str:
        first = np.zeros(self.features, np.int64) if self.codes is None else self.codes.first
        return self.table("start", np.pad(first, (0, padded - self.features)).astype(np.uint8))

    def _chunk(self, features: int, step: int) -> int:
        """How many features are summed in one pass."""
        count = -(-features // _MOST_SUMS)
        each = -(-features // count)
        return min(features, each + -each % step)

    def _chunks(self, features: int, chunk: int, body: list[str]) -> list[str]:
        """A loop over chunks of features, the first of which is `c0`."""
        count = -(-features // chunk)
        first = f"const int32_t c0 = {self.least('chunk', count, chunk, features - chunk) if count > 1 else 0};"
        return nested([loop_head("chunk", count)] if count > 1 else ["{"], [first, *body])

    def _write_codes(self, sums: str, place: str, chunk: int) -> list[str]:
        """The lines that compute codes from the sums of a position and write them to memory."""
        count = min(chunk, self.features)
        out = (
            f"{self.target.name} + c0"
            if self.positions == 1
            else f"{self.target.name} + {place} * {self.features} + c0"
        )
        if self.codes is None:
            sums = f"({sums})" if " " in sums else sums
            return nested(["{"], self.by_epilogue(sums, place, "c0", count))
        codes = self.codes
        roles = {"factor": codes.factor, "offset": codes.offset}
        if codes.kink is not None and codes.below is not None:
            roles.update(kink=codes.kink, below=codes.below)
        tables = [f"{self.table(role, vector.astype(np.int32))} + c0" for role, vector in roles.items()]
        numbers = [str(number) for number in (codes.up, codes.shift, codes.lowest, codes.highest)]
        function = "qjax_codes" if codes.kink is None else "qjax_sides"
        return [f"{function}({', '.join([sums, str(count), *tables, *numbers, out])});"]
