"""Reads and writes arrays in .npy and .npz files: with size limits, without pickle, and never half a file."""

import io
import math
import os
import re
import sys
import zipfile
import zlib
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.lib import format as npy

from qjax.cli.errors import Refused
from qjax.export import files

MAX_BYTES = 4 * 2**30
"""The largest file, and the largest size after decompression."""

_MAX_RANK = 32
_HEADER = re.compile(
    rb"\{'descr': '([ -&(-~]{1,40})', 'fortran_order': (True|False), "
    rb"'shape': \(((?:\d{1,19}, ?)*(?:\d{1,19})?)\),? ?\} *\n?"
)
_NUMBER = re.compile(r"[<>=|]?(b1|[iu][1248]|f[248])")


def read(paths: Sequence[str], names: Sequence[str]) -> list[np.ndarray]:
    """The arrays with these names, in that order.

    Args:
      paths: one .npz, whose entries have these names or are arr_0, arr_1, ... in this order; or one .npy per name.

    Raises:
      Refused, ValueError, OSError: a file is missing, damaged or too large, or does not hold the arrays `names`.
    """
    if len(paths) == 1 and _suffix(paths[0]) == ".npz":
        return _select_named(paths[0], _read_npz(paths[0]), names)
    if len(paths) != len(names):
        raise Refused(
            f"expected one .npy file for each of {', '.join(names)}, or one .npz file with all of them; "
            f"got {len(paths)} files."
        )
    return [_read_npy(path) for path in paths]


def write(path: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays by name to a .npz, or one array to a .npy; never half a file."""
    if _suffix(path) not in (".npy", ".npz"):
        raise Refused(f"{path}: expected a name that ends in .npy or .npz.")
    stream = io.BytesIO()
    if _suffix(path) == ".npz":
        np.savez(stream, **dict(arrays))  # pyright: ignore[reportArgumentType]
    elif len(arrays) == 1:
        npy.write_array(stream, next(iter(arrays.values())), allow_pickle=False)
    else:
        raise Refused(f"{path}: expected one output for a .npy file, got {len(arrays)}: write a .npz.")
    files.write(stream.getvalue(), path)


def check_output(path: str, count: int) -> None:
    """Refuse a name that `write` would refuse, before anything is computed."""
    if _suffix(path) not in (".npy", ".npz"):
        raise Refused(f"{path}: expected a name that ends in .npy or .npz.")
    if _suffix(path) == ".npy" and count != 1:
        raise Refused(f"{path}: expected one output for a .npy file, got {count}: write a .npz.")
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise Refused(f"{path}: expected a folder {folder!r}, got none: create it first.")


def _select_named(path: str, arrays: Mapping[str, np.ndarray], names: Sequence[str]) -> list[np.ndarray]:
    if set(arrays) == set(names):
        return [arrays[name] for name in names]
    if list(arrays) == [f"arr_{i}" for i in range(len(names))]:
        return list(arrays.values())
    raise Refused(
        f"{path}: expected arrays called {', '.join(names)} (or arr_0, ... in this order), "
        f"got {', '.join(arrays) or 'none'}: np.savez(path, {names[0]}=array)."
    )


def _suffix(path: str) -> str:
    return os.path.splitext(path)[1].lower()


def _read_npy(path: str) -> np.ndarray:
    if _suffix(path) != ".npy":
        raise Refused(f"{path}: expected a .npy file, or one .npz file: np.save(path, array).")
    return _parse(files.read(path, MAX_BYTES, "a .npy file"), path)


def _read_npz(path: str) -> dict[str, np.ndarray]:
    data = files.read(path, MAX_BYTES, "a .npz file")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = archive.infolist()
            if sum(entry.file_size for entry in entries) > MAX_BYTES:
                raise Refused(f"{path}: expected at most {MAX_BYTES} bytes of arrays: split the file.")
            found: dict[str, np.ndarray] = {}
            for entry in entries:
                name = entry.filename.removesuffix(".npy")
                if name in found:
                    raise Refused(f"{path}: two arrays are called {name!r}.")
                found[name] = _parse(archive.read(entry), f"{path}: {name}")
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError) as error:
        raise Refused(
            f"{path}: expected a .npz file, got another or a damaged one ({error}): np.savez(path, name=array)."
        ) from error
    return found


def _parse(data: bytes, where: str) -> np.ndarray:
    """The array in the bytes of a .npy file; its size is checked before memory is allocated.

    The header is matched, not evaluated: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html.
    """
    wide = 2 if data[6:7] == b"\1" else 4
    start = 8 + wide
    header = _HEADER.fullmatch(data, start, start + int.from_bytes(data[8:start], "little"))
    if not data.startswith(npy.MAGIC_PREFIX) or header is None:
        raise Refused(f"{where}: expected a .npy file of numbers, got another or a damaged one: np.save(path, array).")
    descr, fortran, sizes = (part.decode("ascii") for part in header.groups())
    if _NUMBER.fullmatch(descr) is None:
        raise Refused(f"{where}: expected an array of numbers, got dtype {descr!r}.")
    dtype, shape = np.dtype(descr), [int(size) for size in sizes.replace(",", " ").split()]
    expected, start = math.prod(shape) * dtype.itemsize, header.end()
    if len(data) - start != expected:
        raise Refused(f"{where}: expected {expected} bytes of data, got {len(data) - start}: the file is damaged.")
    if len(shape) > _MAX_RANK:
        raise Refused(f"{where}: expected at most {_MAX_RANK} dimensions, got {len(shape)}.")
    if any(size > sys.maxsize for size in shape):
        raise Refused(f"{where}: expected sizes that fit the address space, got {shape}.")
    array = np.frombuffer(data, dtype, offset=start) if expected else np.zeros(0, dtype)
    array = array.reshape(shape, order="F" if fortran == "True" else "C")
    return np.ascontiguousarray(array.astype(dtype.newbyteorder("="))).reshape(shape)
