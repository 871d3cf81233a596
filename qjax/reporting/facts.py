"""Collects everything that `qjax inspect` and `qjax.report` show about a graph, as JSON values."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from qjax.assign.overflow import bounds, product_bounds
from qjax.export.integer_graph import IntegerGraph
from qjax.graph.batch_shapes import Sizes, bytes_at, shapes_at
from qjax.graph.ir import Graph, Node, Tensor
from qjax.graph.node_view import NodeView, accumulator_text
from qjax.graph.rounding_phrases import method_of
from qjax.numerics.accumulator import bits_for
from qjax.reporting import counts

_REGISTER = 32


def facts(graph: IntegerGraph, batch: int = 1) -> dict[str, Any]:
    """The graph as JSON values: target, inputs, outputs, nodes, tensors, totals.

    Args:
      batch: the batch size for which multiplications and activations are counted.
    """
    ir = graph.ir
    shapes, sizes = shapes_at(ir, batch), bytes_at(ir, batch)
    nodes = [_node(ir, node, batch, shapes) for node in ir.nodes]
    stored = {name: counts.stored_bytes(tensor) for name, tensor in ir.tensors.items()}
    kernels = {node.constants["kernel"] for node in ir.nodes if "kernel" in node.constants}
    return {
        "target": ir.target,
        "quantization": ir.quantization,
        "inputs": [_tensor(ir.tensors[name], sizes) for name in ir.inputs],
        "outputs": [_tensor(ir.tensors[name], sizes) for name in ir.outputs],
        "nodes": nodes,
        "tensors": [_tensor(tensor, sizes) for tensor in ir.tensors.values()],
        "totals": {
            "batch": batch,
            "nodes": len(nodes),
            "macs": sum(node["macs"] for node in nodes),
            "constant_bytes": sum(counts.tensor_bytes(tensor) for tensor in ir.constants()),
            "packed_bytes": sum(stored.values()),
            "weight_bytes": sum(stored[name] for name in kernels),
            "peak_activation_bytes": counts.peak_bytes(ir, batch),
        },
        "metadata": dict(ir.metadata),
    }


def _node(ir: Graph, node: Node, batch: int, shapes: Mapping[str, Sizes]) -> dict[str, Any]:
    view = NodeView(ir, node)
    reached = _register_bounds(view)
    width = min(_REGISTER, _REGISTER if view.accumulator is None else view.accumulator.bits)
    return {
        "name": node.name,
        "op": node.op,
        "inputs": list(node.inputs),
        "output": node.output,
        "shape": list(view.output.shape),
        "dtype": view.output.dtype,
        **_grid(view.output),
        "method": method_of(node),
        "constants": dict(node.constants),
        "constant_bytes": counts.constant_bytes(ir, node)[0],
        "macs": counts.macs(ir, node, batch, shapes),
        "accumulator": None if view.accumulator is None else accumulator_text(view),
        "accumulator_range": None if reached is None else list(reached),
        "accumulator_bits": None if reached is None else bits_for(*reached),
        "headroom": None if reached is None else width - bits_for(*reached),
        "location": node.location,
    }


def _register_bounds(view: NodeView) -> tuple[int, int] | None:
    """The least and the greatest value of a node's register in the worst case; None if it has no register."""
    register = view.accumulator
    if register is None:
        return None
    if register.bits >= _REGISTER:
        return bounds(view.graph, view.node)
    # A narrow register holds only the products, and the bias is added after it.
    products = product_bounds(view.graph, view.node, stored=register.operands == "codes")
    assert products is not None
    return int(products[0].min(initial=0)), int(products[1].max(initial=0))


def _tensor(tensor: Tensor, sizes: Mapping[str, int]) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "shape": list(tensor.shape),
        "dtype": tensor.dtype,
        **_grid(tensor),
        "constant": tensor.value is not None,
        "bytes": sizes[tensor.name],
    }


def _grid(tensor: Tensor) -> dict[str, Any]:
    """Scale, zero point, and range of codes and of float values; lists along `axes`."""
    q = tensor.quantization
    if q is None:
        return {"scale": None, "zero_point": None, "codes": None, "axes": None, "reals": None}
    scale, zero = np.asarray(q.scale), np.asarray(q.zero_point)
    # A double represents a float32 exactly, and JSON writes the shortest text of the double.
    reals = None
    if scale.ndim == 0 and zero.ndim == 0:
        reals = [(code - int(zero)) * float(scale) for code in (q.qmin, q.qmax)]
    return {
        "scale": scale.astype(np.float64).tolist(),
        "zero_point": zero.tolist(),
        "codes": [q.qmin, q.qmax],
        "axes": list(q.axes),
        "reals": reals,
    }
