"""A .tflite file as plain values: tensors, operators with their options, inputs and outputs, all checked.

What is impossible (an index without a tensor, data that is too short for a shape, an operator that reads what is not
computed yet) is damage and raises an error at once. What is possible but has no integers here is left to the walk,
which lists it.
"""

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from qjax.export.read_errors import ReadError
from qjax.export.tflite_schema.enums import BUILTIN_OPERATORS, NEWEST, OPTIONS, TENSOR_TYPES, Fields
from qjax.export.tflite_schema.file import IDENTIFIER, SCHEMA_VERSION
from qjax.export.tflite_schema.flatbuffer import Bytes, Table, damaged

COMPILED = {
    "CUSTOM 'ethos-u'": (
        "it is a program for Arm's Ethos-U, which Vela compiled from the model",
        "Read the .tflite file that Vela was given",
    ),
    "CUSTOM 'edgetpu-custom-op'": (
        "it is a program for Google's Edge TPU, which edgetpu_compiler compiled from the model",
        "Read the .tflite file that the compiler was given",
    ),
}
"""name -> a description, and the cure."""


MAX_RANK = 8
_BLOCKWISE = 2
"""BlockwiseQuantization in the schema's union of quantizations."""
MAX_ELEMENTS = 2**28
"""Elements of a tensor without data, for one batch: more than any model has, few enough for this machine."""

ITEM_BITS = {
    "float32": 32,
    "float16": 16,
    "int8": 8,
    "uint8": 8,
    "int16": 16,
    "int32": 32,
    "int64": 64,
    "bool": 8,
    "int4": 4,
}


VARIABLE = "a variable, which keeps its value from one run to the next"


@dataclasses.dataclass(frozen=True, eq=False)
class FileTensor:
    """A tensor as the file states it.

    span: the first byte of its data and the byte after it; None for a computed tensor. scale: () floats if it has no
    scales. blocks: for scales of groups along the last axis, the index of their tensor and the length of a group.
    unusual: a property that the graph cannot express (a variable, sparse weights), or "". shaped: "yes", or "empty" or
    "no" if the shape is () because the file states an empty one without a rank, or none: then the operators determine
    it.
    """

    index: int
    name: str
    shape: tuple[int, ...]
    signature: tuple[int, ...]
    dtype: str
    span: tuple[int, int] | None
    scale: np.ndarray
    zero_point: np.ndarray
    axis: int
    unusual: str
    blocks: tuple[int, int] | None = None
    shaped: Literal["yes", "empty", "no"] = "yes"

    @property
    def size(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)


class Options(Mapping[str, Any]):
    """The fields of an operator's options, which record whether anybody read them.

    A field that no reader looks at may select another kernel of the runtime, so `overlooked` makes it an error.
    """

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._values, self._defaults = values, defaults
        self._seen: set[str] = set()

    def __getitem__(self, field: str) -> Any:
        self._seen.add(field)
        return self._values[field]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def overlooked(self, ignored: Collection[str]) -> dict[str, Any]:
        """The fields with another value than the schema's default that nobody read."""
        rest = self._values.keys() - self._seen - set(ignored)
        return {field: self._values[field] for field in sorted(rest) if self._values[field] != self._defaults[field]}


@dataclasses.dataclass(frozen=True, eq=False)
class Operator:
    """One operator. inputs: indices of tensors, -1 for an optional one that is absent. intermediates: those inside.

    unusual: a property that no reader knows (a newer version, fields that are not in the schema), or "".
    """

    index: int
    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    options: Options
    intermediates: tuple[int, ...] = ()
    unusual: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """One subgraph; metadata by name.

    subgraphs: how many there are. signatures: the subgraphs that the file offers to callers, by name. once: those that
    CALL_ONCE runs.
    """

    data: bytes
    tensors: tuple[FileTensor, ...]
    operators: tuple[Operator, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    subgraphs: int
    description: str
    metadata: Mapping[str, tuple[int, int]]
    signatures: Mapping[str, int]
    once: "Mapping[int, Model]" = dataclasses.field(default_factory=dict)

    def block_scales(self, tensor: FileTensor) -> np.ndarray:
        """The float32 scales (channels, groups) of a matrix that has `blocks`.

        Raises:
          ReadError: they do not fit the tensor.
        """
        assert tensor.blocks is not None
        index, size = tensor.blocks
        held = self.tensors[index] if 0 <= index < len(self.tensors) else None
        if held is None or held.span is None or held.dtype not in ("float16", "float32"):
            raise damaged(f"tensor {tensor.name[:60]!r}: no tensor {index} of scales")
        if len(tensor.shape) != 2 or held.shape != (tensor.shape[0], tensor.shape[1] // size) or tensor.shape[1] % size:
            raise damaged(f"tensor {tensor.name[:60]!r} of shape {tensor.shape}: scales {held.shape}, blocks of {size}")
        return self.array(held).astype(np.float32)

    def array(self, tensor: FileTensor) -> np.ndarray:
        """The data of a tensor, as a new array; int4 becomes int8."""
        assert tensor.span is not None
        start, end = tensor.span
        if tensor.dtype == "int4":
            packed = np.frombuffer(self.data, np.uint8, end - start, start)
            both = np.stack([packed & 0xF, packed >> 4], axis=1).reshape(-1)[: tensor.size].astype(np.int8)
            return np.where(both > 7, both - np.int8(16), both).reshape(tensor.shape)
        if tensor.dtype == "bool":
            # Any byte other than 0 is true.
            return np.frombuffer(self.data, np.uint8, tensor.size, start).reshape(tensor.shape) != 0
        kind = np.dtype(tensor.dtype).newbyteorder("<")
        return np.frombuffer(self.data, kind, tensor.size, start).astype(tensor.dtype).reshape(tensor.shape)


def parse(data: bytes, signature: str | None = None) -> Model:
    """The model in a file: its first subgraph, or that of a signature.

    Raises:
      ReadError: the file is damaged, or has no such signature.
    """
    root = Bytes(data).root(IDENTIFIER)
    version = root.scalar(0, "u32")
    if version != SCHEMA_VERSION:
        raise damaged(f"expected version {SCHEMA_VERSION} of the schema, got {version}")
    buffers = [_span(table, len(data)) for table in root.tables(4)]
    codes = [_code(table) for table in root.tables(1)]
    subgraphs = root.tables(2)
    if not subgraphs:
        raise damaged("it has no subgraph")
    metadata = {table.text(0): _buffer(buffers, table.scalar(1, "u32"), "metadata") for table in root.tables(6)}
    held = {name: span for name, span in metadata.items() if span is not None}
    if "COMPRESSION_METADATA" in metadata:
        raise ReadError("its weights are compressed for TFLite Micro. Read the file from which it was made.")

    signatures = {table.text(2): table.scalar(4, "u32") for table in root.tables(7)}
    if signature is not None and signature not in signatures:
        known = ", ".join(map(repr, signatures)) or "none"
        raise ReadError(f"the file has no signature {signature!r}; its signatures are {known}.")
    first = 0 if signature is None else signatures[signature]
    if first >= len(subgraphs):
        raise damaged(f"signature {signature!r} of subgraph {first} of {len(subgraphs)}")

    def graph(table: Table) -> Model:
        tensors = tuple(_tensor(i, tensor, buffers) for i, tensor in enumerate(table.tables(0)))
        operators = tuple(_operator(i, one, codes, len(tensors)) for i, one in enumerate(table.tables(3)))
        inputs, outputs = (_indices(table, field, len(tensors), "the subgraph's") for field in (1, 2))
        model = Model(data, tensors, operators, inputs, outputs, len(subgraphs), root.text(3), held, signatures)
        _check_order(model)
        return model

    main = graph(subgraphs[first])
    once = {operator.options["subgraph"] for operator in main.operators if operator.name == "CALL_ONCE"}
    if not once <= set(range(len(subgraphs))) - {first}:
        raise damaged(f"CALL_ONCE of subgraph {max(once)} of {len(subgraphs)}")
    return dataclasses.replace(main, once={index: graph(subgraphs[index]) for index in sorted(once)})


def _span(table: Table, size: int) -> tuple[int, int] | None:
    start, length = table.scalar(1, "u64"), table.scalar(2, "u64")
    # Files above 2 GB store their data after the flatbuffer. 0 and 1 mean that it is inside.
    if start > 1:
        if start + length > size:
            raise damaged(f"a buffer of {length} bytes at byte {start} of {size}")
        return (start, start + length) if length else None
    found = table.span(0)
    return None if found is None or found[0] == found[1] else found


def _buffer(buffers: Sequence[tuple[int, int] | None], index: int, whose: str) -> tuple[int, int] | None:
    if index >= len(buffers):
        raise damaged(f"{whose}: buffer {index} of {len(buffers)}")
    return buffers[index]


def _code(table: Table) -> tuple[str, str, int]:
    """The operator's name, that of a custom one, and the version."""
    # The old field is one signed byte. Old files have 0 in the new field.
    number = max(table.scalar(0, "i8"), table.scalar(3, "i32"))
    if number < 0:
        raise damaged(f"an operator with the number {number}")
    known = BUILTIN_OPERATORS[number] if number < len(BUILTIN_OPERATORS) else f"operator number {number}"
    return known, table.text(1, 100), table.scalar(2, "i32", 1)


def _indices(table: Table, field: int, count: int, whose: str, least: int = 0) -> tuple[int, ...]:
    found = table.array(field, "int32")
    indices = () if found is None else tuple(int(n) for n in found)
    for index in indices:
        if not least <= index < count:
            raise damaged(f"{whose} tensor {index} of {count}")
    return indices


def _operator(index: int, table: Table, codes: Sequence[tuple[str, str, int]], count: int) -> Operator:
    code = table.scalar(0, "u32")
    if code >= len(codes):
        raise damaged(f"operator {index}: code {code} of {len(codes)}")
    name, custom, version = codes[code]
    where = f"operator {index} ({name}):"
    inputs, outputs = _indices(table, 1, count, where, -1), _indices(table, 2, count, where)
    if name == "CUSTOM":
        return Operator(index, f"CUSTOM {custom!r}", inputs, outputs, Options({}, {}))
    kind, fields = OPTIONS.get(name, _NO_OPTIONS)
    given = table.scalar(3, "u8")
    if kind is not None and given not in (0, kind):
        raise damaged(f"{where} options of another operator")
    held = table.table(4) if given else None
    values = {field: _field(held, *of) for field, of in fields.items()}
    options = Options(values, {field: _field(None, *of) for field, of in fields.items()})
    intermediates = _indices(table, 8, count, where, -1)
    return Operator(index, name, inputs, outputs, options, intermediates, _unusual(name, version, table, held))


_NO_OPTIONS: tuple[int | None, Fields] = (None, {})


def _field(held: Table | None, number: int, form: str, default: int) -> Any:
    """A field of options; held: None means that all fields have their defaults."""
    if form == "text":
        return "" if held is None else held.text(number)
    if form == "ints":
        value = None if held is None else held.array(number, "int32")
        return None if value is None else [int(n) for n in value]
    return default if held is None else held.scalar(number, form, default)


_OPERATOR_FIELDS = 14
_TENSOR_FIELDS = 11
"""How many fields a table has in the schema that this reader knows."""


def _unusual(name: str, version: int, table: Table, held: Table | None) -> str:
    """A property of a builtin operator that no reader knows, or ""."""
    newest = NEWEST.get(name, 1)
    if version > newest:
        return f"it has version {version}, and qjax knows {name} up to version {newest}"
    known = {number for number, _, _ in OPTIONS[name][1].values()} if name in OPTIONS else set[int]()
    unknown = [] if held is None else [number for number in held.stored if number not in known]
    if unknown:
        return f"its options have field {unknown[0]}, which qjax's schema of {name} does not know"
    custom = table.span(5)
    if table.scalar(11, "u8") or table.scalar(9, "u64") or (custom is not None and custom[0] != custom[1]):
        return "it has options of a custom operator or of StableHLO"
    unknown = [number for number in table.stored if number >= _OPERATOR_FIELDS]
    return f"it has field {unknown[0]}, which qjax's schema of operators does not know" if unknown else ""


def _tensor(index: int, table: Table, buffers: Sequence[tuple[int, int] | None]) -> FileTensor:
    name = table.text(3) or f"tensor{index}"
    where = f"tensor {index} ({name[:60]!r})"
    kind = table.scalar(1, "i8")
    if not 0 <= kind < len(TENSOR_TYPES):
        raise damaged(f"{where}: a type with the number {kind}")
    shape = _sizes(table, 0, where)
    signature = _sizes(table, 7, where, -1) or shape
    dtype = TENSOR_TYPES[kind]
    span = _buffer(buffers, table.scalar(2, "u32"), where)
    shaped = "yes" if shape or table.scalar(8, "bool") or span is not None else "empty" if 0 in table.stored else "no"
    if len(signature) != len(shape):
        if shaped == "yes":
            raise damaged(f"{where}: shape {shape} and signature {signature}")
        signature = shape
    unusual = ""
    if table.scalar(5, "bool"):
        unusual = VARIABLE
    elif table.table(6) is not None:
        unusual = "sparse weights"
    elif table.scalar(10, "u32"):
        unusual = "data outside of the file"
    elif table.tables(9) or any(number >= _TENSOR_FIELDS for number in table.stored):
        unusual = "a variant, or has fields that qjax's schema of tensors does not know"
    elif dtype not in ITEM_BITS:
        unusual = f"elements of type {dtype}"
    elif span is not None:
        needed = -(-math.prod(shape) * ITEM_BITS[dtype] // 8)
        if span[1] - span[0] < needed:
            raise damaged(f"{where}: {needed} bytes of data expected, got {span[1] - span[0]}")
        if 0 not in table.stored and span[1] - span[0] > needed:
            unusual = f"{span[1] - span[0]} bytes of data without a shape"
    if span is None and math.prod(shape) > MAX_ELEMENTS:
        raise damaged(f"{where}: the shape {shape} has more than {MAX_ELEMENTS} elements")
    q = table.table(4)
    scale = None if q is None else q.array(2, "float32")
    zero_point = None if q is None else q.array(3, "int64")
    scale = np.zeros(0, np.float32) if scale is None else scale
    zero_point = np.zeros(scale.shape, np.int64) if zero_point is None or not zero_point.size else zero_point
    kind = 0 if q is None else q.scalar(4, "u8")
    blocks = _blocks(q, where) if q is not None and kind == _BLOCKWISE else None
    if kind and blocks is None and not unusual:
        unusual = "a quantization that is no scale and zero point"
    axis = 0 if q is None else q.scalar(6, "i32")
    return FileTensor(index, name, shape, signature, dtype, span, scale, zero_point, axis, unusual, blocks, shaped)


def _blocks(q: Table, where: str) -> tuple[int, int] | None:
    """Of a blockwise quantization without zero points: the tensor of its scales, and the size of a block."""
    details = q.table(5)
    if details is None or details.scalar(1, "i32", -1) > 0:
        return None
    scales, size = details.scalar(0, "i32"), details.scalar(2, "i32")
    if size < 1:
        raise damaged(f"{where}: blocks of {size}")
    return scales, size


def _sizes(table: Table, field: int, where: str, least: int = 0) -> tuple[int, ...]:
    found = table.array(field, "int32")
    if found is None:
        return ()
    if found.size > MAX_RANK:
        raise damaged(f"{where}: {found.size} dimensions, expected at most {MAX_RANK}")
    if found.size and int(found.min()) < least:
        raise damaged(f"{where}: a size of {int(found.min())}")
    return tuple(int(n) for n in found)


def _check_order(model: Model) -> None:
    """Check that every tensor is computed once, and before it is read."""
    known = {tensor.index for tensor in model.tensors if tensor.span is not None}
    for index in model.inputs:
        if index in known:
            raise damaged(f"input {model.tensors[index].name[:60]!r} is listed twice, or has data")
        known.add(index)
    for operator in model.operators:
        # A tensor without elements may have no data. Compiled programs list working memory among their inputs.
        read = () if operator.name in COMPILED else operator.inputs
        for index in read:
            if index >= 0 and index not in known and model.tensors[index].size and not model.tensors[index].unusual:
                raise damaged(
                    f"operator {operator.index} ({operator.name}) reads {model.tensors[index].name[:60]!r} before it "
                    "is computed"
                )
        for index in operator.outputs:
            if index in known:
                raise damaged(
                    f"operator {operator.index} ({operator.name}) computes {model.tensors[index].name[:60]!r} again"
                )
            known.add(index)
    for index in model.outputs:
        if index not in known:
            raise damaged(f"output {model.tensors[index].name[:60]!r} is never computed")


__all__ = ["FileTensor", "Model", "Operator", "ReadError", "parse"]
