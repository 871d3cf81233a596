"""Finds repeated stretches of a graph: the steps of a loop over time, and equal layers one after another.

The lowering unrolls loops, and a stack of layers is a sequence of nodes anyway. This module recovers the repetition
from the nodes alone: nodes `first` to `first + period * count` are `count` iterations of one body of `period` nodes.
The iterations differ only in the values of constants, in what they read from outside, and in attributes that an op
declares as `varying`. A body can therefore be compiled once, however many iterations there are.

    dot0 relu0 dot1 relu1 dot2 relu2 dot3 relu3   ->   Repeat(first=0, period=2, count=4)
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from qjax import ops
from qjax.graph.ir import REAL_DTYPE, Graph, Node
from qjax.graph.kernels import Constants, attributes

FEWEST = 4
"""The fewest iterations of a loop, because a loop takes about as long to compile as a few copies of its body."""


@dataclasses.dataclass(frozen=True)
class Inside:
    """The result of the node at `position` in the same iteration."""

    position: int


@dataclasses.dataclass(frozen=True)
class Carried:
    """The result of the node at `position` in the previous iteration; the tensor `initial` in the first one."""

    position: int
    initial: str


@dataclasses.dataclass(frozen=True)
class Outside:
    """A tensor that no node of the loop computes: its name for every iteration."""

    names: tuple[str, ...]

    @property
    def same(self) -> bool:
        """Whether all iterations read one tensor."""
        return len(set(self.names)) == 1


Read = Inside | Carried | Outside


@dataclasses.dataclass(frozen=True)
class Repeat:
    """`count` iterations of `period` nodes; the first node is number `first` of the graph.

    reads: for every node of the body, the sources of its inputs.
    """

    first: int
    period: int
    count: int
    reads: tuple[tuple[Read, ...], ...]

    @property
    def end(self) -> int:
        """The number of the first node after the loop."""
        return self.first + self.period * self.count

    def nodes(self, graph: Graph, position: int) -> list[Node]:
        """The node at a position of the body, in every iteration."""
        return list(graph.nodes[self.first + position : self.end : self.period])


def repeats(graph: Graph, constants: Constants) -> tuple[Repeat, ...]:
    """All loops, in the order of the nodes; they do not overlap. constants: see `kernels.prepare`."""
    finder = _Finder(graph, constants)
    return tuple(finder.within(0, len(graph.nodes)))


def over_iterations(graph: Graph, loops: Iterable[Repeat]) -> list[list[str]]:
    """For every node of every body: the names of the nodes that it represents."""
    return [[node.name for node in loop.nodes(graph, b)] for loop in loops for b in range(loop.period)]


def read_outside(graph: Graph, loops: Sequence[Repeat], wanted: Iterable[str]) -> set[str]:
    """The tensors that are wanted, or read by a node outside all loops, or by a loop that does not compute them."""
    names, at = set(wanted), 0
    for loop in loops:
        for node in graph.nodes[at : loop.first]:
            names.update(node.inputs)
        for read in (read for reads in loop.reads for read in reads):
            if isinstance(read, Carried):
                names.add(read.initial)
            elif isinstance(read, Outside):
                names.update(read.names)
        at = loop.end
    for node in graph.nodes[at:]:
        names.update(node.inputs)
    return names


def varies(nodes: Sequence[Node]) -> bool:
    """Whether attributes of a node differ between iterations, such as the position of a slice."""
    varying = ops.get(nodes[0].op).varying
    return any(node.attributes[key] != nodes[0].attributes[key] for key in varying for node in nodes)


class _Finder:
    """The search in one graph."""

    def __init__(self, graph: Graph, constants: Constants) -> None:
        self.nodes = graph.nodes
        known: dict[object, int] = {}
        types = [known.setdefault(_type(graph, node, constants[node.name]), len(known)) for node in graph.nodes]
        self.types = np.asarray(types, np.int64)
        self.producer = {node.output: index for index, node in enumerate(graph.nodes)}

    def within(self, low: int, high: int) -> Iterator[Repeat]:
        """The loops among the nodes from `low` to before `high`: the one that saves most, then those around it."""
        best = self._best(low, high)
        if best is not None:
            yield from self.within(low, best.first)
            yield best
            yield from self.within(best.end, high)

    def _best(self, low: int, high: int) -> Repeat | None:
        best, saved = None, 0
        for most, period, start, length in self._candidates(low, high):
            if most <= saved:
                break
            found = self._longest_loop(period, start, length)
            if found is not None and found.period * (found.count - 1) > saved:
                best, saved = found, found.period * (found.count - 1)
        return best

    def _candidates(self, low: int, high: int) -> list[tuple[int, int, int, int]]:
        """Stretches of repeating types: (nodes that a loop would save, period, start, length), most saved first."""
        found: list[tuple[int, int, int, int]] = []
        for period in range(1, (high - low) // FEWEST + 1):
            equal = self.types[low : high - period] == self.types[low + period : high]
            edges = np.flatnonzero(np.diff(np.concatenate([[False], equal, [False]])))
            for start, end in zip(edges[::2], edges[1::2], strict=True):
                length = int(end - start) + period
                if length >= FEWEST * period:
                    found.append(((length // period - 1) * period, period, low + int(start), length))
        return sorted(found, key=lambda entry: (-entry[0], entry[1]))

    def _longest_loop(self, period: int, start: int, length: int) -> Repeat | None:
        """The longest loop in a stretch of equal types; its reads depend on which node begins the body."""
        best = None
        for shift in range(min(length - FEWEST * period, period) + 1):
            count = (length - shift) // period
            if best is not None and best.count >= count:
                break
            found = self._loop(start + shift, period, count)
            if found is not None and (best is None or found.count > best.count):
                best = found
        return best

    def _loop(self, first: int, period: int, count: int) -> Repeat | None:
        """As many of the iterations as read alike; None if these are too few."""
        reads: list[list[Read]] = []
        for position in range(period):
            nodes = self.nodes[first + position : first + period * count : period]
            reads.append([])
            for index in range(len(nodes[0].inputs)):
                found, count = self._read(first, period, [node.inputs[index] for node in nodes[:count]])
                if count < FEWEST:
                    return None
                reads[-1].append(found)
            count = _count_alike(nodes[:count], reads[-1])
            if count < FEWEST:
                return None
        whole = tuple(tuple(_first(read, count) for read in entry) for entry in reads)
        return Repeat(first, period, count, whole)

    def _read(self, first: int, period: int, names: list[str]) -> tuple[Read, int]:
        """The source of one input, and the number of iterations for which that holds."""
        # Number nodes from the loop's first one; tensors from before it, or that no node computes, are outside.
        at = [self.producer.get(name, -1) - first for name in names]
        inside = _leading(m * period <= p < (m + 1) * period and p - m * period == at[0] for m, p in enumerate(at))
        carried = 0
        if at[0] < 0 <= at[1] < period:
            carried = 1 + _leading(p == m * period + at[1] for m, p in enumerate(at[1:]))
        outside = _leading(p < 0 for p in at)
        same = _leading(name == names[0] for name in names) if at[0] < 0 else 0
        count = max(inside, carried, outside, same)
        if count == inside:
            return Inside(at[0]), count
        if count == carried:
            return Carried(at[1], names[0]), count
        return Outside(tuple(names)), count


def _count_alike(nodes: Sequence[Node], reads: Sequence[Read]) -> int:
    """How many of the nodes have the first one's attributes; all of them, if others can be computed for all at once."""
    varying = ops.get(nodes[0].op).varying
    if all(isinstance(read, Outside) and read.same for read in reads):
        return len(nodes)
    facts = [{key: node.attributes[key] for key in varying if key in node.attributes} for node in nodes]
    return _leading(entry == facts[0] for entry in facts)


def _leading(tests: Iterable[bool]) -> int:
    """How many values come before the first False."""
    count = 0
    for test in tests:
        if not test:
            break
        count += 1
    return count


def _first(read: Read, count: int) -> Read:
    return Outside(read.names[:count]) if isinstance(read, Outside) else read


def _type(graph: Graph, node: Node, constants: Mapping[str, Any]) -> Any:
    """What nodes must share to be iterations of one: everything but names, positions and values."""
    tensors = [graph.tensors[name] for name in (*node.inputs, node.output)]
    if any(tensor.dtype == REAL_DTYPE for tensor in tensors):
        # Floats may be rounded differently in a body that is compiled by itself.
        return node.name
    varying = ops.get(node.op).varying
    facts = sorted((key, repr(value)) for key, value in attributes(graph, node).items() if key not in varying)
    held = sorted((role, np.shape(value), str(value.dtype)) for role, value in constants.items())
    return node.op, tuple((t.shape, t.dtype) for t in tensors), tuple(facts), tuple(held)
