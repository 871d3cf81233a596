"""What stochastic rounding does to a network of `TASKS`: at inference, and in the forward pass of training."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import qjax
from experiments.accuracy.__main__ import float_model
from experiments.accuracy.data import DATA, Data
from experiments.accuracy.methods import SETTINGS, Setting, Start, calibrated
from experiments.accuracy.networks import TASKS
from experiments.accuracy.train import accuracy, fit, scores
from experiments.lab.network_drift import FOLDER

WAYS = ("nearest", "stochastic")
BATCH = 500
"""Images that are judged at once."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """How much of it, for one network.

    network: of `TASKS`. images: the first of the test images, which judge inference. draws: keys of stochastic runs.
    trained: the settings that training is compared at. examples: the first of the training images. epochs: how often
    training sees them. seeds: of trainings.
    """

    network: str
    images: int
    draws: int
    trained: tuple[str, ...]
    examples: int
    epochs: int
    seeds: int


def key(seed: int) -> jax.Array:
    """Bits of the kind "rbg": on a CPU they take a fraction of the default's time."""
    return jax.random.key(seed, impl="rbg")


@dataclasses.dataclass(frozen=True, eq=False)
class Inference:
    """Of a calibrated network.

    Accuracies in percent, of the same images. unrounded: of the float network. less: of nearest with a bit less.
    single: of one stochastic run, in the mean. mean: of the mean of all runs' scores. error: standard error of
    single - nearest.
    Squared errors of the class scores, float's being right, as multiples of nearest's: of a single run, of the mean of
    all, and of nearest with a bit less.
    """

    unrounded: float
    nearest: float
    less: float
    single: float
    mean: float
    error: float
    squared_single: float
    squared_mean: float
    squared_less: float

    @property
    def share(self) -> float:
        """Points that a stochastic run loses against nearest, as a part of those that a bit less loses; NaN: none."""
        lost = self.nearest - self.less
        return (self.nearest - self.single) / lost if lost else float("nan")

    @property
    def recovered(self) -> float:
        """The part of the points lost to float by nearest that the mean of all runs has again; NaN: none was lost."""
        lost = self.unrounded - self.nearest
        return (self.mean - self.nearest) / lost if lost else float("nan")


def compared(
    exact: np.ndarray, nearest: np.ndarray, less: np.ndarray, runs: np.ndarray, labels: np.ndarray
) -> Inference:
    """The statistics of class scores [n, classes] of float, nearest and nearest with a bit less; runs: [draws, ...]."""

    def squared(given: np.ndarray) -> float:
        return float(np.mean((given - exact) ** 2, dtype=np.float64))

    right = np.mean(runs.argmax(-1) == labels, axis=0) - (nearest.argmax(-1) == labels)
    mean = runs.mean(0)
    unit = squared(nearest)
    return Inference(
        accuracy(exact, labels),
        accuracy(nearest, labels),
        accuracy(less, labels),
        float(np.mean([accuracy(one, labels) for one in runs])),
        accuracy(mean, labels),
        100 * float(right.std(ddof=1)) / len(labels) ** 0.5,
        squared(runs) / unit,
        squared(mean) / unit,
        squared(less) / unit,
    )


@functools.lru_cache(maxsize=4)
def network(name: str, seed: int) -> tuple[Any, Data]:
    """The float network and its data."""
    task = TASKS[name]
    data = DATA[task.data]()
    return float_model(name, task, data, seed, FOLDER), data


def ready(plan: Plan, bits: Setting, seed: int) -> Any:
    """The calibrated network: what products read has few bits, but 8 in the first and the last layer."""
    model, data = network(plan.network, seed)
    return calibrated(Start(model, data, bits, plan.epochs, seed, TASKS[plan.network].rate), other_bits=8)


def drawn(model: Any, images: np.ndarray, draws: int, seed: int) -> np.ndarray:
    """Class scores [draws, n, classes] of a quantized model that rounds weights and activations stochastically."""
    graphdef, state = nnx.split(model)

    @jax.jit
    def run(state: Any, own: jax.Array, x: jax.Array) -> jax.Array:
        return qjax.training.stochastic_forward(nnx.merge(graphdef, state), own, x)

    def once(index: int) -> np.ndarray:
        # one key for all parts: a run has its weights rounded once
        own = jax.random.fold_in(key(seed), index)
        return np.concatenate([run(state, own, images[i : i + BATCH]) for i in range(0, len(images), BATCH)])

    return np.stack([once(index) for index in range(draws)])


@functools.lru_cache(maxsize=16)
def inference(plan: Plan, bits: str, seed: int) -> Inference:
    """The network after calibration alone."""
    model, data = network(plan.network, seed)
    images, labels = data.test_images[: plan.images], data.test_labels[: plan.images]
    setting = SETTINGS[bits]
    qmodel = ready(plan, setting, seed)
    fewer = ready(plan, Setting(setting.weights - 1, setting.activations - 1), seed)
    exact, nearest, less = (scores(one, images) for one in (model, qmodel, fewer))
    return compared(exact, nearest, less, drawn(qmodel, images, plan.draws, seed), labels)


@dataclasses.dataclass(frozen=True)
class Trained:
    """Accuracies in percent, all with rounding to nearest.

    before: after calibration. after: of each way's integer graphs, one for each seed; the statistics of batch norm are
    taken again with rounding to nearest. raw: before that; empty for a network without batch norm. unequal: test images
    for which a graph chooses another class than its model, of all trainings.
    """

    before: float
    raw: Mapping[str, list[float]]
    after: Mapping[str, list[float]]
    unequal: int

    @property
    def differences(self) -> np.ndarray:
        """Points that training with stochastic rounding gains, one for each seed."""
        return np.array(self.after["stochastic"]) - np.array(self.after["nearest"])

    @property
    def error(self) -> float:
        """Standard error of the differences' mean."""
        return float(self.differences.std(ddof=1) / len(self.differences) ** 0.5)


def _stochastic_loss(model: Any, own: jax.Array, images: jax.Array, labels: jax.Array) -> jax.Array:
    class_scores = qjax.training.stochastic_forward(model, own, images)
    return optax.softmax_cross_entropy_with_integer_labels(class_scores, labels).mean()


def _next_key(model: Any, own: jax.Array, progress: jax.Array) -> jax.Array:
    del model, progress
    return jax.random.fold_in(own, 0)


@functools.lru_cache(maxsize=8)
def trained(plan: Plan, bits: str, seed: int) -> Trained:
    """Trainings from one calibrated network, with the same batches, optimizer and epochs for both ways."""
    model, data = network(plan.network, seed)
    has_norms = any(isinstance(layer, nnx.BatchNorm) for _, layer in nnx.iter_graph(model))
    start = ready(plan, SETTINGS[bits], seed)
    images, labels = data.train_images[: plan.examples], data.train_labels[: plan.examples]
    calibration = [data.train_images[i : i + 128] for i in range(0, 1024, 128)]
    raw: dict[str, list[float]] = {way: [] for way in WAYS}
    after: dict[str, list[float]] = {way: [] for way in WAYS}
    unequal = 0
    for own in range(plan.seeds):
        for way in WAYS:
            mine = nnx.clone(start)
            steps = plan.epochs * (len(images) // 128)
            drawing: dict[str, Any] = {"loss": _stochastic_loss, "extra": key(own), "after": _next_key}
            options = drawing if way == "stochastic" else {}
            optimizer = qjax.training.optimizer(mine, steps)
            fit(mine, images, labels, optimizer, epochs=plan.epochs, seed=seed + own, **options)
            if has_norms:
                raw[way].append(accuracy(scores(mine, data.test_images), data.test_labels))
                qjax.training.reestimate_batch_norm(mine, calibration)
            points, other = deployed(mine, data)
            after[way].append(points)
            unequal += other
    return Trained(accuracy(scores(start, data.test_images), data.test_labels), raw, after, unequal)


def deployed(model: Any, data: Data) -> tuple[float, int]:
    """Accuracy of the integer graph in percent, and test images for which it chooses another class than the model."""
    graph = qjax.convert(model, data.test_images[:4])
    parts = [np.asarray(graph(data.test_images[i : i + BATCH])) for i in range(0, len(data.test_images), BATCH)]
    shipped = np.concatenate(parts)
    other = shipped.argmax(-1) != scores(model, data.test_images).argmax(-1)
    return accuracy(shipped, data.test_labels), int(other.sum())
