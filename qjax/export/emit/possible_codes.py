"""Determines the codes that a tensor can contain if they are few, as after a sign, a comparison or a ternary quantizer.

An emitter may compute with such a tensor bit by bit. What is not known here is None, never a guess.
"""

import jax.numpy as jnp
import numpy as np

from qjax import ops
from qjax.graph import kernels
from qjax.graph.ir import Graph, Node
from qjax.ops.facts import Role


def few_codes(graph: Graph, name: str, most: int) -> tuple[int, ...] | None:
    """The codes that a tensor can contain, in order; None if there are more than `most`, or they are not known.

    Codes that the caller passes, and those that are only moved from there, need not lie within the grid.
    """
    tensor = graph.tensors[name]
    if np.dtype(tensor.dtype).kind not in "iu":
        return None
    if tensor.value is not None:
        return _few(np.unique(np.asarray(tensor.value)), most)
    node = next((node for node in graph.nodes if node.output == name), None)
    if node is None or tensor.quantization is None:
        return None
    op = ops.get(node.op)
    if op.role is Role.GRID:
        return _codes_of_move(graph, node, most)
    if op.role is not Role.PRODUCER:
        return None
    low, high = tensor.quantization.qmin, tensor.quantization.qmax
    if high - low < most:
        # a producer clamps its result to the grid
        return tuple(range(low, high + 1))
    return _codes_of_table(graph, node, most) if op.tabulates else None


def _codes_of_move(graph: Graph, node: Node, most: int) -> tuple[int, ...] | None:
    """The codes of a node that moves codes: those of its inputs, and of its padding."""
    quantization = graph.tensors[node.output].quantization
    assert quantization is not None
    filling = ops.get(node.op).filling(kernels.attributes(graph, node))
    filled = {"none": (), "zero": (quantization.zero_point,), "lowest": (quantization.qmin,)}.get(filling)
    if filled is None or node.constants:
        return None
    found = {int(np.asarray(code).reshape(())) for code in filled}
    for each in node.inputs:
        codes = few_codes(graph, each, most)
        if codes is None:
            return None
        found |= set(codes)
    return tuple(sorted(found)) if len(found) <= most else None


def _codes_of_table(graph: Graph, node: Node, most: int) -> tuple[int, ...] | None:
    """The codes of a table."""
    if len(node.inputs) != 1:
        return None
    dtype = np.dtype(graph.tensors[node.inputs[0]].dtype)
    if dtype.kind not in "iu" or dtype.itemsize > 1:
        return None
    op, attributes = ops.get(node.op), kernels.attributes(graph, node)
    every = np.arange(np.iinfo(dtype).min, np.iinfo(dtype).max + 1).astype(dtype)
    constants = op.runtime(attributes, kernels.constants_of(graph, node))
    return _few(np.unique(np.asarray(op.kernel(attributes, constants, [jnp.asarray(every)]))), most)


def _few(codes: np.ndarray, most: int) -> tuple[int, ...] | None:
    return tuple(int(code) for code in codes) if len(codes) <= most else None


__all__ = ["few_codes"]
