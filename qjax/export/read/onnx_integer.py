"""Reads back what the ONNX emitter's style "integer" wrote.

Nodes are the calls of functions of the domain "qjax"; their attributes, the initializers, and the metadata under the
key "qjax" say the rest. What a function computes is not read but compared: the graph is emitted again, and the file
must be the same, function bodies included. So a file that was changed, or written by another version whose bodies
differ, is refused rather than taken for what it is not.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from qjax.export.check import GraphError, check_integer
from qjax.export.emit.onnx import tensors
from qjax.export.emit.onnx.attributes import decoded
from qjax.export.emit.onnx.builder import DOMAIN
from qjax.export.emit.onnx.integer import STYLE, VERSION, to_model
from qjax.export.ir import Graph, Node, Tensor
from qjax.export.read.errors import ReadError
from qjax.export.retarget import retarget
from qjax.numerics.input_quantization import INPUT_QUANTIZATIONS
from qjax.numerics.output_dequantization import OUTPUT_DEQUANTIZATIONS
from qjax.targets import Target


def matches(model: onnx.ModelProto) -> bool:
    """Whether a model says of itself that style "integer" wrote it."""
    try:
        facts = tensors.taken(model)
    except ValueError:
        return False
    return isinstance(facts, dict) and facts.get("style") == STYLE  # pyright: ignore[reportUnknownMemberType]


def read(model: onnx.ModelProto, target: "str | Target | None" = None) -> Graph:
    """The graph that was written; under another target if one is given.

    Raises:
      ReadError: the model is not, but for the version of its producer, what qjax writes for the graph in it.
    """
    try:
        graph, options = _graph(model)
    except (GraphError, ReadError):
        raise
    except Exception as error:
        # a changed file may fail anywhere
        raise ReadError(
            f"expected an ONNX model of qjax's integer style, got one that is damaged: {error!r}."
        ) from error
    _verify(model, graph, options)
    return graph if target is None else retarget(graph, target)


def _graph(model: onnx.ModelProto) -> tuple[Graph, dict[str, Any]]:
    facts = tensors.taken(model)
    if type(facts["version"]) is not int or not 1 <= facts["version"] <= VERSION:
        raise ReadError(
            f"expected version 1 to {VERSION} of qjax's integer style, got {facts['version']!r}: emit the graph again."
        )
    found: dict[str, Tensor] = {name: tensors.tensor_of(name, described) for name, described in facts["unread"].items()}
    proto = model.graph
    for value in (*proto.input, *proto.value_info, *proto.output):
        described = tensors.taken(value)
        if described is not None:
            found.setdefault(described["name"], tensors.tensor_of(described["name"], described))
    for constant in proto.initializer:
        described = tensors.taken(constant)
        if described is not None:
            found[constant.name] = tensors.tensor_of(constant.name, described, _array(constant))
    functions = {function.name: function for function in model.functions}
    renamed: dict[str, str] = {}
    nodes: list[Node] = []
    for node in proto.node:
        if node.domain == DOMAIN:
            nodes.append(_node(node, functions[node.op_type], renamed))
        elif node.op_type == "Transpose":
            # the same tensor under another order of axes
            first, second = node.input[0], node.output[0]
            renamed[second if first in found else first] = first if first in found else second
    known = INPUT_QUANTIZATIONS[INPUT_QUANTIZATIONS.index(facts["quantization"])]
    first = OUTPUT_DEQUANTIZATIONS[0]
    floats = OUTPUT_DEQUANTIZATIONS[OUTPUT_DEQUANTIZATIONS.index(facts.get("dequantization", first))]
    graph = Graph(
        tensors={name: found[name] for name in facts["tensors"]},
        nodes=tuple(nodes),
        inputs=tuple(facts["inputs"]),
        outputs=tuple(facts["outputs"]),
        target=facts["target"],
        metadata=facts["metadata"],
        quantization=known,
        dequantization=floats,
    )
    options = {"batch": facts["batch"], "vnni": facts.get("vnni", False), "version": facts["version"]}
    return check_integer(graph), options


def _array(constant: onnx.TensorProto) -> np.ndarray:
    if constant.data_location == onnx.TensorProto.EXTERNAL or constant.external_data:
        raise ReadError(f"initializer {constant.name!r}: its data lies in another file, which is not read.")
    return numpy_helper.to_array(constant)


def _node(node: onnx.NodeProto, function: onnx.FunctionProto, renamed: Mapping[str, str]) -> Node:
    facts = tensors.taken(node)
    inputs: list[str] = []
    constants: dict[str, str] = {}
    for role, name in zip(function.input, node.input, strict=True):
        if role[0] == "x" and role[1:].isdigit():
            inputs.append(renamed.get(name, name))
        elif "zero_point" not in role:
            constants[role] = name
    return Node(
        name=node.name,
        op=facts["op"],
        inputs=tuple(inputs),
        output=facts["output"],
        constants=constants,
        attributes={attribute.name: decoded(attribute) for attribute in node.attribute},
        location=facts["location"],
    )


def _verify(model: onnx.ModelProto, graph: Graph, options: Mapping[str, Any]) -> None:
    """Raise unless the graph, emitted again, is this model."""
    try:
        again = to_model(graph, **options)
    except Exception as error:
        # a changed attribute may fail in any kernel that reads it
        raise ReadError(
            f"the graph in the file cannot be written again ({type(error).__name__}: {str(error)[:200]}): the file was "
            "changed. Emit the graph again, or load its .qjax artifact."
        ) from error
    own = again.producer_version
    # another version may well write the same
    again.producer_version = model.producer_version
    if again.SerializeToString(deterministic=True) == model.SerializeToString(deterministic=True):
        return
    functions = {function.name: function for function in again.functions}
    changed = [function.name for function in model.functions if functions.get(function.name) != function]
    what = f"the function {changed[0]!r} is not what its rule" if changed else "the model is not what the graph in it"
    raise ReadError(
        f"{what} becomes with qjax {own} (the file says qjax {model.producer_version}): the file "
        "was changed, or another version wrote it. Emit the graph again, or load its .qjax artifact."
    )


__all__ = ["matches", "read"]
