"""One row: a network, a method and a setting, with what came of it. Rows are kept as JSON lines."""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from experiments.real.network import Outputs


@dataclasses.dataclass
class Row:
    """What the table says about one method at one setting.

    setting: "W8A8", or "float". decibels: of the float outputs' power over the error's, of the worst output.
    cosine: to the float network's output, of the worst example. score: the task's own measure, in percent; of the
    float network: float_score. seconds: to quantize and calibrate. original: only of the float network, its greatest
    difference to the original's outputs. differ: outputs in which the integer graph and the exact forward differ,
    None where they were not compared. note: what the method says of itself. error: type and first line.
    """

    network: str
    method: str
    setting: str
    decibels: float | None = None
    cosine: float | None = None
    score: float | None = None
    float_score: float | None = None
    seconds: float | None = None
    original: float | None = None
    differ: int | None = None
    note: str = ""
    error: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.network, self.method, self.setting


def decibels(found: Outputs, wanted: Outputs) -> float:
    """Signal to noise, of the output with the least."""

    def one(x: np.ndarray, y: np.ndarray) -> float:
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        noise = float(((x - y) ** 2).sum())
        return float("inf") if noise == 0 else 10 * float(np.log10((y**2).sum() / noise))

    return min(one(x, y) for x, y in zip(found, wanted, strict=True))


def cosine(found: Outputs, wanted: Outputs) -> float:
    """Cosine of the example and output with the least."""

    def one(x: np.ndarray, y: np.ndarray) -> float:
        x, y = (np.asarray(a, np.float64).reshape(len(a), -1) for a in (x, y))
        norms = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
        return float(np.min(np.where(norms > 0, (x * y).sum(1) / np.maximum(norms, 1e-300), 0.0)))

    return min(one(x, y) for x, y in zip(found, wanted, strict=True))


def read(path: Path | None) -> dict[tuple[str, str, str], Row]:
    """The rows of earlier runs; of several with the same key the last counts."""
    if path is None or not path.exists():
        return {}
    found = [Row(**json.loads(line)) for line in path.read_text().splitlines() if line.strip()]
    return {row.key: row for row in found}


def keep(path: Path | None, rows: Iterable[Row]) -> None:
    """Append rows."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for row in rows:
            # JSON has no infinity
            fields: dict[str, Any] = {k: v if v != float("inf") else 999.0 for k, v in dataclasses.asdict(row).items()}
            file.write(json.dumps(fields) + "\n")
