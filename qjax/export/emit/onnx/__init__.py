"""ONNX: a graph as one .onnx file.

Style "integer" uses only standard operators on integers, for any target; see `integer`. The targets of ONNX Runtime
have two more styles, which run on its 8-bit kernels: "qdq" (float operators between DequantizeLinear and
QuantizeLinear, see `qdq`) and "qoperator" (QLinearConv, QGemm, ..., see `qoperator`).
"""

import importlib
import os
from typing import Any

from qjax.export import files
from qjax.export.ir import Graph

STYLES = {"integer": "integer", "qdq": "qdq", "qoperator": "qoperator"}
"""Style -> the module of this package with its `to_model(graph, *, batch, ...)`."""


def emit(
    graph: Graph,
    path: str | os.PathLike[str],
    *,
    style: str | None = None,
    batch: int | None = None,
    codes: bool = False,
) -> None:
    """Write a graph as an ONNX model, all or nothing.

    Args:
      style: one of `STYLES`; None: "qdq" for a graph under a target of ONNX Runtime, "integer" for all others.
      batch: the size of the batch in the file; None leaves it free.
      codes: whether the inputs and outputs of the model are codes rather than floats; those of "integer" always are.

    Raises:
      ValueError: an unknown style, or a graph that the style cannot hold; the message names the node and the cure.
    """
    model = to_model(graph, style=style, batch=batch, codes=codes)
    files.write(model.SerializeToString(deterministic=True), path)


def to_model(graph: Graph, *, style: str | None = None, batch: int | None = None, codes: bool = False) -> Any:
    """The `onnx.ModelProto` that `emit` writes."""
    if style is None:
        style = "qdq" if graph.target.startswith("onnxruntime") else "integer"
    if style not in STYLES:
        raise ValueError(f"emit: expected one of the styles {', '.join(STYLES)}, got {style!r}.")
    module = importlib.import_module(f"qjax.export.emit.onnx.{STYLES[style]}")
    options = {} if style == "integer" else {"codes": codes}
    return module.to_model(graph, batch=batch, **options)
