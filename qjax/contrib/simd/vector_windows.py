"""Products of channels-last codes of 8 bits with weights, sixteen features at a time; see `vectors.h`.

Every position of the result has the same features, so that a few positions (a tile) share every vector of weights that
is read, and a few blocks of features share the codes. A tap is one position of the window, and its codes are
consecutive. If their number is no multiple of four, the codes of all taps are copied to a local array first.
"""

import math
from collections.abc import Callable

import numpy as np

from qjax.contrib.simd import vector_channels
from qjax.contrib.simd.tiles import Tiles, in_bytes
from qjax.contrib.simd.vector_codes import FEATURES, Codes, codes_of, stored
from qjax.export.emit.c.blocks import loop_head, nested
from qjax.export.emit.c.index import Index, flat
from qjax.export.emit.c.loops import Layer
from qjax.export.emit.c.values import Buffer, Register, Value
from qjax.export.emit.c.windows import Window
from qjax.export.emit.requantizations import Finish

_QUAD = 4
"""Codes that one step adds, and sums that are computed together if registers are few."""
_MOST_POSITIONS = 8
_MOST_BLOCKS = {1: 8, 2: 8, 3: 8, 4: 6, 5: 4, 6: 4, 7: 3, 8: 3}
"""By positions, the blocks of features with which sums, weights and codes fill 32 registers of 64 bytes.

There are at most 8, because a step of a sum waits for the one before it, and 8 sums hide that.
"""
_SPEED = {1: 0.7, 2: 0.75, 3: 0.75, 4: 0.75, 5: 0.9, 6: 0.97, 7: 0.98, 8: 1.0}
"""By positions, how fast sums are computed, relative to 8; with one block, `_ONE_BLOCK` times that.

Measured on an AMD EPYC of the fifth generation.
"""
_ONE_BLOCK = 0.85
_POINTER = 8
_MOST_LOCAL = 2**15
"""Bytes of a tile's codes or pointers on the stack, which is large on processors with vectors."""


def fits(window: Window) -> bool:
    """Whether this file can write the product."""
    features, *taps, per_group = window.kernel.shape
    if not in_bytes(window):
        return False
    count = math.prod(taps)
    if window.groups == 1:
        each = _POINTER * count if per_group % _QUAD == 0 else count * per_group + _QUAD + _POINTER
        return _MOST_POSITIONS * each <= _MOST_LOCAL
    if is_depthwise(window):
        return features >= FEATURES and _POINTER * (count + _QUAD) <= _MOST_LOCAL
    return per_group % _QUAD == 0 and _MOST_POSITIONS * _POINTER * count <= _MOST_LOCAL


def is_depthwise(window: Window) -> bool:
    """Whether every channel has one feature, and there are several."""
    return 1 < window.groups == len(window.kernel) == window.x.shape[-1]


def store(
    layer: Layer, target: Buffer, window: Window, epilogue: Callable[[Register], Value], finish: Finish | None
) -> None:
    """Writes the nest of loops.

    epilogue: from the sums to the codes, if `finish` is None or has no form in vectors.
    """
    if is_depthwise(window):
        vector_channels.store(layer, target, window, epilogue, finish)
    else:
        _Nest(layer, target, window, epilogue, codes_of(finish, window.kernel.shape[0], target.dtype)).write()


def _plus(name: str, more: int) -> str:
    return f"({name} + {more})" if more else name


class _Nest(Tiles[Codes | None]):
    helper = "vectors"

    def plan(self) -> None:
        self.own = self.features // self.window.groups
        self.blocks = -(-self.own // FEATURES)
        self.last = max(0, self.own - FEATURES)
        within = [min(block * FEATURES, self.last) for block in range(self.blocks)]
        self.starts = [group * self.own + start for group in range(self.window.groups) for start in within]

    # ------------------------------------------------------------------ products

    def write(self) -> None:
        """Write a product whose features share their codes."""
        wide, narrow = self._product(*self._wide()), self._product(*self._narrow())
        both = ["#if QJAX_SUMS >= 8", *wide, "#else", *narrow, "#endif"]
        self.layer.root.add(*(narrow if wide == narrow else both))

    def _narrow(self) -> tuple[int, int]:
        """How many positions and blocks of features are summed together with few registers."""
        return (_QUAD, 1) if self.positions >= _QUAD else (1, min(_QUAD, self.blocks))

    def _wide(self) -> tuple[int, int]:
        """The same with 32 registers, in the least time. Tiles that overlap compute some sums twice."""
        best = (math.inf, 0, 1, 1)
        for own in range(1, min(self.positions, _MOST_POSITIONS) + 1):
            for together in range(1, min(self.blocks, _MOST_BLOCKS[own]) + 1):
                tiles, turns = -(-self.positions // own), -(-self.blocks // together)
                speed = _SPEED[own] * (1 if together > 1 else _ONE_BLOCK)
                best = min(best, (tiles * turns * own * together / speed, -own * together, own, together))
        return best[2], best[3]

    def _product(self, own: int, together: int) -> list[str]:
        """Write the nest. own: positions of a tile. together: blocks."""
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
        tap, grouped = Index.variable("t", taps) * own, self.window.groups > 1
        channels = f" + group * {self.per_group}" if grouped else ""
        one_tap = [
            *(f"const {self.kind} *const x{p} = rows[{tap + p}]{channels};" for p in range(own)),
            *nested([f"for (int32_t k = 0; k < {each}; k += {_QUAD}) {{"], [*steps, "w += 64;"]),
        ]
        body = [
            f"const int8_t *w = {name} + block * {length};",
            *(f"sums16 {total} = {self._start(_plus('block', b))};" for total, _, b in sums),
            *(nested([loop_head("t", taps)], one_tap) if taps > 1 else one_tap),
        ]
        for total, p, b in sums:
            body += self._write_codes(total, _plus("first", p), _plus("block", b))
        turns = -(-self.blocks // together)
        counter = "block" if together == 1 and not grouped else "turn"
        if counter == "turn":
            first = self.least(counter, turns, together, self.blocks - together)
            before = f"group * {self.blocks} + " if grouped else ""
            body = [f"const int32_t block = {before}{f'({first})' if grouped else first};", *body]
        heads = [loop_head(counter, turns)]
        if self.positions == 1 and not grouped:
            overlap = turns * together > self.blocks or self.own % FEATURES != 0
            heads = self.heads(counter, turns, overlap=overlap)
        elif self.positions == 1:
            heads = [*self.heads("group", self.window.groups, overlap=False), *heads]
        elif grouped:
            heads = [loop_head("group", self.window.groups), *heads]
        return self.tiled(own, [*self._rows(own, copies, taps, each), *nested(heads, body)])

    # ------------------------------------------------------------------ parts

    def _blocked(self, vector: np.ndarray) -> np.ndarray:
        """A number per feature, block by block; 0 for missing features."""
        return self._in_blocks(vector).reshape(-1)

    def _in_blocks(self, values: np.ndarray) -> np.ndarray:
        width = min(FEATURES, self.own)
        fill = [(0, 0), (0, FEATURES - width), *[(0, 0)] * (values.ndim - 1)]
        return np.pad(np.stack([values[start : start + width] for start in self.starts]), fill)

    def _blocks(self, kernel: np.ndarray) -> str:
        """The table of weights (features, codes), as (blocks, codes / 4, 16, 4)."""
        laid = self._in_blocks(kernel).reshape(len(self.starts), FEATURES, -1, _QUAD).transpose(0, 2, 1, 3)
        return self.table("kernel", np.ascontiguousarray(laid).astype(np.int8), weights=True)

    def _start(self, block: str) -> str:
        sums = self.window.kernel.reshape(self.features, -1).sum(axis=1, dtype=np.int64)
        flip = 128 if self.suffix == "u8" else -128
        name = self.table("start", self._blocked((flip * sums).astype(np.int32)))
        return f"sums16_start_{self.suffix}({name} + {block} * {FEATURES})"

    def _rows(self, own: int, copies: bool, taps: int, each: int) -> list[str]:
        """Write `rows`: pointers to the codes of every tap and position of the tile."""
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

    def _write_codes(self, sums: str, place: str, block: str) -> list[str]:
        """The lines that compute codes from the sums. place: the position. block: of features."""
        first = self._first(block)
        out = f"{self.target.name} + {first}"
        if self.positions > 1:
            out = f"{self.target.name} + {place} * {self.features} + {first}"
        if self.codes is None:
            return self._scalar(sums, place, first)

        def vector(role: str, values: np.ndarray) -> str:
            return f"{self.table(role, self._blocked(values))} + {block} * {FEATURES}"

        made = self.codes.text(f"sums16_numbers({sums})", vector)
        return stored(made, out, self.own, self.target.dtype)

    def _first(self, block: str) -> str:
        """The first feature of a block."""
        if len(self.starts) == 1:
            return "0"
        if self.window.groups == 1:
            return f"({self.least(block, self.blocks, FEATURES, self.last)})"
        if self.blocks == 1:
            return f"{block} * {self.own}"
        if self.own % FEATURES == 0:
            return f"{block} * {FEATURES}"
        within = self.least(f"{block} % {self.blocks}", self.blocks, FEATURES, self.last)
        return f"({block} / {self.blocks} * {self.own} + ({within}))"

    def _scalar(self, sums: str, place: str, first: str) -> list[str]:
        """The same for one sum after the other."""
        self.layer.local(4 * FEATURES)
        stored = ["int32_t acc[16];", f"numbers16_store(sums16_numbers({sums}), acc);"]
        codes = self.by_epilogue("acc", place, first, min(FEATURES, self.own))
        return ["{", *(f"    {line}" for line in [*stored, *codes]), "}"]
