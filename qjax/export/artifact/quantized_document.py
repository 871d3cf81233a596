"""The quantized graph of a program as a part of the program's document, and back.

Nearly all of it is also in the program, and is stored once: quantization parameters, and the codes of weights,
sometimes with the sign of some channels changed. Two things of the quantized graph are identities, which the lists
"parameters" and "arrays" preserve: tensors that share quantization parameters, and constants that are one array, such
as those of a loop's steps.

    {"inputs": [...], "outputs": [...], "nodes": [...],
     "tensors": [{name, shape, dtype, parameters: index in the list or null, data: index in the list or null}, ...],
     "parameters": [name of a tensor of the program, or {scale, zero_point, qmin, qmax, axes}, ...],
     "arrays": [{tensor: name of a tensor of the program, negated: null or [axis, array]} or {array}, ...]}

A scale, a zero point and an array are names of the file's arrays: "quantized:0", "quantized:1", ...
"""

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np

from qjax.export import document, strict_json
from qjax.export.strict_json import ArtifactError
from qjax.graph.check import check_quantized
from qjax.graph.ir import INTEGER_DTYPES, REAL_DTYPES, Graph, Quantization, Tensor

_FIELDS = ("inputs", "outputs", "nodes", "tensors", "parameters", "arrays")
_TENSOR = ("name", "shape", "dtype", "parameters", "data")
_PARAMETERS = ("scale", "zero_point", *document.PARAMETERS)
_WHERE = "The quantized graph"

Array = np.ndarray


def encode(program: Graph, arrays: dict[str, Array]) -> dict[str, Any] | None:
    """The part of the document; its own arrays are added to `arrays`. None for a program without a quantized graph."""
    graph = program.quantized
    return None if graph is None else _Encoder(program, arrays).document(check_quantized(graph))


class _Encoder:
    def __init__(self, program: Graph, arrays: dict[str, Array]) -> None:
        self.program, self.arrays = program, arrays
        self.own = 0
        self.parameters: list[Any] = []
        self.entries: list[Any] = []
        self._known_parameters: dict[int, int] = {}
        self._known_arrays: dict[int, int] = {}
        self._grids: dict[object, str] = {}
        self._codes: dict[object, str] = {}
        self._magnitudes: dict[object, list[str]] = {}
        for tensor in program.tensors.values():
            if tensor.quantization is not None:
                self._grids.setdefault(_content_of(tensor.quantization), tensor.name)
            if tensor.value is not None:
                codes = np.asarray(tensor.value)
                self._codes.setdefault(_content(codes), tensor.name)
                if _has_sign(codes):
                    self._magnitudes.setdefault(_content(np.abs(codes)), []).append(tensor.name)

    def document(self, graph: Graph) -> dict[str, Any]:
        tensors = [
            {
                "name": tensor.name,
                "shape": tensor.shape,
                "dtype": tensor.dtype,
                "parameters": None if tensor.quantization is None else self._parameters_of(tensor.quantization),
                "data": None if tensor.value is None else self._array_of(tensor.value),
            }
            for tensor in graph.tensors.values()
        ]
        return {
            "inputs": graph.inputs,
            "outputs": graph.outputs,
            "nodes": [document.of_node(node) for node in graph.nodes],
            "tensors": tensors,
            "parameters": self.parameters,
            "arrays": self.entries,
        }

    def _parameters_of(self, quantization: Quantization) -> int:
        if id(quantization) not in self._known_parameters:
            found: Any = self._grids.get(_content_of(quantization))
            if found is None:
                found = {
                    "scale": self._store_array(np.asarray(quantization.scale)),
                    "zero_point": self._store_array(np.asarray(quantization.zero_point)),
                    "qmin": quantization.qmin,
                    "qmax": quantization.qmax,
                    "axes": quantization.axes,
                }
            self._known_parameters[id(quantization)] = len(self.parameters)
            self.parameters.append(found)
        return self._known_parameters[id(quantization)]

    def _array_of(self, value: Any) -> int:
        if id(value) not in self._known_arrays:
            array = np.asarray(value)
            self._known_arrays[id(value)] = len(self.entries)
            self.entries.append(self._shared(array) or {"array": self._store_array(array)})
        return self._known_arrays[id(value)]

    def _shared(self, array: Array) -> dict[str, Any] | None:
        name = self._codes.get(_content(array))
        if name is not None:
            return {"tensor": name, "negated": None}
        if not _has_sign(array):
            return None
        for name in self._magnitudes.get(_content(np.abs(array)), ()):
            changed = array != np.asarray(self.program.tensors[name].value)
            for axis in range(array.ndim):
                flags = changed.any(axis=tuple(other for other in range(array.ndim) if other != axis))
                if np.array_equal(_negated(np.asarray(self.program.tensors[name].value), flags, axis), array):
                    return {"tensor": name, "negated": [axis, self._store_array(flags)]}
        return None

    def _store_array(self, array: Array) -> str:
        key = f"quantized:{self.own}"
        self.own += 1
        self.arrays[key] = array
        return key


def decode(item: Any, program: Graph, take: Callable[[str], Array]) -> Graph:
    """The quantized graph. It trusts nothing: every field is checked, then the graph by `check_quantized`.

    Args:
      item: the part of the document. program: the decoded program.
      take: returns the array of a name, each once; raises an error if there is none.
    """
    known = strict_json.fields(item, _FIELDS, _WHERE)
    parameters = [
        _parameters(entry, program, take)
        for entry in strict_json.sequence(known["parameters"], f"{_WHERE}: parameters")
    ]
    arrays = [_array(entry, program, take) for entry in strict_json.sequence(known["arrays"], f"{_WHERE}: arrays")]
    tensors: dict[str, Tensor] = {}
    for entry in strict_json.sequence(known["tensors"], f"{_WHERE}: tensors"):
        tensor = _tensor(entry, parameters, arrays)
        if tensor.name in tensors:
            raise ArtifactError(f"{_WHERE}: expected every name once, got {tensor.name!r} twice.")
        tensors[tensor.name] = tensor
    nodes = tuple(document.node_of(entry) for entry in strict_json.sequence(known["nodes"], f"{_WHERE}: nodes"))
    inputs, outputs = (strict_json.names(known[key], f"{_WHERE}: {key}") for key in ("inputs", "outputs"))
    if (inputs, outputs) != (program.inputs, program.outputs):
        raise ArtifactError(f"{_WHERE}: expected the program's inputs and outputs, got {inputs} and {outputs}.")
    for name, held in program.tensors.items():
        # The shapes of the program were computed from its nodes; tensors in both stages have the same shape.
        tensor = tensors.get(name)
        if tensor is not None and held.value is None and (tensor.shape, tensor.dtype) != (held.shape, held.dtype):
            raise ArtifactError(
                f"{_WHERE}: expected {name!r} to be of {held.dtype} and shape {held.shape} as in the program, got "
                f"{tensor.dtype} and {tensor.shape}."
            )
    return check_quantized(Graph(tensors, nodes, inputs, outputs, ""))


def _parameters(entry: Any, program: Graph, take: Callable[[str], Array]) -> Quantization:
    where = f"{_WHERE}: parameters"
    if isinstance(entry, str):
        held = program.tensors.get(entry)
        if held is None or held.quantization is None:
            raise ArtifactError(f"{where}: expected a tensor of the program with a scale, got {entry[:40]!r}.")
        # A new object, because tensors share quantization parameters if they refer to the same object.
        return Quantization(**vars(held.quantization))
    given = strict_json.fields(entry, _PARAMETERS, where)
    scale, zero_point = (take(strict_json.name(given[key], where)) for key in ("scale", "zero_point"))
    return document.parameters_of(given, scale, zero_point, "int32", document.MAX_RANK, where)


def _array(entry: Any, program: Graph, take: Callable[[str], Array]) -> Array:
    where = f"{_WHERE}: arrays"
    given = strict_json.mapping(entry, where)
    if set(given) == {"array"}:
        return take(strict_json.name(given["array"], where))
    given = strict_json.fields(entry, ("tensor", "negated"), where)
    held = program.tensors.get(strict_json.name(given["tensor"], where))
    if held is None or held.value is None:
        raise ArtifactError(f"{where}: expected a constant of the program, got {str(given['tensor'])[:40]!r}.")
    value = np.asarray(held.value)
    if given["negated"] is None:
        # A view is a new object, because constants are one array if they refer to the same object.
        return value.view()
    negated = strict_json.sequence(given["negated"], where)
    if len(negated) != 2:
        raise ArtifactError(f"{where}: expected an axis and an array, got {len(negated)} values.")
    axis, key = negated
    flags = take(strict_json.name(key, where))
    axis = strict_json.integer(axis, 0, value.ndim - 1, where)
    if not _has_sign(value) or flags.dtype != np.bool_ or flags.shape != (value.shape[axis],):
        raise ArtifactError(f"{where}: expected a boolean for every channel of {held.name!r}.")
    codes = _negated(value, flags, axis)
    codes.setflags(write=False)
    return codes


def _tensor(item: Any, parameters: list[Quantization], arrays: list[Array]) -> Tensor:
    entry = strict_json.fields(item, _TENSOR, f"{_WHERE}: a tensor")
    name = strict_json.name(entry["name"], f"{_WHERE}: a tensor's name")
    where = f"{_WHERE}: tensor {name!r}"

    def chosen(key: str, known: list[Any]) -> Any:
        place = entry[key]
        return None if place is None else known[strict_json.integer(place, 0, len(known) - 1, f"{where}: {key}")]

    shape = document.shape_of(entry["shape"], where)
    dtype, value = strict_json.name(entry["dtype"], f"{where}: dtype"), chosen("data", arrays)
    quantization = chosen("parameters", parameters)
    known = INTEGER_DTYPES if quantization is not None else (*INTEGER_DTYPES, *REAL_DTYPES)
    if dtype not in known or (quantization is not None and dtype == "bool"):
        raise ArtifactError(f"{where}: expected a dtype of {', '.join(known)}; got {dtype[:40]!r}.")
    if value is not None and (str(value.dtype), value.shape) != (dtype, shape):
        raise ArtifactError(f"{where}: expected data of {dtype} and shape {shape}, got {value.dtype} {value.shape}.")
    return Tensor(name, shape, dtype, quantization, value)


def _has_sign(codes: Array) -> bool:
    return codes.dtype.name in ("int8", "int16") and codes.ndim > 0


def _negated(codes: Array, flags: Array, axis: int) -> Array:
    """Codes, negated where the flag of their index along an axis is set."""
    shape = [-1 if other == axis else 1 for other in range(codes.ndim)]
    return np.where(flags.reshape(shape), -codes, codes)


def _content(array: Array) -> tuple[Any, ...]:
    """A key that is equal for two arrays only if they are equal."""
    data = np.ascontiguousarray(array)
    return str(data.dtype), array.shape, hashlib.blake2b(data.tobytes()).digest()


def _content_of(quantization: Quantization) -> tuple[Any, ...]:
    scale, zero_point = _content(np.asarray(quantization.scale)), _content(np.asarray(quantization.zero_point))
    return scale, zero_point, quantization.qmin, quantization.qmax, quantization.axes


__all__ = ["decode", "encode"]
