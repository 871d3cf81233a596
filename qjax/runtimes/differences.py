"""How the outputs of two runs differ: one line per output."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from qjax.summary import table


@dataclasses.dataclass
class Differing:
    """What was counted of one output.

    largest: the greatest absolute difference. first: the place of the first one, the example counted over all
    batches; with both values.
    """

    name: str
    compared: int = 0
    count: int = 0
    largest: float = 0
    first: str = "-"
    examples: int = 0

    def add(self, expected: np.ndarray, got: np.ndarray, axis: int | None = None) -> None:
        """One batch; axis: that of the examples, None where there is none.

        Raises:
          ValueError: another shape or dtype than expected.
        """
        if expected.shape != got.shape or expected.dtype != got.dtype:
            raise ValueError(
                f"output {self.name!r}: expected {expected.dtype} of shape {expected.shape}, "
                f"got {got.dtype} of shape {got.shape}."
            )
        wrong = expected != got
        self.compared += expected.size
        found = int(np.sum(wrong))
        if found:
            wide = np.int64 if expected.dtype.kind in "iu" else np.float64
            steps = np.abs(got[wrong].astype(wide) - expected[wrong].astype(wide))
            self.largest = max(self.largest, steps.max().item())
            if not self.count:
                place = tuple(int(i) for i in np.argwhere(wrong)[0])
                shown = [str(i + self.examples if k == axis else i) for k, i in enumerate(place)]
                self.first = f"[{', '.join(shown)}]: {expected[place]} expected, {got[place]}"
        self.count += found
        self.examples += 0 if axis is None else expected.shape[axis]


def report(outputs: Sequence[Differing]) -> str:
    """The table of all outputs."""
    header = ("output", "compared", "differ", "by at most", "first at")
    rows = [(o.name, o.compared, o.count, f"{o.largest:.6g}", o.first) for o in outputs]
    return table(header, rows)
