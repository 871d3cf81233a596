"""A graph as a C program: its functions in order, and the memory of every tensor.

Tensors that share memory form a group. A reshape shares the memory of its input. An elementwise operation overwrites an
input that is not read later. A group is a buffer of the caller (an input, an output) or a block of the arena.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from qjax.export.check import check_integer
from qjax.export.emit.c import arena
from qjax.export.emit.c.blocks import Source
from qjax.export.emit.c.layers import lower
from qjax.export.emit.c.loops import Layer
from qjax.export.emit.c.text import identifier
from qjax.export.emit.c.values import Buffer
from qjax.export.ieee import check_islands
from qjax.export.ir import Graph, Node
from qjax.names import Names


@dataclasses.dataclass(frozen=True)
class Step:
    """One call. node: None for a copy into an output."""

    name: str
    node: Node | None
    layer: Layer
    inputs: tuple[str, ...]
    output: str


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a tensor lives: "input" or "output" by index, or "arena" by offset."""

    kind: str
    position: int


@dataclasses.dataclass(frozen=True)
class Program:
    """What the file says.

    shapes: of every tensor, the batch being known. places: of tensors, and of scratch memory as "function/name".
    """

    graph: Graph
    batch: int
    shapes: dict[str, tuple[int, ...]]
    source: Source
    steps: tuple[Step, ...]
    places: dict[str, Place]
    plan: arena.Plan

    @property
    def stack(self) -> int:
        """Bytes of local arrays that are on the stack at once."""
        return max((step.layer.local_bytes for step in self.steps), default=0)


def build(graph: Graph, batch: int, source: Source, prefix: str = "") -> Program:
    """Lower every node and plan the memory.

    prefix: of every function and table, so that several models fit into one file.

    Raises:
      ValueError: a batch below 1, or a node that has no form in C or no certain bits (see `export.ieee`).
      GraphError: the graph is not finished.
    """
    if type(batch) is not int or batch < 1:
        raise ValueError(f"C: expected a batch of at least 1, a whole number, got {batch!r}. Write batch=1, say.")
    check_islands(check_integer(graph), "C")
    shapes = {
        name: tuple(batch if size is None else size for size in tensor.shape) for name, tensor in graph.tensors.items()
    }
    groups = _Groups(graph)
    steps: list[Step] = []
    in_place: dict[str, tuple[int, ...]] = {}
    for node in graph.nodes:
        name = source.names.fresh(identifier(prefix + node.name))
        inputs = tuple(tensor for tensor in node.inputs if graph.tensors[tensor].value is None)
        lowered = lower(graph, node, shapes, source, name)
        if lowered.layer is None:
            assert lowered.alias is not None
            groups.join(inputs[lowered.alias], node.output)
            continue
        steps.append(Step(name, node, lowered.layer, inputs, node.output))
        in_place[node.output] = lowered.in_place
    copies = _copies(graph, groups, shapes, source, prefix)
    steps += copies
    _share(graph, groups, steps, in_place, {copy.output for copy in copies})
    places, plan = _placed(graph, groups, steps, shapes)
    return Program(graph, batch, shapes, source, tuple(steps), places, plan)


class _Groups:
    """Which tensors share memory; the root of a group is its first tensor, an input of the graph where it holds one."""

    def __init__(self, graph: Graph) -> None:
        self._root = {name: name for name in graph.tensors}

    def root(self, name: str) -> str:
        while self._root[name] != name:
            name = self._root[name]
        return name

    def join(self, earlier: str, later: str) -> None:
        self._root[self.root(later)] = self.root(earlier)


def _copies(
    graph: Graph, groups: _Groups, shapes: dict[str, tuple[int, ...]], source: Source, prefix: str
) -> list[Step]:
    """Outputs that share memory with an input or with an earlier output are copied."""
    taken = {groups.root(name) for name in graph.inputs}
    found: list[Step] = []
    for index, name in enumerate(graph.outputs):
        root = groups.root(name)
        if root not in taken:
            taken.add(root)
            continue
        function = source.names.fresh(identifier(f"{prefix}copy_{name}"))
        layer = Layer(source, function, function, "", ["in", "out"])
        dtype = graph.tensors[name].dtype
        layer.store(Buffer(shapes[name], dtype, "out"), Buffer(shapes[name], dtype, "in"))
        found.append(Step(function, None, layer, (name,), f"{index}:{name}"))
    return found


def _share(
    graph: Graph, groups: _Groups, steps: Sequence[Step], in_place: dict[str, tuple[int, ...]], copies: set[str]
) -> None:
    """Lets elementwise operations write over an input that is read for the last time."""
    fixed = {groups.root(name) for name in graph.inputs} | {groups.root(name) for name in graph.outputs}
    for index, step in enumerate(steps):
        if step.output in copies or groups.root(step.output) in fixed:
            continue
        for position in in_place.get(step.output, ()):
            root = groups.root(step.inputs[position])
            later = any(groups.root(name) == root for other in steps[index + 1 :] for name in other.inputs)
            # an operand that is read twice is safe too: both reads come before the write
            if root not in fixed and not later:
                groups.join(step.inputs[position], step.output)
                break


def _placed(
    graph: Graph, groups: _Groups, steps: Sequence[Step], shapes: dict[str, tuple[int, ...]]
) -> tuple[dict[str, Place], arena.Plan]:
    fixed: dict[str, Place] = {}
    for index, name in enumerate(graph.outputs):
        fixed.setdefault(groups.root(name), Place("output", index))
    for index, name in enumerate(graph.inputs):
        fixed[groups.root(name)] = Place("input", index)
    lives: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    dtypes: dict[str, str] = {}
    places: dict[str, Place] = {}
    for time, step in enumerate(steps):
        outputs = [] if step.node is None else [step.output]
        for name in (*step.inputs, *outputs):
            root = groups.root(name)
            if root not in fixed:
                lives.setdefault(root, []).append(time)
                sizes[root] = max(sizes.get(root, 0), _bytes(shapes[name], graph.tensors[name].dtype))
                dtypes[root] = graph.tensors[name].dtype
    blocks = [_block(name, sizes[name], min(times), max(times), dtypes[name]) for name, times in lives.items()]
    for time, step in enumerate(steps):
        for buffer in step.layer.scratch:
            size = _bytes(buffer.shape, buffer.dtype)
            blocks.append(_block(f"{step.name}/{buffer.name}", size, time, time, buffer.dtype))
    plan = arena.plan(blocks)
    for step in steps:
        for name in (*step.inputs, *([] if step.node is None else [step.output])):
            root = groups.root(name)
            places[name] = fixed.get(root) or Place("arena", plan.offsets[root])
        if step.node is None:
            places[step.output] = Place("output", int(step.output.split(":")[0]))
        for buffer in step.layer.scratch:
            name = f"{step.name}/{buffer.name}"
            places[name] = Place("arena", plan.offsets[name])
    return places, plan


def _block(name: str, size: int, first: int, last: int, dtype: str) -> arena.Block:
    return arena.Block(name, size, first, last, np.dtype(dtype).itemsize, dtype == "float32")


def _bytes(shape: tuple[int, ...], dtype: str) -> int:
    return math.prod(shape) * np.dtype(dtype).itemsize


__all__ = ["Names", "Place", "Program", "Step", "build"]
