"""Reads a float .onnx file into the common form: checked nodes, folded constants, weights that training may change."""

import dataclasses
import importlib
import importlib.util
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from qjax.contrib.float_models import operators  # noqa: F401  # they register
from qjax.contrib.float_models.graph import OPERATORS, FloatGraph, Node, Port
from qjax.contrib.float_models.operators.elementwise import TYPES
from qjax.contrib.float_models.weights import Folding, needed, weights_of
from qjax.contrib.importers.onnx import tensors
from qjax.contrib.importers.onnx.model import Model, OnnxNode, model_of, nodes_of, parse
from qjax.contrib.importers.onnx.values import Known
from qjax.export import files
from qjax.export.read_errors import ReadError, reading
from qjax.support.errors import Problems, Unsupported

_QUANTIZED = frozenset(("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "ConvInteger", "MatMulInteger"))
_OLDEST = 7
"""The first operator set whose forms of operators the functions know."""
_NEWEST = 28
"""The operator set whose attributes the functions know."""


def read(data: bytes, path: str = "") -> tuple[FloatGraph, frozenset[str]]:
    """The graph of a file, and which of its parameters are moving statistics of norms.

    Args:
      data: the bytes of the file. path: where it is, for weights in files beside it; "" refuses these.

    Raises:
      ReadError: the file is damaged. Unsupported: it is quantized, or has operators that are not supported.
    """
    if importlib.util.find_spec("onnx") is None:
        raise ModuleNotFoundError('Reading .onnx files needs the package onnx: pip install "qjax-quant[onnx]"')
    with reading("the file's tables", Unsupported):
        proto = parse(data)
        for tensor in _stored_outside(proto.graph):
            _load_external(tensor, path)
        model = model_of(proto)
        _refuse_unknown(model)
        return _Reader(model).graph()


# ---------------------------------------------------------------------- weights in other files


def _stored_outside(graph: Any) -> Iterable[Any]:
    """Every tensor of a graph whose data are in another file."""
    for tensor in graph.initializer:
        if len(tensor.external_data):
            yield tensor
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t") and len(attribute.t.external_data):
                yield attribute.t
            if attribute.HasField("g"):
                yield from _stored_outside(attribute.g)


def _load_external(tensor: Any, path: str) -> None:
    """Put the data of a tensor inside; only files in the folder of the model are opened."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location, where = entries.get("location", ""), f"the weights {tensor.name[:80]!r}"
    if not path:
        raise ReadError(f"{where} are in another file, {location!r}. Give the path of the model instead of its bytes.")
    folder = os.path.realpath(os.path.dirname(os.path.abspath(path)))
    found = os.path.realpath(os.path.join(folder, location))
    if not location or os.path.isabs(location) or os.path.commonpath([folder, found]) != folder or found == folder:
        raise ReadError(
            f"{where} are in {location!r}, and qjax opens no file outside of the model's folder. Save the model with "
            "its weights beside it: onnx.save(onnx.load(path), path)."
        )
    data = memoryview(files.read(found, 2**33, f"the file of {where}", ReadError))
    start = int(entries.get("offset", 0))
    length = int(entries.get("length", len(data) - start))
    if start < 0 or length < 0 or start + length > len(data):
        raise ReadError(f"{where}: bytes {start} to {start + length} of {location!r}, which has {len(data)}.")
    tensor.raw_data = bytes(data[start : start + length])
    tensor.data_location = 0
    del tensor.external_data[:]


# ---------------------------------------------------------------------- refusals


def _refuse_unknown(model: Model) -> None:
    """Raise one error with every operator that qjax has no function for."""
    quantized = [n for n in model.nodes if n.op in _QUANTIZED or n.op.startswith("QLinear")]
    if quantized:
        raise Unsupported(
            f"the file is quantized: {quantized[0].title}, and {len(quantized) - 1} more nodes on codes",
            "Read it as integers: qjax.read(path); for training, export the float model",
        )
    problems = Problems()
    for what, ports in (("input", model.inputs), ("output", model.outputs)):
        for port in ports:
            if port.type not in TYPES.values():
                problems.add(f"{what} {port.name!r}", f"elements of type {port.type}, which JAX does not compute with")
    nodes = list(model.nodes)
    for node in nodes:
        for value in node.attributes.values():
            if hasattr(value, "node"):
                nodes += [OnnxNode(p.op_type, p.domain, p.name, (), tuple(p.output), {}, {}, {}) for p in value.node]
    for node in nodes:
        if node.domain or node.op not in OPERATORS:
            problems.add(node.title, "qjax has no such operator")
            continue
        oldest = _schema(node.op, _OLDEST)
        if model.opset < _OLDEST and (oldest is None or oldest.since_version > model.opset):
            problems.add(
                node.title, f"its form is older than operator set {_OLDEST}", "Convert it: onnx.version_converter"
            )
            continue
        # Attributes that are newer than the functions here would be ignored.
        schema = _schema(node.op, min(model.opset, _NEWEST))
        for key in node.attributes.keys() - (
            schema.attributes.keys() if schema is not None else node.attributes.keys()
        ):
            problems.add(node.title, f"its attribute {key!r} is newer than operator set {_NEWEST}")
    if problems:
        listed = "\n".join(f"  {line}." for line in problems.lines[:40])
        more = f"\n  ... and {len(problems.lines) - 40} more." if len(problems.lines) > 40 else ""
        raise Unsupported(
            f"{len(problems.lines)} parts of the model are not supported:\n{listed}{more}\n"
            "Leave these parts out of the export, or compute them after the model"
        )


def _schema(op: str, version: int) -> Any:
    defs: Any = importlib.import_module("onnx.defs")
    return defs.get_schema(op, version, "") if defs.has(op, version, "") else None


# ---------------------------------------------------------------------- nodes and constants


class _Reader:
    """Builds the common form of a checked model."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.folding = Folding()
        self.nodes: list[Node] = []

    def graph(self) -> tuple[FloatGraph, frozenset[str]]:
        """The whole model."""
        model, outputs = self.model, [port.name for port in self.model.outputs]
        self.add(model.initializers, model.nodes)
        known = {*self.folding.constants, *(port.name for port in model.inputs)}
        kept = needed(self.nodes, outputs, known)
        nodes, parameters, constants, statistics = weights_of(kept, self.folding, outputs)
        ports = [tuple(map(_port, side)) for side in (model.inputs, model.outputs)]
        return FloatGraph("onnx", tuple(nodes), constants, parameters, ports[0], ports[1]), statistics

    def add(self, initializers: Mapping[str, Any], nodes: Sequence[OnnxNode]) -> None:
        """Add constants and nodes; nodes whose inputs are constants become constants."""
        for name, proto in initializers.items():
            value, stored = tensors.array(proto, f"Initializer {name[:80]!r}")
            self.folding.add(name, value.astype("bfloat16") if stored == "bfloat16" else value)
        made = [self._node(node) for node in nodes]
        self.folding.count(made)
        self.nodes += [node for node in made if not self.folding.fold(node)]

    def _node(self, node: OnnxNode) -> Node:
        attributes: dict[str, Any] = {}
        inputs = list(node.inputs)
        for key, value in node.attributes.items():
            if isinstance(value, Known):
                attributes[key] = value.value
            elif hasattr(value, "node"):
                attributes[key] = branch = self._branch(value, f"{node.outputs[0]}/{key}")
                inputs += [port.name for port in branch.inputs if port.name not in inputs]
            else:
                attributes[key] = value
        return Node(node.op, node.name or node.outputs[0], tuple(inputs), node.outputs, attributes, self.model.opset)

    def _branch(self, proto: Any, prefix: str) -> FloatGraph:
        """A branch of an If as a graph, whose inputs are the outer values that it reads."""
        inner = _Reader(self.model)
        inner.add({tensor.name: tensor for tensor in proto.initializer}, nodes_of(proto.node))
        outputs = [port.name for port in proto.output]
        own = {name for node in inner.nodes for name in node.outputs} | inner.folding.constants.keys()
        read = [*(name for node in inner.nodes for name in node.inputs), *outputs]
        captured = list(dict.fromkeys(name for name in read if name and name not in own))
        nodes = tuple(dataclasses.replace(n, name=f"{prefix}/{n.name}") for n in inner.nodes)
        ports = [tuple(Port(name, "", None) for name in names) for names in (captured, outputs)]
        return FloatGraph("onnx", nodes, inner.folding.constants, {}, ports[0], ports[1])


def _port(port: Any) -> Port:
    dims = None if port.dims is None else tuple(n if isinstance(n, int) else None for n in port.dims)
    return Port(port.name, port.type, dims)
