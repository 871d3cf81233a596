"""What it costs a ResNet with 4 bits to promise that no input overflows a narrow accumulator."""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from matplotlib.figure import Figure

import qjax
from experiments.accuracy.__main__ import float_model
from experiments.accuracy.data import DATA
from experiments.accuracy.methods import SETTINGS, Start, calibrated
from experiments.accuracy.networks import TASKS
from experiments.accuracy.train import accuracy, fit
from experiments.lab.network_drift import FOLDER
from qjax.contrib.lab.study import Measurement, Prediction, Settings, Study, Table

BITS = 4
WIDTHS = (13, 11, 9)
METHODS = ("A2Q", "A2Q+")
FREE = ("free", 32)
PAPER = {16: (94.2, 94.2), 14: (92.6, 94.1), 12: (83.9, 90.6)}
"""Bits -> CIFAR-10, ResNet-18, W4A4: A2Q and A2Q+ (Colbert et al. 2024, arXiv 2401.10432)."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """network: of `TASKS`. epochs: of the quantized training. images: that judge. looked: that sums are counted on.

    fewer: bits by which its largest sum is shorter than the 4,608 products of the papers' ResNet-18.
    least: points that A2Q+ is ahead of A2Q with 9 bits, at least.
    """

    network: str
    epochs: int
    images: int
    looked: int
    fewer: int
    least: float


def plan(settings: Settings) -> Plan:
    return Plan("ResNet", 2, 10_000, 500, 3, 3) if settings.full else Plan("CNN on digits", 20, 500, 500, 4, 0)


@dataclasses.dataclass(frozen=True)
class Run:
    """One training.

    points: accuracy of the integer graph in percent; projected: before training. worst: bits that the bounded sums need
    for the worst input; seen: on the images looked at. zeros: share of the bounded weights whose code is 0.
    """

    points: float
    projected: float
    worst: int
    seen: int
    zeros: float


@dataclasses.dataclass(frozen=True, eq=False)
class Network:
    """What all trainings start from. bounded: names of the weights of few bits. float_points: the float network's."""

    start: Start
    qmodel: Any
    bounded: tuple[str, ...]
    float_points: float


@functools.lru_cache(maxsize=1)
def network(settings: Settings) -> Network:
    """The float network, calibrated: products read and hold 4 bits, but for the first and the last layer."""
    chosen = plan(settings)
    task = TASKS[chosen.network]
    data = DATA[task.data]()
    model = float_model(chosen.network, task, data, settings.seed, FOLDER)
    start = Start(model, data, SETTINGS["W4A4"], chosen.epochs, settings.seed + 1000, task.rate)
    qmodel = calibrated(start, other_bits=8)
    few = {name for name, q in qmodel.qparams().items() if q.spec.bits == BITS}
    bounded = tuple(name for name in qjax.training.weights_of(qmodel, data.test_images[:1]).names if name in few)
    given = np.concatenate([np.asarray(model(x)) for x in np.array_split(data.test_images, 20)])
    return Network(start, qmodel, bounded, accuracy(given, data.test_labels))


@functools.lru_cache(maxsize=16)
def trained(method: str, bits: int, settings: Settings) -> Run:
    """From the same start, with the same batches and optimizer. "free" has no bound."""
    known, chosen = network(settings), plan(settings)
    data, model = known.start.data, nnx.clone(known.qmodel)
    constraint = None
    if (method, bits) != FREE:
        only = "|".join(map(re.escape, known.bounded))
        constraint = qjax.training.constrain_accumulators(
            model, data.test_images[:1], bits, plus=method == "A2Q+", only=only
        )
        constraint.initialize(model)

    def after(model: Any, extra: Any, progress: jax.Array) -> Any:
        del progress
        if constraint is not None:
            constraint.project(model)
        return extra

    def graph_of(model: Any) -> tuple[qjax.IntegerGraph, float]:
        graph = qjax.convert(model, data.test_images[:4])
        parts = [np.asarray(graph(data.test_images[i : i + 500])) for i in range(0, len(data.test_images), 500)]
        return graph, accuracy(np.concatenate(parts), data.test_labels)

    _, projected = graph_of(model)
    fit(
        model,
        data.train_images,
        data.train_labels,
        qjax.training.optimizer(model, known.start.steps),
        epochs=chosen.epochs,
        seed=known.start.seed,
        after=after,
    )
    graph, points = graph_of(model)
    layers = {name.removesuffix("/kernel") for name in known.bounded}
    report = qjax.accumulators(graph, [data.test_images[: chosen.looked]])
    nodes = [node for node in report.nodes if node.name in layers]
    if len(nodes) != len(layers):
        raise RuntimeError(f"Expected a node for each of {sorted(layers)}, got {[node.name for node in nodes]}.")
    codes = qjax.training.codes_of(model, known.bounded)
    zeros = sum(int((np.asarray(c) == 0).sum()) for c in codes.values()) / sum(c.size for c in codes.values())
    seen = max(node.observed.bits for node in nodes if node.observed is not None)
    return Run(points, projected, max(node.bits for node in nodes), seen, zeros)


Claim = tuple[Prediction, Callable[[], float]]


def claims(settings: Settings) -> list[Claim]:
    def run(method: str, bits: int) -> Run:
        return trained(method, bits, settings)

    def gap(bits: int) -> float:
        return run("A2Q+", bits).points - run("A2Q", bits).points

    def over(what: str) -> float:
        return max(getattr(run(method, bits), what) - bits for method in METHODS for bits in WIDTHS)

    chosen = plan(settings)
    noise = 5 * 100 * (0.05 / chosen.images) ** 0.5
    why = f"one deviation of two trainings that judge 5% of the images differently is {noise / 5:.2f} points"
    return [
        (
            Prediction("bits of the worst case above those asked for, greatest", -2, 0, "the bound is a proof"),
            lambda: over("worst"),
        ),
        (
            Prediction("bits seen on images above those asked for, greatest", -8, 0, "the same"),
            lambda: over("seen"),
        ),
        (
            Prediction(
                "trained freely, points less the float network's",
                -3 - noise,
                noise,
                f"4 bits cost a network of this size up to 3 points in few epochs; {why}",
            ),
            lambda: run(*FREE).points - network(settings).float_points,
        ),
        (
            Prediction(
                "13 bits, A2Q+ less trained freely, points",
                -2 - noise,
                noise,
                "the papers lose 0.8 points to the float network at their 16 bits, which are "
                f"{16 - chosen.fewer} here; {why}",
            ),
            lambda: run("A2Q+", 13).points - run(*FREE).points,
        ),
        (
            Prediction("13 bits, A2Q+ less A2Q, points", -noise, 2 + noise, f"equal with the papers' 16 bits; {why}"),
            lambda: gap(13),
        ),
        (
            Prediction(
                "11 bits, A2Q+ less A2Q, points",
                0,
                12,
                f"the papers' 14 bits, {14 - chosen.fewer} here: 1.5 points; the perceptron of `accumulators` had five "
                "times their gap",
            ),
            lambda: gap(11),
        ),
        (
            Prediction(
                "9 bits, A2Q+ less A2Q, points",
                chosen.least,
                60,
                f"the papers' 12 bits, {12 - chosen.fewer} here: 6.7 points; A2Q leaves 15 codes of 1 a channel",
            ),
            lambda: gap(9),
        ),
    ]


def predict(settings: Settings) -> list[Prediction]:
    return [prediction for prediction, _ in claims(settings)]


def measure(settings: Settings) -> Measurement:
    values = {prediction.name: read() for prediction, read in claims(settings)}
    runs = {key: trained(*key, settings) for key in (FREE, *((m, b) for m in METHODS for b in WIDTHS))}
    rows = [
        [method, bits, run.worst, run.seen, f"{run.projected:.2f}", f"{run.points:.2f}", f"{100 * run.zeros:.0f}"]
        for (method, bits), run in runs.items()
    ]
    fewer = plan(settings).fewer
    columns = ("method", "bits", "worst case", "seen", "before training, %", "trained, %", "zeros, %")
    beside = [[bits, plus - a2q, bits - fewer, _gap(runs, bits - fewer)] for bits, (a2q, plus) in PAPER.items()]
    gaps = ("bits, papers", "A2Q+ less A2Q, points", "bits, here", "A2Q+ less A2Q, points (here)")
    known, name = network(settings), plan(settings).network
    data = {
        "float": known.float_points,
        "free": runs[FREE].points,
        "methods": {m: [[bits, runs[m, bits].points] for bits in WIDTHS] for m in METHODS},
    }
    tables = [Table(f"{name}, {BITS} bits", columns, rows), Table("Compared with the papers", gaps, beside)]
    return Measurement(values, tables, data, _conclusion(name, known.float_points, runs))


def _gap(runs: Mapping[tuple[str, int], Run], bits: int) -> str:
    """Points by which A2Q+ is ahead; empty where that width was not tried."""
    return f"{runs['A2Q+', bits].points - runs['A2Q', bits].points:.2f}" if bits in WIDTHS else ""


def _conclusion(name: str, float_points: float, runs: Mapping[tuple[str, int], Run]) -> str:
    free = runs[FREE]
    lines = [
        f"- The {name} with {BITS} bits, trained without a bound, reaches {free.points:.2f} % (float "
        f"{float_points:.2f} %). Its worst case needs {free.worst} bits, and the test images used {free.seen}."
    ]
    for bits in WIDTHS:
        points = ", ".join(f"{m} {runs[m, bits].points - free.points:+.2f}" for m in METHODS)
        lines.append(f"- If no input may overflow {bits} bits, accuracy changes by (points): {points}.")
    return "\n".join(lines)


def draw(figure: Figure, data: Mapping[str, Any]) -> None:
    panel = figure.subplots()
    for method, points in data["methods"].items():
        panel.plot([bits for bits, _ in points], [value for _, value in points], "o-", label=method)
    panel.axhline(data["float"], color="black", linestyle=":", label="float")
    panel.axhline(data["free"], color="#8a8a8a", linestyle="--", label=f"{BITS} bits, no bound")
    panel.set(xlabel="bits that no input overflows", ylabel="accuracy, %", xticks=WIDTHS)
    panel.legend(fontsize=8)


STUDY = Study(
    name="network_accumulators",
    title="Narrow accumulators for a convolutional network",
    question=(
        "A register of 13 bits or fewer is cheap on an FPGA. How much accuracy does a convolutional network lose if "
        "no input may overflow such a register?"
    ),
    method=(
        "The network is trained in float, calibrated, and trained with quantization. Operands of products have 4 "
        "bits; everything else, including the first and the last layer, has 8. With `--full` it is a ResNet on "
        "Fashion-MNIST, otherwise a CNN on digits. The 4-bit layers train either freely or under the bound of "
        "`qjax.training.constrain_accumulators`, with scales chosen for that bound. Start, batches, optimizer and "
        "epochs are the same. The integer graph is evaluated on all test images, and `qjax.accumulators` proves the "
        "worst case. The papers' ResNet-18 sums up to 4,608 products, this ResNet 576 and the CNN 288. We therefore "
        "compare the papers' widths with widths of 3 or 4 bits less."
    ),
    predict=predict,
    measure=measure,
    draw=draw,
    answer=(
        "Ask `qjax.accumulators` first, because sums of 4-bit codes need far fewer than 32 bits. If your register "
        "is narrower than the worst case, train with A2Q+, which guarantees that no input overflows it. For the "
        "same accuracy A2Q+ needs about one bit less than A2Q."
    ),
    command="python -m experiments network_accumulators",
)
