"""Proves that no int32 accumulator can overflow, from the weights themselves."""

import math

import numpy as np
from jax.core import Tracer

from qjax.export.ir import Graph, Node, Tensor
from qjax.export.lower import ConversionError
from qjax.ops.channels import weight_to_result

_LIMIT = 2**31 - 1


def check_accumulators(graph: Graph) -> Graph:
    """Verify the worst case of every accumulator; the graph is returned as it is.

    Constants that are being traced cannot be looked at; their bound was verified when the graph was first converted.
    """
    for node in graph.nodes:
        if any(size is None for size in _summed_sizes(graph, node)):
            raise ConversionError(
                f"{node.location}: {node.name!r} ({node.op}) sums over the batch, whose size is free: no bound of its "
                "accumulator exists. Sum behind the graph's output."
            )
        bound = worst_case(graph, node)
        if bound is not None and bound > _LIMIT:
            raise ConversionError(
                f"{node.location}: the accumulator of {node.name!r} ({node.op}) may reach {bound}, beyond int32. "
                "Use fewer bits for its activations or its weights."
            )
    return graph


def _summed_sizes(graph: Graph, node: Node) -> list[int | None]:
    """The sizes of the activation's axes that a node sums over."""
    axes: list[int] = []
    if node.op == "sum":
        axes = node.attributes["axes"]
    elif node.op == "dot":
        axes = node.attributes["rhs_contracting" if node.attributes["weight"] == 0 else "lhs_contracting"]
    return [graph.tensors[node.inputs[0]].shape[axis] for axis in axes]


def worst_case(graph: Graph, node: Node) -> int | None:
    """The largest |accumulator| that any input codes can give, or None where it has none (or is unknown)."""
    tensors = [graph.tensors[name] for name in node.inputs]
    if node.op in ("dot", "conv") and "kernel" in node.constants:
        kernel, bias = graph.constant(node, "kernel"), graph.constant(node, "bias")
        if isinstance(kernel, Tracer) or isinstance(bias, Tracer):
            return None
        rank = np.ndim(kernel)
        kept = [w for _, w in node.attributes["channels"]]
        summed = tuple(axis for axis in range(rank) if axis not in kept)
        norms = np.abs(np.asarray(kernel).astype(np.int64)).sum(axis=summed, keepdims=True)
        sums = weight_to_result(norms, node.attributes["channels"], node.attributes["rank"])
        return int((sums * _reach(tensors[0]) + np.abs(np.asarray(bias).astype(np.int64))).max(initial=0))
    if node.op == "dot":
        return _count(graph, node) * _reach(tensors[0]) * _reach(tensors[1])
    if node.op == "multiply":
        return _reach(tensors[0]) * _reach(tensors[1])
    if node.op == "sum":
        return _count(graph, node) * _reach(tensors[0])
    if node.op == "window_sum":
        return math.prod(node.attributes["window"]) * _reach(tensors[0])
    return None


def _count(graph: Graph, node: Node) -> int:
    return math.prod(size for size in _summed_sizes(graph, node) if size is not None)


def _reach(tensor: Tensor) -> int:
    q = tensor.quantization
    assert q is not None
    return q.qmax - q.qmin if isinstance(q.zero_point, Tracer) else _reach_of(q.qmin, q.qmax, q.zero_point)


def _reach_of(qmin: int, qmax: int, zero_point: object) -> int:
    z = int(np.max(np.asarray(zero_point)))
    return max(qmax - z, z - qmin)
