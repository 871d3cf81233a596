"""Replaces operations that a runtime lacks by chains of operations that it has, see `ops.composed`.

This is the first pass of `assign`, from quantized graph to quantized graph. Every part of a chain is an accumulator
followed by a quantizer, or moves codes. `fuse` then treats these parts like all others, so the target's rounding
applies to each operator. The quantized graph that a program keeps is the one before this pass.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from qjax import ops, targets
from qjax.assign.bounds import operand
from qjax.assign.constants import affine_steps, step_of
from qjax.graph.ir import Graph, Node, Quantization, Tensor
from qjax.ops import Operand, Preparation, Role
from qjax.ops.affine_step import AffineStep
from qjax.ops.composed import Codes, Part
from qjax.ops.epilogue import Affine
from qjax.ops.quantize import Quantize


def compose(graph: Graph, target: targets.Target) -> Graph:
    """The quantized graph with a chain instead of every node that the target composes."""
    if not target.composed:
        return graph
    readers: dict[str, list[Node]] = {}
    for node in graph.nodes:
        for name in set(node.inputs):
            readers.setdefault(name, []).append(node)
    made = _Made(graph)
    gone: set[str] = set()
    known: dict[object, list[Part] | None] = {}
    for node in graph.nodes:
        if node.name in gone:
            continue
        chain = _chain(graph, readers, node) if node.op in target.composed else None
        parts = None if chain is None else _parts(graph, target, node, chain, known)
        if chain is None or parts is None:
            made.nodes.append(node)
            continue
        gone |= {step.name for step in chain}
        made.write(node, chain, parts)
    if not gone:
        return graph
    return graph.replace(nodes=tuple(made.nodes), tensors=made.tensors)


def _chain(graph: Graph, readers: dict[str, list[Node]], node: Node) -> list[Node] | None:
    """The steps after an accumulator, the quantizer last; None if the node's result has codes itself."""
    chain: list[Node] = []
    output = node.output
    if graph.tensors[output].quantization is not None:
        return None
    while not chain or ops.get(chain[-1].op).role is not Role.QUANTIZER:
        following = readers.get(output, [])
        if len(following) != 1:
            return None
        chain.append(following[0])
        output = chain[-1].output
    return chain


def _parts(
    graph: Graph, target: targets.Target, node: Node, chain: Sequence[Node], known: dict[object, list[Part] | None]
) -> list[Part] | None:
    """The parts of the chain; nodes with equal inputs share them, and so the constants that follow."""
    op, tensors, output = ops.get(node.op), graph.tensors, graph.tensors[chain[-1].output]
    steps = affine_steps(graph, chain[:-1])
    own = step_of(graph, node, tuple(role for role in node.constants if role not in op.keeps))
    inputs = [tensors[name] for name in node.inputs]

    def identity(step: Any) -> Any:
        return step.op, repr(sorted(step.attributes.items())), *((r, id(v)) for r, v in sorted(step.constants.items()))

    grids = [(x.shape, x.dtype, id(x.quantization)) for x in (*inputs, output)]
    key = (*map(identity, (own, *steps)), *grids)
    if key not in known:
        affine = Affine.identity()
        for step in steps:
            affine = ops.get(step.op).compose(step.attributes, step.constants, affine)
        given = Preparation(
            node.attributes, own.constants, tuple(map(operand, inputs)), operand(output), affine, target
        )
        known[key] = op.composed(given, [(step.attributes, step.constants) for step in steps])
    return known[key]


class _Made:
    """The new graph's nodes and tensors. Equal grids of shared parts stay one object, which `fuse` relies on."""

    def __init__(self, graph: Graph) -> None:
        self.nodes: list[Node] = []
        self.tensors = dict(graph.tensors)
        self._grids: dict[int, Quantization] = {}
        self._kept: list[Operand] = []

    def write(self, node: Node, chain: Sequence[Node], parts: Sequence[Part]) -> None:
        """Append the chain of a node."""
        results: dict[int, str] = {}
        for index, part in enumerate(parts):
            last = index == len(parts) - 1
            results[id(part)] = self._part(node, chain, part, results, last=last)

    def _part(self, node: Node, chain: Sequence[Node], part: Part, results: dict[int, str], *, last: bool) -> str:
        op, final = ops.get(part.op), chain[-1].output
        name = f"{final}/{part.name}"
        inputs = tuple(self._input(node, final, one, results) for one in part.inputs)
        before = self.tensors[inputs[0]]
        if len(inputs) == 1 and op.is_identity(part.attributes, before.shape, part.shape) and not last:
            return inputs[0]
        constants = {role: self._constant(f"{name}/{role}/real", value) for role, value in part.constants.items()}
        if op.role in (Role.GRID, Role.INTEGER):
            data = next((self.tensors[i] for i in inputs if self.tensors[i].quantization is not None), before)
            own = Tensor(name, part.shape, data.dtype, data.quantization)
            self.tensors[name] = own if part.grid is None else Tensor(name, part.shape, part.grid.dtype)
            self.nodes.append(Node(name, part.op, inputs, name, constants, part.attributes, node.location))
            return name
        accumulator = f"{name}/sum"
        self.tensors[accumulator] = Tensor(accumulator, part.shape, "int32")
        self.nodes.append(Node(accumulator, part.op, inputs, accumulator, constants, part.attributes, node.location))
        if part.divisor != 1:
            value = self._constant(f"{name}/divisor", np.asarray(part.divisor, np.float32))
            divided = f"{name}/quotient"
            self.tensors[divided] = Tensor(divided, part.shape, "int32")
            step = Node(divided, AffineStep.name, (accumulator,), divided, {"value": value}, {"step": "div"})
            self.nodes.append(dataclasses.replace(step, location=node.location))
            accumulator = divided
        if part.finishes:
            return self._finish(chain, accumulator)
        assert part.grid is not None
        self.tensors[name] = Tensor(name, part.shape, part.grid.dtype, self._grid(part.grid))
        self.nodes.append(Node(name, Quantize.name, (accumulator,), name, {}, {}, node.location))
        return name

    def _finish(self, chain: Sequence[Node], accumulator: str) -> str:
        """The clamps and the quantizer of the whole node; the affine steps are in the parts."""
        for step in chain:
            if ops.get(step.op).role is Role.CHAIN and not ops.get(step.op).clamps:
                continue
            self.nodes.append(dataclasses.replace(step, inputs=(accumulator, *step.inputs[1:])))
            accumulator = step.output
        return accumulator

    def _input(self, node: Node, final: str, one: Part | Codes | int, results: dict[int, str]) -> str:
        if isinstance(one, int):
            return node.inputs[one]
        if isinstance(one, Part):
            return results[id(one)]
        name = f"{final}/{one.name}"
        self.tensors[name] = Tensor(name, one.operand.shape, one.operand.dtype, self._grid(one.operand), one.value)
        return name

    def _constant(self, name: str, value: Any) -> str:
        self.tensors[name] = Tensor(name, tuple(np.shape(value)), str(value.dtype), None, value)
        return name

    def _grid(self, grid: Operand) -> Quantization:
        if id(grid) not in self._grids:
            assert grid.qmin is not None
            assert grid.qmax is not None
            self._kept.append(grid)
            self._grids[id(grid)] = Quantization(grid.scale, grid.zero_point, grid.qmin, grid.qmax)
        return self._grids[id(grid)]
