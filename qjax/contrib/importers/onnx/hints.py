"""Hints: what ONNX has no field for, as JSON in the model's metadata_props under the key "qjax".

    {"version": 10, "target": "onnxruntime", "quantization": "division",
     "names": {NAME IN THE FILE: TENSOR OF THE GRAPH},
     "layouts": {NODE: [ORDER OF THE KERNEL'S AXES: OUTPUT, INPUT, SPATIAL ...]},
     "ranges": {CONSTANT: [LEAST CODE, GREATEST CODE]},
     "locations": {NODE: "file:line"}, "metadata": {...}}

Every field but the version, `emit.onnx.builder.VERSION`, is optional. A hint never changes a number: it names, orders
and annotates.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from qjax.contrib.importers.restored import check_version
from qjax.export import strict_json
from qjax.export.emit.onnx.builder import VERSION
from qjax.export.onnx_ops import METADATA
from qjax.export.read_errors import ReadError
from qjax.graph.check import check_integer
from qjax.graph.ir import Graph, Tensor
from qjax.numerics.input_quantization import INPUT_QUANTIZATIONS


@dataclasses.dataclass(frozen=True)
class Hints:
    """See the module's docstring."""

    target: str | None = None
    quantization: str | None = None
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    layouts: Mapping[str, list[int]] = dataclasses.field(default_factory=dict)
    ranges: Mapping[str, list[int]] = dataclasses.field(default_factory=dict)
    locations: Mapping[str, str] = dataclasses.field(default_factory=dict)
    metadata: Mapping[str, Any] | None = None


def hints_of(metadata: Mapping[str, str]) -> Hints:
    """The hints of a model; empty if it has none. Raises ReadError for JSON that is not as described."""
    if METADATA not in metadata:
        return Hints()
    where = f"The model's metadata {METADATA!r}"
    try:
        found = strict_json.loads(metadata[METADATA], where)
    except ValueError as error:
        raise ReadError(str(error)) from None
    if not isinstance(found, dict):
        raise ReadError(f"{where}: expected an object, got {type(found).__name__}.")
    check_version(found, VERSION)
    fields = {field.name for field in dataclasses.fields(Hints)}
    chosen = {key: value for key, value in found.items() if key in fields}
    strings = all(isinstance(chosen.get(key, ""), str) for key in ("target", "quantization"))
    tables = all(
        isinstance(chosen.get(key, {}), dict) for key in ("names", "layouts", "ranges", "locations", "metadata")
    )
    if not strings or not tables:
        raise ReadError(f"{where}: a field has another type than expected.")
    for key, kind in (("names", str), ("locations", str)):
        if not all(isinstance(value, kind) for value in chosen.get(key, {}).values()):
            raise ReadError(f"{where}: {key}: expected names mapped to text.")
    for key in ("layouts", "ranges"):
        for value in chosen.get(key, {}).values():
            if not isinstance(value, list) or not all(type(n) is int for n in value):
                raise ReadError(f"{where}: {key}: expected names mapped to lists of whole numbers.")
    return Hints(**chosen)


_WHERE = f"The model's metadata {METADATA!r}"


def annotated(graph: Graph, hints: Hints) -> Graph:
    """The graph with the names, ranges, locations and metadata of the hints.

    Raises:
      ReadError: the names are then not unique, a name belongs to no tensor, or a range is wider than the codes'.
    """
    if hints.quantization is not None and hints.quantization not in INPUT_QUANTIZATIONS:
        raise ReadError(f"{_WHERE}: unknown quantization {hints.quantization!r}.")
    return check_integer(
        _rename_tensors(graph, hints).replace(
            metadata=graph.metadata if hints.metadata is None else hints.metadata,
            quantization=hints.quantization or graph.quantization,
            quantized=None if graph.quantized is None else _rename_tensors(graph.quantized, hints),
        )
    )


def _rename_tensors(graph: Graph, hints: Hints) -> Graph:
    """The graph with the names, ranges and locations of the hints."""
    tensors: dict[str, Tensor] = {}
    for held in graph.tensors.values():
        name, span = hints.names.get(held.name, held.name), hints.ranges.get(held.name)
        if name in tensors:
            raise ReadError(f"{_WHERE}: two tensors are called {name!r}.")
        quantization = held.quantization
        if span is not None and held.value is not None and quantization is not None:
            if len(span) != 2 or not quantization.qmin <= span[0] < span[1] <= quantization.qmax:
                raise ReadError(f"{_WHERE}: the range {span} of {name!r} is not within that of its codes.")
            quantization = dataclasses.replace(quantization, qmin=span[0], qmax=span[1])
        tensors[name] = dataclasses.replace(held, name=name, quantization=quantization)

    def renamed(name: str) -> str:
        return hints.names.get(name, name)

    nodes = tuple(
        dataclasses.replace(
            node,
            name=renamed(node.name),
            inputs=tuple(renamed(name) for name in node.inputs),
            output=renamed(node.output),
            constants={role: renamed(name) for role, name in node.constants.items()},
            location=hints.locations.get(node.name, node.location),
        )
        for node in graph.nodes
    )
    return graph.replace(
        tensors=tensors,
        nodes=nodes,
        inputs=tuple(renamed(name) for name in graph.inputs),
        outputs=tuple(renamed(name) for name in graph.outputs),
    )
