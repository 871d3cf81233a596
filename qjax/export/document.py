"""What a file format has no field for, as JSON: the same parts in `.qjax`, `.tflite` and `.onnx` files.

The fields of the graph and of its nodes are the same in all three. A tensor's data, scale and type are where the format
has them: as arrays in `.qjax`, as tensors in `.tflite`. In ONNX a tensor has no scale, so `of_tensor` writes it.
"""

import base64
import json
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from qjax.assign.overflow import check_accumulators
from qjax.export import strict_json
from qjax.export.strict_json import ArtifactError
from qjax.graph import state
from qjax.graph.check import GraphError
from qjax.graph.ir import Array, Graph, Node, Quantization, Tensor
from qjax.graph.recompute import check_computed, same_quantization
from qjax.graph.structure import positions
from qjax.numerics.input_quantization import INPUT_QUANTIZATIONS
from qjax.numerics.output_dequantization import OUTPUT_DEQUANTIZATIONS

# ----------------------------------------------------------------------------------------------------------------------
# The checks that a graph from a file must pass before anybody gets it. A digest proves nothing about the content.


def check_read(graph: Graph) -> Graph:
    """Verify everything that a file states about a program: its nodes, its tensors, its sums and its metadata.

    Raises:
      GraphError: names what is stated and what was expected.
    """
    check_computed(graph)
    try:
        check_accumulators(graph)
        _check_metadata(graph)
    except GraphError:
        raise
    except Exception as error:
        # As in `check_computed`, an impossible field can fail anywhere.
        raise GraphError(f"The graph's fields contradict each other ({type(error).__name__}: {error}).") from error
    return graph


def _check_metadata(graph: Graph) -> None:
    known = graph.metadata
    for key, names, whole in (("input_structure", graph.inputs, True), ("output_structure", graph.outputs, False)):
        structure = known.get(key)
        if structure is None:
            continue
        where = f"The graph's {key}"
        found = [place for place in positions(structure, where) if place is not None]
        if sorted(found if whole else set(found)) != list(range(len(names))):
            raise GraphError(f"{where}: expected the positions of {len(names)} arrays, got {str(found)[:100]}.")
    given = known.get("input_structure")
    if given is not None and (type(given) is int or given[0] != "tuple"):
        raise GraphError("The graph's input_structure: expected a tuple of the call's arguments.")
    ranges: Any = known.get("integers", [])
    if not _are_ranges(ranges, len(graph.inputs)):
        raise GraphError("The graph's integers: expected the range of each input, or null, in a list.")
    if known.get("batch") not in (None, "fixed") or type(known.get("profile", "")) is not str:
        raise GraphError("The graph's metadata: expected the batch to be 'fixed' or absent, and the profile a name.")
    for part in state.parts(graph):
        before, after = part.tensor(graph), graph.tensors[graph.outputs[part.output]]
        alike = (before.shape, before.dtype) == (after.shape, after.dtype)
        if not alike or not same_quantization(before.quantization, after.quantization):
            raise GraphError(f"The state {before.name!r}: expected its next value to be of the same kind.")


def _are_ranges(value: Any, count: int) -> bool:
    if type(value) is not list or len(value) not in (0, count):
        return False
    pairs = [entry for entry in value if entry is not None]
    return all(type(pair) is list and len(pair) == 2 and all(type(n) is int for n in pair) for pair in pairs)


NODE = ("name", "op", "inputs", "output", "constants", "attributes", "location")
PARAMETERS = ("qmin", "qmax", "axes")
MAX_RANK = 32
MAX_DIMENSION = 2**31 - 1
MAX_TEXT = 2**26
"""Bytes of a document, uncompressed, the same as for a header of `.qjax`; a file that claims more is refused."""

_Name = TypeVar("_Name", bound=str)


def text(value: Any) -> str:
    """Compact JSON, with keys in the given order."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


# ---------------------------------------------------------------------------- nodes and graphs, every field checked


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
    """A program from its parts and the document's other fields, checked by `check_read`.

    Raises:
      ArtifactError: a field has a wrong type or value. GraphError: the parts are no valid graph.
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
    return check_read(graph)


def shape_of(value: Any, where: str) -> tuple[int | None, ...]:
    """A tensor's shape; None is a free size. Raises ArtifactError."""
    sizes = strict_json.sequence(value, f"{where}: shape")
    if len(sizes) > MAX_RANK:
        raise ArtifactError(f"{where}: expected at most {MAX_RANK} dimensions, got {len(sizes)}.")
    return tuple(
        None if size is None else strict_json.integer(size, 0, MAX_DIMENSION, f"{where}: shape") for size in sizes
    )


def parameters_of(
    entry: Mapping[str, Any], scale: Array, zero_point: Array, dtype: str, rank: int, where: str
) -> Quantization:
    """Quantization parameters of an entry with the fields `PARAMETERS`. Raises ArtifactError."""
    low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    axes = strict_json.sequence(entry["axes"], f"{where}: axes")
    return Quantization(
        scale=scale,
        zero_point=zero_point,
        qmin=strict_json.integer(entry["qmin"], low, high, f"{where}: qmin"),
        qmax=strict_json.integer(entry["qmax"], low, high, f"{where}: qmax"),
        axes=tuple(strict_json.integer(axis, 0, rank - 1, f"{where}: axes") for axis in axes),
    )


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


# ---------------------------------------------------------------------------- tensors, with scales


def of_tensor(tensor: Tensor, order: Sequence[int] | None = None, *, data: bool = False) -> dict[str, Any]:
    """A tensor's type and quantization parameters.

    Args:
      order: for each axis of the file's tensor, the axis of the graph's tensor; None: the same.
      data: whether a constant's numbers are listed too.
    """
    facts: dict[str, Any] = {"name": tensor.name, "shape": list(tensor.shape), "dtype": tensor.dtype}
    if order is not None and list(order) != list(range(len(tensor.shape))):
        facts["order"] = list(order)
    q = tensor.quantization
    if q is not None:
        facts["quantization"] = {
            # the decimal digits of a double represent a float32 exactly
            "scale": np.asarray(q.scale).astype(np.float64).tolist(),
            "zero_point": np.asarray(q.zero_point).tolist(),
            "qmin": q.qmin,
            "qmax": q.qmax,
            "axes": list(q.axes),
        }
    if data and tensor.value is not None:
        facts["value"] = np.asarray(tensor.value).tolist()
    return facts


def tensor_of(facts: Mapping[str, Any], value: np.ndarray | None = None, name: str | None = None) -> Tensor:
    """The inverse, for files that are written again and compared: its fields are not checked.

    Args:
      value: in the file's axis order; None: the numbers that are listed, if any. name: replaces the stated one.
    """
    known = facts.get("quantization")
    quantization = None
    if known is not None:
        quantization = Quantization(
            np.asarray(known["scale"], np.float32),
            np.asarray(known["zero_point"], np.int32),
            known["qmin"],
            known["qmax"],
            tuple(known["axes"]),
        )
    if value is None and "value" in facts:
        value = np.asarray(facts["value"], facts["dtype"])
    if value is not None:
        value = value.astype(facts["dtype"])
        if "order" in facts:
            value = np.ascontiguousarray(np.transpose(value, np.argsort(facts["order"])))
    return Tensor(facts["name"] if name is None else name, tuple(facts["shape"]), facts["dtype"], quantization, value)


# ---------------------------------------------------------------------------- all of it, compressed


def compressed(graph: Graph, held: Collection[str]) -> str:
    """The nodes and tensors of a graph as compressed text. held: the tensors whose data are elsewhere in the file."""
    same = {_content(graph.tensors[name].value): name for name in sorted(held) if name in graph.tensors}
    listed: list[dict[str, Any]] = []
    for name, tensor in graph.tensors.items():
        holder = None
        if tensor.value is not None:
            holder = name if name in held else same.get(_content(tensor.value))
        entry = of_tensor(tensor, data=holder is None)
        listed.append(entry if holder is None else {**entry, "constant": holder})
    return packed({"tensors": listed, "nodes": [of_node(node) for node in graph.nodes]})


def packed(value: Any) -> str:
    """JSON as compressed text."""
    return packed_text(text(value))


def packed_text(text: str) -> str:
    """Compressed text, in characters that any file can contain."""
    return base64.b64encode(deflated(text.encode())).decode()


def unpacked_text(packed: str) -> str:
    """The inverse. Raises a ValueError if the text is too large or not in this form."""
    return inflated(base64.b64decode(packed, validate=True)).decode()


def deflated(data: bytes) -> bytes:
    """Bytes, compressed with zlib."""
    return zlib.compress(data, 9)


def inflated(data: bytes) -> bytes:
    """The inverse. Raises a ValueError if the data are too large or damaged."""
    reader = zlib.decompressobj()
    try:
        found = reader.decompress(data, MAX_TEXT)
    except zlib.error as error:
        raise ValueError(f"the document is damaged: {error}") from None
    if reader.unconsumed_tail or not reader.eof:
        raise ValueError(f"the document is damaged or larger than {MAX_TEXT} bytes")
    return found


def read(data: bytes, where: str) -> Any:
    """Read compressed JSON with the limits of `strict_json`; all documents within files are read by this function.

    Raises a ValueError if the document is too large, too deep or not JSON; where: what it is, for the message.
    """
    return strict_json.loads(inflated(data).decode(), where)


def uncompressed(compressed: str) -> Mapping[str, Any]:
    """The inverse of `packed`. Raises the same errors as `read`."""
    where = "The compressed document"
    return strict_json.mapping(strict_json.loads(unpacked_text(compressed), where), where)


def _content(value: Any) -> tuple[Any, ...]:
    array = np.asarray(value)
    return array.dtype.str, array.shape, array.tobytes()
