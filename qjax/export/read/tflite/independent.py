"""Whether a graph treats the examples of a batch apart: then it is right for any number of them."""

from collections.abc import Callable, Sequence

from qjax.export.ir import Graph, Node

Shape = Sequence[int | None]


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
    rule = _RULES.get(node.op)
    return rule is None or all(rule(node, shape, output) for shape in shapes if None in shape)


def _reshape(node: Node, shape: Shape, output: Shape) -> bool:
    return shape[0] is None and output[0] is None


def _reduced(node: Node, shape: Shape, output: Shape) -> bool:
    return shape.index(None) not in node.attributes["axes"]


def _joined(node: Node, shape: Shape, output: Shape) -> bool:
    return shape.index(None) != node.attributes["axis"]


def _window(node: Node, shape: Shape, output: Shape) -> bool:
    axis = shape.index(None)
    return node.attributes["window"][axis] == 1 and node.attributes["strides"][axis] == 1


def _conv(node: Node, shape: Shape, output: Shape) -> bool:
    return shape.index(None) == node.attributes["lhs_layout"][0]


def _slice(node: Node, shape: Shape, output: Shape) -> bool:
    axis = shape.index(None)
    attributes = node.attributes
    return attributes["start"][axis] == 0 and attributes["limit"][axis] is None and attributes["strides"][axis] == 1


def _pad(node: Node, shape: Shape, output: Shape) -> bool:
    return not any(node.attributes["padding"][shape.index(None)])


def _dot(node: Node, shape: Shape, output: Shape) -> bool:
    summed = {*node.attributes["lhs_contracting"], *node.attributes["rhs_contracting"]}
    return node.attributes["weight"] is not None or shape.index(None) not in summed


def _along(node: Node, shape: Shape, output: Shape) -> bool:
    return shape.index(None) != node.attributes["axis"]


_RULES: dict[str, Callable[[Node, Shape, Shape], bool]] = {
    "reshape": _reshape,
    "min": _reduced,
    "softmax": _reduced,
    "argument": _along,
    "top_k": _along,
    "take": _along,
    "pad_value": _pad,
    "sum": _reduced,
    "max": _reduced,
    "reverse": _reduced,
    "concatenate": _joined,
    "split": _joined,
    "window_sum": _window,
    "max_pool": _window,
    "conv": _conv,
    "slice": _slice,
    "pad": _pad,
    "dot": _dot,
}
