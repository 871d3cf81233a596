"""Whether a graph treats the examples of a batch apart: then it is right for any number of them."""

from qjax import ops
from qjax.export.ir import Graph, Node


def independent(graph: Graph) -> bool:
    """Whether the free axis of every tensor is the batch's, and no operation works along it.

    Requires: every free size follows the batch (`free_batch`).
    """
    computed = [*graph.inputs, *(node.output for node in graph.nodes)]
    if any(graph.tensors[name].shape.count(None) > 1 for name in computed):
        return False
    return all(_apart(graph, node) for node in graph.nodes)


def _apart(graph: Graph, node: Node) -> bool:
    shapes = [graph.tensors[name].shape for name in node.inputs]
    output = graph.tensors[node.output].shape
    if not any(None in shape for shape in shapes):
        return None not in output
    # a result without the batch has lost it
    if None not in output:
        return False
    along = ops.get(node.op).works_along(node.attributes, shapes, output)
    return all(shape.index(None) not in axes for shape, axes in zip(shapes, along, strict=True) if None in shape)
