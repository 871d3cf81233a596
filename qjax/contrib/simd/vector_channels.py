"""Depthwise convolutions of channels-last codes of 8 bits, many channels at a time; see `vectors.h`.

Every channel has its own codes and weights, so the channels of four taps are read as four rows. Blocks of sixty-four
channels have the order that results from interleaving the rows within 16 bytes, and so have their weights and
constants:

    channel 16 l + 4 j + i  is number  16 j + 4 l + i,  with l, j and i from 0 to 3
"""

import math
from collections.abc import Callable

import numpy as np

from qjax.contrib.simd.tiles import Tiles
from qjax.contrib.simd.vector_codes import FEATURES, Codes, codes_of, stored
from qjax.export.emit.c.blocks import Block, loop_head, nested
from qjax.export.emit.c.index import Index, flat
from qjax.export.emit.c.loops import Layer
from qjax.export.emit.c.values import Buffer, Register, Value
from qjax.export.emit.c.windows import Window
from qjax.export.emit.requantizations import Finish

_QUAD = 4
"""Taps of one step."""
_POINTER = 8
_MANY = 4
"""Blocks of 16 channels that are computed together, if there are as many."""


def store(
    layer: Layer, target: Buffer, window: Window, epilogue: Callable[[Register], Value], finish: Finish | None
) -> None:
    """Writes the nest of loops.

    epilogue: from the sums to the codes, if `finish` is None or has no form in vectors.
    """
    _Nest(layer, target, window, epilogue, codes_of(finish, window.kernel.shape[0], target.dtype)).write()


class _Nest(Tiles[Codes | None]):
    helper = "vectors"

    def plan(self) -> None:
        many = self.codes is not None and self.features >= _MANY * FEATURES
        self.blocks = _MANY if many else 1
        self.width = self.blocks * FEATURES
        count, last = -(-self.features // self.width), self.features - self.width
        self.starts = [min(block * self.width, last) for block in range(count)]
        lanes = np.arange(self.width).reshape(self.blocks, self.blocks, -1) if many else np.arange(self.width)
        self.order = lanes.swapaxes(0, 1).reshape(-1) if many else lanes

    def write(self) -> None:
        """Write loops over positions, and in each over blocks of channels."""
        block = Block(self.layer.root)
        heads: list[str] = []
        at: list[Index] = []
        for axis, size in enumerate(self.sizes):
            name = block.fresh(f"place{axis}") if size > 1 else ""
            at.append(Index.variable(name, size))
            if size > 1:
                heads += [loop_head(name, size)] if heads else self.heads(name, size, overlap=False)
        self.layer.root.add(
            *nested(heads or ["{"], [*self._rows(at), *self._blocks(flat(tuple(at), tuple(self.sizes)))])
        )

    def _rows(self, at: list[Index]) -> list[str]:
        """Write `rows`: pointers to the channels that every tap reads; for missing taps, to padding."""
        taps = math.prod(self.taps)
        filled = taps + -taps % _QUAD
        self.layer.local(filled * _POINTER)
        heads, tap = self.tap_loops()
        found = nested(heads, [f"rows[{flat(tap, tuple(self.taps))}] = {self.codes_under(at, tap)};"])
        return [
            f"const {self.kind} *rows[{filled}];",
            *found,
            *(f"rows[{place}] = {self.padding()};" for place in range(taps, filled)),
        ]

    def _blocks(self, place: Index) -> list[str]:
        steps = -(-math.prod(self.taps) // _QUAD)
        first = self.least("block", len(self.starts), self.width, self.starts[-1])
        rows = ", ".join(f"rows[4 * t + {i}] + start" for i in range(_QUAD))
        kind, length = f"sums{self.width}", _QUAD * self.width
        body = [
            f"const int32_t start = {first};",
            f"const int8_t *const w = {self._weights()} + block * {steps * length};",
            f"{kind} sums = {kind}_start_{self.suffix}({self._start()} + block * {self.width});",
            *nested(
                [loop_head("t", steps)],
                [f"sums = {kind}_rows_{self.suffix}(sums, {rows}, w + t * {length});"],
            ),
            *self._write_codes(place),
        ]
        return nested([loop_head("block", len(self.starts))], body)

    # ------------------------------------------------------------------ tables

    def _ordered(self, values: np.ndarray) -> np.ndarray:
        """Numbers per channel (channels, ...), block by block."""
        return np.stack([values[start : start + self.width][self.order] for start in self.starts])

    def _weights(self) -> str:
        """(blocks, steps, 16-channel blocks, 16, 4)."""
        kernel = self.window.kernel.reshape(self.features, -1)
        padded = np.pad(kernel, ((0, 0), (0, -kernel.shape[1] % _QUAD)))
        found = self._ordered(padded).reshape(len(self.starts), self.blocks, FEATURES, -1, _QUAD)
        return self.table("kernel", np.ascontiguousarray(found.transpose(0, 3, 1, 2, 4)).astype(np.int8), weights=True)

    def _start(self) -> str:
        sums = self.window.kernel.reshape(self.features, -1).sum(axis=1, dtype=np.int64)
        flip = 128 if self.suffix == "u8" else -128
        return self.table("start", self._ordered((flip * sums).astype(np.int32)).reshape(-1))

    # ------------------------------------------------------------------ results

    def _write_codes(self, place: Index) -> list[str]:
        """The lines that compute codes from the sums and write them to memory."""
        out = f"{self.target.name} + {place * self.features} + start" if place.terms else f"{self.target.name} + start"
        if self.codes is None:
            self.layer.local(4 * FEATURES)
            lines = ["int32_t acc[16];", "numbers16_store(sums16_numbers(sums), acc);"]
            return [*lines, *self.by_epilogue("acc", str(place), "start", FEATURES)]
        made = [self._codes(part) for part in range(self.blocks)]
        if self.blocks == 1:
            return stored(made[0], out, self.features, self.target.dtype)
        lines = [f"const numbers16 codes{part} = {text};" for part, text in enumerate(made)]
        given = ", ".join(f"codes{part}" for part in range(self.blocks))
        return [*lines, f"numbers64_{'u8' if self.target.dtype == 'uint8' else 'i8'}({given}, {out});"]

    def _codes(self, part: int) -> str:
        """The codes of one of the blocks of 16 channels."""
        assert self.codes is not None
        more = f" + {part * FEATURES}" if part else ""

        def vector(role: str, values: np.ndarray) -> str:
            return f"{self.table(role, self._ordered(values).reshape(-1))} + block * {self.width}{more}"

        sums = "sums" if self.blocks == 1 else f"sums.of[{part}]"
        return self.codes.text(f"sums16_numbers({sums})", vector)


__all__ = ["store"]
