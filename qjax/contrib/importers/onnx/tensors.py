"""Tensors of ONNX files as NumPy arrays: every length is checked against the shape before anything is allocated."""

import math
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qjax.export.read_errors import ReadError

# onnx.TensorProto.DataType: number -> (name, bits, field of the elements that are not raw)
_TYPES = {
    1: ("float32", 32, "float_data"),
    2: ("uint8", 8, "int32_data"),
    3: ("int8", 8, "int32_data"),
    4: ("uint16", 16, "int32_data"),
    5: ("int16", 16, "int32_data"),
    6: ("int32", 32, "int32_data"),
    7: ("int64", 64, "int64_data"),
    9: ("bool", 8, "int32_data"),
    10: ("float16", 16, "int32_data"),
    11: ("float64", 64, "double_data"),
    12: ("uint32", 32, "uint64_data"),
    13: ("uint64", 64, "uint64_data"),
    16: ("bfloat16", 16, "int32_data"),
    21: ("uint4", 4, "int32_data"),
    22: ("int4", 4, "int32_data"),
    25: ("uint2", 2, "int32_data"),
    26: ("int2", 2, "int32_data"),
}
_OTHERS = {8: "string", 14: "complex64", 15: "complex128", 17: "float8e4m3fn", 18: "float8e4m3fnuz"}
_FLOATS = {19: "float8e5m2", 20: "float8e5m2fnuz", 23: "float4e2m1", 24: "float8e8m0"}
_EXTERNAL = 1
MAX_RANK = 32
MAX_DIMENSION = 2**31 - 1


def type_name(number: int) -> str:
    """The name of an element type; the number of an unknown one."""
    return _TYPES[number][0] if number in _TYPES else (_OTHERS | _FLOATS).get(number, f"number {number}")


def small_range(name: str) -> tuple[int, int] | None:
    """The lowest and highest code of a type below 8 bits, None for other types."""
    return {"uint4": (0, 15), "int4": (-8, 7), "uint2": (0, 3), "int2": (-2, 1)}.get(name)


def code_range(name: str) -> tuple[int, int]:
    """The lowest and the highest code of an integer type."""
    found = small_range(name)
    return found if found is not None else (int(np.iinfo(name).min), int(np.iinfo(name).max))


def array(proto: Any, where: str) -> tuple[np.ndarray, str]:
    """The data of a TensorProto, and the name of its type in the file ("int4" has no NumPy dtype, so it becomes int8).

    Raises:
      ReadError: a type that has no numbers here, data in another file, a length that does not fit the shape.
    """
    if proto.data_location == _EXTERNAL or len(proto.external_data):
        raise ReadError(
            f"{where}: its data is in another file, and the reader opens none. Save the model with its data inside: "
            "onnx.save(onnx.load(path), path, save_as_external_data=False)."
        )
    if proto.data_type not in _TYPES:
        raise ReadError(f"{where}: expected numbers, got elements of type {type_name(proto.data_type)}.")
    if proto.HasField("segment"):
        raise ReadError(f"{where}: its data comes in segments, which no tool writes. Save the model again.")
    name, bits, field = _TYPES[proto.data_type]
    shape = dimensions(proto.dims, where)
    size = math.prod(shape)
    if proto.HasField("raw_data"):
        data = bytes(proto.raw_data)
        expected = -(-size * bits // 8)
        if len(data) != expected:
            raise ReadError(f"{where}: expected {expected} bytes for the shape {list(shape)}, got {len(data)}.")
        return _raw(data, name, bits, size).reshape(shape), name
    values = getattr(proto, field)
    expected = -(-size * bits // 8) if bits < 8 else size
    if len(values) != expected:
        raise ReadError(f"{where}: expected {expected} elements for the shape {list(shape)}, got {len(values)}.")
    return _typed(values, name, bits, size, where).reshape(shape), name


def dimensions(dims: Any, where: str) -> tuple[int, ...]:
    """A shape of known sizes, each within 31 bits."""
    shape = tuple(int(n) for n in dims)
    if len(shape) > MAX_RANK or any(not 0 <= n <= MAX_DIMENSION for n in shape):
        raise ReadError(
            f"{where}: expected at most {MAX_RANK} sizes from 0 to {MAX_DIMENSION}, got {list(shape)[:40]}."
        )
    return shape


def _raw(data: bytes, name: str, bits: int, size: int) -> np.ndarray:
    if bits < 8:
        return _unpacked(np.frombuffer(data, np.uint8), name, bits, size)
    if name == "bfloat16":
        return _bfloat16(np.frombuffer(data, np.dtype("<u2")))
    if name == "bool":
        return np.frombuffer(data, np.uint8) != 0
    values = np.frombuffer(data, np.dtype(name).newbyteorder("<"))
    return values if sys.byteorder == "little" else values.astype(name)


def _bfloat16(bits: np.ndarray) -> NDArray[np.float32]:
    """The upper half of a float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _typed(values: Any, name: str, bits: int, size: int, where: str) -> np.ndarray:
    if name in ("float32", "float64", "int64", "uint64", "int32"):
        return np.array(values, dtype=name)
    numbers = np.array(values, dtype=np.uint64 if name == "uint32" else np.int64)
    wide = {"float16": "uint16", "bfloat16": "uint16", "bool": "uint8"}.get(name, name)
    low, high = (0, 255) if bits < 8 else code_range(wide)
    if numbers.size and (int(numbers.min()) < low or int(numbers.max()) > high):
        raise ReadError(f"{where}: expected elements of {name}, in [{low}, {high}]; some lie outside.")
    if bits < 8:
        return _unpacked(numbers.astype(np.uint8), name, bits, size)
    if name == "float16":
        return numbers.astype(np.uint16).view(np.float16)
    if name == "bfloat16":
        return _bfloat16(numbers)
    return numbers.astype(name)


def _unpacked(data: NDArray[np.uint8], name: str, bits: int, size: int) -> np.ndarray:
    """Elements below 8 bits: the first in the lowest bits of a byte."""
    mask, signed = (1 << bits) - 1, name.startswith("int")
    parts = np.stack([(data >> shift) & mask for shift in range(0, 8, bits)], axis=-1).reshape(-1)[:size]
    if not signed:
        return parts.astype(np.uint8)
    half = 1 << (bits - 1)
    return ((parts.astype(np.int16) ^ half) - half).astype(np.int8)
