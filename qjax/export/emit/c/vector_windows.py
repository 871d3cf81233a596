"""Products of channels-last codes of 8 bits with weights, sixteen features at a time; see `vectors.h`.

Every position of the result has the same features. So a few positions, a tile, share every vector of weights that is
read, and a few blocks of features share the codes. A tap is one position of the window, and its codes lie one behind
the other. If their number is no multiple of four, the codes of all taps are copied to a local array first.
"""

import math
from collections.abc import Callable

import numpy as np

from qjax.export.emit.c import vector_channels
from qjax.export.emit.c.blocks import loop_head, nested
from qjax.export.emit.c.index import Index, flat
from qjax.export.emit.c.loops import Layer
from qjax.export.emit.c.tiles import Tiles, in_bytes
from qjax.export.emit.c.values import Buffer, Register, Value
from qjax.export.emit.c.vector_codes import FEATURES, Codes, codes_of, stored
from qjax.export.emit.c.windows import MOST_LOCAL, Window
from qjax.export.emit.requantizations import Finish

_QUAD = 4
"""Codes that one step adds, and sums side by side where registers are few."""
_MOST_POSITIONS = 8
_MOST_BLOCKS = {1: 8, 2: 8, 3: 8, 4: 6, 5: 4, 6: 4, 7: 3, 8: 3}
"""By positions, the blocks of features with which sums, weights and codes fill 32 registers of 64 bytes. No more than
8: a step of a sum waits for the one before it, which 8 sums hide."""
_SPEED = {1: 0.7, 2: 0.75, 3: 0.75, 4: 0.75, 5: 0.9, 6: 0.97, 7: 0.98, 8: 1.0}
"""By positions, how fast sums are computed; `_ONE_BLOCK` of it with one block. Seen on an AMD EPYC of the fifth
generation."""
_ONE_BLOCK = 0.85
_POINTER = 8


def fits(window: Window) -> bool:
    """Whether a product has a form here."""
    features, *taps, per_group = window.kernel.shape
    pointers = _POINTER * _MOST_POSITIONS * (math.prod(taps) + _QUAD)
    if not in_bytes(window) or pointers > MOST_LOCAL:
        return False
    if window.groups == 1:
        return per_group % _QUAD == 0 or _MOST_POSITIONS * (math.prod(taps) * per_group + _QUAD) <= MOST_LOCAL
    return window.groups == features == window.x.shape[-1] and features >= FEATURES


def store(
    layer: Layer, target: Buffer, window: Window, epilogue: Callable[[Register], Value], finish: Finish | None
) -> None:
    """The nest of loops. epilogue: from the sums to the codes, where `finish` is None or has no form in vectors."""
    if window.groups > 1:
        vector_channels.store(layer, target, window, epilogue, finish)
    else:
        _Nest(layer, target, window, epilogue, codes_of(finish, window.kernel.shape[0], target.dtype)).write()


def _plus(name: str, more: int) -> str:
    return f"({name} + {more})" if more else name


class _Nest(Tiles):
    def __init__(
        self,
        layer: Layer,
        target: Buffer,
        window: Window,
        epilogue: Callable[[Register], Value],
        codes: Codes | None,
    ) -> None:
        super().__init__(layer, target, window, epilogue, "vectors")
        self.codes = codes
        count = max(1, -(-self.features // FEATURES))
        last = max(0, self.features - FEATURES)
        self.starts = [min(block * FEATURES, last) for block in range(count)]

    # ------------------------------------------------------------------ products

    def write(self) -> None:
        """Features share their codes."""
        wide, narrow = self._product(*self._wide()), self._product(*self._narrow())
        both = ["#if QJAX_SUMS >= 8", *wide, "#else", *narrow, "#endif"]
        self.layer.root.add(*(narrow if wide == narrow else both))

    def _narrow(self) -> tuple[int, int]:
        """How many positions and blocks of features are summed side by side in few registers."""
        return (_QUAD, 1) if self.positions >= _QUAD else (1, min(_QUAD, len(self.starts)))

    def _wide(self) -> tuple[int, int]:
        """The same in 32 registers: the least work, and what overlaps is work, then the most sums."""
        blocks = len(self.starts)
        best = (math.inf, 0, 1, 1)
        for own in range(1, min(self.positions, _MOST_POSITIONS) + 1):
            for together in range(1, min(blocks, _MOST_BLOCKS[own]) + 1):
                tiles, turns = -(-self.positions // own), -(-blocks // together)
                speed = _SPEED[own] * (1 if together > 1 else _ONE_BLOCK)
                best = min(best, (tiles * turns * own * together / speed, -own * together, own, together))
        return best[2], best[3]

    def _product(self, own: int, together: int) -> list[str]:
        """The nest. own: positions of a tile. together: blocks."""
        kernel = self.window.kernel.reshape(self.features, -1, self.per_group)
        copies = self.per_group % _QUAD != 0
        if copies:
            kernel = kernel.reshape(self.features, 1, -1)
            kernel = np.pad(kernel, ((0, 0), (0, 0), (0, -kernel.shape[2] % _QUAD)))
        _, taps, each = kernel.shape
        name = self._blocks(kernel.reshape(self.features, -1))
        length = taps * each * FEATURES
        sums = [(f"sums{p}_{b}", p, b) for p in range(own) for b in range(together)]
        add = f"sums16_add_{self.suffix}"
        steps = [f"{total} = {add}({total}, x{p} + k, {_plus('w', b * length)});" for total, p, b in sums]
        tap = Index.variable("t", taps) * own
        one_tap = [
            *(f"const {self.kind} *const x{p} = rows[{tap + p}];" for p in range(own)),
            *nested([f"for (int32_t k = 0; k < {each}; k += {_QUAD}) {{"], [*steps, "w += 64;"]),
        ]
        body = [
            f"const int8_t *w = {name} + block * {length};",
            *(f"sums16 {total} = {self._start(_plus('block', b))};" for total, _, b in sums),
            *(nested([loop_head("t", taps)], one_tap) if taps > 1 else one_tap),
        ]
        for total, p, b in sums:
            body += self._written(total, _plus("first", p), _plus("block", b))
        turns = -(-len(self.starts) // together)
        counter = "block" if together == 1 else "turn"
        if together > 1:
            first = self.least(counter, turns, together, len(self.starts) - together)
            body = [f"const int32_t block = {first};", *body]
        return self.tiled(own, [*self._rows(own, copies, taps, each), *nested([loop_head(counter, turns)], body)])

    # ------------------------------------------------------------------ parts

    def _blocked(self, vector: np.ndarray) -> np.ndarray:
        """A number per feature, block by block; 0 for features that there are not."""
        padded = np.pad(vector, (0, max(0, FEATURES - self.features)))
        return np.concatenate([padded[start : start + FEATURES] for start in self.starts])

    def _blocks(self, kernel: np.ndarray) -> str:
        """The table of weights (features, codes), as (blocks, codes / 4, 16, 4)."""
        padded = np.pad(kernel, ((0, max(0, FEATURES - self.features)), (0, 0)))
        blocks = np.stack([padded[start : start + FEATURES] for start in self.starts])
        laid = blocks.reshape(len(self.starts), FEATURES, -1, _QUAD).transpose(0, 2, 1, 3)
        return self.table("kernel", np.ascontiguousarray(laid).astype(np.int8), weights=True)

    def _start(self, block: str) -> str:
        sums = self.window.kernel.reshape(self.features, -1).sum(axis=1, dtype=np.int64)
        flip = 128 if self.suffix == "u8" else -128
        name = self.table("start", self._blocked((flip * sums).astype(np.int32)))
        return f"sums16_start_{self.suffix}({name} + {block} * {FEATURES})"

    def _rows(self, own: int, copies: bool, taps: int, each: int) -> list[str]:
        """`rows`: where the codes of every tap and position of the tile are."""
        kind = f"const {self.kind} *"
        count = math.prod(self.taps) * self.per_group

        def put(place: Index, source: str, codes: int) -> list[str]:
            if codes > self.per_group:
                return [f"memcpy(patch[p] + {place}, {source}, {codes});"]
            return nested([loop_head("i", codes)], [f"patch[p][{place} + i] = {source}[i];"])

        def copy(outer: list[Index]) -> list[str]:
            zeros = [f"patch[p][{rest}] = 0;" for rest in range(count, each)]
            return [*self.copied(outer, put), *zeros, "rows[p] = patch[p];"]

        def point(outer: list[Index]) -> list[str]:
            heads, tap = self.tap_loops()
            pointer = flat(tap, tuple(self.taps)) * own
            text = f"{pointer} + p" if pointer.terms else "p"
            return nested(heads, [f"rows[{text}] = {self.codes_under(outer, tap)};"])

        if copies:
            self.layer.local(own * (each + _POINTER))
            return [f"{self.kind} patch[{own}][{each}];", f"{kind}rows[{own}];", *self.each_position(own, copy)]
        self.layer.local(own * taps * _POINTER)
        return [f"{kind}rows[{own * taps}];", *self.each_position(own, point)]

    def _written(self, sums: str, place: str, block: str) -> list[str]:
        """From sums to codes in memory. place: the position. block: of features."""
        first = self.least(block, len(self.starts), FEATURES, self.starts[-1])
        first = "0" if len(self.starts) == 1 else f"({first})"
        out = f"{self.target.name} + {first}"
        if self.positions > 1:
            out = f"{self.target.name} + {place} * {self.features} + {first}"
        if self.codes is None:
            return self._scalar(sums, place, first)

        def vector(role: str, values: np.ndarray) -> str:
            return f"{self.table(role, self._blocked(values))} + {block} * {FEATURES}"

        made = self.codes.text(f"sums16_numbers({sums})", vector)
        return stored(made, out, self.features, self.target.dtype)

    def _scalar(self, sums: str, place: str, first: str) -> list[str]:
        """One sum after the other."""
        self.layer.local(4 * FEATURES)
        stored = ["int32_t acc[16];", f"numbers16_store(sums16_numbers({sums}), acc);"]
        codes = self.by_epilogue("acc", place, first, min(FEATURES, self.features))
        return ["{", *(f"    {line}" for line in [*stored, *codes]), "}"]
