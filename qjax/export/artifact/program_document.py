"""A graph as one JSON document and a flat set of named arrays, and back.

The document contains the structure; every number that decides a bit is an array: the data of the constants, the scales
(float32, never written in decimal) and the zero points (int32). The arrays of tensor `t` are named `value:t`, `scale:t`
and `zero_point:t`. Tuples in attributes and in the metadata become lists; all else returns unchanged. The quantized
graph of a program is the field "quantized", see `quantized_document`.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.core import Tracer

from qjax.export import document, strict_json
from qjax.export.artifact import packing, quantized_document
from qjax.export.strict_json import ArtifactError
from qjax.graph.check import GraphError, check_integer
from qjax.graph.ir import INTEGER_DTYPES, REAL_DTYPE, Array, Graph, Quantization, Tensor
from qjax.numerics.output_dequantization import OUTPUT_DEQUANTIZATIONS

Arrays = Mapping[str, np.ndarray]

MAX_BYTES = 2**62

_GRAPH = ("target", "quantization", "inputs", "outputs", "tensors", "nodes", "metadata")
_OPTIONAL = ("dequantization", "quantized")
"""Fields that are only present for graphs with a non-default dequantization, or with their quantized graph."""
_TENSOR = ("name", "shape", "dtype", "quantization", "data")


def encode(graph: Graph) -> tuple[str, dict[str, np.ndarray]]:
    """The document and the arrays of a finished graph, each in an order that depends on the graph only.

    Raises GraphError for a graph that is not finished or breaks a rule, and ArtifactError for what a file cannot
    contain: tracers, attributes that are not JSON.
    """
    for stage in (graph, graph.quantized):
        for tensor in stage.tensors.values() if stage is not None else ():
            _refuse_tracers(tensor)
    check_integer(graph)
    arrays: dict[str, np.ndarray] = {}
    known = {
        "target": graph.target,
        "quantization": graph.quantization,
        "inputs": graph.inputs,
        "outputs": graph.outputs,
        "tensors": [_encode_tensor(tensor, arrays) for tensor in graph.tensors.values()],
        "nodes": [document.of_node(node) for node in graph.nodes],
        "metadata": graph.metadata,
    }
    if graph.dequantization != OUTPUT_DEQUANTIZATIONS[0]:
        known["dequantization"] = graph.dequantization
    quantized = quantized_document.encode(graph, arrays)
    if quantized is not None:
        known["quantized"] = quantized
    placed = {key: strict_json.plain(value, f"The graph's {key}") for key, value in known.items()}
    return strict_json.dumps(placed, "The graph"), arrays


def decode(text: str, arrays: Arrays) -> Graph:
    """The inverse. It trusts nothing: every field and array is checked, then the graph by `check_integer`.

    Raises ArtifactError or GraphError.
    """
    held = strict_json.mapping(strict_json.loads(text, "The graph's JSON"), "The graph")
    names = (*_GRAPH, *(key for key in _OPTIONAL if key in held))
    known = strict_json.fields(held, names, "The graph")
    unused = set(arrays)
    tensors: dict[str, Tensor] = {}
    for item in strict_json.sequence(known["tensors"], "The graph's tensors"):
        tensor = _decode_tensor(item, arrays, unused, tensors)
        tensors[tensor.name] = tensor
    nodes = map(document.node_of, strict_json.sequence(known["nodes"], "The graph's nodes"))
    graph = document.graph_of(known, tensors.values(), nodes)

    def take(key: str) -> np.ndarray:
        if key not in unused:
            raise ArtifactError(f"The quantized graph: expected an array {key!r}, got none.")
        unused.remove(key)
        return arrays[key]

    quantized = known.get("quantized")
    if quantized is not None:
        graph = graph.replace(quantized=quantized_document.decode(quantized, graph, take))
    if unused:
        raise ArtifactError(f"expected every array to belong to a tensor, got a stray {min(unused)!r}.")
    return graph


def stored_bytes(tensor: Tensor) -> int:
    """The bytes that a constant's data takes in a file, after packing; 0 for a tensor without data."""
    if tensor.value is None:
        return 0
    count = math.prod(np.shape(tensor.value))
    bits = packing.packed_bits(tensor.dtype, tensor.quantization)
    return packing.packed_size(count, bits) if bits else count * np.dtype(tensor.dtype).itemsize


def _encode_tensor(tensor: Tensor, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
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
    shape = document.shape_of(entry["shape"], where)
    dtype = strict_json.name(entry["dtype"], f"{where}: dtype")
    known_dtypes = (*INTEGER_DTYPES, REAL_DTYPE)
    if dtype not in known_dtypes:
        raise ArtifactError(f"{where}: expected a dtype of {', '.join(known_dtypes)}; got {dtype[:40]!r}.")

    def take(role: str) -> np.ndarray:
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
    entry = strict_json.fields(item, document.PARAMETERS, f"{where}: quantization")
    if dtype in (REAL_DTYPE, "bool"):
        raise ArtifactError(f"{where}: expected a tensor with a quantization to hold integer codes; got {dtype!r}.")
    return document.parameters_of(entry, scale, zero_point, dtype, rank, where)


def _decode_value(
    stored: np.ndarray,
    layout: Any,
    shape: tuple[int | None, ...],
    dtype: str,
    quantization: Quantization | None,
    where: str,
) -> np.ndarray:
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
