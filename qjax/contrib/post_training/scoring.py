"""Scores a quantized model on held-out data, and decides which of two scores is better."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx

from qjax.contrib.post_training.caches import Units
from qjax.contrib.post_training.layerwise_runner import Stream, Walk
from qjax.contrib.post_training.noise import float_leaves, noise_of
from qjax.contrib.post_training.report import Score
from qjax.model.quantized_model import QuantizedModel, evaluation_copy
from qjax.support.batches import brief
from qjax.support.tables import decibels_text

Scorer = Callable[[Any, Any], Any]
"""A function of (output of the model, batch) that returns a scalar, the mean over the examples of the batch."""

Batch = tuple[Any, tuple[Any, ...]]
"""The batch as the caller gave it, and the arguments of the model's call."""


@dataclasses.dataclass(frozen=True)
class Unseen:
    """Noise that a step measured by cross-validation: the `Score.noise` before and after it."""

    before: float
    after: float


class Judge:
    """Measures on the held-out batches; units: of the float model's state, whose noise does not count."""

    def __init__(
        self, held: list[Batch], loss: Scorer | None, metric: Scorer | None, units: Units | None = None
    ) -> None:
        self._held, self._loss, self._metric = held, loss, metric
        self._arguments = [args for _, args in held]
        self._units = units
        self.examples = sum(map(size_of, self._arguments))
        self.float_score = Score(0.0)
        self._truth: list[Any] = []

    def prepare(self, walk: Walk, reference: QuantizedModel, model: nnx.Module) -> None:
        """Run the float model once. reference: its quantized copy."""
        # Products whose scales are found at run time have no quantizer that could be switched off.
        dynamic = bool(reference.plan.dynamic)
        real = Stream.of(reference, quantized=False)
        truth = self._outputs(model, None) if dynamic else walk.outputs(real, self._arguments)
        self._truth = self._judged(truth)
        if not all(np.isfinite(leaf).any() for y in self._truth for leaf in float_leaves(y)):
            raise ValueError(
                "post_training: expected finite outputs of the float model, got only NaN or infinity. Find the cause "
                "in the float model first: jax.config.update('jax_debug_nans', True)."
            )
        if not any(float_leaves(y) for y in self._truth) and self._loss is None and self._metric is None:
            raise ValueError("post_training: the model returns no float array to compare. Give a loss or a metric.")
        self.float_score = self._score(truth)

    def simulated(self, walk: Walk, qmodel: QuantizedModel, units: Units | None = None) -> Score:
        """The score of a model by a walk, an estimate that needs no compilation. units: of its state."""
        return self._score(_restore_units(walk.outputs(Stream.of(qmodel), self._given(units)), units))

    def true(self, qmodel: QuantizedModel, units: Units | None = None) -> Score:
        """The score by the fake-quantized forward itself."""
        return self._score(self._outputs(qmodel, units))

    def _outputs(self, model: nnx.Module, units: Units | None) -> list[Any]:
        graphdef, state = nnx.split(evaluation_copy(model))
        forward = jax.jit(lambda state, args: nnx.merge(graphdef, state)(*args))
        return _restore_units([forward(state, args) for args in self._given(units)], units)

    def _given(self, units: Units | None) -> list[tuple[Any, ...]]:
        return self._arguments if units is None else [units.arguments(args) for args in self._arguments]

    def _judged(self, outputs: list[Any]) -> list[Any]:
        """The outputs that count; a state counts by its effect on later calls."""
        return outputs if self._units is None else [self._units.rest(y) for y in outputs]

    def better(self, score: Score, than: Score, unseen: Unseen | None = None) -> bool:
        """Whether a score is no worse than another.

        unseen: replaces the noise in the decision. It must have been measured on the held-out batches too. An outlier
        is rare, so a few held-out examples alone cannot show the benefit of a wider range.
        """
        if score.loss is not None and than.loss is not None:
            return score.loss <= than.loss
        if score.metric is not None and than.metric is not None:
            gained = (score.metric - than.metric) * self.examples
            if abs(gained) > 1.0 + 1e-6:
                return gained > 0
        return score.noise <= than.noise if unseen is None else unseen.after <= unseen.before

    def why(self, score: Score, than: Score, unseen: Unseen | None = None) -> str:
        """Why a step was undone."""
        if score.loss is not None and than.loss is not None:
            return f"loss {score.loss:.4g}, before {than.loss:.4g}"
        if score.metric is not None and than.metric is not None and score.noise <= than.noise:
            return f"metric {score.metric:.4g}, before {than.metric:.4g}"
        if unseen is not None:
            after, before = (decibels_text(noise) for noise in (unseen.after, unseen.before))
            return f"{after} dB by cross-validation, before {before} dB"
        return f"{score.decibels:.2f} dB, before {than.decibels:.2f} dB"

    def _score(self, outputs: list[Any]) -> Score:
        return Score(
            noise_of(self._truth, self._judged(outputs)),
            self._mean(self._loss, outputs, "loss"),
            self._mean(self._metric, outputs, "metric"),
        )

    def _mean(self, score: Scorer | None, outputs: list[Any], name: str) -> float | None:
        if score is None:
            return None
        total = 0.0
        for (batch, args), output in zip(self._held, outputs, strict=True):
            value = np.asarray(_call_scorer(score, name, output, batch))
            if value.size != 1 or not np.isfinite(value).all():
                raise ValueError(
                    f"post_training: expected {name}(output, batch) to return one finite number, the mean over the "
                    f"batch, got {value if value.size == 1 else f'shape {value.shape}'}."
                )
            total += size_of(args) * float(value.reshape(()))
        return total / self.examples


def _restore_units(outputs: list[Any], units: Units | None) -> list[Any]:
    return outputs if units is None else [units.outputs(y) for y in outputs]


def _call_scorer(score: Scorer, name: str, output: Any, batch: Any) -> Any:
    try:
        return score(output, batch)
    except (IndexError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"post_training: {name}(output, batch) failed on a batch of {brief(batch)}: {type(error).__name__}: "
            f"{error}. "
            "Everything else that it needs, such as labels, must be in the batch: batches=[(images, labels), ...] with "
            "inputs=lambda batch: batch[0]."
        ) from error


def size_of(args: tuple[Any, ...]) -> int:
    """The number of examples in the arguments of a call."""
    return next((int(x.shape[0]) for x in jax.tree.leaves(args) if getattr(x, "ndim", 0)), 1)
