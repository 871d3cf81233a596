"""One circuit of one training, and the file that keeps it."""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path


@dataclasses.dataclass
class Row:
    """What a tool had after an epoch.

    valid, test: the accuracy of the circuit's own model, in percent. ebops: as the tool counts them. tables: lookup
    tables, alkaid's estimate. same: whether alkaid's emulator of the circuit gives the model's scores of the test rows.
    error: why there is no circuit.
    """

    task: str
    tool: str
    seed: int
    epoch: int
    price: float
    valid: float = 0.0
    test: float = 0.0
    ebops: float = 0.0
    tables: float = 0.0
    same: bool = False
    seconds: float = 0.0
    error: str = ""

    @property
    def run(self) -> tuple[str, str, int]:
        """The training that it belongs to."""
        return self.task, self.tool, self.seed


def read(path: Path | None) -> list[Row]:
    """The rows of earlier trainings."""
    if path is None or not path.exists():
        return []
    return [Row(**json.loads(line)) for line in path.read_text().splitlines() if line.strip()]


def keep(path: Path | None, rows: Iterable[Row]) -> None:
    """Append the rows of one training."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.writelines(json.dumps(dataclasses.asdict(row)) + "\n" for row in rows)
