"""Measures what a set of quantizers does to a model's output: noise against float, and changes of loss and metric."""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from qjax.analysis.switched import SwitchedModel
from qjax.support.batches import batch_size

Score = Callable[[Any, Any], Any]
"""A function of (output of the model, batch) that returns a scalar, the mean over the examples of the batch."""


@dataclasses.dataclass(frozen=True)
class Effect:
    """The difference from the float model, over all batches.

    noise: `sum (y - y_q)^2 / sum y^2` over every float output; 0 where nothing differs. loss, metric: their changes;
    None if they were not asked for. The change of a metric is negative where quantization hurts it.
    """

    noise: float
    loss: float | None = None
    metric: float | None = None

    @property
    def sqnr(self) -> float:
        """The output's signal-to-quantization-noise ratio in dB: `-10 log10(noise)`; infinite without noise."""
        return decibels(self.noise)

    def to_json(self) -> dict[str, Any]:
        """JSON values; an infinite or undefined number is null."""
        return {name: finite(getattr(self, name)) for name in ("noise", "sqnr", "loss", "metric")}


@dataclasses.dataclass(frozen=True)
class Measured:
    """The effects of several sets of quantizers, and the float model's own loss and metric."""

    effects: tuple[Effect, ...]
    loss: float | None
    metric: float | None
    examples: int


def decibels(noise: float) -> float:
    """`-10 log10(noise)`."""
    return math.inf if noise == 0 else -10 * math.log10(noise) if noise > 0 else math.nan


def finite(value: float | None) -> float | None:
    """The number if JSON can represent it, otherwise None."""
    return None if value is None or not math.isfinite(value) else float(value)


def measure(
    model: SwitchedModel,
    sets: Sequence[Collection[str]],
    batches: Iterable[tuple[Any, tuple[Any, ...]]],
    *,
    loss: Score | None = None,
    metric: Score | None = None,
    what: str = "sensitivity",
) -> Measured:
    """Run every set of quantizers on every batch; sums are float64 on the host.

    Args:
      batches: pairs of a batch and the arguments of its call, as `Batches` yields them. what: the caller, for messages.
    """
    chosen = [frozenset(), *map(frozenset, sets)]
    distinct = list(dict.fromkeys(chosen))
    noise, signal = np.zeros(len(distinct)), 0.0
    scores = {name: np.zeros(len(distinct)) for name in ("loss", "metric")}
    examples = 0
    for batch, args in batches:
        size = batch_size(args)
        reference: list[np.ndarray] = []
        for index, quantizers in enumerate(distinct):
            output = model(quantizers, args)
            values = _float_leaves(output)
            if index == 0:
                reference = values
                signal += sum(_power(y) for y in values)
            noise[index] += sum(_distance(y, q) for y, q in zip(reference, values, strict=True))
            for name, score in (("loss", loss), ("metric", metric)):
                if score is not None:
                    scores[name][index] += size * _scalar(score(output, batch), name, what)
        if not reference and loss is None and metric is None:
            raise ValueError(f"{what}: the model returns no float array to compare. Give a loss or a metric.")
        examples += size
    if examples == 0:
        raise ValueError(f"{what}: expected at least one batch with an example, got none.")

    def change(name: str, score: Score | None, index: int) -> float | None:
        return None if score is None else float((scores[name][index] - scores[name][0]) / examples)

    effects = {
        quantizers: Effect(
            _ratio(float(noise[index]), signal), change("loss", loss, index), change("metric", metric, index)
        )
        for index, quantizers in enumerate(distinct)
    }
    return Measured(
        tuple(effects[quantizers] for quantizers in chosen[1:]),
        None if loss is None else float(scores["loss"][0] / examples),
        None if metric is None else float(scores["metric"][0] / examples),
        examples,
    )


def _float_leaves(output: Any) -> list[np.ndarray]:
    leaves = [leaf for leaf in jax.tree.leaves(output) if jax.dtypes.issubdtype(leaf.dtype, np.floating)]
    return [np.asarray(leaf).astype(np.float64) for leaf in leaves]


def _power(y: np.ndarray) -> float:
    return float(np.sum(np.square(y[np.isfinite(y)])))


def _distance(y: np.ndarray, q: np.ndarray) -> float:
    """`sum (y - q)^2`; equal infinities, such as those of a mask, contribute nothing."""
    different = y != q
    return float(np.sum(np.square(y[different] - q[different])))


def _ratio(noise: float, signal: float) -> float:
    return noise / signal if signal else (math.inf if noise else 0.0)


def _scalar(value: Any, name: str, what: str) -> float:
    array = np.asarray(value)
    if array.size != 1:
        raise ValueError(
            f"{what}: expected {name}(output, batch) to return one number, the mean over the batch, got shape "
            f"{array.shape}."
        )
    return float(array.reshape(()))
