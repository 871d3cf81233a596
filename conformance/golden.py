"""Recordings of runtimes that not every machine has: what they answered to the matrix, and which version did.

One `.npz` per runtime in `recorded/`, written by `python -m conformance --record RUNTIME`. A row keeps the number of
its answers, the SHA-256 of all of them and a sample spread over them: the digest proves equality of every one, the
sample shows where to look when it fails. The inputs are seeded (`cases`, `accumulators`) and not stored.
"""

import dataclasses
import functools
import hashlib
import io
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from qjax.export import files

FOLDER = Path(__file__).parent / "recorded"
SAMPLE = 2048
_VERSION = "version"


@dataclasses.dataclass(frozen=True)
class Answers:
    """What is kept of one row's answers."""

    count: int
    digest: bytes
    sample: np.ndarray

    @classmethod
    def of(cls, answers: np.ndarray) -> "Answers":
        """Of all answers of a row, one vector of integers; as little-endian int32 they are hashed."""
        numbers = answers.astype("<i4")
        return cls(numbers.size, hashlib.sha256(numbers.tobytes()).digest(), _spread(numbers))

    def mismatches(self, answers: np.ndarray) -> int:
        """0 if all answers agree; otherwise at least 1: those of the sample that differ.

        Raises ValueError if the number of answers is another one.
        """
        other = Answers.of(answers)
        if other.count != self.count:
            raise ValueError(f"expected {self.count} answers, got {other.count}: the recording belongs to other cases.")
        if other.digest == self.digest:
            return 0
        return max(1, int(np.count_nonzero(other.sample != self.sample)))


@dataclasses.dataclass(frozen=True)
class Recording:
    """The answers of one runtime by row."""

    version: str
    rows: Mapping[str, Answers]


@functools.cache
def load(runtime: str) -> Recording | None:
    """The recording of a runtime, or None where there is none."""
    path = _path(runtime)
    if not path.exists():
        return None
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    names = [name.removesuffix("/sample") for name in arrays if name.endswith("/sample")]
    rows = {
        name: Answers(int(arrays[f"{name}/count"]), arrays[f"{name}/digest"].tobytes(), arrays[f"{name}/sample"])
        for name in names
    }
    return Recording(str(arrays[_VERSION]), rows)


def save(runtime: str, recording: Recording) -> Path:
    """Write a recording, atomically; returns its path."""
    arrays: dict[str, np.ndarray] = {_VERSION: np.array(recording.version)}
    for name, answers in recording.rows.items():
        arrays[f"{name}/count"] = np.array(answers.count, np.int64)
        arrays[f"{name}/digest"] = np.frombuffer(answers.digest, np.uint8)
        arrays[f"{name}/sample"] = answers.sample
    FOLDER.mkdir(exist_ok=True)
    data = io.BytesIO()
    np.savez_compressed(data, allow_pickle=False, **arrays)
    path = _path(runtime)
    files.write(data.getvalue(), path)
    load.cache_clear()
    return path


def _spread(numbers: np.ndarray) -> np.ndarray:
    """Up to `SAMPLE` answers, evenly spread."""
    return numbers[np.linspace(0, numbers.size - 1, min(SAMPLE, numbers.size)).astype(np.int64)]


def _path(runtime: str) -> Path:
    return FOLDER / f"{runtime}.npz"
