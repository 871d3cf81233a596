"""A ModelProto as plain, checked data: nodes in order, functions inlined, initializers decoded on demand.

Everything in the file is distrusted. Names are resolved and unique, sizes bounded, nothing outside of the file is
opened, and the inlining of functions terminates.
"""

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qjax.contrib.importers.onnx import tensors
from qjax.contrib.importers.onnx.values import Known
from qjax.export.read_errors import ReadError

# ----------------------------------------------------------------------------------------------------------------------
# Checks nodes by ONNX's own schemas: ONNX Runtime refuses a file that breaks one, so its codes would mean nothing.


def check_nodes(
    nodes: Sequence[Any], types: Mapping[str, str], outputs: Mapping[str, str], opset: int, ir_version: int
) -> None:
    """Refuse ONNX operators whose attributes, numbers of inputs or types are not allowed in this opset.

    Operators without a schema, such as those of ONNX Runtime's own domain, are checked by their handlers.

    Args:
      nodes: in order, functions inlined. types: of the inputs and initializers, by name, as ONNX writes them.
      outputs: the same of the model's outputs.

    Raises:
      ReadError: the first operator that is refused, and what its schema allows.
    """
    defs: Any = importlib.import_module("onnx.defs")
    known, newest = dict(types), (defs.onnx_opset_version(), importlib.import_module("onnx").IR_VERSION)
    if opset > newest[0] or ir_version > newest[1]:
        raise ReadError(
            f"expected an opset of at most {newest[0]} and an IR version of at most {newest[1]}, which the installed "
            f"package onnx knows, got {opset} and {ir_version}. Upgrade onnx, or export the model for an older opset."
        )
    for node in nodes:
        if node.domain or not defs.has(node.op):
            continue
        try:
            schema = defs.get_schema(node.op, opset, "")
        except defs.SchemaError:
            raise ReadError(
                f"{node.title}: ONNX has no such operator in the opset {opset}, which the model imports."
            ) from None
        _check_attributes(node, schema)
        _check_counts(node, schema)
        known |= _check_types(node, schema, known)
    for name, kind in outputs.items():
        if known.get(name, kind) != kind:
            raise ReadError(f"the output {name[:80]!r} is declared as {kind}, but its operator returns {known[name]}.")


def _check_attributes(node: Any, schema: Any) -> None:
    for name, kind in node.kinds.items():
        if name not in schema.attributes:
            listed = ", ".join(sorted(schema.attributes)) or "none"
            raise ReadError(f"{node.title}: ONNX has no attribute {name!r} here. The operator's attributes: {listed}.")
        wanted = schema.attributes[name].type
        if kind not in (0, wanted.value):
            raise ReadError(f"{node.title}: expected the attribute {name!r} to be of the kind {wanted.name}.")
    for name, attribute in schema.attributes.items():
        if attribute.required and name not in node.kinds:
            raise ReadError(f"{node.title}: the attribute {name!r} is missing, which ONNX requires here.")


def _check_counts(node: Any, schema: Any) -> None:
    for what, names, least, most in (
        ("inputs", node.inputs, schema.min_input, schema.max_input),
        ("outputs", node.outputs, schema.min_output, schema.max_output),
    ):
        if not least <= len(names) <= most:
            raise ReadError(f"{node.title}: expected {least} to {most} {what}, got {len(names)}.")
    for formal, name in zip(schema.inputs, node.inputs, strict=False):
        if not name and formal.option.name == "Single":
            raise ReadError(f"{node.title}: its input {formal.name!r} is missing, which ONNX requires here.")


def _check_types(node: Any, schema: Any, known: Mapping[str, str]) -> dict[str, str]:
    """The types of the outputs, derived from those of the inputs."""
    allowed = {c.type_param_str: set(c.allowed_type_strs) for c in schema.type_constraints}
    bound: dict[str, str] = {}
    last = len(schema.inputs) - 1
    for index, name in enumerate(node.inputs):
        kind = known.get(name)
        if not name or kind is None:
            continue
        formal = schema.inputs[min(index, last)]
        wanted = allowed.get(formal.type_str, {formal.type_str})
        if kind not in wanted:
            raise ReadError(
                f"{node.title}: its input {name[:80]!r} is of {kind}, but ONNX takes {', '.join(sorted(wanted))} here."
            )
        if formal.option.name == "Variadic" and not formal.is_homogeneous:
            continue
        if bound.setdefault(formal.type_str, kind) != kind:
            raise ReadError(
                f"{node.title}: its input {name[:80]!r} is of {kind}, and another one of {bound[formal.type_str]}, and "
                "ONNX wants one type for both."
            )
    found: dict[str, str] = {}
    for formal, name in zip(schema.outputs, node.outputs, strict=False):
        kind = bound.get(formal.type_str) if formal.type_str in allowed else formal.type_str
        if name and kind is not None:
            found[name] = kind
    return found


MAX_NODES = 50_000
MAX_NAME = 1_024
"""The longest name; every node of an inlined function has the names of all its calls before its own."""
MAX_DEPTH = 32
_STANDARD = ("", "ai.onnx")

# onnx.AttributeProto.AttributeType
_FLOAT, _INT, _STRING, _TENSOR, _GRAPH, _FLOATS, _INTS, _STRINGS = 1, 2, 3, 4, 5, 6, 7, 8


@dataclasses.dataclass(frozen=True, eq=False)
class OnnxNode:
    """One node; domain: "" for ONNX's own. attributes: numbers, strings, lists of them, or `Known` for tensors."""

    op: str
    domain: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    metadata: Mapping[str, str]
    kinds: Mapping[str, int]
    """The types of the attributes, as `AttributeProto.type` numbers them."""

    @property
    def title(self) -> str:
        """The node's name in messages."""
        kind = self.op if not self.domain else f"{self.domain}.{self.op}"
        name = self.name or (self.outputs[0] if self.outputs else "")
        return f"{kind} {_short(name)!r}"

    def get(self, key: str, default: Any, kind: type | tuple[type, ...] = int) -> Any:
        """An attribute of the given type, or the default."""
        value = self.attributes.get(key, default)
        if value is default:
            return value
        if not isinstance(value, kind):
            raise ReadError(f"{self.title}: attribute {key!r}: got {type(value).__name__}, which is not its type.")
        return value

    def ints(self, key: str, default: list[int] | None = None) -> list[int] | None:
        """An attribute that is a list of ints, or the default."""
        value = self.attributes.get(key, default)
        if value is not None and not (isinstance(value, list) and all(isinstance(n, int) for n in value)):  # pyright: ignore[reportUnknownVariableType]
            raise ReadError(f"{self.title}: attribute {key!r}: expected a list of ints.")
        return value


@dataclasses.dataclass(frozen=True, eq=False)
class Port:
    """An input or output of the model; dims: sizes, or a symbol, or None for an unknown size. None: unknown rank."""

    name: str
    type: str
    dims: tuple[int | str | None, ...] | None


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """The part of a model that the reader reads."""

    nodes: tuple[OnnxNode, ...]
    initializers: Mapping[str, Any]
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    metadata: Mapping[str, str]
    opset: int
    producer: str
    cache: dict[str, Known] = dataclasses.field(default_factory=dict)

    def initializer(self, name: str) -> Known:
        """The data of an initializer."""
        if name not in self.cache:
            value, stored = tensors.array(self.initializers[name], f"Initializer {_short(name)!r}")
            self.cache[name] = Known(value, name, stored if tensors.small_range(stored) else "")
        return self.cache[name]


def parse(data: bytes) -> Any:
    """The ModelProto of a file. Raises ReadError if the bytes are none."""
    onnx: Any = importlib.import_module("onnx")
    message: Any = importlib.import_module("google.protobuf.message")
    try:
        proto = onnx.load_model_from_string(data)
    except (message.DecodeError, ValueError, RecursionError) as error:
        raise ReadError(f"expected an ONNX model (a ModelProto), got bytes that are none: {error}") from None
    if not proto.HasField("graph") or not len(proto.opset_import):
        raise ReadError("expected an ONNX model (a ModelProto), got one without a graph or without an opset.")
    return proto


def model_of(proto: Any) -> Model:
    """The checked model."""
    graph = proto.graph
    if len(proto.graph.sparse_initializer):
        raise ReadError("the model contains sparse initializers, which a graph cannot represent. Store them densely.")
    initializers: dict[str, Any] = {}
    for tensor in graph.initializer:
        if not tensor.name or tensor.name in initializers:
            raise ReadError(f"initializer {_short(tensor.name)!r}: expected a unique name.")
        initializers[_checked(tensor.name)] = tensor
    inputs = [_port(info) for info in graph.input if info.name not in initializers]
    nodes = _Inliner(proto).nodes(graph.node)
    _check_names(initializers, inputs, nodes)
    opsets = {("" if o.domain in _STANDARD else o.domain): int(o.version) for o in proto.opset_import}
    for domain in {node.domain for node in nodes} - opsets.keys():
        if not any(domain in map(_domain, (o.domain for o in f.opset_import)) for f in proto.functions):
            raise ReadError(f"the model has operators of the domain {domain!r}, but imports no opset of it.")
    types = {port.name: f"tensor({_schema_type(port.type)})" for port in inputs}
    types |= {name: f"tensor({_schema_type(tensors.type_name(t.data_type))})" for name, t in initializers.items()}
    metadata = _metadata(proto)
    outputs = tuple(_port(info) for info in graph.output)
    made = {port.name: f"tensor({_schema_type(port.type)})" for port in outputs}
    check_nodes(nodes, types, made, opsets.get("", 1), proto.ir_version)
    if not outputs:
        raise ReadError("the model has no outputs.")
    producer = " ".join(_text_of(part) for part in (proto.producer_name, proto.producer_version) if part)[:256]
    return Model(tuple(nodes), initializers, tuple(inputs), outputs, metadata, opsets.get("", 1), producer)


def _schema_type(kind: str) -> str:
    """A type as the schemas of ONNX call it."""
    return {"float32": "float", "float64": "double"}.get(kind, kind)


def _port(info: Any) -> Port:
    where = f"{_short(info.name)!r}"
    if info.type.WhichOneof("value") != "tensor_type":
        raise ReadError(f"{where}: expected a tensor, got {info.type.WhichOneof('value')}.")
    kind = info.type.tensor_type
    name = tensors.type_name(kind.elem_type)
    if not kind.HasField("shape"):
        return Port(_checked(info.name), name, None)
    dims: list[int | str | None] = []
    for dim in kind.shape.dim:
        chosen = dim.WhichOneof("value")
        if chosen == "dim_value" and dim.dim_value >= 0:
            dims += tensors.dimensions([dim.dim_value], where)
        else:
            # Some exporters write -1 for a free size.
            dims.append(_checked(dim.dim_param) if chosen == "dim_param" and dim.dim_param else None)
    if len(dims) > tensors.MAX_RANK:
        raise ReadError(f"{where}: expected at most {tensors.MAX_RANK} axes, got {len(dims)}.")
    return Port(_checked(info.name), name, tuple(dims))


def _check_names(initializers: Mapping[str, Any], inputs: list[Port], nodes: list[OnnxNode]) -> None:
    known = set(initializers)
    for port in inputs:
        if port.name in known:
            raise ReadError(f"input {_short(port.name)!r} is listed twice.")
        known.add(port.name)
    for node in nodes:
        for name in node.inputs:
            if name and name not in known:
                raise ReadError(
                    f"{node.title} reads {_short(name)!r}, which is no input, no initializer and no result of an "
                    "earlier node. The model is damaged, or its nodes are out of order or form a cycle."
                )
        for name in node.outputs:
            if name and name in known:
                raise ReadError(f"{node.title} computes {_short(name)!r}, which exists already.")
            known.add(name)


class _Inliner:
    """Replaces calls of the model's own functions by their bodies."""

    def __init__(self, proto: Any) -> None:
        self.functions: dict[tuple[str, str, str], Any] = {}
        for function in proto.functions:
            key = (_domain(function.domain), function.name, getattr(function, "overload", ""))
            if key in self.functions:
                raise ReadError(f"two functions are called {_short(function.name)!r}.")
            self.functions[key] = function
        self.found: list[OnnxNode] = []

    def nodes(self, protos: Any) -> list[OnnxNode]:
        self._expand(protos, {}, None, "", ())
        return self.found

    def _expand(
        self, protos: Any, names: dict[str, str], given: Mapping[str, Any] | None, prefix: str, stack: tuple[Any, ...]
    ) -> None:
        for position, proto in enumerate(protos):
            if len(self.found) >= MAX_NODES:
                raise ReadError(f"expected at most {MAX_NODES} nodes, got more (functions inlined).")

            def renamed(name: str) -> str:
                # An empty prefix means the model's own graph. In a function's body every name gets the prefix of the
                # call.
                name = _checked(name)
                return _checked(names.get(name, f"{prefix}{name}") if name and prefix else name)

            attributes = _attributes(proto, given)
            inputs, outputs = tuple(map(renamed, proto.input)), tuple(map(renamed, proto.output))
            key = (_domain(proto.domain), proto.op_type, getattr(proto, "overload", ""))
            function = self.functions.get(key)
            if function is None:
                metadata = _metadata(proto)
                name = _checked(f"{prefix}{_text_of(proto.name)}")
                kinds = _kinds(proto, given)
                self.found.append(
                    OnnxNode(
                        _checked(proto.op_type),
                        key[0],
                        name,
                        inputs,
                        outputs,
                        attributes,
                        metadata,
                        kinds,
                    )
                )
                continue
            title = f"function {_short(proto.op_type)!r}"
            if key in stack or len(stack) >= MAX_DEPTH:
                raise ReadError(f"{title} calls itself, or calls are nested deeper than {MAX_DEPTH}.")
            if len(inputs) > len(function.input) or len(outputs) > len(function.output):
                raise ReadError(f"{title}: a call has more inputs or outputs than the function.")
            inner = dict.fromkeys((*function.input, *function.output), "")
            inner |= dict(zip(function.input, inputs, strict=False))
            # An output that the caller drops still needs a name in the body.
            call = f"{prefix}{proto.name or proto.op_type}:{position}/"
            for index, formal in enumerate(function.output):
                outer = outputs[index] if index < len(outputs) else ""
                inner[formal] = outer or f"{call}{formal}"
            defaults = {a.name: _attribute(a, title) for a in function.attribute_proto}
            self._expand(function.node, inner, {**defaults, **attributes}, call, (*stack, key))


def nodes_of(protos: Any) -> list[OnnxNode]:
    """The nodes of a graph within a node, without calls of the model's functions."""
    found: list[OnnxNode] = []
    for proto in protos:
        if len(proto.output) == 0:
            raise ReadError(f"{_short(proto.op_type)} {_short(proto.name)!r} has no outputs: the model is damaged.")
        inputs, outputs = (tuple(map(_checked, names)) for names in (proto.input, proto.output))
        found.append(
            OnnxNode(
                _checked(proto.op_type),
                _domain(proto.domain),
                _checked(proto.name),
                inputs,
                outputs,
                _attributes(proto, None),
                {},
                _kinds(proto, None),
            )
        )
    return found


def _attributes(proto: Any, given: Mapping[str, Any] | None) -> dict[str, Any]:
    where = f"{_short(proto.op_type)} {_short(proto.name)!r}"
    found: dict[str, Any] = {}
    for attribute in proto.attribute:
        if attribute.ref_attr_name:
            if given is None:
                raise ReadError(
                    f"{where}: attribute {_short(attribute.name)!r} refers to a function's, outside of one."
                )
            if attribute.ref_attr_name in given:
                found[attribute.name] = given[attribute.ref_attr_name]
            continue
        found[attribute.name] = _attribute(attribute, where)
    if len({attribute.name for attribute in proto.attribute}) != len(proto.attribute):
        raise ReadError(f"{where}: expected every attribute once, got one twice.")
    return found


def _kinds(proto: Any, given: Mapping[str, Any] | None) -> dict[str, int]:
    return {a.name: a.type for a in proto.attribute if not a.ref_attr_name or a.ref_attr_name in (given or {})}


def _attribute(attribute: Any, where: str) -> Any:
    kind = attribute.type
    if kind == _FLOAT:
        return float(np.float32(attribute.f))
    if kind == _INT:
        return int(attribute.i)
    if kind == _STRING:
        return _text(attribute.s, where)
    if kind == _FLOATS:
        return [float(np.float32(f)) for f in attribute.floats]
    if kind == _INTS:
        return [int(i) for i in attribute.ints]
    if kind == _STRINGS:
        return [_text(s, where) for s in attribute.strings]
    if kind == _TENSOR:
        value, stored = tensors.array(attribute.t, f"{where}, attribute {_short(attribute.name)!r}")
        return Known(value, stored=stored if tensors.small_range(stored) else "")
    # Graphs are for `qjax.contrib.float_models`, whose If has them; the reader of quantized files has no such operator.
    return attribute.g if kind == _GRAPH else None


def _text(value: bytes, where: str) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise ReadError(f"{where}: expected text in UTF-8 as an attribute.") from None


def _domain(domain: str) -> str:
    return "" if domain in _STANDARD else _checked(domain)


def _metadata(proto: Any) -> dict[str, str]:
    return {_text_of(entry.key): _text_of(entry.value) for entry in proto.metadata_props}


def _text_of(value: str | bytes) -> str:
    """A text; protobuf returns bytes if it is not UTF-8."""
    if isinstance(value, bytes):
        raise ReadError(f"expected names in UTF-8, got {value[:40]!r}: the model is damaged.")
    return value


def _checked(name: str | bytes) -> str:
    name = _text_of(name)
    if len(name) > MAX_NAME:
        raise ReadError(f"expected names of at most {MAX_NAME} characters, got {len(name)}: {_short(name)!r}.")
    return name


def _short(name: str | bytes) -> str:
    name = _text_of(name)
    return name if len(name) <= 80 else f"{name[:77]}..."
