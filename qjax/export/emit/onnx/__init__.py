"""ONNX: writes a graph as one .onnx file.

Style "integer" uses only standard operators on integers, for any target; see `integer`. The targets of ONNX Runtime
have two more styles, which run on its 8-bit kernels: "qdq" (float operators between DequantizeLinear and
QuantizeLinear, see `qdq`) and "qoperator" (QLinearConv, QGemm, ..., see `qoperator`).
"""

import dataclasses
import importlib
import os
from typing import Any

from qjax import targets
from qjax.export import files
from qjax.export.ieee import check_islands
from qjax.graph.ir import Graph
from qjax.support.extensions import ONNX_STYLES, STYLE_OF_TARGET
from qjax.support.names import short_location

PORTABLE = ("floats", "codes")
"""How biases may be written for other runtimes than ONNX Runtime."""


def emit(
    graph: Graph,
    path: str | os.PathLike[str],
    *,
    style: str | None = None,
    batch: int | None = None,
    codes: bool = False,
    portable: str | None = None,
    vnni: bool = False,
) -> None:
    """Write a graph as an ONNX model, all or nothing.

    Args:
      style: "integer", "qdq", "qoperator", "openvino" or "qonnx"; None: "qdq" for a graph under a target of ONNX
        Runtime, "openvino" for one under `openvino_cpu`, "integer" for all others.
      batch: the batch size in the file; None leaves it free.
      codes: whether the inputs and outputs of the model are codes rather than floats; those of "integer" always are.
      portable: for style "qdq": write the file for other runtimes than ONNX Runtime, with every operator between
        DequantizeLinear and QuantizeLinear (see `portable`). "floats": with biases of float32. "codes": with biases of
        int32.
      vnni: whether the file only has to run on x86 CPUs with VNNI. On these, int8 weights beside uint8 activations are
        faster, and exact; on other x86 CPUs the same file may return other codes.

    Raises:
      ValueError: an unknown style, or a graph that the style cannot represent; the message names the node and the cure.
    """
    model = to_model(graph, style=style, batch=batch, codes=codes, portable=portable, vnni=vnni)
    files.write(model.SerializeToString(deterministic=True), path)


def to_model(
    graph: Graph,
    *,
    style: str | None = None,
    batch: int | None = None,
    codes: bool = False,
    portable: str | None = None,
    vnni: bool = False,
) -> Any:
    """The `onnx.ModelProto` that `emit` writes."""
    if style is None:
        style = STYLE_OF_TARGET.get(graph.target, "integer")
    if style not in ONNX_STYLES:
        raise ValueError(f"emit: expected one of the styles {', '.join(ONNX_STYLES)}, got {style!r}.")
    if portable is not None and (portable not in PORTABLE or style != "qdq"):
        raise ValueError(
            f"emit: expected portable={' or '.join(map(repr, PORTABLE))} with style='qdq', or None. Got {portable!r} "
            f"with style={style!r}."
        )
    if type(vnni) is not bool or (vnni and (portable is not None or targets.get(graph.target).accumulator.pairs)):
        raise ValueError(
            "emit: expected vnni=True or False, and False with portable or under a target whose pairs of products "
            f"saturate. Got vnni={vnni!r} with portable={portable!r} under {graph.target!r}."
        )
    check_islands(graph, "onnx")
    # here and not where the model is made, because a reader makes it again, with the locations that the file states
    nodes = tuple(dataclasses.replace(node, location=short_location(node.location)) for node in graph.nodes)
    graph = graph.replace(nodes=nodes)
    module = importlib.import_module(ONNX_STYLES[style])
    options: dict[str, Any] = {} if style == "integer" else {"codes": codes}
    if portable is not None:
        options["plain"] = True
    model = module.to_model(graph, batch=batch, vnni=vnni, **options)
    if portable is None:
        return model
    rewrite: Any = importlib.import_module("qjax.export.emit.onnx.portable")
    return rewrite.portable(model, float_bias=portable == "floats")
