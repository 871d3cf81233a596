"""Runs a graph with its loops as loops: a body is traced and compiled once, however many iterations it has.

The result is that of `interpreter.run`: the same kernels on the same codes, in `lax.scan` instead of one after another.
"""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from qjax import ops
from qjax.graph.ir import Array, Graph, Node
from qjax.graph.kernels import alive, attributes, forks, run_node
from qjax.numerics.fence import computed_once
from qjax.numerics.meshes import zeros_of
from qjax.run.find_loops import Carried, Inside, Outside, Repeat, read_outside, varies
from qjax.run.shared_constants import SharedConstants


def outputs(
    graph: Graph,
    loops: Sequence[Repeat],
    constants: SharedConstants,
    inputs: Sequence[Array],
    wanted: Collection[str],
) -> dict[str, jax.Array]:
    """The wanted tensors by name. Pure JAX: may be traced, jitted, batched.

    loops: those that `repeats` finds. constants: of all nodes, preferably with the loops' iterations stacked.
    """
    run = _Run(graph, loops, constants, inputs, wanted)
    return {name: run.value(name) for name in wanted}


@dataclasses.dataclass(frozen=True, eq=False)
class _Part:
    """One iteration's tensor in the stack of all iterations; it is sliced out when something reads it."""

    stack: jax.Array
    index: int


class _Run:
    """The tensors of one run, by name."""

    def __init__(
        self,
        graph: Graph,
        loops: Sequence[Repeat],
        constants: SharedConstants,
        inputs: Sequence[Array],
        wanted: Collection[str],
    ) -> None:
        self.graph, self.constants = graph, constants
        self.env: dict[str, Array | _Part] = dict(zip(graph.inputs, inputs, strict=True))
        self.env |= graph.data()
        self.alive, self.forks = alive(constants), forks(graph)
        self.needed = read_outside(graph, loops, wanted)
        at = 0
        for loop in loops:
            for node in graph.nodes[at : loop.first]:
                self.node(node)
            self.loop(loop)
            at = loop.end
        for node in graph.nodes[at:]:
            self.node(node)

    def value(self, name: str) -> jax.Array:
        """A tensor that was fed or computed."""
        held = self.env[name]
        if isinstance(held, _Part):
            held = lax.index_in_dim(held.stack, held.index, 0, keepdims=False)
            self.env[name] = held
        return jnp.asarray(held)

    def node(self, node: Node) -> None:
        """Compute a node outside all loops."""
        stack = self.in_order(node.inputs) if len(node.inputs) > 1 else None
        if stack is not None:
            codes = ops.get(node.op).of_stack(attributes(self.graph, node), stack)
            if codes is not None:
                self.env[node.output] = codes
                return
        codes = run_node(self.graph, node, self.constants[node.name], [self.value(name) for name in node.inputs])
        self.env[node.output] = self.once(codes, [node.output])

    def once(self, codes: jax.Array, names: Sequence[str]) -> jax.Array:
        """The codes, computed only once if a residual branch starts there."""
        fork = self.alive is not None and any(name in self.forks for name in names)
        return computed_once(self.alive, codes) if fork and self.alive is not None else codes

    def in_order(self, names: Sequence[str]) -> jax.Array | None:
        """Several tensors as one array along a new first axis, if a loop produced them so; None otherwise."""
        parts = [self.env[name] for name in names]
        first, second = parts[:2]
        if not (isinstance(first, _Part) and isinstance(second, _Part)):
            return None
        step = second.index - first.index
        indices = [first.index + step * i for i in range(len(parts))]
        if step not in (1, -1) or not all(
            isinstance(part, _Part) and part.stack is first.stack and part.index == index
            for part, index in zip(parts, indices, strict=True)
        ):
            return None
        whole = first.stack
        if len(parts) < whole.shape[0]:
            whole = lax.slice_in_dim(whole, min(indices), max(indices) + 1)
        return whole if step > 0 else lax.rev(whole, (0,))

    def stacked(self, names: Sequence[str]) -> jax.Array:
        """Stack several tensors along a new first axis."""
        stack = self.in_order(names)
        return jnp.stack([self.value(name) for name in names]) if stack is None else stack

    def loop(self, loop: Repeat) -> None:
        """Compute all iterations of a loop."""
        body = _Body(self, loop)
        outer = [[node.output for node in nodes] for nodes in body.nodes]
        kept = [b for b, names in enumerate(outer) if any(name in self.needed for name in names)]
        last = [b for b in kept if not any(name in self.needed for name in outer[b][:-1])]
        carried = sorted({(r.position, r.initial) for reads in loop.reads for r in reads if isinstance(r, Carried)})
        stacks: dict[int, jax.Array] = {}
        final: dict[int, jax.Array] = {}
        if not carried and all(ops.get(nodes[0].op).moves for nodes in body.nodes):
            found = jax.vmap(lambda given: body({}, given))(body.given)
            stacks = {b: found[b] for b in kept}
        else:
            initial = {key: self.value(key[1]) for key in carried}
            shapes = jax.eval_shape(
                lambda state, given: body(state, given), initial, jax.tree.map(lambda x: x[0], body.given)
            )
            # Of tensors that are read only in their last state after the loop, keep only that state.
            ends = {b: zeros_of(shapes[b]) for b in last}

            def step(state: Any, given: Any) -> tuple[Any, Any]:
                codes = body(state[0], given)
                moved = {key: codes[key[0]] for key in carried}
                return (moved, {b: codes[b] for b in ends}), {b: codes[b] for b in kept if b not in ends}

            (_, final), stacks = lax.scan(step, (initial, ends), body.given, length=loop.count)
        for b, stack in stacks.items():
            self.env |= {name: _Part(stack, index) for index, name in enumerate(outer[b])}
        for b, codes in final.items():
            self.env[outer[b][-1]] = codes


class _Body:
    """One iteration as a function of the previous iteration's results, and of its inputs from outside."""

    def __init__(self, run: _Run, loop: Repeat) -> None:
        self.run, self.loop = run, loop
        self.nodes = [loop.nodes(run.graph, position) for position in range(loop.period)]
        self.same: list[dict[str, Any]] = []
        self.given: dict[tuple[int | str, ...], Any] = {}
        """The values that differ between the iterations, stacked."""
        self.outer: dict[str, jax.Array] = {}
        """The values from outside that all iterations share. In the body, every iteration would recompute them."""
        for position, (nodes, reads) in enumerate(zip(self.nodes, loop.reads, strict=True)):
            same, stacked = run.constants.over([node.name for node in nodes])
            self.same.append(same)
            self.given |= {(position, "constant", role): array for role, array in stacked.items()}
            # Their codes are computed before the loop.
            if varies(nodes):
                entries = [attributes(run.graph, node) for node in nodes]
                self.given[position, "codes"] = ops.get(nodes[0].op).iterated(entries, run.value(nodes[0].inputs[0]))
                continue
            for index, read in enumerate(reads):
                if isinstance(read, Outside) and read.same:
                    self.outer[read.names[0]] = run.value(read.names[0])
                elif isinstance(read, Outside):
                    self.given[position, "input", index] = run.stacked(read.names)

    def __call__(
        self, state: dict[tuple[int, str], jax.Array], given: dict[tuple[int | str, ...], Any]
    ) -> list[jax.Array]:
        """The results of every node of the body."""
        codes: list[jax.Array] = []
        for position, (nodes, reads) in enumerate(zip(self.nodes, self.loop.reads, strict=True)):
            if (position, "codes") in given:
                codes.append(given[position, "codes"])
                continue
            inputs: list[jax.Array] = []
            for index, read in enumerate(reads):
                match read:
                    case Inside(at):
                        inputs.append(codes[at])
                    case Carried(at, initial):
                        inputs.append(state[at, initial])
                    case Outside(names):
                        inputs.append(self.outer[names[0]] if read.same else given[position, "input", index])
            own = {str(key[2]): value for key, value in given.items() if key[:2] == (position, "constant")}
            value = run_node(self.run.graph, nodes[0], self.same[position] | own, inputs)
            codes.append(self.run.once(value, [node.output for node in nodes]))
        return codes
