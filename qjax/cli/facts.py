"""Everything that `qjax inspect` says of a graph, as JSON values; the tables are made of the same."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qjax.cli import counts
from qjax.export.integer_graph import IntegerGraph
from qjax.export.ir import Graph, Node, Tensor
from qjax.export.methods import method_of
from qjax.export.passes.overflow import bounds, product_bounds
from qjax.export.view import NodeView, accumulator_text
from qjax.numerics.accumulator import bits_for
from qjax.summary import table

_REGISTER = 32


def facts(graph: IntegerGraph, batch: int = 1) -> dict[str, Any]:
    """The graph as JSON values: target, inputs, outputs, nodes, tensors, totals.

    Args:
      batch: the size of the batch that multiplications and activations are counted for.
    """
    ir = graph.ir
    nodes = [_node(ir, node, batch) for node in ir.nodes]
    stored = {name: counts.stored_bytes(tensor) for name, tensor in ir.tensors.items()}
    kernels = {node.constants["kernel"] for node in ir.nodes if "kernel" in node.constants}
    return {
        "target": ir.target,
        "quantization": ir.quantization,
        "inputs": [_tensor(ir.tensors[name], batch) for name in ir.inputs],
        "outputs": [_tensor(ir.tensors[name], batch) for name in ir.outputs],
        "nodes": nodes,
        "tensors": [_tensor(tensor, batch) for tensor in ir.tensors.values()],
        "totals": {
            "batch": batch,
            "nodes": len(nodes),
            "macs": sum(node["macs"] for node in nodes),
            "constant_bytes": sum(counts.tensor_bytes(tensor, 1) for tensor in ir.constants()),
            "packed_bytes": sum(stored.values()),
            "weight_bytes": sum(stored[name] for name in kernels),
            "peak_activation_bytes": counts.peak_bytes(ir, batch),
        },
        "metadata": dict(ir.metadata),
    }


def _node(ir: Graph, node: Node, batch: int) -> dict[str, Any]:
    view = NodeView(ir, node)
    reached = _reached(view)
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
        "macs": counts.macs(ir, node, batch),
        "accumulator": None if view.accumulator is None else accumulator_text(view),
        "accumulator_range": None if reached is None else list(reached),
        "accumulator_bits": None if reached is None else bits_for(*reached),
        "headroom": None if reached is None else width - bits_for(*reached),
        "location": node.location,
    }


def _reached(view: NodeView) -> tuple[int, int] | None:
    """The least and the greatest value of a node's register in the worst case, or None where it has none."""
    register = view.accumulator
    if register is None:
        return None
    if register.bits >= _REGISTER:
        return bounds(view.graph, view.node)
    # a narrow register holds the products alone; the bias comes behind it
    products = product_bounds(view.graph, view.node, stored=register.operands == "codes")
    assert products is not None
    return int(products[0].min(initial=0)), int(products[1].max(initial=0))


def _tensor(tensor: Tensor, batch: int) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "shape": list(tensor.shape),
        "dtype": tensor.dtype,
        **_grid(tensor),
        "constant": tensor.value is not None,
        "bytes": counts.tensor_bytes(tensor, batch),
    }


def _grid(tensor: Tensor) -> dict[str, Any]:
    """Scale, zero point, range of codes and of reals; a list of them along `axes`."""
    q = tensor.quantization
    if q is None:
        return {"scale": None, "zero_point": None, "codes": None, "axes": None, "reals": None}
    scale, zero = np.asarray(q.scale), np.asarray(q.zero_point)
    # float32 is a double exactly, and JSON writes the shortest text that gives the double back
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


# ---------------------------------------------------------------------------- text


def heading(found: Mapping[str, Any], title: str) -> str:
    """The model's name, its target, its inputs and outputs."""
    lines = [f"{title}: target {found['target']}, {found['totals']['nodes']} nodes"]
    lines += [f"  input  {_signature(tensor)}" for tensor in found["inputs"]]
    lines += [f"  output {_signature(tensor)}" for tensor in found["outputs"]]
    return "\n".join(lines)


def _signature(tensor: Mapping[str, Any]) -> str:
    text = f"{tensor['name']}: {tensor['dtype']} {shape_text(tensor['shape'])}"
    if tensor["scale"] is None:
        return f"{text}, no scale"
    low, high = tensor["codes"]
    text += f", scale {_span(tensor['scale'])}, zero point {_span(tensor['zero_point'])}, codes {low}..{high}"
    return text if tensor["reals"] is None else f"{text}, reals {tensor['reals'][0]:.6g}..{tensor['reals'][1]:.6g}"


def node_table(found: Mapping[str, Any]) -> str:
    """One line per node."""
    header = ("node", "op", "inputs", "shape", "dtype", "scale", "zero", "method")
    header += ("bytes", "MACs", "accumulator", "bits", "headroom")
    rows: list[Sequence[Any]] = []
    for node in found["nodes"]:
        row = [node["name"], node["op"], ", ".join(node["inputs"]), shape_text(node["shape"]), node["dtype"]]
        row += [_span(node["scale"]), _span(node["zero_point"]), _dash(node["method"]), node["constant_bytes"]]
        row += [node["macs"] or "-", _dash(node["accumulator"]), _dash(node["accumulator_bits"])]
        rows.append([*row, _dash(node["headroom"])])
    return table(header, rows)


def tensor_table(found: Mapping[str, Any]) -> str:
    """One line per tensor, constants included."""
    header = ("tensor", "kind", "dtype", "shape", "scale", "axes", "zero", "codes", "bytes")
    ends = {tensor["name"]: "input" for tensor in found["inputs"]}
    ends |= {tensor["name"]: "output" for tensor in found["outputs"]}
    rows: list[Sequence[Any]] = []
    for tensor in found["tensors"]:
        kind = "constant" if tensor["constant"] else ends.get(tensor["name"], "activation")
        codes = "-" if tensor["codes"] is None else f"{tensor['codes'][0]}..{tensor['codes'][1]}"
        axes = ", ".join(map(str, tensor["axes"] or ())) or "-"
        row = [tensor["name"], kind, tensor["dtype"], shape_text(tensor["shape"]), _span(tensor["scale"]), axes]
        rows.append([*row, _span(tensor["zero_point"]), codes, tensor["bytes"]])
    return table(header, rows)


def totals(found: Mapping[str, Any]) -> str:
    """Two lines: what the model computes and what it holds."""
    t = found["totals"]
    batch = f"a batch of {t['batch']}"
    return (
        f"for {batch}: {t['macs']:,} MACs, at most {t['peak_activation_bytes']:,} bytes of activations alive\n"
        f"constants: {t['packed_bytes']:,} bytes in a file ({t['weight_bytes']:,} of weights), "
        f"{t['constant_bytes']:,} in memory"
    )


def shape_text(shape: Sequence[int | None]) -> str:
    """A shape as 3x3x16, the batch by name."""
    return "x".join("batch" if size is None else str(size) for size in shape) or "scalar"


def _dash(value: Any) -> Any:
    return "-" if value is None else value


def _span(values: Any) -> str:
    if values is None:
        return "-"
    array = np.asarray(values)
    if not array.size:
        return "none"
    text = "{:.6g}".format if array.dtype.kind == "f" else str
    low, high = text(array.min()), text(array.max())
    return low if low == high else f"{low} .. {high}"
