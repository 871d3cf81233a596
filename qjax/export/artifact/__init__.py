"""The artifact: one file, `*.qjax`, that holds a graph.

It is a safetensors file, so that anything which reads safetensors reads its arrays, and no reader ever runs
code:

    8 bytes   little-endian length of the header
    header    JSON: "__metadata__" first, then each array's dtype, shape and place; padded with spaces
    data      the arrays, little-endian, the widest dtypes first, without gaps

"__metadata__" begins with four fields at fixed places: "format" ("qjax"), "sha256" (of the
whole file, with these 64 digits read as zeros), "bytes" (the file's size, 19 digits) and "version"; then
"graph", the structure as one JSON document (`program_document.py`), compressed with zlib and in base64. The
digest finds damage; it is not a signature, so the content is not trusted. Equal graphs have equal bytes under
one version of zlib. To look inside:

    python -c "import base64, json, sys, zlib; f = open(sys.argv[1], 'rb'); \
    h = json.loads(f.read(int.from_bytes(f.read(8), 'little'))); \
    g = zlib.decompress(base64.b64decode(h['__metadata__']['graph'])); \
    print(json.dumps(json.loads(g), indent=1))" model.qjax
"""

import hashlib
import math
import os
import re
import sys
from typing import Any

import numpy as np

from qjax.export import document, files, strict_json
from qjax.export.artifact.program_document import MAX_BYTES, Arrays, decode, encode, stored_bytes
from qjax.export.document import MAX_DIMENSION, MAX_RANK
from qjax.export.strict_json import ArtifactError
from qjax.graph.check import GraphError
from qjax.graph.ir import Graph

VERSION = 4
"""The version of the format; a file of any other is refused."""
MAX_FILE = 4 * 2**30
MAX_HEADER = 64 * 2**20

_DTYPES = {
    "I64": "int64",
    "I32": "int32",
    "F32": "float32",
    "I16": "int16",
    "U16": "uint16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
    "F64": "float64",
    "F16": "float16",
    "BF16": "bfloat16",
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
START = b'{"__metadata__":{"format":"qjax","sha256":"'
_FRAME = re.compile(
    re.escape(START) + rb'([0-9a-f]{64})","bytes":"(\d{19})","version":"(0|[1-9]\d{0,8})",'
    rb'"graph":"'
)
_DIGEST = slice(8 + len(START), 8 + len(START) + 64)
_METADATA = ("format", "sha256", "bytes", "version", "graph")

StrPath = files.StrPath


def save(graph: Graph, path: StrPath) -> None:
    """Write a finished graph to one file, all or nothing.

    The bytes go to a temporary file in the same folder, reach the disk, and then take the name in one step:
    whatever fails, an earlier file of that name is whole. A new file gets the usual permissions, a replaced
    one keeps its own; a symbolic link is followed. What is written has been read back in memory and found to
    be a valid graph.

    Raises:
      GraphError: the graph is not finished.
      ArtifactError: a file cannot hold it (tracers, codes outside of their range, attributes that are not
        JSON), or `path` is a folder or a device.
      OSError: the folder is missing, not writable or full.
    """
    data = to_bytes(graph)
    files.write(data, path, ArtifactError)


def load(path: StrPath, *, max_bytes: int = MAX_FILE) -> Graph:
    """Read a graph; its arrays are numpy arrays. No code in the file can run.

    Memory stays within a few times the size of the file, of the codes in it and of its structure, which is at most
    64 MiB of JSON.

    Raises:
      FileNotFoundError: there is no such file.
      ArtifactError: it is no artifact, damaged, cut short, too large, of another version, or its content
        breaks the format.
      GraphError: its content is well formed but no valid graph.
    """
    try:
        return from_bytes(files.read(path, max_bytes, "a qjax artifact", ArtifactError))
    except (ArtifactError, GraphError) as error:
        raise type(error)(f"{os.fspath(path)}: {error}") from None


def artifact_size(graph: Graph) -> int:
    """The bytes that a graph's constants take in its file: weights, biases, multipliers, shifts, tables.

    Codes of at most 4 (2) bits count as packed, two (four) to a byte. Scales, zero points and the header are not
    counted.
    """
    return sum(stored_bytes(tensor) for tensor in graph.constants())


def to_bytes(graph: Graph) -> bytes:
    """The content of the file. Raises as `save` does."""
    text, arrays = encode(graph)
    if len(text.encode()) > document.MAX_TEXT:
        raise ArtifactError(_TOO_LARGE.format(document.MAX_TEXT, len(text.encode())))
    # The sort is stable: within one width the arrays stay in the order of the graph's tensors.
    order = sorted(arrays, key=lambda key: -arrays[key].dtype.itemsize)
    header: dict[str, Any] = {
        "__metadata__": {
            "format": "qjax",
            "sha256": "0" * 64,
            "bytes": "0" * 19,
            "version": str(VERSION),
            "graph": document.packed_text(text),
        }
    }
    chunks: list[bytes] = []
    end = 0
    for key in order:
        array = arrays[key]
        chunks.append(array.astype(array.dtype.newbyteorder("<")).tobytes())
        begin, end = end, end + array.nbytes
        entry = {"dtype": _CODES[array.dtype.name], "shape": array.shape, "data_offsets": (begin, end)}
        header[key] = entry
    head = _dumps_header(header)
    size = 8 + len(head) + end
    zeros = b'"bytes":"' + b"0" * 19
    head = head.replace(zeros, zeros[:-19] + b"%019d" % size, 1)
    data = bytearray(b"".join((len(head).to_bytes(8, "little"), head, *chunks)))
    data[_DIGEST] = _digest(data).encode()
    result = bytes(data)
    from_bytes(result)
    return result


def from_bytes(data: bytes) -> Graph:
    """The graph in the content of a file. Raises as `load` does; the arrays are read-only."""
    _check_frame(data)
    length = int.from_bytes(data[:8], "little")
    if length > min(MAX_HEADER, len(data) - 8):
        raise ArtifactError(
            f"expected a header of at most {min(MAX_HEADER, len(data) - 8)} bytes, got a length of {length}."
        )
    try:
        text = data[8 : 8 + length].decode()
    except UnicodeDecodeError as error:
        raise ArtifactError(f"expected a header in UTF-8, got {error}.") from None
    header = strict_json.mapping(strict_json.loads(text, "The header"), "The header")
    metadata = strict_json.fields(header.pop("__metadata__", None), _METADATA, "The header's metadata")
    arrays = _arrays(header, memoryview(data)[8 + length :])
    return decode(_unpacked(metadata["graph"]), arrays)


def _unpacked(given: Any) -> str:
    if type(given) is not str:
        raise ArtifactError(f"The graph: expected compressed JSON as text, got {type(given).__name__}.")
    try:
        return document.unpacked_text(given)
    except ValueError as error:
        raise ArtifactError(f"The graph: expected compressed JSON, got text that does not unpack ({error}).") from None


_TOO_LARGE = (
    "expected a structure of at most {} bytes of JSON, got {}: move large attributes and metadata into constants, or "
    "split the graph."
)


def _dumps_header(header: dict[str, Any]) -> bytes:
    head = strict_json.dumps(header, "The header").encode()
    head += b" " * (-len(head) % 8)
    if len(head) > MAX_HEADER:
        raise ArtifactError(_TOO_LARGE.format(MAX_HEADER, len(head)))
    return head


def _check_frame(data: bytes) -> None:
    """Everything that does not need a parser: the kind of file, its size, its digest, its version."""
    if not data:
        raise ArtifactError("expected a qjax artifact, got an empty file: write it again with qjax's save.")
    seen = data[8 : 8 + len(START)]
    if data[4:8] == b"TFL3":
        raise ArtifactError("this is a .tflite model, but load only reads what qjax's save wrote: use qjax.read(path).")
    if not START.startswith(seen):
        raise ArtifactError(
            f"expected a qjax artifact ({START.decode()}... from byte 8 on), got {data[:32]!r}...: "
            "is this the right file? qjax.read(path) reads .tflite and .onnx models."
        )
    frame = _FRAME.match(data, 8)
    if frame is None:
        raise ArtifactError(
            f"expected the fields sha256, bytes, version and graph from byte 8 on, got {data[8:64]!r}...: "
            "the file is damaged or cut short; copy or download it again."
        )
    digest, size, version = frame[1].decode(), int(frame[2]), int(frame[3])
    if len(data) < size:
        raise ArtifactError(f"expected {size} bytes, got {len(data)}: cut short; copy or download it again.")
    if len(data) > size:
        raise ArtifactError(f"expected {size} bytes, got {len(data)}: too long; copy or download it again.")
    actual = _digest(data)
    if actual != digest:
        raise ArtifactError(
            f"expected content with SHA-256 {digest}, got {actual}: the file is damaged; copy or download it again."
        )
    if version != VERSION:
        raise ArtifactError(
            f"expected format version {VERSION}, got {version}: convert the model again with this version of qjax, or "
            "load the file with the version that wrote it."
        )


def _digest(data: bytes | bytearray) -> str:
    view = memoryview(data)
    result = hashlib.sha256(view[: _DIGEST.start])
    result.update(b"0" * 64)
    result.update(view[_DIGEST.stop :])
    return result.hexdigest()


def _arrays(header: dict[str, Any], data: memoryview) -> Arrays:
    """The arrays that a header describes: back to back, in its order, over the whole of the data."""
    arrays: dict[str, np.ndarray] = {}
    position = 0
    for key, item in header.items():
        where = f"Array {key!r}"
        entry = strict_json.fields(item, ("dtype", "shape", "data_offsets"), where)
        code = strict_json.name(entry["dtype"], f"{where}: dtype")
        if code not in _DTYPES:
            raise ArtifactError(f"{where}: expected a dtype among {', '.join(_DTYPES)}; got {code[:40]!r}.")
        dtype = np.dtype(_DTYPES[code])
        shape = strict_json.sequence(entry["shape"], f"{where}: shape")
        if len(shape) > MAX_RANK:
            raise ArtifactError(f"{where}: expected at most {MAX_RANK} dimensions, got {len(shape)}.")
        sizes = [strict_json.integer(size, 0, MAX_DIMENSION, f"{where}: shape") for size in shape]
        offsets = [
            strict_json.integer(offset, 0, len(data), f"{where}: data_offsets")
            for offset in strict_json.sequence(entry["data_offsets"], f"{where}: data_offsets")
        ]
        end = position + math.prod(sizes) * dtype.itemsize
        if offsets != [position, end]:
            raise ArtifactError(
                f"{where}: expected data_offsets [{position}, {end}] for {dtype} of shape {sizes}, got {offsets[:4]}."
            )
        if math.prod(size for size in sizes if size) * 8 > MAX_BYTES:
            raise ArtifactError(f"{where}: expected a shape that fits the address space, got {sizes}.")
        if dtype == np.bool_ and any(byte > 1 for byte in data[position:end]):
            raise ArtifactError(f"{where}: expected booleans, bytes of 0 or 1.")
        array = _view(data[position:end], dtype).reshape(sizes)
        array.setflags(write=False)
        arrays[key] = array
        position = end
    if position != len(data):
        raise ArtifactError(f"expected arrays of {len(data)} bytes together, got {position}.")
    return arrays


def _view(data: memoryview, dtype: np.dtype[Any]) -> np.ndarray:
    if not len(data):
        return np.zeros(0, dtype)
    array = np.frombuffer(data, dtype.newbyteorder("<"))
    return array if sys.byteorder == "little" else array.astype(dtype)


__all__ = ["ArtifactError", "GraphError", "artifact_size", "from_bytes", "load", "save", "to_bytes"]
