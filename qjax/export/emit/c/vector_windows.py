"""Products of channels-last codes of 8 bits with weights, sixteen features at a time; see `vectors.h`.

Every position of the result has the same features. So a few positions, a tile, share every vector of weights that is
read, and a few blocks of features share the codes. A tap is one position of the window, and its codes lie one behind
the other. If their number is no multiple of four, the codes of all taps are copied to a local array first.

The last tile and the last block of features may overlap the ones before them. What they compute twice is the same.
"""

import math
from collections.abc import Callable

import numpy as np

from qjax.export.emit.c.blocks import Block, loop_head, nested
from qjax.export.emit.c.index import Index, Indices, flat
from qjax.export.emit.c.loops import Layer
from qjax.export.emit.c.text import STORED, stripped
from qjax.export.emit.c.values import Buffer, Register, Value
from qjax.export.emit.c.vector_codes import Codes, codes_of
from qjax.export.emit.c.windows import MOST_LOCAL, Window, inside, reach
from qjax.export.emit.requantizations import Finish

FEATURES = 16
"""Of a block."""
_QUAD = 4
"""Codes that one step adds, and sums side by side where registers are few."""
_MOST_SUMS = 8
"""Sums side by side where there are 32 registers of 64 bytes: a step waits for the one before it on the same sum."""
_POINTER = 8


def fits(window: Window) -> bool:
    """Whether a product has a form here."""
    features, *taps, per_group = window.kernel.shape
    low, high = int(window.kernel.min(initial=0)), int(window.kernel.max(initial=0))
    plain = (
        window.x.dtype in ("int8", "uint8")
        and low >= -128
        and high <= 127
        and window.out_axes == tuple(range(len(window.out_axes)))
        and reach(window) < 2**31
    )
    pointers = _POINTER * _MOST_SUMS * (math.prod(taps) + _QUAD)
    if not plain or pointers > MOST_LOCAL:
        return False
    if window.groups == 1:
        return per_group % _QUAD == 0 or _MOST_SUMS * (math.prod(taps) * per_group + _QUAD) <= MOST_LOCAL
    return window.groups == features == window.x.shape[-1] and features >= FEATURES


def store(
    layer: Layer, target: Buffer, window: Window, epilogue: Callable[[Register], Value], finish: Finish | None
) -> None:
    """The nest of loops. epilogue: from the sums to the codes, where `finish` is None or has no form in vectors."""
    nest = _Nest(layer, target, window, epilogue, codes_of(finish, window.kernel.shape[0], target.dtype))
    if window.groups > 1:
        nest.by_channel()
    else:
        nest.by_product()


def _plus(name: str, more: int) -> str:
    return f"({name} + {more})" if more else name


class _Nest:
    def __init__(
        self,
        layer: Layer,
        target: Buffer,
        window: Window,
        epilogue: Callable[[Register], Value],
        codes: Codes | None,
    ) -> None:
        self.layer, self.target, self.window, self.epilogue, self.codes = layer, target, window, epilogue, codes
        layer.source.helpers.add("vectors")
        layer.reads_elsewhere(window.x)
        layer.writes.append(("vectors",))
        self.features, *self.taps, self.per_group = window.kernel.shape
        self.sizes = [target.shape[axis] for axis in window.out_axes[:-1]]
        self.positions = math.prod(self.sizes)
        self.suffix = "u8" if window.x.dtype == "uint8" else "i8"
        self.kind = STORED[window.x.dtype]
        count = max(1, -(-self.features // FEATURES))
        last = max(0, self.features - FEATURES)
        self.starts = [min(block * FEATURES, last) for block in range(count)]

    # ------------------------------------------------------------------ products

    def by_product(self) -> None:
        """Features share their codes."""
        # as many sums as there are registers for
        wide, narrow = (self._product(*self._tile(sums)) for sums in (_MOST_SUMS, _QUAD))
        both = ["#if QJAX_SUMS >= 8", *wide, "#else", *narrow, "#endif"]
        self.layer.root.add(*(narrow if wide == narrow else both))

    def _tile(self, sums: int) -> tuple[int, int]:
        """How many positions and blocks of features are summed side by side, given how many sums there may be."""
        blocks = len(self.starts)
        if self.positions < _QUAD:
            return 1, min(sums, blocks)
        if blocks > 1 or self.positions < sums:
            return _QUAD, min(sums // _QUAD, blocks)
        return sums, 1

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
        sums = [(f"sums{p * together + b}", p, b) for p in range(own) for b in range(together)]
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
            first = self._least(counter, turns, together, len(self.starts) - together)
            body = [f"const int32_t block = {first};", *body]
        return self._tiled(own, [*self._rows(own, copies, taps, each), *nested([loop_head(counter, turns)], body)])

    # ------------------------------------------------------------------ channels

    def by_channel(self) -> None:
        """A depthwise convolution: every channel has its own codes."""
        taps = math.prod(self.taps)
        kernel = self.window.kernel.reshape(self.features, taps)
        kernel = np.pad(kernel, ((0, 0), (0, -taps % _QUAD)))
        steps = kernel.shape[1] // _QUAD
        name = self._blocks(kernel)
        rows = ", ".join(f"rows[4 * t + {i}] + start" for i in range(_QUAD))
        inner = [
            f"const int32_t start = {self._least('block', len(self.starts), FEATURES, self.starts[-1])};",
            f"const int8_t *const w = {name} + block * {steps * 64};",
            f"sums16 sums0 = {self._start('block')};",
            *nested(
                [loop_head("t", steps)],
                [f"sums0 = sums16_rows_{self.suffix}(sums0, {rows}, w + t * 64);"],
            ),
            *self._written("sums0", "first", "block"),
        ]
        lines = [
            *self._rows(1, False, taps, self.features, whole=True),
            *nested([loop_head("block", len(self.starts))], inner),
        ]
        self.layer.root.add(*self._tiled(1, lines))

    # ------------------------------------------------------------------ parts

    def _table(self, role: str, array: np.ndarray, *, weights: bool = False) -> str:
        return self.layer.source.table(f"{self.layer.prefix}_{role}", array, weights=weights)

    def _blocked(self, vector: np.ndarray) -> np.ndarray:
        """A number per feature, block by block; 0 for features that there are not."""
        padded = np.pad(vector, (0, max(0, FEATURES - self.features)))
        return np.concatenate([padded[start : start + FEATURES] for start in self.starts])

    def _blocks(self, kernel: np.ndarray) -> str:
        """The table of weights (features, codes), as (blocks, codes / 4, 16, 4)."""
        padded = np.pad(kernel, ((0, max(0, FEATURES - self.features)), (0, 0)))
        blocks = np.stack([padded[start : start + FEATURES] for start in self.starts])
        laid = blocks.reshape(len(self.starts), FEATURES, -1, _QUAD).transpose(0, 2, 1, 3)
        return self._table("kernel", np.ascontiguousarray(laid).astype(np.int8), weights=True)

    def _start(self, block: str) -> str:
        sums = self.window.kernel.reshape(self.features, -1).sum(axis=1, dtype=np.int64)
        flip = 128 if self.suffix == "u8" else -128
        name = self._table("start", self._blocked((flip * sums).astype(np.int32)))
        return f"sums16_start_{self.suffix}({name} + {block} * {FEATURES})"

    def _least(self, counter: str, count: int, step: int, last: int) -> str:
        """counter * step, at most `last`."""
        plain = f"{counter} * {step}"
        if (count - 1) * step == last:
            return plain
        return f"{counter} < {count - 1} ? {plain} : {last}"

    def _rows(self, own: int, copies: bool, taps: int, each: int, *, whole: bool = False) -> list[str]:
        """`rows`: where the codes of every tap and position of the tile are. whole: taps in fours, of all channels."""
        block = Block(self.layer.root, inner=True)
        outer = self._outer("m", block)
        kind = f"const {self.kind} *"
        if copies:
            self.layer.local(own * (each + _POINTER))
            lines = [f"{self.kind} patch[{own}][{each}];", f"{kind}rows[{own}];"]
            count = math.prod(self.taps) * self.per_group
            body = [*self._copied(outer), *(f"patch[p][{rest}] = 0;" for rest in range(count, each))]
            body.append("rows[p] = patch[p];")
        else:
            filled = taps + (-taps % _QUAD if whole else 0)
            self.layer.local(own * filled * _POINTER)
            lines = [f"{kind}rows[{own * filled}];"]
            heads, tap = self._taps(self.taps)
            pointer = flat(tap, tuple(self.taps)) * own
            text = f"{pointer} + p" if pointer.terms else "p"
            body = nested(heads, [f"rows[{text}] = {self._source(outer, tap)};"])
            body += [f"rows[{at}] = {self._padding()};" for at in range(taps, filled)]
        m = ["const int32_t m = first + p;"] if self.positions > 1 else []
        return [*lines, *nested([loop_head("p", own)], [*m, *block.lines, *body])]

    def _copied(self, outer: list[Index]) -> list[str]:
        """The codes of all taps one behind the other. Those of a row of the window lie so, if all are in the input."""
        heads, tap = self._taps(self.taps)
        place = flat((*tap, Index()), (*self.taps, self.per_group))
        one = [
            f"const {self.kind} *const source = {self._source(outer, tap)};",
            *nested([loop_head("i", self.per_group)], [f"patch[p][{place} + i] = source[i];"]),
        ]
        if not self.taps or self.taps[-1] == 1 or self.window.dilation[-1] != 1:
            return nested(heads, one)
        *before, last = self.taps
        start, end = (inside(self.window, outer, (*tap[:-1], Index({}, k))) for k in (0, last - 1))
        tests = list(dict.fromkeys([*start[0], *end[0]]))
        first = flat((*tap[:-1], Index(), Index()), (*self.taps, self.per_group))
        copy = f"memcpy(patch[p] + {first}, {self.window.x.name} + {start[1]}, {last * self.per_group});"
        if not tests:
            return nested(heads[: len(heads) - 1], [copy])
        single = nested([loop_head(f"k{len(before)}", last)], one)
        choice = [f"if ({' && '.join(tests)}) {{", f"    {copy}", "} else {", *(f"    {x}" for x in single), "}"]
        return nested(heads[: len(heads) - 1], choice)

    def _taps(self, sizes: list[int]) -> tuple[list[str], Indices]:
        """Loops over a window, and the indices in it."""
        heads = [loop_head(f"k{axis}", size) for axis, size in enumerate(sizes) if size > 1]
        return heads, tuple(Index.variable(f"k{axis}", size) for axis, size in enumerate(sizes))

    def _source(self, outer: list[Index], tap: Indices) -> str:
        """Where the channels are that a tap meets."""
        tests, start = inside(self.window, outer, tap)
        there = f"{self.window.x.name} + {start}"
        return f"{' && '.join(tests)} ? {there} : {self._padding()}" if tests else there

    def _padding(self) -> str:
        window = self.window
        return self._table("padding", np.full(window.x.shape[-1], window.zero_point, np.dtype(window.x.dtype)))

    def _outer(self, m: str, block: Block) -> list[Index]:
        """The position m as indices of the result."""
        found: list[Index] = []
        below = self.positions
        for axis, size in enumerate(self.sizes):
            below //= max(size, 1)
            if size == 1:
                found.append(Index())
                continue
            text = m if below == 1 else f"{m} / {below}"
            if any(other > 1 for other in self.sizes[:axis]):
                text = f"({text}) % {size}" if below > 1 else f"{text} % {size}"
            name = block.fresh(f"at{axis}")
            block.add(f"const int32_t {name} = {text};")
            found.append(Index.variable(name, size))
        return found

    def _written(self, sums: str, place: str, block: str) -> list[str]:
        """From sums to codes in memory. place: the position. block: of features."""
        first = self._least(block, len(self.starts), FEATURES, self.starts[-1])
        first = "0" if len(self.starts) == 1 else f"({first})"
        out = f"{self.target.name} + {first}"
        if self.positions > 1:
            out = f"{self.target.name} + {place} * {self.features} + {first}"
        if self.codes is None:
            return self._scalar(sums, place, first)

        def vector(role: str, values: np.ndarray) -> str:
            return f"{self._table(role, self._blocked(values))} + {block} * {FEATURES}"

        made = self.codes.text(f"sums16_numbers({sums})", vector)
        suffix = "u8" if self.target.dtype == "uint8" else "i8"
        if self.features >= FEATURES:
            return [f"numbers16_{suffix}({made}, {out});"]
        kind = STORED[self.target.dtype]
        return [
            "{",
            f"    {kind} few[{FEATURES}];",
            f"    numbers16_{suffix}({made}, few);",
            f"    memcpy({out}, few, {self.features});",
            "}",
        ]

    def _scalar(self, sums: str, place: str, first: str) -> list[str]:
        """One sum after the other, by the traced epilogue."""
        layer, target = self.layer, self.target
        layer.local(4 * FEATURES)
        block = Block(layer.root, inner=True)
        block.add("int32_t acc[16];", f"numbers16_store(sums16_numbers({sums}), acc);")
        if self.positions > 1:
            block.add(f"const int32_t m = {place};")
        outer = self._outer("m", block)
        last = Block(block)
        c = Index.variable("c", self.features)
        at: Indices = (*outer, c)
        total = Register(target.shape, "int32", "acc[i]", at, reach(self.window))
        text, _ = layer.expression(last, self.epilogue(total), at, root=True)
        body = [f"const int32_t c = {first} + i;"] if self.features > 1 else []
        body += [*last.lines, f"{target.name}[{flat(at, target.shape)}] = {stripped(text)};"]
        return [
            "{",
            *(f"    {line}" for line in [*block.lines, *nested([loop_head("i", min(FEATURES, self.features))], body)]),
            "}",
        ]

    def _tiled(self, own: int, lines: list[str]) -> list[str]:
        """A loop over tiles of so many positions."""
        turns = -(-self.positions // own)
        if self.positions == 1:
            return nested(["{"], lines)
        first = f"const int32_t first = {self._least('tile', turns, own, self.positions - own)};"
        return nested([loop_head("tile", turns)], [first, *lines])
