"""The trainer's own arithmetic on real networks: float32, TF32 and bfloat16, at evaluation and in training."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.lab.precision_claims import claims, plan
from experiments.lab.precision_outcomes import (
    CLASSIC,
    DTYPES,
    EMULATED,
    INTEGER,
    Forwards,
    Plan,
    Trained,
    differences,
    forwards,
    trainings,
)
from qjax.contrib.lab.study import Measurement, Prediction, Settings, Study, Table


def predict(settings: Settings) -> list[Prediction]:
    return [prediction for prediction, _ in claims(settings)]


def measure(settings: Settings) -> Measurement:
    values = {prediction.name: read() for prediction, read in claims(settings)}
    chosen = plan(settings)
    judged = {name: forwards(chosen, name, settings.seed) for name in chosen.evaluated}
    trained = trainings(chosen, settings.seed)
    first = [
        [name, way, machine, f"{100 * one.codes:.3g}", one.decisions, f"{one.points:+.2f}"]
        for name, of in judged.items()
        for (way, machine), one in [*of.ways.items(), (("the model's own call", "this CPU"), of.own)]
    ]
    second = [
        [
            dtype,
            " ".join(f"{points:.2f}" for points in one.points),
            _difference(trained, dtype) if dtype != DTYPES[0] else "",
            f"{100 * np.mean([own.codes for own in one.own]):.3g}",
            " ".join(str(own.decisions) for own in one.own),
            one.exact,
        ]
        for dtype, one in trained.items()
    ]
    columns = ["network", "forward", "machine", "codes that differ, %", "decisions that differ", "points"]
    ways = ["dtype", "accuracy, %", "less float32, points", "own call: codes that differ, %", "decisions", "exact"]
    tables = [
        Table(f"W8A8, {chosen.images:,} images: forwards beside the integer graph", columns, first),
        Table(f"{chosen.trained}, W4A4, trained: the integer graph, and what differs from it", ways, second),
    ]
    data = {
        "codes": {
            name: {way: [of.ways[way, machine.name].codes for machine in EMULATED] for way in (CLASSIC, INTEGER)}
            for name, of in judged.items()
        },
        "points": {dtype: one.points for dtype, one in trained.items()},
    }
    return Measurement(values, tables, data, _conclusion(judged, trained, chosen))


def _difference(found: Mapping[str, Trained], dtype: str) -> str:
    points = differences(found, dtype)
    return f"{points.mean():+.2f} ± {points.std(ddof=1) / len(points) ** 0.5:.2f}"


def _conclusion(judged: Mapping[str, Forwards], trained: Mapping[str, Trained], chosen: Plan) -> str:
    lines: list[str] = []
    for name, of in judged.items():
        for way in (CLASSIC, INTEGER):
            shares = ", ".join(f"{100 * of.ways[way, m.name].codes:.3g}% ({m.name})" for m in EMULATED)
            lines.append(f"- {name}, W8A8, {way}: wrong output codes {shares}.")
        one = of.ways[CLASSIC, EMULATED[-1].name]
        lines.append(
            f"- {name}: classic in bfloat16 changes {one.decisions} of {chosen.images:,} decisions, and accuracy by "
            f"{one.points:+.2f} points."
        )
    for dtype in DTYPES[1:]:
        lines.append(
            f"- {chosen.trained}, W4A4, trained with {dtype}: {_difference(trained, dtype)} points against float32."
        )
    return "\n".join(lines)


def draw(figure: Figure, data: Mapping[str, Any]) -> None:
    panels = figure.subplots(1, len(data["codes"]) + 1, squeeze=False)[0]
    names = [machine.name for machine in EMULATED]
    for panel, (name, ways) in zip(panels, data["codes"].items(), strict=False):
        for marker, (way, shares) in zip("os", ways.items(), strict=True):
            # a share of 0 has no place on a logarithmic axis: it is drawn on the lower edge
            panel.plot(names, [max(share, 1e-5) for share in shares], f"{marker}-", label=way)
        panel.set(yscale="log", ylim=(8e-6, 1.2), title=f"{name}, W8A8", ylabel="output codes that differ")
        panel.legend(fontsize=8)
    last = panels[-1]
    for index, points in enumerate(data["points"].values()):
        last.plot([index] * len(points), points, "o", color="#3b6ea5")
    last.set(title="trained, W4A4", ylabel="accuracy of the integer graph, %", xlim=(-0.5, len(DTYPES) - 0.5))
    last.set_xticks(range(len(DTYPES)), [dtype.replace(" ", "\n") for dtype in DTYPES], fontsize=8)


STUDY = Study(
    name="network_precision",
    title="Precision of the trainer on real networks",
    question=(
        "A network is trained on hardware that multiplies in TF32 or bfloat16, or is itself in bfloat16. Does its "
        "forward pass still compute the integer codes that will ship, and does accuracy suffer?"
    ),
    method=(
        "A calibrated 8-bit network is evaluated in two ways. *Integer-valued*: products multiply codes minus their "
        "zero points, as qjax does. *Classic*: products multiply fake-quantized floats, and biases and norms are "
        "floats too. In both, the operands of every convolution and matrix product are rounded to the bits of the "
        "machine: 24 significant for float32, 11 for TF32, 8 for bfloat16. Nothing else is emulated: sums and all "
        "other operations are in float32. Both are compared with the integer graph of `qjax.convert`. With `--full` "
        "the networks are a ResNet and a GRU on Fashion-MNIST, otherwise a CNN on digits.\n\n"
        "Then a network trains with 4 bits for the operands of products, and 8 for the rest and for the first and "
        "last layer. With `--full` it is the GRU, and it sees half of the images. *bfloat16 activations*: its "
        "layers compute in bfloat16, and its parameters are float32. *bfloat16 throughout*: parameters and "
        "optimizer state are bfloat16 too. Here JAX itself computes in bfloat16, and nothing is emulated. Float "
        "weights, batches, optimizer and epochs are the same. Integer graphs are evaluated on all test images. A "
        "model's own call in bfloat16 is compared with the graph's outputs rounded to bfloat16. An error with ± is "
        "the standard error of 2 seeds."
    ),
    predict=predict,
    measure=measure,
    draw=draw,
    answer=(
        "Train with the integer-valued forward of `qjax.quantize`, because its codes are the same in float32, TF32 "
        "and bfloat16. Scaled floats with float biases get up to a quarter of the output codes wrong in float32 and "
        "about half in bfloat16, although few decisions change. You may train in bfloat16: the deployed GRU was "
        "within 0.1 points of float32, and `qjax.exact` computed its codes."
    ),
    command="python -m experiments network_precision",
)
