"""A graph as a C program: its functions in order, its loops, and the memory of every tensor."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from qjax import ops
from qjax.export.emit.c import arena
from qjax.export.emit.c.blocks import Source
from qjax.export.emit.c.layers import Lowered, lower, lower_stack
from qjax.export.emit.c.loops import Layer
from qjax.export.emit.c.memory import Access, Memories, Place, Step, Turns, in_order
from qjax.export.emit.c.step_products import products_in_steps
from qjax.export.emit.c.text import identifier
from qjax.export.emit.c.values import Buffer, of_array
from qjax.export.ieee import check_islands
from qjax.graph import kernels
from qjax.graph.batch_shapes import shapes_at
from qjax.graph.ir import Graph, Node
from qjax.graph.recompute import check_computed
from qjax.ops import Op
from qjax.run.find_loops import Carried, Inside, Repeat, read_outside, repeats, varies


@dataclasses.dataclass(frozen=True)
class Program:
    """The content of the file.

    shapes: of every tensor, for the known batch. places: of memory, and of scratch memory as "function/name". dtypes:
    of memory.
    """

    graph: Graph
    batch: int
    shapes: Mapping[str, tuple[int, ...]]
    source: Source
    steps: tuple[Step, ...]
    loops: tuple[Turns, ...]
    places: Mapping[str, Place]
    dtypes: Mapping[str, str]
    plan: arena.Plan

    @property
    def stack(self) -> int:
        """The most bytes of local arrays that are on the stack at the same time."""
        return max((step.layer.local_bytes for step in self.steps), default=0)


def build(graph: Graph, batch: int, source: Source, prefix: str = "") -> Program:
    """Write every node as C and plan the memory.

    prefix: of every function and table, so that several models fit into one file.

    Raises:
      ValueError: a batch below 1, or a node that has no form in C or no certain bits (see `export.ieee`).
      GraphError: the graph is not finished.
    """
    if type(batch) is not int or batch < 1:
        raise ValueError(f"C: expected a batch of at least 1, a whole number such as batch=1, got {batch!r}.")
    check_islands(check_computed(graph), "C")
    graph = products_in_steps(graph)
    builder = _Builder(graph, batch, source, prefix)
    loops, at = repeats(graph, kernels.prepare(graph)), 0
    needed = read_outside(graph, loops, graph.outputs)
    for loop in loops:
        for node in graph.nodes[at : loop.first]:
            builder.node(node)
        body = _Body(builder, loop, needed)
        if body.fits:
            body.write()
        else:
            for node in graph.nodes[loop.first : loop.end]:
                builder.node(node)
        at = loop.end
    for node in graph.nodes[at:]:
        builder.node(node)
    builder.outputs()
    memories = builder.memories
    memories.share(builder.steps, builder.loops)
    places, plan = memories.placed(builder.steps, builder.loops)
    dtypes = {name: memory.dtype for name, memory in memories.of.items()}
    return Program(
        graph, batch, builder.shapes, source, tuple(builder.steps), tuple(builder.loops), places, dtypes, plan
    )


class _Builder:
    """The steps so far, and where every tensor is."""

    def __init__(self, graph: Graph, batch: int, source: Source, prefix: str) -> None:
        self.graph, self.source, self.prefix = graph, source, prefix
        self.shapes = shapes_at(graph, batch)
        self.memories = Memories()
        self.steps: list[Step] = []
        self.loops: list[Turns] = []
        self.env: dict[str, Access] = {}
        for index, name in enumerate(graph.inputs):
            self.env[name] = Access(self.memory(name, place=Place("input", index)))

    def elements(self, tensor: str) -> int:
        return math.prod(self.shapes[tensor])

    def memory(self, tensor: str, *, place: Place | None = None) -> str:
        """New memory for a tensor, under its name."""
        return self.memories.add(tensor, self.elements(tensor), self.graph.tensors[tensor].dtype, place=place)

    def data(self, node: Node) -> list[str]:
        """The inputs of a node that are not constant tables."""
        return [name for name in node.inputs if self.graph.tensors[name].value is None]

    def apart(self) -> Source:
        """A `Source` for texts that are not written to a file."""
        return Source(simd=self.source.simd, threads=self.source.threads)

    def lowered(self, node: Node, source: Source | None = None, *, once: bool = False) -> tuple[str, Lowered]:
        """A node's function and its name; source: receives the file's texts, by default that of the file.

        once: as in `layers.lower`.
        """
        source = self.source if source is None else source
        name = source.names.fresh(identifier(self.prefix + node.name))
        return name, lower(self.graph, node, self.shapes, source, name, once=once)

    def node(self, node: Node) -> None:
        """A node that runs once."""
        names = self.data(node)
        inputs = tuple(self.env[name] for name in names)
        stack = self.stack(node, names, inputs)
        if stack is None:
            name, lowered = self.lowered(node, once=True)
        else:
            inputs = (dataclasses.replace(stack, turn=0),)
            name = self.source.names.fresh(identifier(self.prefix + node.name))
            lowered = lower_stack(self.graph, node, len(names), self.shapes, self.source, name)
        self.env[node.output] = self.step(name, node, lowered, inputs)

    def step(self, name: str, node: Node, lowered: Lowered, inputs: tuple[Access, ...]) -> Access:
        """The access to a node's result; adds a step, unless the result is a piece of an input."""
        if lowered.layer is None:
            assert lowered.alias is not None
            return inputs[lowered.alias].moved(lowered.offset)
        output = Access(self.memory(node.output))
        self.steps.append(Step(name, node, lowered.layer, inputs, output, lowered.in_place))
        return output

    def stack(self, node: Node, names: Sequence[str], inputs: Sequence[Access]) -> Access | None:
        """The inputs of a node as one array, if they are stacked in memory and the op accepts that."""
        if type(ops.get(node.op)).of_stack is Op.of_stack or len(names) != len(node.inputs) or len(names) < 2:
            return None
        found = in_order(inputs)
        equal = len({self.shapes[name] for name in names}) == 1
        return found if found is not None and equal and found.turn == self.elements(names[0]) else None

    def copy(self, tensor: str, source: Access | None, target: Access, note: str) -> None:
        """A copy of a tensor; source: None for a constant."""
        function = self.source.names.fresh(identifier(f"{self.prefix}copy_{tensor}"))
        shape, dtype = self.shapes[tensor], self.graph.tensors[tensor].dtype
        layer = Layer(self.source, function, function, "", ["in", "out"])
        if source is None:
            value = self.graph.tensors[tensor].value
            layer.store(Buffer(shape, dtype, "out"), of_array(np.broadcast_to(np.asarray(value), shape), "initial"))
        else:
            layer.store(Buffer(shape, dtype, "out"), Buffer(shape, dtype, "in"))
        self.steps.append(Step(function, None, layer, () if source is None else (source,), target, note=note))

    def outputs(self) -> None:
        """Gives every output a buffer of the caller: its own memory, or a copy if that is an input or already taken."""
        for index, name in enumerate(self.graph.outputs):
            access, place = self.env[name], Place("output", index)
            whole = self.memories.is_whole(access, self.elements(name))
            if whole and access.memory not in self.memories.fixed:
                self.memories.fixed[access.memory] = place
                continue
            dtype = self.graph.tensors[name].dtype
            target = self.memories.add(f"{index}:{name}", self.elements(name), dtype, place=place)
            self.copy(name, access, Access(target), "A copy into an output.")


class _Body:
    """A loop of the graph as a loop in C, if its iterations differ only in what they read and write.

    fits: whether this is so. All iterations have the same constants; what an iteration reads from outside is in one
    memory at equal distances; and no state is a piece of another state.
    """

    def __init__(self, builder: _Builder, loop: Repeat, needed: set[str]) -> None:
        self.builder, self.loop = builder, loop
        self.nodes = [loop.nodes(builder.graph, position) for position in range(loop.period)]
        self.outputs = [[node.output for node in nodes] for nodes in self.nodes]
        self.kept = [b for b, names in enumerate(self.outputs) if any(name in needed for name in names)]
        self.whole = {b for b in self.kept if any(name in needed for name in self.outputs[b][:-1])}
        self.carried = sorted(
            {(read.position, read.initial) for reads in loop.reads for read in reads if isinstance(read, Carried)}
        )
        self.writes: dict[int, Access] = {}
        """Where a position of the body writes, if not into its own memory."""
        self.states = {key: Access(f"state {key[0]} {key[1]}") for key in self.carried}
        """The memory of a state when an iteration reads it."""
        self.copied: list[tuple[int, str]] = []
        """The states that are copied at the end of an iteration."""
        self.own: dict[str, int] = {}
        """Memory that the body writes -> the position in the body that writes it."""
        self.fits = self._equal_constants() and self._planned()

    def _equal_constants(self) -> bool:
        for nodes in self.nodes:
            first, *others = ([*kernels.constants_of(self.builder.graph, node).items()] for node in nodes)
            for other in others:
                for (role, a), (name, b) in zip(first, other, strict=True):
                    if role != name or (a is not b and not np.array_equal(np.asarray(a), np.asarray(b))):
                        return False
        return True

    def _planned(self) -> bool:
        """Decides where every position writes, without writing anything into the file."""
        builder = self.builder
        local: list[Access] = []
        real: list[int] = []
        reads: list[tuple[int, Access]] = []
        for position, nodes in enumerate(self.nodes):
            inputs = self._inputs(position, local)
            if inputs is None:
                return False
            _, lowered = builder.lowered(nodes[0], builder.apart())
            if lowered.layer is not None:
                if varies(nodes):
                    return False
                local.append(Access(nodes[0].output))
                self.own[nodes[0].output] = position
                real.append(position)
                # an elementwise operation reads an element right before it writes that element
                reads += [
                    (position - 1 if index in lowered.in_place else position, access)
                    for index, access in enumerate(inputs)
                ]
                continue
            assert lowered.alias is not None
            moved = self._move_access(nodes, lowered, inputs[lowered.alias])
            if moved is None:
                return False
            local.append(moved)
        states = {access.memory for access in self.states.values()}
        stacks: set[int] = set()
        for b in self.kept:
            memory = local[b].memory
            if memory in states:
                return False
            if memory in self.own and b in self.whole:
                stacks.add(self.own[memory])
        for key in self.carried:
            access = local[key[0]]
            if access.memory in states:
                if access != self.states[key]:
                    return False
                continue
            position = self.own.get(access.memory)
            elements = builder.elements(self.nodes[key[0]][0].output)
            plain = position is not None and access == Access(access.memory) and position not in self.writes
            plain = plain and elements == builder.elements(access.memory)
            if plain and position is not None and position in stacks:
                # the stack has one more row, in front, for the initial state
                self.states[key] = Access(access.memory, 0, elements)
                self.writes[position] = Access(access.memory, elements, elements)
            elif (
                plain
                and position is not None
                and all(at < position for at, read in reads if read.memory == self.states[key].memory)
            ):
                # nothing reads the old state any more
                self.writes[position] = self.states[key]
            else:
                self.copied.append(key)
        for position in stacks - self.writes.keys():
            name = self.nodes[position][0].output
            self.writes[position] = Access(name, 0, builder.elements(name))
        return True

    def _move_access(self, nodes: Sequence[Node], lowered: Lowered, access: Access) -> Access | None:
        """A piece of an input, which moves with every iteration if attributes require it."""
        if not varies(nodes):
            return access.moved(lowered.offset)
        if access.turn:
            return None
        found = [lowered, *(self.builder.lowered(node, self.builder.apart())[1] for node in nodes[1:])]
        if any(one.layer is not None for one in found):
            return None
        return in_order([access.moved(one.offset) for one in found])

    def _inputs(self, position: int, local: Sequence[Access]) -> tuple[Access, ...] | None:
        """The accesses that a position reads; None if those of the iterations are not evenly spaced."""
        tensors = self.builder.graph.tensors
        found: list[Access] = []
        for read in self.loop.reads[position]:
            if isinstance(read, Inside):
                found.append(local[read.position])
            elif isinstance(read, Carried):
                found.append(self.states[read.position, read.initial])
            elif any(tensors[name].value is not None for name in read.names):
                if not read.same:
                    return None
            elif read.same:
                found.append(self.builder.env[read.names[0]])
            else:
                access = in_order([self.builder.env[name] for name in read.names])
                if access is None:
                    return None
                found.append(access)
        return tuple(found)

    def write(self) -> None:
        """Writes the steps, the states before the first iteration, and the places from which later nodes read."""
        builder, count = self.builder, self.loop.count
        held = {access.memory for access in self.writes.values() if access.turn}
        for key, access in self.states.items():
            if access.memory not in held:
                self._state(key[1], access.memory)
        for position, nodes in enumerate(self.nodes):
            name = nodes[0].output
            if name in held:
                slots = count + (1 if self.writes[position].offset else 0)
                dtype = builder.graph.tensors[name].dtype
                builder.memories.add(name, slots * builder.elements(name), dtype, held=True)
        for key, access in self.states.items():
            source = builder.env.get(key[1])
            target = dataclasses.replace(access, turn=0)
            builder.copy(key[1], source, target, f"The state before the first of {count} iterations.")
        first = len(builder.steps)
        local: list[Access] = []
        for position, nodes in enumerate(self.nodes):
            inputs = self._inputs(position, local)
            assert inputs is not None
            node = nodes[0]
            if position in self.own.values():
                name, lowered = builder.lowered(node)
                assert lowered.layer is not None
                output = self.writes.get(position)
                if output is None:
                    output = Access(builder.memory(node.output))
                builder.steps.append(Step(name, node, lowered.layer, inputs, output, lowered.in_place))
                local.append(output)
                continue
            _, lowered = builder.lowered(node, builder.apart())
            assert lowered.alias is not None
            moved = self._move_access(nodes, lowered, inputs[lowered.alias])
            assert moved is not None
            local.append(moved)
        for key in self.copied:
            target = self.states[key]
            builder.copy(self.outputs[key[0]][0], local[key[0]], target, "The state for the next iteration.")
        if len(builder.steps) > first:
            builder.loops.append(Turns(first, len(builder.steps), count))
        for b in self.kept:
            for index, name in enumerate(self.outputs[b]):
                builder.env[name] = dataclasses.replace(
                    local[b], offset=local[b].offset + index * local[b].turn, turn=0
                )

    def _state(self, initial: str, memory: str) -> None:
        builder = self.builder
        dtype = builder.graph.tensors[initial].dtype
        builder.memories.add(memory, builder.elements(initial), dtype, held=True)
