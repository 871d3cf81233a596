"""Removes nodes that no output needs, and nodes that change nothing."""

import dataclasses

from qjax import ops
from qjax.graph.ir import Graph, Node


def remove_identities(graph: Graph) -> Graph:
    """Remove reshapes to the same shape, transposes in the same order, casts to the same dtype, and full slices."""
    renamed: dict[str, str] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        node = dataclasses.replace(node, inputs=tuple(renamed.get(name, name) for name in node.inputs))
        if _identity(graph, node) and node.output not in graph.outputs:
            renamed[node.output] = node.inputs[0]
        else:
            nodes.append(node)
    return graph.replace(nodes=tuple(nodes))


def _identity(graph: Graph, node: Node) -> bool:
    if not node.inputs:
        return False
    before, after = (graph.tensors[name].shape for name in (node.inputs[0], node.output))
    return ops.get(node.op).is_identity(node.attributes, before, after)


def remove_dead(graph: Graph) -> Graph:
    """Remove nodes and tensors that no output needs; the others are in the order in which they are read."""
    needed = set(graph.outputs)
    nodes: list[Node] = []
    for node in reversed(graph.nodes):
        if node.output in needed:
            nodes.append(node)
            needed.update(node.inputs)
    nodes.reverse()
    read = [*graph.inputs]
    for node in nodes:
        read += [*node.inputs, *node.constants.values(), node.output]
    read += graph.outputs
    tensors = {name: graph.tensors[name] for name in read}
    return graph.replace(nodes=tuple(nodes), tensors=tensors, quantized=graph.quantized)
