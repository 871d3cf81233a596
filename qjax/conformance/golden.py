"""Recordings of runtimes that not every machine has: their answers to the matrix, with the versions that gave them.

One `.npz` per runtime beside this file, written by `python -m qjax.conformance record`: per row the answers of all its
cases in order, and the version. The inputs are not stored; they are seeded (`cases`).
"""

import dataclasses
import functools
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent / "recorded"
_VERSION = "version"


@dataclasses.dataclass(frozen=True)
class Recording:
    """The answers of one runtime by row."""

    version: str
    answers: Mapping[str, np.ndarray]


@functools.cache
def load(runtime: str) -> Recording | None:
    """The recording of a runtime, or None where there is none."""
    path = _path(runtime)
    if not path.exists():
        return None
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    version = arrays.pop(_VERSION)
    return Recording(str(version), arrays)


def save(runtime: str, recording: Recording) -> Path:
    """Write a recording, atomically; returns its path."""
    FOLDER.mkdir(exist_ok=True)
    handle, name = tempfile.mkstemp(dir=FOLDER, suffix=".npz")
    with os.fdopen(handle, "wb") as file:
        np.savez_compressed(file, allow_pickle=False, **{_VERSION: np.array(recording.version), **recording.answers})
    os.chmod(name, 0o644)
    path = _path(runtime)
    os.replace(name, path)
    load.cache_clear()
    return path


def _path(runtime: str) -> Path:
    return FOLDER / f"{runtime}.npz"
