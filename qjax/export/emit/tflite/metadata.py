"""JSON metadata for what a .tflite file has no field for, so that reading it restores the same graph.

    {"version": 1, "target": ..., "quantization": ..., "metadata": ..., "inputs": [...], "outputs": [...],
     "tensors": [[name, shape, dtype, range or null], ...], "nodes": [{...}, ...]}

Tensors are in the graph's order. Scales, zero points and data are those of the file's tensors of the same name. A range
is [qmin, qmax, axes, whether there is a zero point per scale]. A node has the fields of `ir.Node`, and "operators", the
span [first, end) of the operators that compute it. "values" lists the constants that are neither tensors of the file
(kernel, bias) nor derived by the target's rule or formula (`retarget`). These are clamps, counts of averages, the
factors of an exact sum, the entries of a table, and the codes of constant operands.
"""

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from qjax.export.artifact import fields, strict_json
from qjax.export.tflite_schema.file import METADATA_VERSION
from qjax.graph.ir import Graph, Node, Tensor

if TYPE_CHECKING:
    from qjax.export.emit.tflite.writer import Writer

VALUES = ("count", "clamp_min", "clamp_max")
"""Constants whose values are always listed."""


def metadata_of(graph: Graph, writer: "Writer") -> bytes:
    """The document."""
    document = {
        "version": METADATA_VERSION,
        "target": graph.target,
        "quantization": graph.quantization,
        "metadata": graph.metadata,
        "inputs": graph.inputs,
        "outputs": graph.outputs,
        "tensors": [_tensor(tensor) for tensor in graph.tensors.values()],
        "nodes": [_node(graph, node, span) for node, span in zip(graph.nodes, writer.spans, strict=True)],
    }
    return json.dumps(strict_json.plain(document, "The graph"), ensure_ascii=False, separators=(",", ":")).encode()


def _tensor(tensor: Tensor) -> list[Any]:
    q = tensor.quantization
    grid = None if q is None else [q.qmin, q.qmax, list(q.axes), np.ndim(q.zero_point) > 0]
    return [tensor.name, list(tensor.shape), tensor.dtype, grid]


def _node(graph: Graph, node: Node, span: tuple[int, int]) -> dict[str, Any]:
    entry = {**fields.of_node(node), "operators": list(span)}
    exact = not {"rule", "formula"} & set(node.attributes)
    listed = [role for role in node.constants if role in VALUES or (exact and role not in ("kernel", "bias"))]
    if listed:
        entry["values"] = {role: np.asarray(graph.constant(node, role)).tolist() for role in listed}
    return entry
