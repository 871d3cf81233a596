"""The fields of a graph and of its nodes as JSON, the same in `.qjax`, `.tflite` and `.onnx` files.

What a file says of its tensors is its format's own affair: their data, scales and types are where the format has them.
Decoding trusts nothing: every field is checked.
"""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from qjax.export.artifact import strict_json
from qjax.export.artifact.strict_json import ArtifactError
from qjax.graph.check import check_integer
from qjax.graph.ir import Graph, Node, Tensor
from qjax.numerics.input_quantization import INPUT_QUANTIZATIONS
from qjax.numerics.output_dequantization import OUTPUT_DEQUANTIZATIONS

NODE = ("name", "op", "inputs", "output", "constants", "attributes", "location")

_Name = TypeVar("_Name", bound=str)


def of_node(node: Node) -> dict[str, Any]:
    """A node's fields. Raises ArtifactError for attributes that are not JSON."""
    return {key: strict_json.plain(getattr(node, key), f"Node {node.name!r}: {key}") for key in NODE}


def node_of(item: Any) -> Node:
    """The inverse. Raises ArtifactError."""
    entry = strict_json.fields(item, NODE, "A node")
    name = strict_json.name(entry["name"], "A node's name")
    where = f"Node {name!r}"
    constants = strict_json.mapping(entry["constants"], f"{where}: constants")
    attributes = strict_json.mapping(entry["attributes"], f"{where}: attributes")
    for key, value in attributes.items():
        _refuse_mappings(value, f"{where}: attribute {key!r}")
    location = entry["location"]
    if location is not None and type(location) is not str:
        raise ArtifactError(f"{where}: expected a location of str or null, got {type(location).__name__}.")
    return Node(
        name=name,
        op=strict_json.name(entry["op"], f"{where}: op"),
        inputs=strict_json.names(entry["inputs"], f"{where}: inputs"),
        output=strict_json.name(entry["output"], f"{where}: output"),
        constants={
            role: strict_json.name(reference, f"{where}: constant {role!r}") for role, reference in constants.items()
        },
        attributes=attributes,
        location=location,
    )


def graph_of(document: Mapping[str, Any], tensors: Iterable[Tensor], nodes: Iterable[Node]) -> Graph:
    """A program of its parts and the document's other fields, checked by `check_integer`.

    Raises:
      ArtifactError: a field is not what it must be. GraphError: the parts are no valid graph.
    """
    graph = Graph(
        tensors={tensor.name: tensor for tensor in tensors},
        nodes=tuple(nodes),
        inputs=strict_json.names(document["inputs"], "The graph's inputs"),
        outputs=strict_json.names(document["outputs"], "The graph's outputs"),
        target=strict_json.name(document["target"], "The graph's target"),
        quantization=_one_of(document["quantization"], INPUT_QUANTIZATIONS, "quantization"),
        dequantization=_one_of(
            document.get("dequantization", OUTPUT_DEQUANTIZATIONS[0]), OUTPUT_DEQUANTIZATIONS, "dequantization"
        ),
        metadata=strict_json.mapping(document["metadata"], "The graph's metadata"),
    )
    return check_integer(graph)


def _one_of(value: Any, choices: tuple[_Name, ...], field: str) -> _Name:
    given = strict_json.name(value, f"The graph's {field}")
    for known in choices:
        if given == known:
            return known
    raise ArtifactError(f"The graph's {field}: expected one of {', '.join(choices)}, got {given!r}.")


def _refuse_mappings(value: Any, where: str) -> None:
    if type(value) is dict:
        raise ArtifactError(f"{where}: expected numbers, strings, null and lists of these, got an object.")
    if type(value) is list:
        for item in value:  # pyright: ignore[reportUnknownVariableType]
            _refuse_mappings(item, where)
