"""Counts what a graph costs: multiplications, bytes of constants, bytes of activations."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qjax import ops
from qjax.export.artifact.program_document import stored_bytes
from qjax.graph.batch_shapes import Sizes, bytes_at, input_shape, shapes_at
from qjax.graph.ir import Graph, Node, Tensor
from qjax.ops import backend
from qjax.ops.facts import CountsProducts


def macs(graph: Graph, node: Node, batch: int = 1, shapes: Mapping[str, Sizes] | None = None) -> int:
    """The number of products of a code and a weight (or of two codes) in a matrix product or convolution.

    Products with padding elements count, because a kernel with a padded input computes them. Products with the zeros
    that a transposed convolution inserts between the elements of its input do not count. Fused nodes are the sum of
    their members. For every other operation the number is 0.

    shapes: the result of `shapes_at` for the batch, if known.
    """
    shapes = shapes_at(graph, batch) if shapes is None else shapes
    if node.op == backend.NAME:
        members = backend.members_of(node.attributes).values()
        return sum(_member_macs(graph, node, member, batch, shapes) for member in members)
    inputs = [shapes[name] for name in node.inputs]
    kernel = _weight(graph, node, "")
    return _macs(node.op, node.attributes, inputs, [size or 0 for size in kernel])


def _member_macs(graph: Graph, node: Node, member: backend.Member, batch: int, shapes: Mapping[str, Sizes]) -> int:
    members = backend.members_of(node.attributes)
    inputs: list[tuple[int, ...]] = []
    for source in member.inputs:
        own = shapes[node.inputs[source]] if isinstance(source, int) else input_shape(members[source].shape, batch)
        inputs.append(own)
    kernel = _weight(graph, node, f"{member.label}/")
    return _macs(member.op, member.attributes, inputs, [size or 0 for size in kernel])


def _weight(graph: Graph, node: Node, prefix: str) -> Sequence[int | None]:
    """The shape of the weight of a node, or of a member of a fused node; () if it has none."""
    names = [node.constants[prefix + role] for role in ("kernel", "weights") if prefix + role in node.constants]
    return graph.tensors[names[0]].shape if names else ()


def _macs(op: str, attributes: Mapping[str, Any], inputs: Sequence[tuple[int, ...]], kernel: Sequence[int]) -> int:
    found = ops.get(op)
    return found.products(attributes, inputs, kernel) if isinstance(found, CountsProducts) else 0


def tensor_bytes(tensor: Tensor) -> int:
    """The bytes of a constant in memory."""
    return math.prod(input_shape(tensor.shape, 1)) * np.dtype(tensor.dtype).itemsize


def constant_bytes(graph: Graph, node: Node) -> tuple[int, int]:
    """The bytes of a node's constants in memory, and in a .qjax file, where codes of 4 bits and less are packed."""
    tensors = [graph.tensors[name] for name in dict.fromkeys(node.constants.values())]
    return sum(tensor_bytes(tensor) for tensor in tensors), sum(stored_bytes(tensor) for tensor in tensors)


def peak_bytes(graph: Graph, batch: int) -> int:
    """The most bytes of activations that are alive at the same time.

    A tensor lives from the node that computes it (an input: from the start) to its last reader (an output: to the end),
    and no node overwrites its input. Nodes run in their stored order.
    """
    last: dict[str, int] = {}
    for index, node in enumerate(graph.nodes):
        last |= dict.fromkeys(node.inputs, index)
    last |= dict.fromkeys(graph.outputs, len(graph.nodes))
    sizes = bytes_at(graph, batch)
    alive = {name: sizes[name] for name in graph.inputs}
    peak = sum(alive.values())
    for index, node in enumerate(graph.nodes):
        alive[node.output] = sizes[node.output]
        peak = max(peak, sum(alive.values()))
        for name in itertools.chain(node.inputs, [node.output]):
            if last.get(name, index) <= index:
                alive.pop(name, None)
    return peak
