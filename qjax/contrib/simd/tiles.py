"""Nests of loops over tiles: a few positions of a product's result that share every weight that is read.

The last tile may overlap the one before it, and so may the last block of features. What is computed twice has the same
result.
"""

import math
from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np

from qjax.export.emit.c import threads
from qjax.export.emit.c.blocks import Block, loop_head, nested
from qjax.export.emit.c.index import Index, Indices, flat
from qjax.export.emit.c.loops import Layer
from qjax.export.emit.c.text import STORED, stripped
from qjax.export.emit.c.values import Buffer, Register, Value
from qjax.export.emit.c.windows import Window, inside, reach

Put = Callable[[Index, str, int], list[str]]
"""(where in the patch, a pointer to codes, how many) -> lines that copy them."""


def in_bytes(window: Window) -> bool:
    """Whether codes and weights take a byte each, sums 32 bits, and the result has its channels last."""
    low, high = int(window.kernel.min(initial=0)), int(window.kernel.max(initial=0))
    return (
        window.x.dtype in ("int8", "uint8")
        and low >= -128
        and high <= 127
        and window.out_axes == tuple(range(len(window.out_axes)))
        and reach(window) < 2**31
    )


Kind = TypeVar("Kind")


class Tiles(Generic[Kind]):
    """What such nests have in common.

    positions: of the result, each of which has all features. codes: what the nest knows of its codes.
    """

    helper: str
    """The name of the helper that the nest calls."""

    def __init__(
        self, layer: Layer, target: Buffer, window: Window, epilogue: Callable[[Register], Value], codes: Kind
    ) -> None:
        self.layer, self.target, self.window, self.epilogue, self.codes = layer, target, window, epilogue, codes
        layer.source.helpers.add(self.helper)
        layer.reads_elsewhere(window.x)
        layer.writes.append((self.helper,))
        self.features, *self.taps, self.per_group = window.kernel.shape
        self.sizes = [target.shape[axis] for axis in window.out_axes[:-1]]
        self.positions = math.prod(self.sizes)
        self.suffix = "u8" if window.x.dtype == "uint8" else "i8"
        self.kind = STORED[window.x.dtype]
        self.plan()

    def plan(self) -> None:
        """Choose how the nest is split, before its first line is written."""

    def table(self, role: str, array: np.ndarray, *, weights: bool = False) -> str:
        return self.layer.source.table(f"{self.layer.prefix}_{role}", array, weights=weights)

    def least(self, counter: str, count: int, step: int, last: int) -> str:
        """counter * step, at most `last`."""
        plain = f"{counter} * {step}"
        if (count - 1) * step == last:
            return plain
        return f"{counter} < {count - 1} ? {plain} : {last}"

    def heads(self, name: str, turns: int, *, overlap: bool) -> list[str]:
        """The openings of the outermost loop. overlap: whether its last iteration repeats part of the previous one."""
        elements, products = self.positions * self.features, self.positions * self.window.kernel.size
        return threads.shared(self.layer.source, name, turns, elements, products, overlap=overlap)

    def tiled(self, own: int, lines: list[str]) -> list[str]:
        """A loop over tiles of that many positions."""
        turns = -(-self.positions // own)
        if self.positions == 1:
            return nested(["{"], lines)
        first = f"const int32_t first = {self.least('tile', turns, own, self.positions - own)};"
        return nested(self.heads("tile", turns, overlap=turns * own > self.positions), [first, *lines])

    def position(self, m: str, block: Block) -> list[Index]:
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

    def each_position(self, own: int, body: Callable[[list[Index]], list[str]]) -> list[str]:
        """A loop over the positions of a tile, by the variable `p`; body: from a position's indices to its lines."""
        block = Block(self.layer.root, inner=True)
        outer = self.position("m", block)
        m = ["const int32_t m = first + p;"] if self.positions > 1 else []
        return nested([loop_head("p", own)], [*m, *block.lines, *body(outer)])

    def tap_loops(self) -> tuple[list[str], Indices]:
        """Loops over a window, and the indices in it."""
        heads = [loop_head(f"k{axis}", size) for axis, size in enumerate(self.taps) if size > 1]
        return heads, tuple(Index.variable(f"k{axis}", size) for axis, size in enumerate(self.taps))

    def codes_under(self, outer: list[Index], tap: Indices) -> str:
        """A pointer to the channels that a tap reads."""
        tests, start = inside(self.window, outer, tap)
        there = f"{self.window.x.name} + {start}"
        return f"{' && '.join(tests)} ? {there} : {self.padding()}" if tests else there

    def padding(self) -> str:
        window = self.window
        return self.table("padding", np.full(window.x.shape[-1], window.zero_point, np.dtype(window.x.dtype)))

    def copied(self, outer: list[Index], put: Put) -> list[str]:
        """Copy the codes of all taps into consecutive memory.

        Those of one row of the window are consecutive already if all lie inside the input.
        """
        heads, tap = self.tap_loops()
        shape = (*self.taps, self.per_group)
        one = [
            f"const {self.kind} *const source = {self.codes_under(outer, tap)};",
            *put(flat((*tap, Index()), shape), "source", self.per_group),
        ]
        if not self.taps or self.taps[-1] == 1 or self.window.dilation[-1] != 1:
            return nested(heads, one)
        *before, last = self.taps
        start, end = (inside(self.window, outer, (*tap[:-1], Index({}, k))) for k in (0, last - 1))
        tests = list(dict.fromkeys([*start[0], *end[0]]))
        first = flat((*tap[:-1], Index(), Index()), shape)
        row = put(first, f"{self.window.x.name} + {start[1]}", last * self.per_group)
        if not tests:
            return nested(heads[:-1], row)
        single = nested([loop_head(f"k{len(before)}", last)], one)
        choice = [f"if ({' && '.join(tests)}) {{", *(f"    {x}" for x in row), "} else {"]
        return nested(heads[:-1], [*choice, *(f"    {x}" for x in single), "}"])

    def by_epilogue(self, sums: str, place: str, first: str, count: int) -> list[str]:
        """From `count` sums to consecutive codes in memory, by the traced epilogue.

        sums: an array. place: the position. first: the feature of the first sum.
        """
        layer, target = self.layer, self.target
        block = Block(layer.root, inner=True)
        if self.positions > 1:
            block.add(f"const int32_t m = {place};")
        outer = self.position("m", block)
        last = Block(block)
        c = Index.variable("c", self.features)
        at: Indices = (*outer, c)
        total = Register(target.shape, "int32", f"{sums}[i]", at, reach(self.window))
        text, _ = layer.expression(last, self.epilogue(total), at, root=True)
        body = [f"const int32_t c = {first} + i;"] if self.features > 1 else []
        body += [*last.lines, f"{target.name}[{flat(at, target.shape)}] = {stripped(text)};"]
        return [*block.lines, *nested([loop_head("i", count)], body)]
