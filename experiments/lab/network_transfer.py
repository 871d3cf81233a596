"""Whether training through the integers of the target pays on a network of convolutions with few bits."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from matplotlib.figure import Figure

import qjax
from experiments.accuracy.__main__ import float_model
from experiments.accuracy.data import DATA, Data
from experiments.accuracy.methods import SETTINGS, Start, learned
from experiments.accuracy.networks import TASKS
from experiments.accuracy.train import accuracy, cross_entropy, fit, steps_of
from experiments.lab.network_drift import FOLDER
from qjax.contrib.lab.study import Measurement, Prediction, Settings, Study, Table

TARGET = "tflite_micro"
BITS = ("W4A4", "W2A2")
WAYS = ("exact", "fake-quantized")
DISAGREE = {"W4A4": 0.03, "W2A2": 0.06}
"""Share of images that two further trainings of one network judge differently."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """network: of `TASKS`. first: epochs of quantized training before the ways part. further: epochs of each way."""

    network: str
    images: int
    first: int
    further: int
    seeds: int


def plan(settings: Settings) -> Plan:
    return Plan("ResNet", 10_000, 2, 1, 2) if settings.full else Plan("CNN on digits", 500, 20, 10, 4)


@dataclasses.dataclass(frozen=True)
class Trained:
    """In percent, as deployed under the target. before: of the network from which both ways start.

    ways: of each way, one for each seed. unequal: output codes in which the exact forward of a model is not its graph.
    """

    before: float
    ways: Mapping[str, list[float]]
    unequal: int

    @property
    def differences(self) -> np.ndarray:
        """Points that the exact forward gains, one for each seed."""
        exact, control = (np.array(self.ways[way]) for way in WAYS)
        return exact - control


@functools.lru_cache(maxsize=4)
def trained(bits: str, settings: Settings) -> Trained:
    """One quantized network, trained on in both ways: same start, batches, optimizer and number of epochs.

    Both run in evaluation mode: the exact forward has batch norm within its convolutions.
    """
    chosen = plan(settings)
    task = TASKS[chosen.network]
    data = DATA[task.data]()
    model = float_model(chosen.network, task, data, settings.seed, FOLDER)
    start = learned(
        Start(model, data, SETTINGS[bits], chosen.first, settings.seed + 1000, task.rate), other_bits=8
    ).model
    sample = data.test_images[:4]
    forward = qjax.exact(start, sample, target=TARGET)

    def exactly(model: Any, extra: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        del extra
        return optax.softmax_cross_entropy_with_integer_labels(forward(model, images), labels).mean()

    def deployed(model: Any) -> tuple[float, np.ndarray]:
        graph = qjax.convert(model, sample, target=TARGET)
        parts = [np.asarray(graph(data.test_images[i : i + 500])) for i in range(0, len(data.test_images), 500)]
        return accuracy(np.concatenate(parts), data.test_labels), parts[0]

    found: dict[str, list[float]] = {way: [] for way in WAYS}
    unequal = 0
    for seed in range(chosen.seeds):
        for way in WAYS:
            mine = nnx.clone(start)
            fit(
                mine,
                data.train_images,
                data.train_labels,
                _optimizer(mine, data, chosen),
                epochs=chosen.further,
                seed=seed,
                loss=exactly if way == "exact" else cross_entropy,
                frozen_norms=True,
            )
            points, outputs = deployed(mine)
            found[way].append(points)
            if way == "exact":
                unequal += int(np.sum(outputs != np.asarray(forward(mine, data.test_images[: len(outputs)]))))
    return Trained(deployed(start)[0], found, unequal)


def _optimizer(model: Any, data: Data, chosen: Plan) -> optax.GradientTransformation:
    """A third of the rate that the first quantized training begins with."""
    return qjax.training.optimizer(model, steps_of(data.train_images, chosen.further), learning_rate=3e-4)


Claim = tuple[Prediction, Callable[[], float]]


def claims(settings: Settings) -> list[Claim]:
    chosen = plan(settings)
    found: list[Claim] = []
    for bits in BITS:
        width = 5 * 100 * (DISAGREE[bits] / (chosen.images * chosen.seeds)) ** 0.5
        why = (
            f"no effect: McNemar's error of {chosen.images:,} images of which {DISAGREE[bits]:.0%} are judged "
            f"differently, 5 standard errors of the mean over {chosen.seeds} pairs"
        )
        title = f"{bits}: accuracy trained through {TARGET} less the control's, points"
        found.append(
            (Prediction(title, -width, width, why), lambda bits=bits: float(trained(bits, settings).differences.mean()))
        )
        title = f"{bits}: outputs in which the exact forward differs from the graph that is deployed"
        found.append(
            (
                Prediction(title, 0, 0, "it computes the graph"),
                lambda bits=bits: float(trained(bits, settings).unequal),
            )
        )
    return found


def predict(settings: Settings) -> list[Prediction]:
    return [prediction for prediction, _ in claims(settings)]


def measure(settings: Settings) -> Measurement:
    values = {prediction.name: read() for prediction, read in claims(settings)}
    name = plan(settings).network
    results = {bits: trained(bits, settings) for bits in BITS}
    rows = [
        [bits, one.before, *(float(np.mean(one.ways[way])) for way in WAYS), float(one.differences.mean()), _error(one)]
        for bits, one in results.items()
    ]
    columns = ["bits", "before", *WAYS, "difference, points", "standard error"]
    data = {bits: {"before": one.before, **one.ways} for bits, one in results.items()}
    table = Table(f"{name} under {TARGET}: accuracy after the same further epochs, %", columns, rows)
    return Measurement(values, [table], data, _conclusion(name, results))


def _error(one: Trained) -> float:
    return float(one.differences.std(ddof=1) / len(one.differences) ** 0.5)


def _conclusion(name: str, results: Mapping[str, Trained]) -> str:
    return "\n".join(
        f"- {name}, {bits}: training through the target's integers changes accuracy by "
        f"{one.differences.mean():+.2f} points (standard error {_error(one):.2f})."
        for bits, one in results.items()
    )


def draw(figure: Figure, data: Mapping[str, Any]) -> None:
    panels = figure.subplots(1, len(data), squeeze=False)[0]
    for panel, (bits, one) in zip(panels, data.items(), strict=True):
        for index, way in enumerate(WAYS):
            panel.plot([index] * len(one[way]), one[way], "o", color="#3b6ea5")
        panel.axhline(one["before"], color="#8a8a8a", linestyle=":", label="before")
        panel.set(xticks=range(len(WAYS)), xticklabels=WAYS, xlim=(-0.5, 1.5), title=bits)
        panel.legend(fontsize=8)
    panels[0].set(ylabel=f"accuracy under {TARGET}, %")


STUDY = Study(
    name="network_transfer",
    title="Train convolutions through the target's integers",
    question=(
        "A low-bit convolutional network is deployed on a runtime that rounds twice. Does it pay to train it "
        "through the integers of that runtime?"
    ),
    method=(
        "The network is trained in float, then with quantization: 4 or 2 bits for the operands of products, 8 for "
        "the rest. With `--full` it is a ResNet on Fashion-MNIST, otherwise a CNN on digits. Then clones train "
        "further in two ways, from the same start and with the same batches: one through `qjax.exact`, which "
        "computes the integers of the target, the other through the fake-quantized forward. Both freeze the "
        f"statistics of batch norm. All are evaluated as integer graphs under `{TARGET}`, on all test images."
    ),
    predict=predict,
    measure=measure,
    draw=draw,
    answer=(
        "Train with fake quantization and convert for your runtime. Training through the runtime's integers gained "
        "nothing here that can be told from chance. Use `qjax.exact` if you want to know the deployed accuracy "
        "while you train."
    ),
    command="python -m experiments network_transfer",
)
