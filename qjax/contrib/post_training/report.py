"""The report of post-training quantization, step by step."""

import dataclasses
from typing import Any

import numpy as np

from qjax.recipe.recipe import Recipe
from qjax.support.tables import table


@dataclasses.dataclass(frozen=True)
class Score:
    """How close a quantized model is to the float model on held-out calibration data.

    Attributes:
      noise: `sum (y - y_q)^2 / sum y^2`, the mean over the float arrays of the output.
      loss, metric: of the quantized model; None if none was given.
    """

    noise: float
    loss: float | None = None
    metric: float | None = None

    @property
    def decibels(self) -> float:
        """The output's signal-to-quantization-noise ratio, `-10 log10(noise)`."""
        return float(-10 * np.log10(self.noise)) if self.noise > 0 else float("inf")


@dataclasses.dataclass(frozen=True)
class StepReport:
    """The report of one step.

    Attributes:
      step: its name, one of `STEPS` or "calibrate".
      score: of the fake-quantized model after it, on the held-out data.
      seconds: how long it took.
      kept: False if the step was undone, None if it found nothing to do.
      said: what it changed, or why it did not.
      details: the result of the step's own function.
    """

    step: str
    score: Score
    seconds: float
    kept: bool | None
    said: str
    details: Any = None


@dataclasses.dataclass(frozen=True, eq=False)
class PostTrainingReport:
    """The result of `qjax.post_training`; `str()` is a table.

    Attributes:
      steps: the first is plain calibration.
      final: the score of the model that was returned, by its true forward; that of the steps is simulated (see
        `simulated`).
      recipe: a recipe with which `quantize` gives a model the same widths.
      float_loss, float_metric: of the float model.
      held_out: the number of held-out examples.
      seen: whether the steps saw them too, because there was only one example.
      examples: their number in all batches.
      seconds: the total time.
    """

    steps: tuple[StepReport, ...]
    final: Score
    recipe: Recipe
    float_loss: float | None
    float_metric: float | None
    held_out: int
    seen: bool
    examples: int
    seconds: float

    def __getitem__(self, step: str) -> StepReport:
        """The last report of a step."""
        for one in reversed(self.steps):
            if one.step == step:
                return one
        raise KeyError(f"No step {step!r}. Steps: {', '.join(one.step for one in self.steps)}.")

    def __str__(self) -> str:
        header = ["step", "dB"]
        header += ["loss"] if self.final.loss is not None else []
        header += ["metric"] if self.final.metric is not None else []
        rows = [
            [one.step, *_numbers(one.score), f"{one.seconds:.1f}", _verdict(one.kept), one.said] for one in self.steps
        ]
        rows.append(["true forward", *_numbers(self.final), "", "", "the model that is returned"])
        lines = [table([*header, "seconds", "", "what changed"], rows)]
        judged = f"{self.held_out} held-out examples of {self.examples}"
        if self.seen:
            judged = f"the {self.examples} examples that the steps saw too: give at least two"
        scores = (("loss", self.float_loss), ("metric", self.float_metric))
        floats = [f"{name} {value:.4g}" for name, value in scores if value is not None]
        lines.append(f"judged on {judged}{'; float: ' + ', '.join(floats) if floats else ''}; {self.seconds:.0f} s")
        return "\n".join(lines)


def _numbers(score: Score) -> list[str]:
    found = [f"{score.decibels:.2f}"]
    return found + [f"{value:.4g}" for value in (score.loss, score.metric) if value is not None]


def _verdict(kept: bool | None) -> str:
    return {True: "kept", False: "taken back", None: "nothing to do"}[kept]
