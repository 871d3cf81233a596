"""Reads the weights of a file that torch.save wrote, as numpy arrays, without torch.

Both forms are read: the zip archive of torch 1.6 and later, and the older stream of pickles. The pickle may name
nothing but tensors, so a file cannot run code.
"""

import pickle
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

_MAGIC = 0x1950A86A20F9469CFC6C
_DTYPES = {
    "DoubleStorage": np.float64,
    "FloatStorage": np.float32,
    "HalfStorage": np.float16,
    "LongStorage": np.int64,
    "IntStorage": np.int32,
    "ByteStorage": np.uint8,
    "BoolStorage": np.bool_,
}


class _Storage:
    """The numbers of one or more tensors; filled before or after the tensors are made."""

    def __init__(self, dtype: Any, size: int) -> None:
        self.values = np.zeros(size, dtype)


class _Tensor:
    """A view of a storage."""

    def __init__(self, storage: _Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self.storage, self.offset, self.shape, self.strides = storage, offset, shape, strides

    def array(self) -> np.ndarray:
        values = self.storage.values[self.offset :]
        strides = [stride * values.itemsize for stride in self.strides]
        return np.lib.stride_tricks.as_strided(values, self.shape, strides).copy()


def _rebuild(storage: _Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any) -> _Tensor:
    return _Tensor(storage, offset, shape, strides)


class _Unpickler(pickle.Unpickler):
    """Knows tensors, their storages and ordered dicts, and nothing else."""

    def __init__(self, file: Any, archive: zipfile.ZipFile | None, prefix: str) -> None:
        super().__init__(file, encoding="latin1")
        self.archive, self.prefix = archive, prefix
        self.storages: dict[str, _Storage] = {}

    def find_class(self, module: str, name: str) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) in (("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_tensor")):
            return _rebuild
        if module == "torch" and name in _DTYPES:
            return name
        raise ValueError(f"Expected a file of tensors only, got one that names {module}.{name}.")

    def persistent_load(self, pid: Any) -> _Storage:
        _, kind, key, _, size = pid[:5]
        if key not in self.storages:
            storage = _Storage(_DTYPES[kind], size)
            if self.archive is not None:
                storage.values = np.frombuffer(self.archive.read(f"{self.prefix}/data/{key}"), _DTYPES[kind])
            self.storages[key] = storage
        return self.storages[key]


def _read_stream(file: BinaryIO) -> Any:
    if pickle.load(file) != _MAGIC:
        raise ValueError(f"Expected a file that torch.save wrote, got {file.name}.")
    for _ in range(2):  # the protocol's version, and the sizes of C's integers
        pickle.load(file)
    unpickler = _Unpickler(file, None, "")
    result = unpickler.load()
    for key in pickle.load(file):
        storage = unpickler.storages[key]
        (size,) = struct.unpack("<q", file.read(8))
        if size != storage.values.size:
            raise ValueError(f"{file.name}: storage {key}: expected {storage.values.size} numbers, got {size}.")
        storage.values = np.frombuffer(file.read(storage.values.nbytes), storage.values.dtype)
    return result


def read(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a state dict by name."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
            with archive.open(name) as file:
                tensors = _Unpickler(file, archive, name.removesuffix("/data.pkl")).load()
    else:
        with path.open("rb") as file:
            tensors = _read_stream(file)
    return {name: tensor.array() for name, tensor in tensors.items()}
