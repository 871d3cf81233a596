"""Loops of a graph as ONNX's Scan, in files of style "integer": a recurrent layer is one body, whatever its length.

A body's inputs are the states and what each iteration reads of a stack. Its outputs are the next states and what later
nodes read of each iteration. Loops are those that `run.find_loops` finds, if a state goes from one iteration to the
next and all iterations have equal constants and scales.

Because the file no longer has a node for every node of the graph, its metadata contain the nodes and tensors,
compressed, and the reader compares the file that results from them with the given file.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
from jax import lax
from onnx import helper, numpy_helper

from qjax import ops
from qjax.export import document
from qjax.export.emit.onnx import nodes as functions
from qjax.export.emit.onnx import tensors
from qjax.export.emit.onnx.builder import DOMAIN
from qjax.export.emit.onnx.integer import Writer
from qjax.export.emit.onnx.views import View
from qjax.graph.ir import Graph, Node, Quantization, Tensor
from qjax.graph.kernels import attributes as attributes_of
from qjax.graph.kernels import prepare
from qjax.ops import Op
from qjax.run.find_loops import Carried, Inside, Repeat, read_outside, repeats, varies


@dataclasses.dataclass(frozen=True)
class Part:
    """One iteration's tensor in the stack of all of them."""

    stack: View
    index: int


class Rolled(Writer):
    """One model under construction, whose loops are Scan operators."""

    def __init__(self, graph: Graph, batch: int | None, *, vnni: bool, loops: Sequence[Repeat]) -> None:
        super().__init__(graph, batch, vnni=vnni)
        self.loops = loops
        self.parts: dict[str, Part] = {}
        self.needed = read_outside(graph, loops, graph.outputs)
        self.taken = set(graph.tensors)
        self.kept: set[str] = set()
        """The initializers of the file."""

    def every_node(self) -> None:
        at = 0
        for loop in self.loops:
            for node in self.graph.nodes[at : loop.first]:
                self.node(node)
            self.loop(loop)
            at = loop.end
        for node in self.graph.nodes[at:]:
            self.node(node)

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "document": document.compressed(self.graph, self.kept)}

    # ------------------------------------------------------------------ tensors

    def fresh(self, name: str) -> str:
        """A name that no tensor has so far."""
        found, count = name, 1
        while found in self.taken:
            count += 1
            found = f"{name}_{count}"
        self.taken.add(found)
        return found

    def value(self, name: str) -> View:
        part = self.parts.get(name)
        if part is not None and name not in self.views:
            index = self.fresh(f"{name}/index")
            self.initializers[index] = numpy_helper.from_array(np.asarray(part.index), index)
            self.nodes.append(helper.make_node("Gather", [part.stack.name, index], [name], axis=0))
            view = View.full(name, part.stack.dtype, part.stack.shape[1:])
            self.values.append(self.info(view))
            self.views[name] = view
        return super().value(name)

    def function(self, title: str, function: Callable[..., jax.Array], views: Sequence[View], name: str) -> View:
        """The call of a function of the file that computes the given function of arrays."""
        made, shape = functions.of_function(self.library, title, function, views, self.free)
        self.nodes.append(helper.make_node(made, [view.name for view in views], [name], name=name, domain=DOMAIN))
        view = View.full(name, views[0].dtype, shape)
        self.values.append(self.info(view))
        return view

    def in_stack(self, names: Sequence[str]) -> Callable[[jax.Array], jax.Array] | None:
        """A function from a larger stack to the stack of these tensors; None if they are not evenly spaced in one."""
        found = [self.parts[name] for name in names if name in self.parts]
        if len(found) < max(len(names), 2) or any(part.stack is not found[0].stack for part in found):
            return None
        indices = [part.index for part in found]
        step = indices[1] - indices[0]
        if step not in (1, -1) or indices != [indices[0] + step * i for i in range(len(indices))]:
            return None
        low, high = min(indices), max(indices) + 1

        def cut(stack: jax.Array) -> jax.Array:
            part = stack if high - low == stack.shape[0] else lax.slice_in_dim(stack, low, high)
            return part if step > 0 else lax.rev(part, (0,))

        return cut

    def stacked(self, names: Sequence[str], name: str) -> View:
        """Several tensors along a new first axis."""
        cut = self.in_stack(names)
        if cut is None:
            views = [self.plain(self.value(one)) for one in names]
            return self.function("stack", lambda *arrays: jnp.stack(arrays), views, name)
        return self.function("stack", cut, [self.parts[names[0]].stack], name)

    def plain(self, view: View) -> View:
        """The tensor with its axes in their own order."""
        return self.in_order(view, tuple(range(len(view.shape))))

    # ------------------------------------------------------------------ nodes

    def node(self, node: Node) -> None:
        op, cut = ops.get(node.op), self.in_stack(node.inputs)
        if cut is None or node.constants or type(op).of_stack is Op.of_stack:
            super().node(node)
            return
        known = attributes_of(self.graph, node)

        def whole(stack: jax.Array) -> jax.Array:
            found = op.of_stack(known, cut(stack))
            assert found is not None
            return found

        name = self.place(node.output, ())
        self.views[node.output] = self.function(node.op, whole, [self.parts[node.inputs[0]].stack], name)

    def loop(self, loop: Repeat) -> None:
        """A loop with states as one Scan; without states, a kernel over all iterations at once."""
        graph = self.graph
        outer = [[node.output for node in loop.nodes(graph, position)] for position in range(loop.period)]
        if _alone(graph, loop):
            self._at_once(loop, outer[0])
            return
        _Body(self, loop).write(outer)

    def _at_once(self, loop: Repeat, names: Sequence[str]) -> None:
        node = loop.nodes(self.graph, 0)[0]
        known, op = attributes_of(self.graph, node), ops.get(node.op)
        reads = [one.inputs[0] for one in loop.nodes(self.graph, 0)]
        stack = self.stacked(reads, self.fresh(f"{node.inputs[0]}/stack"))

        def kernel(stack: jax.Array) -> jax.Array:
            return jax.vmap(lambda x: op.kernel(known, {}, [x]))(stack)

        view = self.function(node.op, kernel, [stack], self.fresh(f"{node.output}/stack"))
        self.parts |= {name: Part(view, index) for index, name in enumerate(names)}

    def read_initializers(self, nodes: Sequence[onnx.NodeProto]) -> list[onnx.TensorProto]:
        found = super().read_initializers([*nodes, *(inner for node in nodes for inner in _inner(node))])
        self.kept = {proto.name for proto in found}
        return found


class _Body:
    """The body of one loop, written with the nodes of the first iteration under their own names."""

    def __init__(self, writer: Rolled, loop: Repeat) -> None:
        self.writer, self.loop = writer, loop
        self.tensors: dict[str, Tensor] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.states: dict[tuple[int, str], str] = {}
        self.given: dict[str, View] = {}
        """What the body reads of each iteration -> the stack outside."""

    def new(self, like: str, suffix: str) -> str:
        """A tensor of the body."""
        name = self.writer.fresh(f"{like}/{suffix}")
        self.tensors[name] = dataclasses.replace(self.writer.graph.tensors[like], name=name, value=None)
        self.shapes[name] = self.writer.shapes[like]
        return name

    def write(self, outer: Sequence[Sequence[str]]) -> None:
        writer, loop, graph = self.writer, self.loop, self.writer.graph
        for reads in loop.reads:
            for read in reads:
                if isinstance(read, Carried) and (read.position, read.initial) not in self.states:
                    self.states[read.position, read.initial] = self.new(read.initial, "state")
        each: list[str] = []
        kept_nodes: list[Node] = []
        for position, reads in enumerate(loop.reads):
            nodes = loop.nodes(graph, position)
            if varies(nodes):
                each.append(self._slice_iterations(nodes))
                continue
            names: list[str] = []
            for index, read in enumerate(reads):
                if isinstance(read, Inside):
                    names.append(each[read.position])
                elif isinstance(read, Carried):
                    names.append(self.states[read.position, read.initial])
                elif read.same or graph.tensors[read.names[0]].value is not None:
                    names.append(read.names[0])
                else:
                    names.append(self._read([node.inputs[index] for node in nodes]))
            each.append(self.new(nodes[0].output, "each"))
            kept_nodes.append(dataclasses.replace(nodes[0], inputs=tuple(names), output=each[-1]))
        kept = [b for b, names in enumerate(outer) if any(name in writer.needed for name in names)]
        moved = {key[0]: key for key in self.states}
        last = {b: moved[b] for b in kept if b in moved and not any(n in writer.needed for n in outer[b][:-1])}
        stacks = [b for b in kept if b not in last]
        before = [writer.plain(writer.value(initial)).name for _, initial in self.states]
        if not self.given:
            counter = writer.fresh(f"{outer[0][0]}/iterations")
            zeros = Tensor(counter, (loop.count,), "int8", None, np.zeros(loop.count, np.int8))
            writer.initializers[counter] = tensors.initializer(counter, zeros, plain=True)
            self.given[self._placeholder(counter)] = View.full(counter, "int8", (loop.count,))
        proto, results = self._body(
            kept_nodes, [each[position] for position, _ in self.states], [each[b] for b in stacks]
        )
        states = [writer.fresh(f"{outer[position][-1]}/last") for position, _ in self.states]
        found = [writer.fresh(f"{outer[b][0]}/stack") for b in stacks]
        writer.nodes.append(
            helper.make_node(
                "Scan",
                [*before, *(view.name for view in self.given.values())],
                [*states, *found],
                name=writer.fresh(f"{outer[0][0]}/loop"),
                num_scan_inputs=len(self.given),
                body=proto,
            )
        )
        views = [View.full(name, view.dtype, view.shape) for name, view in zip(states, results, strict=False)]
        for view in views:
            writer.values.append(writer.info(view))
        of_state = dict(zip(self.states, views, strict=True))
        for b, key in last.items():
            name = outer[b][-1]
            if name in graph.outputs:
                writer.nodes.append(helper.make_node("Identity", [of_state[key].name], [name]))
                of_state[key] = dataclasses.replace(of_state[key], name=name)
            writer.views[name] = of_state[key]
        for b, name, view in zip(stacks, found, results[len(states) :], strict=True):
            stack = View.full(name, view.dtype, (loop.count, *view.shape))
            writer.values.append(writer.info(stack))
            writer.parts |= {one: Part(stack, index) for index, one in enumerate(outer[b])}

    def _placeholder(self, counter: str) -> str:
        """What a body reads if nothing else determines its number of iterations."""
        name = self.writer.fresh(f"{counter}/each")
        self.tensors[name], self.shapes[name] = Tensor(name, (), "int8"), ()
        return name

    def _slice_iterations(self, nodes: Sequence[Node]) -> str:
        """The result of a node that differs between iterations only by position: sliced for all of them beforehand."""
        writer = self.writer
        known, op = [attributes_of(writer.graph, node) for node in nodes], ops.get(nodes[0].op)
        name = writer.fresh(f"{nodes[0].output}/stack")
        source = writer.plain(writer.value(nodes[0].inputs[0]))
        each = self.new(nodes[0].output, "each")
        self.given[each] = writer.function(nodes[0].op, lambda x: op.iterated(known, x), [source], name)
        return each

    def _read(self, names: Sequence[str]) -> str:
        each = self.new(names[0], "each")
        self.given[each] = self.writer.stacked(names, self.writer.fresh(f"{names[0]}/stack"))
        return each

    def _body(
        self, nodes: Sequence[Node], states: Sequence[str], stacks: Sequence[str]
    ) -> tuple[onnx.GraphProto, list[View]]:
        """The body, and its results: the states first."""
        writer, whole = self.writer, self.writer.graph
        outside = writer.nodes, writer.values, dict(writer.views), dict(writer.ordered)
        writer.graph = whole.replace(tensors={**whole.tensors, **self.tensors}, nodes=(), outputs=())
        writer.nodes, writer.values = [], []
        inputs = [self._input(name) for name in (*self.states.values(), *self.given)]
        for node in nodes:
            writer.node(node)
        results: list[View] = []
        for name in (*states, *stacks):
            view = writer.plain(writer.views[name])
            output = writer.fresh(f"{name}/out")
            writer.nodes.append(helper.make_node("Identity", [view.name], [output]))
            results.append(View.full(output, view.dtype, view.shape))
        proto = helper.make_graph(
            writer.nodes, "body", inputs, [writer.info(view) for view in results], value_info=writer.values
        )
        held = {name: view for name, view in writer.views.items() if name in writer.initializers}
        writer.nodes, writer.values, views, writer.ordered = outside
        writer.views = {**held, **views}
        writer.graph = whole
        return proto, results

    def _input(self, name: str) -> onnx.ValueInfoProto:
        self.writer.views[name] = View.full(name, self.tensors[name].dtype, self.shapes[name])
        return self.writer.info(self.writer.views[name])


def loops_of(graph: Graph) -> list[Repeat]:
    """The loops that become loops of the file, without those that only move their stacks."""
    found = repeats(graph, prepare(graph))
    loops = [loop for loop in found if _has_state(loop) and _fits(graph, loop)]
    return [loop for loop in found if loop in loops or (loops and _alone(graph, loop))]


def _has_state(loop: Repeat) -> bool:
    return any(isinstance(read, Carried) for reads in loop.reads for read in reads)


def _alone(graph: Graph, loop: Repeat) -> bool:
    """Whether a loop is one node that only moves codes, those of another tensor in each iteration."""
    node = graph.nodes[loop.first]
    reads = loop.reads[0]
    moves = ops.get(node.op).moves and not varies(loop.nodes(graph, 0)) and not node.constants
    return loop.period == 1 and moves and len(reads) == 1 and not isinstance(reads[0], Carried | Inside)


def _fits(graph: Graph, loop: Repeat) -> bool:
    """Whether all iterations have equal constants, scales and zero points."""
    for position, reads in enumerate(loop.reads):
        nodes = loop.nodes(graph, position)
        if not all(_same(graph.tensors[nodes[0].output], graph.tensors[node.output]) for node in nodes):
            return False
        if varies(nodes):
            if nodes[0].constants:
                return False
            continue
        for role in nodes[0].constants:
            first = graph.constant(nodes[0], role)
            if not all(node.constants.keys() == nodes[0].constants.keys() for node in nodes):
                return False
            if not all(_equal(first, graph.constant(node, role)) for node in nodes):
                return False
        for index, read in enumerate(reads):
            given = [graph.tensors[node.inputs[index]] for node in nodes]
            if not all(_same(given[0], tensor) for tensor in given):
                return False
            constant = [tensor.value is not None for tensor in given]
            # the initial state may be a constant
            held = any(constant[1:] if isinstance(read, Carried) else constant)
            if held and not (all(constant) and all(_equal(given[0].value, tensor.value) for tensor in given)):
                return False
    return True


def _equal(a: Any, b: Any) -> bool:
    return a is b or np.array_equal(np.asarray(a), np.asarray(b))


def _same(a: Tensor, b: Tensor) -> bool:
    p, q = a.quantization, b.quantization
    if a.dtype != b.dtype or a.shape != b.shape or (p is None) != (q is None):
        return False
    return p is q or (p is not None and q is not None and _facts(p) == _facts(q))


def _facts(q: Quantization) -> Any:
    return np.asarray(q.scale).tolist(), np.asarray(q.zero_point).tolist(), q.qmin, q.qmax, q.axes


def _inner(node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """The nodes of a node's bodies."""
    bodies = [attribute.g for attribute in node.attribute if attribute.type == onnx.AttributeProto.GRAPH]
    return [inner for body in bodies for inner in body.node]
