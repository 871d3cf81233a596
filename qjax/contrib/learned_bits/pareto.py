"""Collects the Pareto-optimal models of a training run: those that no other model beats in both cost and score."""

import dataclasses
import math

from qjax.model.quantized_model import QuantizedModel
from qjax.support.tables import table


@dataclasses.dataclass(frozen=True)
class Point:
    """One model.

    Attributes:
      cost: for example its EBOPs; less is better.
      score: for example its accuracy; more is better.
      model: the quantized model.
    """

    cost: float
    score: float
    model: QuantizedModel = dataclasses.field(repr=False)


class ParetoFront:
    """Collects the models of a training run that are not beaten; `str()` is a table, cheapest first.

    Examples:
      >>> import qjax
      >>> front = qjax.training.ParetoFront()
      >>> str(front)
      'no model yet'
    """

    def __init__(self) -> None:
        self.points: tuple[Point, ...] = ()

    def add(self, cost: float, score: float, model: QuantizedModel) -> bool:
        """Add a model, unless a known one is at least as good at no higher cost. Models that it beats are dropped.

        Returns:
          Whether it was added.

        Raises:
          ValueError: a number is not finite.
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
        """The best model with at most this cost.

        Raises:
          ValueError: there is none; the message names the cheapest.
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
