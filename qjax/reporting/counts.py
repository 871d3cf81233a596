"""What a graph costs: multiplications, bytes of constants, bytes of activations."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from qjax import ops
from qjax.export.artifact.program_document import stored_bytes
from qjax.graph.ir import Graph, Node
from qjax.ops import backend
from qjax.ops.facts import CountsProducts
from qjax.runtimes.batches import shape_of, tensor_bytes


def macs(graph: Graph, node: Node, batch: int = 1) -> int:
    """Products of a code and a weight (or of two codes) that a matrix product or convolution adds up.

    Those with elements of the padding are counted, as a kernel with a padded input computes them; those with the zeros
    that a transposed convolution puts between the elements of its input are not. Fused nodes are the sum of their
    members. 0 for every other operation.
    """
    if node.op == backend.NAME:
        return sum(_member_macs(graph, node, member, batch) for member in backend.members_of(node.attributes).values())
    inputs = [shape_of(graph.tensors[name], batch) for name in node.inputs]
    kernel = _weight(graph, node, "")
    return _macs(node.op, node.attributes, inputs, [size or 0 for size in kernel])


def _member_macs(graph: Graph, node: Node, member: backend.Member, batch: int) -> int:
    members = backend.members_of(node.attributes)
    inputs: list[tuple[int, ...]] = []
    for source in member.inputs:
        shape = graph.tensors[node.inputs[source]].shape if isinstance(source, int) else members[source].shape
        inputs.append(tuple(batch if size is None else size for size in shape))
    kernel = _weight(graph, node, f"{member.label}/")
    return _macs(member.op, member.attributes, inputs, [size or 0 for size in kernel])


def _weight(graph: Graph, node: Node, prefix: str) -> Sequence[int | None]:
    """The shape of the weight of a node, or of a member of a fused node; () without one."""
    names = [node.constants[prefix + role] for role in ("kernel", "weights") if prefix + role in node.constants]
    return graph.tensors[names[0]].shape if names else ()


def _macs(op: str, attributes: Mapping[str, Any], inputs: Sequence[tuple[int, ...]], kernel: Sequence[int]) -> int:
    found = ops.get(op)
    return found.products(attributes, inputs, kernel) if isinstance(found, CountsProducts) else 0


def constant_bytes(graph: Graph, node: Node) -> tuple[int, int]:
    """The bytes of a node's constants in memory, and in a .qjax file, where codes of 4 bits and less are packed."""
    tensors = [graph.tensors[name] for name in dict.fromkeys(node.constants.values())]
    return sum(tensor_bytes(tensor, 1) for tensor in tensors), sum(stored_bytes(tensor) for tensor in tensors)


def peak_bytes(graph: Graph, batch: int) -> int:
    """The most bytes of activations that are alive at once.

    A tensor lives from the node that computes it (an input: from the start) to its last reader (an output: to the end),
    and no node writes over its input. The order is that of the nodes.
    """
    last: dict[str, int] = {}
    for index, node in enumerate(graph.nodes):
        last |= dict.fromkeys(node.inputs, index)
    last |= dict.fromkeys(graph.outputs, len(graph.nodes))
    alive = {name: tensor_bytes(graph.tensors[name], batch) for name in graph.inputs}
    peak = sum(alive.values())
    for index, node in enumerate(graph.nodes):
        alive[node.output] = tensor_bytes(graph.tensors[node.output], batch)
        peak = max(peak, sum(alive.values()))
        for name in itertools.chain(node.inputs, [node.output]):
            if last.get(name, index) <= index:
                alive.pop(name, None)
    return peak
