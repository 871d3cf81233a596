"""Nearest or learned rounding on real networks: how many dB, and how many images."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.lab.learned_claims import ADA, BIAS, LEVELS, UNEQUAL, at, claims, curves, every, float_points
from experiments.lab.learned_networks import BITS, SEQUENCE, WAYS, network, outcome, paired, plan, ready
from experiments.lab.rounding_theory import decibels
from qjax.contrib.lab.study import Measurement, Prediction, Settings, Study, Table


def predict(settings: Settings) -> list[Prediction]:
    return [prediction for prediction, _ in claims(settings)]


def measure(settings: Settings) -> Measurement:
    values = {prediction.name: read() for prediction, read in claims(settings)}
    tables = [*(_table(name, settings) for name in plan(settings).networks), _layers(settings)]
    return Measurement(values, tables, _data(settings), f"{_conclusion(settings)}\n\n{summary(tables, values)}")


def _table(name: str, settings: Settings) -> Table:
    reals, rows = network(name, settings).scores.argmax(-1), list[list[Any]]()
    _, shares = curves(name, settings)
    whole = float_points(name, settings)
    for bits in BITS:
        ways = outcome(name, bits, settings).ways
        for key, way in ways.items():
            gain, error = paired(way.right, ways["nearest"].right)
            rows.append(
                [
                    f"W{bits}A8",
                    key,
                    f"{way.sqnr:.2f}",
                    f"{way.points:.2f}",
                    f"{way.points - whole:+.2f}",
                    "" if key == "nearest" else f"{gain:+.2f} ± {error:.2f}",
                    int(np.sum(way.classes != reals)),
                    round(len(reals) * float(at(shares, way.sqnr))),
                ]
            )
    columns = ("bits", "rounding", "SQNR, dB", "accuracy, %", "less float", "less nearest", "changed", "expected")
    return Table(f"{name}, float {whole:.2f}%: integer graphs, and images whose class changes", columns, rows)


def _layers(settings: Settings) -> Table:
    rows = [
        [name, f"W{bits}A8", one.name, f"{decibels(one.nearest / one.learned):.2f}", f"{one.changed / one.weights:.0%}"]
        for name, bits, found in every(settings)
        for one in found.layers
        if one.name in ready(name, bits, settings).few
    ]
    columns = ("network", "bits", "weight", "gain of AdaRound, dB", "codes that are not the nearest")
    return Table("Products with few bits, calibration data", columns, rows)


def _data(settings: Settings) -> dict[str, Any]:
    return {
        name: {
            "curve": [list(LEVELS), list(-curves(name, settings)[0])],
            "ways": {
                key: [
                    [bits, found.ways[key].sqnr, found.ways[key].points - float_points(name, settings)]
                    for bits in BITS
                    for found in [outcome(name, bits, settings)]
                    if key in found.ways
                ]
                for key in (*WAYS, SEQUENCE)
            },
        }
        for name in plan(settings).networks
    }


def _conclusion(settings: Settings) -> str:
    lines: list[str] = []
    for name in plan(settings).networks:
        for bits in BITS:
            ways, whole = outcome(name, bits, settings).ways, float_points(name, settings)
            parts = []
            for key in [key for key in (ADA, BIAS, SEQUENCE) if key in ways]:
                gain, error = paired(ways[key].right, ways["nearest"].right)
                dB = ways[key].sqnr - ways["nearest"].sqnr
                parts.append(f"{_label(key)}: {dB:+.1f} dB, {gain:+.2f} points (standard error {error:.2f}).")
            loss = ways["nearest"].points - whole
            lines.append(
                f"- {name}, W{bits}A8: nearest rounding changes accuracy by {loss:+.2f} points against "
                f"float. {' '.join(parts)}"
            )
    return "\n".join(lines)


def _label(way: str) -> str:
    """At the start of a sentence."""
    return f"`qjax.{way}`" if way == SEQUENCE else way[0].upper() + way[1:]


def summary(tables: Sequence[Table], values: Mapping[str, float]) -> str:
    """Classes that change beside those expected, and graphs beside their models, from the study's own tables."""
    rows = [row for table in tables if "expected" in table.columns for row in table.rows]

    def times(way: str) -> float:
        mine = [row for row in rows if row[1] == way]
        return sum(float(row[-2]) for row in mine) / max(1.0, sum(float(row[-1]) for row in mine))

    return (
        f"Nearest rounding changes {times('nearest'):.1f} times as many classes as normal noise of the same SQNR "
        f"would, and AdaRound {times(ADA):.1f} times as many. Errors that all images share cost more than noise.\n\n"
        f"A graph and its model chose different classes {values[UNEQUAL]:.0f} times, because the model computes in "
        "float32; `qjax.exact` computes what the graph does."
    )


def draw(figure: Figure, data: Mapping[str, Any]) -> None:
    panels = figure.subplots(1, len(data), squeeze=False)[0]
    for panel, (name, one) in zip(panels, data.items(), strict=True):
        levels, curve = one["curve"]
        panel.plot(levels, curve, color="#8a8a8a", linestyle=":", label="float scores with noise")
        for index, (way, found) in enumerate(one["ways"].items()):
            panel.plot([dB for _, dB, _ in found], [y for *_, y in found], "o", color=f"C{index}", label=way)
            for bits, dB, y in found:
                panel.annotate(str(bits), (dB, y), (3, 3), textcoords="offset points", fontsize=7)
        places = [(dB, y) for found in one["ways"].values() for _, dB, y in found]
        panel.set(xlabel="SQNR of the class scores, dB", title=name)
        panel.set_xlim(min(dB for dB, _ in places) - 2, max(dB for dB, _ in places) + 2)
        low, high = min(y for _, y in places), max(y for _, y in places)
        panel.set_ylim(low - 0.1 * (high - low) - 0.3, high + 0.1 * (high - low) + 0.3)
    panels[0].set(ylabel="accuracy less float, points (numbers: bits)")
    panels[0].legend(fontsize=7, loc="lower right")


STUDY = Study(
    name="network_learned_rounding",
    title="Learned rounding of weights on real networks",
    question=(
        "Learned rounding (AdaRound, Nagel et al. 2020, arXiv 2004.10568) and bias correction (Nagel et al. 2019, "
        "arXiv 1906.04721) reduce the error of each layer without labels. At which bit widths does that raise "
        "accuracy?"
    ),
    method=(
        "Trained float networks are calibrated with 1,024 training images. Weights have 4, 3 or 2 bits with a scale "
        "per output channel. Activations have 8 bits, and so have the first and the last layer. With `--full` they "
        "are a ResNet, a depthwise network and a GRU on Fashion-MNIST, otherwise a CNN on digits. Weights are "
        "rounded to nearest, with `qjax.training.correct_bias`, with `qjax.training.adaround`, and with both. Some "
        f"also get the sequence of `qjax.{SEQUENCE}`, which may give single tensors more bits. Integer graphs are "
        "evaluated on all test images. SQNR is that of their class scores against the float network.\n\n"
        "The predictions come from the float network and from single products. If d is the error of a product's "
        "weights and G the second moment of its inputs, d^T G d is the error of its output. Each weight is also "
        "rounded alone in the float network, and the squared errors of the class scores are added up. Adding normal "
        "noise to the float scores shows how many classes change at a given SQNR."
    ),
    predict=predict,
    measure=measure,
    draw=draw,
    answer=(
        "Round 3- and 4-bit weights of convolutions with `qjax.training.adaround`, which loses less than a point of "
        "accuracy where nearest rounding loses up to 36. At 2 bits it still loses 1 to 8 points, so train the "
        "network instead. Use `qjax.post_training` if single tensors may have more bits, because it had the best "
        "SQNR wherever it ran, for the GRU too."
    ),
    command="python -m experiments network_learned_rounding",
)
