"""What holding or damping weights that oscillate does for a depthwise network with few bits."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from matplotlib.figure import Figure

import qjax
from experiments.accuracy.__main__ import float_model
from experiments.accuracy.data import DATA
from experiments.accuracy.methods import SETTINGS, Start, calibrated
from experiments.accuracy.networks import TASKS
from experiments.accuracy.train import accuracy, cross_entropy, fit, scores
from experiments.lab.network_drift import FOLDER
from qjax.contrib.lab.study import Measurement, Prediction, Settings, Study, Table

BITS = ("W4A4", "W3A3")
WAYS = ("plain", "damping", "freezing")
CURES = WAYS[1:]
DAMPING = 0.01
THRESHOLDS = (0.04, 0.01)
OFTEN = 0.005
DISAGREE = {"W4A4": 0.05, "W3A3": 0.08}
"""Share of images that two trainings of one network judge differently."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """network: of `TASKS`. images: that judge. epochs: of the quantized training."""

    network: str
    images: int
    epochs: int
    seeds: int


def plan(settings: Settings) -> Plan:
    return Plan("depthwise CNN", 10_000, 2, 2) if settings.full else Plan("CNN on digits", 500, 20, 2)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Of one training.

    oscillating, frozen: shares of the weights of few bits at its end. before, after: accuracy in percent, before and
    after batch norm is re-estimated. unequal: images for which model and integer graph choose different classes.
    """

    oscillating: float
    frozen: float
    before: float
    after: float
    unequal: int


def _risen(progress: Any) -> jax.Array:
    """From 0 to 1 along a cosine."""
    return 0.5 * (1 - jnp.cos(jnp.float32(np.pi) * progress))


@functools.lru_cache(maxsize=4)
def outcomes(bits: str, settings: Settings) -> Mapping[str, list[Outcome]]:
    """Way -> its trainings, one for each seed: same start, batches, optimizer and number of epochs."""
    chosen = plan(settings)
    task = TASKS[chosen.network]
    data = DATA[task.data]()
    model = float_model(chosen.network, task, data, settings.seed, FOLDER)
    found: dict[str, list[Outcome]] = {way: [] for way in WAYS}
    for seed in range(chosen.seeds):
        start = Start(model, data, SETTINGS[bits], chosen.epochs, seed, task.rate)
        ready = calibrated(start, other_bits=8)
        for way in WAYS:
            mine = nnx.clone(ready)
            tracker = _train(mine, way, start)
            before = accuracy(scores(mine, data.test_images), data.test_labels)
            qjax.training.reestimate_batch_norm(mine, start.batches())
            given = scores(mine, data.test_images)
            graph = qjax.convert(mine, data.test_images[:4])
            shipped = [np.asarray(graph(data.test_images[i : i + 500])) for i in range(0, len(given), 500)]
            found[way].append(
                Outcome(
                    float(tracker.share(OFTEN)),
                    float(tracker.share_frozen()),
                    before,
                    accuracy(given, data.test_labels),
                    int((np.concatenate(shipped).argmax(-1) != given.argmax(-1)).sum()),
                )
            )
    return found


def _train(model: Any, way: str, start: Start) -> qjax.training.Oscillations:
    """Train in place; returns what was counted."""
    tracker = qjax.training.Oscillations.start(model, start.batches()[0], max_bits=4)
    names = tracker.names

    def loss(model: Any, extra: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        value = cross_entropy(model, None, images, labels)
        return value + extra[1] * qjax.training.dampening(model, names) if way == "damping" else value

    def after(model: Any, extra: Any, progress: jax.Array) -> Any:
        followed = extra[0].update(model)
        if way == "freezing":
            first, last = THRESHOLDS
            followed = followed.freeze(model, first + (last - first) * _risen(progress))
        return followed, DAMPING * _risen(progress)

    optimizer: optax.GradientTransformation = qjax.training.optimizer(model, start.steps)
    images, labels = start.data.train_images, start.data.train_labels
    extra = (tracker, jnp.zeros((), jnp.float32))
    _, (tracker, _) = fit(
        model, images, labels, optimizer, epochs=start.epochs, seed=start.seed, loss=loss, extra=extra, after=after
    )
    return tracker


def gains(found: Mapping[str, list[Outcome]], way: str) -> np.ndarray:
    """Points that a cure adds to plain training, both re-estimated, one for each seed."""
    return np.array([one.after - plain.after for one, plain in zip(found[way], found["plain"], strict=True)])


def _mean(found: Mapping[str, list[Outcome]], way: str, field: str) -> float:
    return float(np.mean([getattr(one, field) for one in found[way]]))


Claim = tuple[Prediction, Callable[[Mapping[str, list[Outcome]]], float]]


def _claims(bits: str, settings: Settings) -> list[Claim]:
    chosen = plan(settings)
    noise = 5 * 100 * (DISAGREE[bits] / (chosen.images * chosen.seeds)) ** 0.5
    claim = "Nagel et al. 2022 claim that both cures raise the accuracy of depthwise networks at 3 and 4 bits; below: "
    claim += f"5 standard errors of equal models that disagree on {DISAGREE[bits]:.0%} of the images"
    found: list[Claim] = [
        (
            Prediction(
                f"{bits}, plain: share of weights that oscillate at the end",
                0.01,
                0.995,
                "below 1% there is nothing to cure; on a quadratic loss without noise all but those within 0.0025 of "
                "a step of a code would oscillate",
            ),
            lambda found: _mean(found, "plain", "oscillating"),
        ),
        (
            Prediction(
                f"{bits}: images for which an integer graph chooses another class than its model",
                0,
                0,
                "the graph computes the model; a class changes only where two scores are one code apart",
            ),
            lambda found: float(sum(one.unequal for ones in found.values() for one in ones)),
        ),
    ]
    for way in CURES:
        found += [
            (
                Prediction(
                    f"{bits}, {way}: oscillating share as a part of plain training's",
                    0,
                    0.5,
                    "Nagel et al. 2022: it removes most oscillations; we require at least half",
                ),
                lambda found, way=way: (
                    _mean(found, way, "oscillating") / max(_mean(found, "plain", "oscillating"), 1e-9)
                ),
            ),
            (
                Prediction(f"{bits}, {way} minus plain, both re-estimated, points", -noise, 5, claim),
                lambda found, way=way: float(gains(found, way).mean()),
            ),
        ]
    return found


def predict(settings: Settings) -> list[Prediction]:
    return [prediction for bits in BITS for prediction, _ in _claims(bits, settings)]


def measure(settings: Settings) -> Measurement:
    results = {bits: outcomes(bits, settings) for bits in BITS}
    values = {
        prediction.name: read(found) for bits, found in results.items() for prediction, read in _claims(bits, settings)
    }
    rows = [
        [
            bits,
            way,
            100 * _mean(found, way, "oscillating"),
            100 * _mean(found, way, "frozen"),
            f"{_mean(found, way, 'before'):.2f}",
            f"{_mean(found, way, 'after'):.2f}",
            "" if way == "plain" else f"{gains(found, way).mean():+.2f} ± {_error(gains(found, way)):.2f}",
        ]
        for bits, found in results.items()
        for way in WAYS
    ]
    columns = ["bits", "training", "oscillating, %", "frozen, %", "accuracy, %", "re-estimated, %", "gain, points"]
    name = plan(settings).network
    data = {
        bits: {
            way: {field: [getattr(one, field) for one in found[way]] for field in ("oscillating", "after")}
            for way in WAYS
        }
        for bits, found in results.items()
    }
    return Measurement(
        values, [Table(f"{name}, products with few bits", columns, rows)], data, _conclusion(name, results)
    )


def _error(differences: np.ndarray) -> float:
    return float(differences.std(ddof=1) / len(differences) ** 0.5)


def _conclusion(name: str, results: Mapping[str, Mapping[str, list[Outcome]]]) -> str:
    lines: list[str] = []
    for bits, found in results.items():
        share = 100 * _mean(found, "plain", "oscillating")
        lines.append(f"- {name}, {bits}: {share:.1f}% of the weights oscillate at the end of plain training.")
        for way in CURES:
            gain = f"{gains(found, way).mean():+.2f} points (standard error {_error(gains(found, way)):.2f})"
            lines.append(f"- {name}, {bits}: {way} changes accuracy by {gain} against plain training.")
    return "\n".join(lines)


def draw(figure: Figure, data: Mapping[str, Any]) -> None:
    panels = figure.subplots(1, len(data), squeeze=False)[0]
    for panel, (bits, ways) in zip(panels, data.items(), strict=True):
        for way, one in ways.items():
            panel.plot([100 * share for share in one["oscillating"]], one["after"], "o", label=way)
        panel.set(xlabel="weights that oscillate at the end, %", title=bits)
        panel.legend(fontsize=8)
    panels[0].set(ylabel="accuracy after re-estimation, %")


STUDY = Study(
    name="network_oscillations",
    title="Oscillating weights of a depthwise network",
    question=(
        "Low-bit weights oscillate between two codes during training. Does it pay to damp or freeze them in a "
        "depthwise network, where Nagel et al. 2022 (arXiv 2203.11086) report gains?"
    ),
    method=(
        "The network is trained in float, calibrated, and trained with quantization: 4 or 3 bits for the operands "
        "of products, 8 for the rest and for the first and the last layer. With `--full` it is a depthwise network "
        "on Fashion-MNIST, otherwise a CNN on digits. It is trained in three ways: plain, with "
        f"`qjax.training.dampening` and a weight that grows to {DAMPING}, and with `Oscillations.freeze` and a "
        f"threshold that falls from {THRESHOLDS[0]} to {THRESHOLDS[1]}. Start, batches, optimizer and epochs are the "
        f"same for all. A weight counts as oscillating if the moving average of its turns exceeds {OFTEN} per step. "
        "Then batch norm is re-estimated, and the integer graph is evaluated on all test images."
    ),
    predict=predict,
    measure=measure,
    draw=draw,
    answer=(
        "Train without either cure first. Damp or freeze weights only if you have measured that it helps your "
        "network. Both stop oscillations, but neither reliably raises accuracy."
    ),
    command="python -m experiments network_oscillations",
)
