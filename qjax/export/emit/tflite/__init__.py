"""Writes a graph as a .tflite file of quantized operators, whose codes in the matching runtime are those of the graph.

A .tflite file contains scales but no rounding. Each runtime rounds differently, so the same file has different codes in
LiteRT's reference kernels, its optimised ones, XNNPACK and TFLite Micro. Therefore only graphs of a target of that
family are written. `graph.retarget` converts any other graph, and `qjax.compare` shows how much this changes.

The file's metadata "qjax" contains as JSON what the format has no field for, so that reading it restores the same
graph. It is compressed with zlib, because a microcontroller stores the whole file in its flash:

    {"version": 3, "target": ..., "quantization": ..., "metadata": ..., "inputs": [...], "outputs": [...],
     "tensors": [[name, shape, dtype, range or null], ...], "nodes": [{...}, ...]}

Tensors are in the graph's order. Scales, zero points and data are those of the file's tensors of the same name. A range
is [qmin, qmax, axes, whether there is a zero point per scale]; for a tensor that is not in the file, scales and zero
points follow. A node has the fields of `ir.Node`, and "operators", the span [first, end) of the operators that compute
it. "values" lists the constants that are neither tensors of the file (kernel, bias) nor derived by the target's rule or
formula (`retarget`). These are clamps, counts of averages, the factors of an exact sum, the entries of a table, and the
codes of constant operands.
"""

# importing a file registers its lowerings
# pyright: reportUnusedImport=false

import os
from collections.abc import Collection
from typing import Any

import numpy as np

from qjax.export import document, files, strict_json
from qjax.export.emit.tflite import arithmetic, floats, functions, moves, plain_integers, products, selections, tables
from qjax.export.emit.tflite.support import check_target, problems_of
from qjax.export.emit.tflite.writer import Writer
from qjax.export.tflite_schema.file import METADATA, METADATA_VERSION
from qjax.graph.ir import Graph, Node, Tensor
from qjax.support.errors import Problems

__all__ = [
    "arithmetic",
    "attempt",
    "emit",
    "floats",
    "functions",
    "moves",
    "plain_integers",
    "products",
    "selections",
    "tables",
    "to_bytes",
]

_LISTED = ("count", "clamp_min", "clamp_max")
"""Constants whose values are always in the metadata."""


def emit(graph: Graph, path: str | os.PathLike[str], *, batch: int = 1, int4: bool | None = None) -> None:
    """Write a .tflite file, all or nothing.

    Args:
      graph: a finished graph for a target of the TFLite family, int8 or int16 activations, int8 weights.
      batch: the batch size in the file's shapes. If every operator allows it, the file also declares a free batch, and
        LiteRT's `resize_tensor_input` changes it.
      int4: store weights of 4 bits and less packed, two per byte. None: if the target's runtime then computes the
        same codes, see `support.takes_int4`.

    Raises:
      ValueError: another target; operations or types for which the runtime has no integers. The message lists every
        node and its cure.
      ModuleNotFoundError: ai-edge-litert or flatbuffers is missing.
    """
    files.write(to_bytes(graph, batch=batch, int4=int4), path)


def to_bytes(graph: Graph, *, batch: int = 1, int4: bool | None = None) -> bytes:
    """The bytes of the file, see `emit`."""
    data, problems = attempt(graph, batch=batch, int4=int4)
    if problems:
        listed = "\n".join(f"  {line}" for line in problems.lines)
        raise ValueError(f"emit: {len(problems.found)} parts of the graph have no form in a .tflite file:\n{listed}")
    return data


def attempt(graph: Graph, *, batch: int = 1, int4: bool | None = None) -> tuple[bytes, Problems]:
    """The file, with an input instead of every node that cannot be written, and the list of these nodes.

    If the graph's types have no form at all, the file is empty.

    Raises:
      ValueError: a graph of another target.
    """
    if type(batch) is not int or batch < 1:
        raise ValueError(f"emit: expected a batch of 1 or more, got {batch!r}.")
    check_target(graph)
    problems = problems_of(graph)
    if problems:
        return b"", problems
    writer = _writer(graph, batch, int4)
    return _bytes(graph, writer), writer.problems


def _bytes(graph: Graph, writer: Writer) -> bytes:
    if not writer.resizable:
        # an operator contains the batch size as a number, so the shapes are fixed
        for tensor in writer.file.tensors:
            tensor.shapeSignature = None
    return bytes(
        writer.file.to_bytes(
            [*(writer.values[name].index for name in graph.inputs), *writer.unwritten],
            writer.outputs(),
            description=f"qjax, target {graph.target}",
            metadata={METADATA: _metadata(graph, writer)},
        )
    )


def _writer(graph: Graph, batch: int, int4: bool | None) -> Writer:
    try:
        writer = Writer(graph, batch, int4)
    except ImportError as error:
        missing: Any = error.name
        raise ModuleNotFoundError(
            f"emit: writing .tflite needs the packages ai-edge-litert and flatbuffers, and {missing!r} is missing: "
            "pip install ai-edge-litert flatbuffers"
        ) from error
    writer.run()
    return writer


def _metadata(graph: Graph, writer: Writer) -> bytes:
    held = {tensor.name for tensor in writer.file.tensors}
    known = {
        "version": METADATA_VERSION,
        "target": graph.target,
        "quantization": graph.quantization,
        "metadata": graph.metadata,
        "inputs": graph.inputs,
        "outputs": graph.outputs,
        "tensors": [_tensor(tensor, held) for tensor in graph.tensors.values()],
        "nodes": [_node(graph, node, span) for node, span in zip(graph.nodes, writer.spans, strict=True)],
    }
    return document.deflated(strict_json.dumps(known, "The graph").encode())


def _tensor(tensor: Tensor, held: Collection[str]) -> list[Any]:
    q = tensor.quantization
    grid: list[Any] | None = None if q is None else [q.qmin, q.qmax, list(q.axes), np.ndim(q.zero_point) > 0]
    if q is not None and grid is not None and tensor.name not in held:
        grid += [np.asarray(q.scale).tolist(), np.asarray(q.zero_point).tolist()]
    return [tensor.name, list(tensor.shape), tensor.dtype, grid]


def _node(graph: Graph, node: Node, span: tuple[int, int]) -> dict[str, Any]:
    entry = {**document.of_node(node), "operators": list(span)}
    exact = not {"rule", "formula", "dynamic"} & set(node.attributes)
    listed = [role for role in node.constants if role in _LISTED or (exact and role not in ("kernel", "bias"))]
    if listed:
        entry["values"] = {role: np.asarray(graph.constant(node, role)).tolist() for role in listed}
    return entry
