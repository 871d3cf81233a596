"""Reads back the graph that the ONNX emitter wrote.

The model's metadata under the key "qjax" has the fields of the graph. In the styles "qdq" and "qoperator" it also has
those of the tensors and nodes, compressed, and the initializers contain the weights. In style "integer" the nodes are
the calls of functions of the domain "qjax", and each tensor of the model has its own metadata. The content of a
function is not read but compared: see `restored`.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from qjax.contrib.importers.restored import OPERATORS, check_version, restored
from qjax.export import document
from qjax.export.emit.onnx import integer, qdq, qoperator, tensors
from qjax.export.emit.onnx.builder import DOMAIN, VERSION
from qjax.export.emit.onnx.tensors import decoded
from qjax.graph.ir import Graph, Node, Tensor

_WRITERS = {style.STYLE: style.to_model for style in (integer, qdq, qoperator)}
_CURES = {integer.STYLE: "Emit the graph again, or load its .qjax artifact."}
"""The cure for the style whose operators cannot be read alone."""


def style_of(model: onnx.ModelProto) -> str | None:
    """The style in which qjax wrote a model, according to its metadata; None for any other model."""
    try:
        facts = tensors.taken(model)
    except (ValueError, RecursionError):
        return None
    style: Any = facts.get("style") if isinstance(facts, dict) else None  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType]
    return style if isinstance(style, str) and style in _WRITERS else None


def read(model: onnx.ModelProto) -> Graph:
    """The graph from which a model was written, for a model that has a `style_of` its own.

    Raises:
      ReadError: the file is not what qjax writes for the graph in its metadata.
    """
    facts = tensors.taken(model)
    cure = _CURES.get(facts["style"], OPERATORS)

    def make() -> Graph:
        check_version(facts, VERSION)
        return _of_calls(model, facts) if facts["style"] == integer.STYLE else _of_document(model, facts)

    def difference(graph: Graph) -> str:
        options = {"batch": facts["batch"], "vnni": facts.get("vnni", False)}
        if "codes" in facts:
            options["codes"] = facts["codes"]
        again = _WRITERS[facts["style"]](graph, **options)
        own = again.producer_version
        # Another version of qjax or of JAX may write the same file, with another documentation of a function.
        again.producer_version = model.producer_version
        if len(again.functions) == len(model.functions):
            for written, function in zip(again.functions, model.functions, strict=True):
                # an empty text that is set makes another file than one that is not set
                if written.doc_string != function.doc_string:
                    written.doc_string = function.doc_string
        if again.SerializeToString(deterministic=True) == model.SerializeToString(deterministic=True):
            return ""
        functions = {function.name: function for function in again.functions}
        changed = [function.name for function in model.functions if functions.get(function.name) != function]
        what = f"the function {changed[0]!r} is not what its rule becomes" if changed else "it becomes another one"
        return f"{what} with qjax {own}, and the file says qjax {model.producer_version}"

    return restored(make, difference, cure)


def _array(constant: onnx.TensorProto) -> np.ndarray:
    if constant.data_location == onnx.TensorProto.EXTERNAL or constant.external_data:
        raise ValueError(f"initializer {constant.name!r}: its data lies in another file")
    return numpy_helper.to_array(constant)


# ---------------------------------------------------------------------------- styles "qdq" and "qoperator"


def _of_document(model: onnx.ModelProto, facts: Mapping[str, Any]) -> Graph:
    held = {constant.name: constant for constant in model.graph.initializer}
    known = document.uncompressed(facts["document"])
    found = [_tensor(described, held) for described in known["tensors"]]
    return document.graph_of(facts, found, map(document.node_of, known["nodes"]))


def _tensor(described: Mapping[str, Any], held: Mapping[str, onnx.TensorProto]) -> Tensor:
    if "shape" in described:
        return document.tensor_of(described)
    name = described["name"]
    holder = held[described.get("constant", name)]
    facts = tensors.taken(holder)
    codes = _array(holder).astype(np.int64) - facts.get("offset", 0)
    order = facts.get("order", range(len(facts["shape"])))
    return document.tensor_of(facts, codes.reshape([facts["shape"][axis] for axis in order]), name)


# ---------------------------------------------------------------------------- style "integer"


def _of_calls(model: onnx.ModelProto, facts: Mapping[str, Any]) -> Graph:
    proto = model.graph
    if "document" in facts:
        known = document.uncompressed(facts["document"])
        held = {constant.name: constant for constant in proto.initializer}
        found = [_constant(entry, held) for entry in known["tensors"]]
        return document.graph_of(facts, found, map(document.node_of, known["nodes"]))
    found = {name: document.tensor_of(described, name=name) for name, described in facts["unread"].items()}
    for value in (*proto.input, *proto.value_info, *proto.output):
        described = tensors.taken(value)
        if described is not None:
            found.setdefault(described["name"], document.tensor_of(described))
    for constant in proto.initializer:
        described = tensors.taken(constant)
        if described is not None:
            found[constant.name] = document.tensor_of(described, _array(constant), constant.name)
    functions = {function.name: function for function in model.functions}
    renamed: dict[str, str] = {}
    nodes: list[Node] = []
    for node in proto.node:
        if node.domain == DOMAIN:
            nodes.append(_node(node, functions[node.op_type], renamed, found))
        elif node.op_type == "Transpose":
            # The same tensor in another axis order.
            first, second = node.input[0], node.output[0]
            renamed[second if first in found else first] = first if first in found else second
    return document.graph_of(facts, [found[name] for name in facts["tensors"]], nodes)


def _constant(entry: Mapping[str, Any], held: Mapping[str, onnx.TensorProto]) -> Tensor:
    """A tensor of a document, whose constants are initializers or are stated in the document."""
    name = entry.get("constant")
    if name is None:
        return document.tensor_of(entry)
    stored = document.tensor_of(tensors.taken(held[name]), _array(held[name]))
    return document.tensor_of(entry, np.asarray(stored.value))


def _node(
    node: onnx.NodeProto, function: onnx.FunctionProto, renamed: Mapping[str, str], known: Mapping[str, Tensor]
) -> Node:
    facts = tensors.taken(node)
    inputs: list[str] = []
    constants: dict[str, str] = {}
    for role, name in zip(function.input, node.input, strict=True):
        if role[0] == "x" and role[1:].isdigit():
            inputs.append(renamed.get(name, name))
        elif name in known:  # the zero points of inputs are no tensors of the graph
            constants[role] = name
    attributes = {attribute.name: decoded(attribute) for attribute in node.attribute}
    return Node(node.name, facts["op"], tuple(inputs), facts["output"], constants, attributes, facts["location"])


__all__ = ["read", "style_of"]
