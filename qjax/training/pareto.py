"""The models of one training that no other of them beats: at least as good for less, or better."""

import dataclasses
import math

from qjax.model.quantized_model import QuantizedModel
from qjax.support.tables import table


@dataclasses.dataclass(frozen=True)
class Point:
    """One model.

    Attributes:
      cost: what it takes, such as its EBOPs; less is better.
      score: how good it is, such as its accuracy; more is better.
      model: the quantized model.
    """

    cost: float
    score: float
    model: QuantizedModel = dataclasses.field(repr=False)


class ParetoFront:
    """Keeps the models of a training that are not beaten; `str()` is a table, the cheapest first.

    Examples:
      >>> import qjax
      >>> front = qjax.training.ParetoFront()
      >>> str(front)
      'no model yet'
    """

    def __init__(self) -> None:
        self.points: tuple[Point, ...] = ()

    def add(self, cost: float, score: float, model: QuantizedModel) -> bool:
        """Keep a model, unless a known one is at least as good for at most its cost. What it beats is dropped.

        Returns:
          Whether it was kept.

        Raises:
          ValueError: a number that is not finite.
        """
        for name, value in (("cost", cost), ("score", score)):
            if not math.isfinite(value):
                raise ValueError(f"ParetoFront: {name}: expected a finite number, got {value!r}.")
        if any(known.cost <= cost and known.score >= score for known in self.points):
            return False
        left = (known for known in self.points if known.cost < cost or known.score > score)
        self.points = tuple(sorted((*left, Point(cost, score, model)), key=lambda point: point.cost))
        return True

    def within(self, cost: float) -> Point:
        """The best model that takes at most this.

        Raises:
          ValueError: none does; the message names the cheapest.
        """
        found = [point for point in self.points if point.cost <= cost]
        if not found:
            cheapest = f"The cheapest takes {self.points[0].cost:,.0f}." if self.points else "No model was added."
            raise ValueError(f"ParetoFront: no model takes at most {cost:,.0f}. {cheapest}")
        return found[-1]

    def __str__(self) -> str:
        if not self.points:
            return "no model yet"
        return table(["cost", "score"], [[f"{point.cost:,.0f}", f"{point.score:.4f}"] for point in self.points])
