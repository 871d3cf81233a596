"""One row: a network, a method, a setting and a seed, with the accuracy that came of it. Kept as JSON lines."""

import dataclasses
import json
from pathlib import Path

Key = tuple[str, str, str, int, int]


@dataclasses.dataclass
class Row:
    """What one training gave.

    setting: "W4A4", or "float". epochs: of the quantized training; 0 for what needs none. accuracy: of the model on
    the test images, in percent. graph: of the integer graph. decisions: test images whose class differs between the
    two. float_accuracy: of the float model that all rows of the seed start from. loss: the last epoch's mean.
    error: type and first line of what failed. made: machine and versions.
    """

    network: str
    method: str
    setting: str
    seed: int
    epochs: int
    accuracy: float | None = None
    graph: float | None = None
    decisions: int | None = None
    float_accuracy: float | None = None
    loss: float | None = None
    seconds: float | None = None
    error: str = ""
    made: str = ""

    @property
    def key(self) -> Key:
        return self.network, self.method, self.setting, self.seed, self.epochs

    @property
    def points(self) -> float | None:
        """The model's accuracy minus the float model's."""
        return None if self.accuracy is None or self.float_accuracy is None else self.accuracy - self.float_accuracy

    @property
    def graph_points(self) -> float | None:
        """The graph's accuracy minus the float model's."""
        return None if self.graph is None or self.float_accuracy is None else self.graph - self.float_accuracy


def read(path: Path | None) -> dict[Key, Row]:
    """The rows of earlier runs; of several with the same key the last counts."""
    if path is None or not path.exists():
        return {}
    found = [Row(**json.loads(line)) for line in path.read_text().splitlines() if line.strip()]
    return {row.key: row for row in found}


def keep(path: Path | None, row: Row) -> None:
    """Append a row."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(dataclasses.asdict(row)) + "\n")
