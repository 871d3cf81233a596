"""The result of `equalize` and `smooth`: which factors moved, and what they improved."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from qjax.contrib.post_training.caches import Units
from qjax.support.tables import decibels_text, table


@dataclasses.dataclass(frozen=True)
class Moved:
    """One pair. before, after: the noise at the model's output (`Score`) without and with the accepted scales.

    Attributes:
      made: the parameters that produce the tensor.
      read: the weights that read it.
      way: the formula and its strength.
      before, after: the noise.
      spread: max s / min s.
    """

    made: tuple[str, ...]
    read: tuple[str, ...]
    way: str
    before: float
    after: float
    spread: float


@dataclasses.dataclass(frozen=True)
class Migration:
    """The result of `equalize` and `smooth`; `str()` is a table.

    Attributes:
      moved: the pairs whose scales were changed.
      kept: how many pairs were not changed, because no scale improved them.
      left: name of a weight -> why no scale can move through its layer's input; with a state, name of one of its arrays
        -> why it has no scales.
      units: the units of the state, if one was given.
    """

    moved: tuple[Moved, ...]
    kept: int
    left: Mapping[str, str]
    units: Units | None = None

    def state(self, state: Any) -> Any:
        """Convert a state of the original float model, such as a filled cache, to the units of the changed model.

        An empty cache of zeros is the same in both.

        Raises:
          ValueError: no state was given to `equalize`.
        """
        if self.units is None:
            raise ValueError("Migration.state: expected a result of equalize(..., state=...), got one without a state.")
        return self.units.state(state)

    def __str__(self) -> str:
        rows = [
            [m.read[0], m.made[0], m.way, decibels_text(m.before), decibels_text(m.after), f"{m.spread:.3g}"]
            for m in self.moved
        ]
        text = table(["weight", "scales of", "by", "before, dB", "after, dB", "max / min"], rows)
        lines = [text, f"{self.kept} pairs are better as they are"]
        return "\n".join([*lines, *(f"{name}: left, {why}" for name, why in self.left.items())])
