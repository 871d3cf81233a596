"""A .tflite file under construction: tensors, operators, one subgraph, and the flatbuffer that they become.

It is written through the schema's object API. Equal data is stored once; data starts at multiples of 16 bytes, as the
runtimes' memory mapping requires.
"""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qjax.export.tflite_schema.operators import OPERATORS, first_runtime, version

SCHEMA_VERSION = 3
IDENTIFIER = b"TFL3"
METADATA = "qjax"
"""The name of the metadata that contains what the format has no field for."""
METADATA_VERSION = 3
"""The version of that metadata and of the operators that go with it. The reader refuses any other."""
SIGNATURE = "serving_default"
MAX_BYTES = 2**31 - 1
ALIGNMENT = 16

TYPES = {
    "float32": "FLOAT32",
    "float16": "FLOAT16",
    "int4": "INT4",
    "int8": "INT8",
    "uint8": "UINT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "bool": "BOOL",
}
"""dtype -> the name in the schema's TensorType. int4: two codes per byte, the first in the low half."""


@dataclasses.dataclass(frozen=True, eq=False)
class Scales:
    """The quantization of a tensor: float32 scale () or (channels,) along `axis`, and its zero point.

    block: the length of groups along the last axis; then the scale is float16 (channels, groups).
    """

    scale: Any
    zero_point: Any = 0
    axis: int = 0
    block: int | None = None

    @property
    def per_channel(self) -> bool:
        """Whether there are several scales."""
        return np.size(self.scale) > 1


@dataclasses.dataclass(frozen=True)
class _Facts:
    dtype: str
    rank: int
    per_channel: bool


class File:
    """One model with one subgraph. Tensors are named by their index."""

    def __init__(self) -> None:
        # typed as Any: the bindings have no types
        import ai_edge_litert.schema_py_generated as schema

        self._schema: Any = schema
        self.tensors: list[Any] = []
        self.operators: list[Any] = []
        self._facts: list[_Facts] = []
        self._codes: dict[tuple[str, int], int] = {}
        # buffer 0 is empty by convention of the format
        self._buffers: list[Any] = [schema.BufferT()]
        self._to_bytes_of_type: dict[tuple[int, bytes], int] = {}
        self._bytes = 0

    def tensor(
        self,
        name: str,
        shape: Sequence[int],
        dtype: str,
        scales: Scales | None = None,
        data: Any = None,
        signature: Sequence[int] | None = None,
    ) -> int:
        """Add a tensor; signature: its shape with -1 if a runtime may choose the size."""
        tensor = self._schema.TensorT()
        tensor.name, tensor.shape = name, [int(n) for n in shape]
        tensor.type = getattr(self._schema.TensorType, TYPES[dtype])
        if signature is not None:
            tensor.shapeSignature = [int(n) for n in signature]
        if scales is not None and scales.block is not None:
            tensor.quantization = self._blockwise(name, scales)
        elif scales is not None:
            held = tensor.quantization = self._schema.QuantizationParametersT()
            held.scale = np.atleast_1d(np.asarray(scales.scale, np.float32)).ravel()
            held.zeroPoint = np.broadcast_to(np.asarray(scales.zero_point, np.int64), held.scale.shape).copy()
            held.quantizedDimension = scales.axis
        if data is not None:
            tensor.buffer = self.buffer(_to_bytes_of_type(data, dtype))
        self.tensors.append(tensor)
        self._facts.append(_Facts(dtype, len(tensor.shape), scales is not None and scales.per_channel))
        return len(self.tensors) - 1

    def _blockwise(self, name: str, scales: Scales) -> Any:
        """Scales in a separate tensor, which comes before the tensor to which they belong."""
        held, details = self._schema.QuantizationParametersT(), self._schema.BlockwiseQuantizationT()
        data = np.asarray(scales.scale, np.float16)
        details.scales, details.zeroPoints = self.tensor(f"{name}/scales", data.shape, "float16", None, data), -1
        details.blockSize = scales.block
        held.detailsType, held.details = self._schema.QuantizationDetails.BlockwiseQuantization, details
        return held

    def buffer(self, data: memoryview | bytes) -> int:
        """The index of the buffer with these bytes."""
        key = (len(data), hashlib.sha256(data).digest())
        if key not in self._to_bytes_of_type:
            self._bytes += len(data)
            self._buffers.append(_Buffer(self._schema, data))
            self._to_bytes_of_type[key] = len(self._buffers) - 1
        return self._to_bytes_of_type[key]

    def rename(self, tensor: int, name: str) -> None:
        """Give a tensor another name."""
        self.tensors[tensor].name = name

    def operator(self, name: str, inputs: Sequence[int], outputs: Sequence[int], **options: Any) -> int:
        """Append an operator, in the version that its tensors need; returns its index.

        options: fields of its options in the schema; a string is a name in the schema's Padding or
        ActivationFunctionType, or for a dtype.
        """
        known = OPERATORS[name]
        present = [self._facts[i] for i in inputs if i >= 0]
        number = version(
            name,
            [facts.dtype for facts in present],
            present[known.decides].rank,
            per_channel=len(present) > 1 and present[1].per_channel,
            grouped=bool(options.pop("grouped", False)),
            batched=bool(options.get("batchDims", 0)),
        )
        operator = self._schema.OperatorT()
        operator.opcodeIndex = self._codes.setdefault((name, number), len(self._codes))
        operator.inputs, operator.outputs = list(inputs), list(outputs)
        if known.options:
            operator.builtinOptionsType = getattr(self._schema.BuiltinOptions, known.options)
            operator.builtinOptions = getattr(self._schema, f"{known.options}T")()
            for field, value in options.items():
                if not hasattr(operator.builtinOptions, field):
                    raise ValueError(f"{name}: {known.options} has no field {field!r}.")
                setattr(operator.builtinOptions, field, self._enum_value(field, value))
        self.operators.append(operator)
        return len(self.operators) - 1

    def _enum_value(self, field: str, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if field.endswith(("DataType", "outputType")):
            return getattr(self._schema.TensorType, TYPES[value])
        kind = self._schema.Padding if field == "padding" else self._schema.ActivationFunctionType
        return getattr(kind, value)

    def to_bytes(
        self,
        inputs: Sequence[int],
        outputs: Sequence[int],
        *,
        description: str = "",
        metadata: Mapping[str, bytes] | None = None,
    ) -> bytearray:
        """The bytes of the file.

        Raises:
          ValueError: more than 2 GB, which do not fit a flatbuffer.
        """
        import flatbuffers

        schema = self._schema
        graph = schema.SubGraphT()
        graph.tensors, graph.operators, graph.name = self.tensors, self.operators, "main"
        graph.inputs, graph.outputs = list(inputs), list(outputs)
        signature = schema.SignatureDefT()
        signature.inputs, signature.outputs = self._maps(inputs), self._maps(outputs)
        signature.signatureKey, signature.subgraphIndex = SIGNATURE, 0
        model = schema.ModelT()
        model.version, model.description = SCHEMA_VERSION, description
        model.operatorCodes = [self._code(name, number) for name, number in self._codes]
        model.subgraphs, model.signatureDefs = [graph], [signature]
        # 16 bytes padded with zeros, like the converters write it
        oldest = first_runtime(list(self._codes)).encode().ljust(16, b"\0")
        model.metadata = [
            self._metadata(name, data) for name, data in {"min_runtime_version": oldest, **(metadata or {})}.items()
        ]
        model.buffers = self._buffers
        if self._bytes > MAX_BYTES - 2**20:
            raise ValueError(
                f"a .tflite file must be smaller than 2 GB, but the constants of this model take {self._bytes} bytes. "
                "Use fewer bits for the weights, or split the model."
            )
        builder = flatbuffers.Builder(self._bytes + ALIGNMENT * len(self._buffers) + 1024 * (len(self.tensors) + 8))
        builder.Finish(model.Pack(builder), IDENTIFIER)
        return builder.Output()

    def _code(self, name: str, number: int) -> Any:
        code = self._schema.OperatorCodeT()
        builtin = getattr(self._schema.BuiltinOperator, name)
        # the old field is one signed byte, in which 127 refers old readers to the new one
        code.builtinCode, code.deprecatedBuiltinCode, code.version = builtin, min(builtin, 127), number
        return code

    def _maps(self, tensors: Sequence[int]) -> list[Any]:
        found: list[Any] = []
        for index in tensors:
            entry = self._schema.TensorMapT()
            entry.name, entry.tensorIndex = self.tensors[index].name, index
            found.append(entry)
        return found

    def _metadata(self, name: str, data: bytes) -> Any:
        entry = self._schema.MetadataT()
        entry.name, entry.buffer = name, self.buffer(data)
        return entry


class _Buffer:
    """Packs like the schema's BufferT, with its data in place and aligned."""

    def __init__(self, schema: Any, data: memoryview | bytes) -> None:
        self._schema, self._data = schema, data

    def Pack(self, builder: Any) -> Any:
        size = len(self._data)
        builder.StartVector(1, size, ALIGNMENT)
        builder.head -= size
        builder.Bytes[builder.head : builder.head + size] = self._data
        vector = builder.EndVector()
        self._schema.BufferStart(builder)
        self._schema.BufferAddData(builder, vector)
        return self._schema.BufferEnd(builder)


def _to_bytes_of_type(data: Any, dtype: str) -> memoryview | bytes:
    if dtype == "int4":
        return pack_int4(np.asarray(data))
    # the format is little-endian
    codes = np.ascontiguousarray(np.asarray(data), np.dtype(dtype).newbyteorder("<"))
    return memoryview(codes.reshape(-1).view(np.uint8)).cast("B") if codes.size else b""


def pack_int4(codes: np.ndarray) -> bytes:
    """Codes of 4 bits, two per byte, the first in the low half."""
    flat = np.ascontiguousarray(codes).reshape(-1).astype(np.uint8) & 0xF
    if flat.size % 2:
        flat = np.append(flat, np.uint8(0))
    return (flat[0::2] | (flat[1::2] << 4)).tobytes()
