"""A graph as one JSON document and a flat set of named arrays, and back.

The document holds the structure; every number that decides a bit is an array: the data of the constants, the
scales (float32, never written in decimal) and the zero points (int32). The arrays of tensor `t` are named
`value:t`, `scale:t` and `zero_point:t`. Tuples in attributes and in the metadata become lists; all else
returns as it was. The quantized graph of a program is the field "quantized", see `quantized_document`.
"""

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
from jax.core import Tracer
from numpy.typing import NDArray

from qjax.export import packing, quantized_document, strict_json
from qjax.export.check import GraphError, check_integer
from qjax.export.ir import INTEGER_DTYPES, REAL_DTYPE, Array, Graph, Node, Quantization, Tensor
from qjax.export.strict_json import ArtifactError
from qjax.numerics.input_quantization import INPUT_QUANTIZATIONS
from qjax.numerics.output_dequantization import OUTPUT_DEQUANTIZATIONS

Arrays = Mapping[str, NDArray[Any]]
_Name = TypeVar("_Name", bound=str)

MAX_RANK = 32
MAX_DIMENSION = 2**31 - 1
MAX_BYTES = 2**62

_GRAPH = ("target", "quantization", "inputs", "outputs", "tensors", "nodes", "metadata")
_OPTIONAL = ("dequantization", "quantized")
"""Fields that only graphs with another formula than the first have, and those that keep their quantized graph."""
_TENSOR = ("name", "shape", "dtype", "quantization", "data")
_QUANTIZATION = ("qmin", "qmax", "axes")
_NODE = ("name", "op", "inputs", "output", "constants", "attributes", "location")


def encode(graph: Graph) -> tuple[str, dict[str, NDArray[Any]]]:
    """The document and the arrays of a finished graph, each in an order that depends on the graph only.

    Raises GraphError for a graph that is not finished or breaks a rule, and ArtifactError for what a file cannot
    hold: tracers, attributes that are not JSON.
    """
    for stage in (graph, graph.quantized):
        for tensor in stage.tensors.values() if stage is not None else ():
            _refuse_tracers(tensor)
    check_integer(graph)
    arrays: dict[str, NDArray[Any]] = {}
    document = {
        "target": graph.target,
        "quantization": graph.quantization,
        "inputs": graph.inputs,
        "outputs": graph.outputs,
        "tensors": [_encode_tensor(tensor, arrays) for tensor in graph.tensors.values()],
        "nodes": [{key: getattr(node, key) for key in _NODE} for node in graph.nodes],
        "metadata": graph.metadata,
    }
    if graph.dequantization != OUTPUT_DEQUANTIZATIONS[0]:
        document["dequantization"] = graph.dequantization
    quantized = quantized_document.encode(graph, arrays)
    if quantized is not None:
        document["quantized"] = quantized
    placed = {key: _placed(key, value) for key, value in document.items()}
    return strict_json.dumps(placed, "The graph"), arrays


def decode(text: str, arrays: Arrays) -> Graph:
    """The inverse. Trusts nothing: every field and array is checked, then the graph by `check_integer`.

    Raises ArtifactError or GraphError.
    """
    held = strict_json.mapping(strict_json.loads(text, "The graph's JSON"), "The graph")
    names = (*_GRAPH, *(key for key in _OPTIONAL if key in held))
    document = strict_json.fields(held, names, "The graph")
    unused = set(arrays)
    tensors: dict[str, Tensor] = {}
    for item in strict_json.sequence(document["tensors"], "The graph's tensors"):
        tensor = _decode_tensor(item, arrays, unused, tensors)
        tensors[tensor.name] = tensor
    nodes = strict_json.sequence(document["nodes"], "The graph's nodes")
    graph = Graph(
        tensors=tensors,
        nodes=tuple(_decode_node(item) for item in nodes),
        inputs=strict_json.names(document["inputs"], "The graph's inputs"),
        outputs=strict_json.names(document["outputs"], "The graph's outputs"),
        target=strict_json.name(document["target"], "The graph's target"),
        quantization=_one_of(document["quantization"], INPUT_QUANTIZATIONS, "quantization"),
        dequantization=_one_of(
            document.get("dequantization", OUTPUT_DEQUANTIZATIONS[0]), OUTPUT_DEQUANTIZATIONS, "dequantization"
        ),
        metadata=strict_json.mapping(document["metadata"], "The graph's metadata"),
    )
    check_integer(graph)

    def take(key: str) -> NDArray[Any]:
        if key not in unused:
            raise ArtifactError(f"The quantized graph: expected an array {key!r}, got none.")
        unused.remove(key)
        return arrays[key]

    quantized = document.get("quantized")
    if quantized is not None:
        graph = graph.replace(quantized=quantized_document.decode(quantized, graph, take, _decode_node))
    if unused:
        raise ArtifactError(f"expected every array to belong to a tensor, got a stray {min(unused)!r}.")
    return graph


def _one_of(value: Any, choices: tuple[_Name, ...], field: str) -> _Name:
    given = strict_json.name(value, f"The graph's {field}")
    for known in choices:
        if given == known:
            return known
    raise ArtifactError(f"The graph's {field}: expected one of {', '.join(choices)}, got {given!r}.")


def stored_bytes(tensor: Tensor) -> int:
    """The bytes that a constant's data takes in a file, after packing; 0 for a tensor without data."""
    if tensor.value is None:
        return 0
    count = math.prod(np.shape(tensor.value))
    bits = packing.packed_bits(tensor.dtype, tensor.quantization)
    return packing.packed_size(count, bits) if bits else count * np.dtype(tensor.dtype).itemsize


def _placed(key: str, value: Any) -> Any:
    # Converted piece by piece only so that an error names the node rather than the whole graph.
    if key == "nodes":
        return [
            {field: strict_json.plain(node[field], f"Node {node['name']!r}: {field}") for field in node}
            for node in value
        ]
    if key == "quantized":
        return {part: _placed(part, held) for part, held in value.items()}
    return strict_json.plain(value, f"The graph's {key}")


def _encode_tensor(tensor: Tensor, arrays: dict[str, NDArray[Any]]) -> dict[str, Any]:
    quantization = tensor.quantization
    if quantization is not None:
        arrays[f"scale:{tensor.name}"] = np.asarray(quantization.scale)
        arrays[f"zero_point:{tensor.name}"] = np.asarray(quantization.zero_point)
    bits = packing.packed_bits(tensor.dtype, quantization)
    if tensor.value is not None:
        codes = np.asarray(tensor.value)
        arrays[f"value:{tensor.name}"] = packing.pack(codes, bits) if bits else codes
    return {
        "name": tensor.name,
        "shape": tensor.shape,
        "dtype": tensor.dtype,
        "quantization": None
        if quantization is None
        else {"qmin": quantization.qmin, "qmax": quantization.qmax, "axes": quantization.axes},
        "data": None if tensor.value is None else _layout(bits),
    }


def _decode_tensor(item: Any, arrays: Arrays, unused: set[str], known: Mapping[str, Tensor]) -> Tensor:
    entry = strict_json.fields(item, _TENSOR, "A tensor")
    name = strict_json.name(entry["name"], "A tensor's name")
    where = f"Tensor {name!r}"
    if name in known:
        raise ArtifactError(f"{where}: expected every name once, got it twice.")
    shape = tuple(
        None if size is None else strict_json.integer(size, 0, MAX_DIMENSION, f"{where}: shape")
        for size in strict_json.sequence(entry["shape"], f"{where}: shape")
    )
    if len(shape) > MAX_RANK:
        raise ArtifactError(f"{where}: expected at most {MAX_RANK} dimensions, got {len(shape)}.")
    dtype = strict_json.name(entry["dtype"], f"{where}: dtype")
    known_dtypes = (*INTEGER_DTYPES, REAL_DTYPE)
    if dtype not in known_dtypes:
        raise ArtifactError(f"{where}: expected a dtype of {', '.join(known_dtypes)}; got {dtype[:40]!r}.")

    def take(role: str) -> NDArray[Any]:
        key = f"{role}:{name}"
        if key not in unused:
            raise ArtifactError(f"{where}: expected an array {key!r}, got none.")
        unused.remove(key)
        return arrays[key]

    quantization = None
    if entry["quantization"] is not None:
        quantization = _decode_quantization(
            entry["quantization"], dtype, len(shape), take("scale"), take("zero_point"), where
        )
    value = None
    if entry["data"] is not None:
        value = _decode_value(take("value"), entry["data"], shape, dtype, quantization, where)
    return Tensor(name, shape, dtype, quantization, value)


def _decode_quantization(item: Any, dtype: str, rank: int, scale: Array, zero_point: Array, where: str) -> Quantization:
    entry = strict_json.fields(item, _QUANTIZATION, f"{where}: quantization")
    if dtype in (REAL_DTYPE, "bool"):
        raise ArtifactError(f"{where}: expected a tensor with a quantization to hold integer codes; got {dtype!r}.")
    info = np.iinfo(dtype)
    low, high = int(info.min), int(info.max)
    axes = tuple(
        strict_json.integer(axis, 0, rank - 1, f"{where}: axes")
        for axis in strict_json.sequence(entry["axes"], f"{where}: axes")
    )
    return Quantization(
        scale=scale,
        zero_point=zero_point,
        qmin=strict_json.integer(entry["qmin"], low, high, f"{where}: qmin"),
        qmax=strict_json.integer(entry["qmax"], low, high, f"{where}: qmax"),
        axes=axes,
    )


def _decode_value(
    stored: NDArray[Any],
    layout: Any,
    shape: tuple[int | None, ...],
    dtype: str,
    quantization: Quantization | None,
    where: str,
) -> NDArray[Any]:
    bits = packing.packed_bits(dtype, quantization)
    if layout != _layout(bits):
        raise ArtifactError(f"{where}: expected its data to be {_layout(bits)!r}, got {str(layout)[:40]!r}.")
    sizes = tuple(size for size in shape if size is not None)
    if len(sizes) != len(shape):
        raise ArtifactError(f"{where}: expected a constant to have a full shape, got {shape}.")
    if math.prod(size for size in sizes if size) * 8 > MAX_BYTES:
        raise ArtifactError(f"{where}: expected a shape that fits the address space, got {shape}.")
    if bits is None or quantization is None:
        if stored.dtype != np.dtype(dtype) or stored.shape != sizes:
            raise ArtifactError(
                f"{where}: expected data of {dtype} and shape {sizes}, got {stored.dtype} and {stored.shape}."
            )
        codes = stored
    else:
        if stored.dtype != np.uint8 or stored.ndim != 1:
            raise ArtifactError(
                f"{where}: expected packed data in one row of uint8, got {stored.dtype} and {stored.shape}."
            )
        try:
            codes = packing.unpack(stored, bits, math.prod(sizes), dtype=dtype, signed=quantization.qmin < 0)
        except ValueError as error:
            raise ArtifactError(f"{where}: {error}.") from None
        codes = codes.reshape(sizes)
        codes.setflags(write=False)
    return codes


def _decode_node(item: Any) -> Node:
    entry = strict_json.fields(item, _NODE, "A node")
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


def _refuse_mappings(value: Any, where: str) -> None:
    if type(value) is dict:
        raise ArtifactError(f"{where}: expected numbers, strings, null and lists of these, got an object.")
    if type(value) is list:
        for item in value:  # pyright: ignore[reportUnknownVariableType]
            _refuse_mappings(item, where)


def _refuse_tracers(tensor: Tensor) -> None:
    values = [tensor.value]
    if tensor.quantization is not None:
        values += [tensor.quantization.scale, tensor.quantization.zero_point]
    if any(isinstance(value, Tracer) for value in values):
        raise ArtifactError(
            f"Tensor {tensor.name!r}: expected concrete arrays, got a tracer: "
            "save the graph outside of jit, grad and vmap."
        )


def _layout(bits: int | None) -> str:
    return "plain" if bits is None else f"packed {bits} bits"


__all__ = ["Arrays", "ArtifactError", "GraphError", "decode", "encode", "stored_bytes"]
