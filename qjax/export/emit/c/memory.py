"""The memory of a C program: which tensors share it, how long it is needed, and where it is.

A tensor is read and written through an `Access`: a piece of some memory that starts at an offset. A reshape, and a
slice of whole rows, is the same memory read from another offset and costs nothing. In a loop the offset of an access
grows with every iteration. Memory is a buffer of the caller (an input, an output) or a block of the arena.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from qjax.export.emit.c import arena
from qjax.export.emit.c.loops import Layer
from qjax.graph.ir import Node


@dataclasses.dataclass(frozen=True)
class Access:
    """A tensor in memory. offset: of its first element. turn: by how many elements the offset grows per iteration."""

    memory: str
    offset: int = 0
    turn: int = 0

    def moved(self, offset: int) -> "Access":
        """The same tensor with a larger offset."""
        return dataclasses.replace(self, offset=self.offset + offset)


@dataclasses.dataclass(frozen=True)
class Step:
    """One call. node: None for a copy; note: the purpose of a copy."""

    name: str
    node: Node | None
    layer: Layer
    inputs: tuple[Access, ...]
    output: Access
    in_place: tuple[int, ...] = ()
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Turns:
    """The steps from `first` up to, but not including, `last` run `count` times."""

    first: int
    last: int
    count: int


@dataclasses.dataclass(frozen=True)
class Place:
    """Where memory is: "input" or "output" by index, or "arena" by offset in bytes."""

    kind: str
    position: int


@dataclasses.dataclass(frozen=True)
class Memory:
    """elements, dtype: of its content. held: whether iterations of a loop leave something in it for others."""

    elements: int
    dtype: str
    held: bool = False

    @property
    def size(self) -> int:
        """The size in bytes."""
        return self.elements * np.dtype(self.dtype).itemsize


class Memories:
    """All memory of a program, by name. Memory that an operation overwrites with its result becomes that result's."""

    def __init__(self) -> None:
        self.of: dict[str, Memory] = {}
        self.fixed: dict[str, Place] = {}
        self._root: dict[str, str] = {}

    def add(self, name: str, elements: int, dtype: str, *, held: bool = False, place: Place | None = None) -> str:
        """Add memory; place: that of a buffer of the caller."""
        assert name not in self.of
        self.of[name] = Memory(elements, dtype, held)
        self._root[name] = name
        if place is not None:
            self.fixed[name] = place
        return name

    def root(self, name: str) -> str:
        """The memory that represents all others with the same bytes."""
        while self._root[name] != name:
            name = self._root[name]
        return name

    def is_whole(self, access: Access, elements: int) -> bool:
        """Whether a tensor of that many elements fills all of its memory."""
        return access == Access(access.memory) and self.of[access.memory].elements == elements

    def share(self, steps: Sequence[Step], loops: Sequence[Turns]) -> None:
        """Let elementwise operations overwrite an input that is read for the last time."""
        first = _first_uses(steps)
        last: dict[str, int] = {}
        for time, step in enumerate(steps):
            last |= dict.fromkeys((access.memory for access in step.inputs), time)
        for time, step in enumerate(steps):
            loop = next((loop for loop in loops if loop.first <= time < loop.last), None)
            out = self.root(step.output.memory)
            if step.node is None or not self._free(step.output, out, loop, first):
                continue
            for position in step.in_place:
                access = step.inputs[position]
                root = self.root(access.memory)
                whole = self.of[step.output.memory].elements
                # an operand that is read twice is safe too: both reads come before the write
                if self.is_whole(access, whole) and self._free(access, root, loop, first) and last[root] <= time:
                    self._root[out] = root
                    last[root] = max(last[root], last.get(out, time))
                    break

    def _free(self, access: Access, root: str, loop: Turns | None, first: dict[str, int]) -> bool:
        """Whether an operation may overwrite the memory: neither a buffer of the caller nor shared by iterations."""
        if access != Access(access.memory) or self.of[access.memory].held or self.of[root].held or root in self.fixed:
            return False
        return loop is None or loop.first <= first[root]

    def placed(self, steps: Sequence[Step], loops: Sequence[Turns]) -> tuple[dict[str, Place], arena.Plan]:
        """The places of all memory, and of scratch memory as "function/name"."""
        lives: dict[str, list[int]] = {}
        for time, step in enumerate(steps):
            for access in (*step.inputs, step.output):
                lives.setdefault(self.root(access.memory), []).append(time)
        for loop in loops:
            for name, times in lives.items():
                inside = any(loop.first <= time < loop.last for time in times)
                # needed by every iteration, or written by all, so it is alive as long as the loop runs
                if inside and (self.of[name].held or times[0] < loop.first):
                    times += [loop.first, loop.last - 1]
        free = {name: times for name, times in lives.items() if name not in self.fixed}
        blocks = [
            _block(name, self.of[name].size, min(times), max(times), self.of[name].dtype)
            for name, times in free.items()
        ]
        for time, step in enumerate(steps):
            for buffer in step.layer.scratch:
                size = math.prod(buffer.shape) * np.dtype(buffer.dtype).itemsize
                blocks.append(_block(f"{step.name}/{buffer.name}", size, time, time, buffer.dtype))
        plan = arena.plan(blocks)
        places = {name: Place("arena", offset) for name, offset in plan.offsets.items()}
        for name in self.of:
            root = self.root(name)
            if root in self.fixed:
                places[name] = self.fixed[root]
            elif root in places:
                places[name] = places[root]
        return places, plan


def _block(name: str, size: int, first: int, last: int, dtype: str) -> arena.Block:
    return arena.Block(name, size, first, last, np.dtype(dtype).itemsize, dtype == "float32")


def _first_uses(steps: Sequence[Step]) -> dict[str, int]:
    first: dict[str, int] = {}
    for time, step in enumerate(steps):
        for access in (*step.inputs, step.output):
            first.setdefault(access.memory, time)
    return first


def in_order(accesses: Sequence[Access]) -> Access | None:
    """Several accesses as one whose offset grows from each to the next; None if they are not evenly spaced."""
    first, second = accesses[:2]
    turn = second.offset - first.offset
    expected = [Access(first.memory, first.offset + turn * index) for index in range(len(accesses))]
    return dataclasses.replace(first, turn=turn) if list(accesses) == expected else None
