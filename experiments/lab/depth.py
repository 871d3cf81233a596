"""Drift with depth: how far targets part along chains of int8 layers, and how biased they become."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.lab import chain_theory as theory
from experiments.lab.chains import drift
from experiments.lab.depth_claims import (
    FLOOR,
    PUBLISHED,
    PUBLISHED_BIAS,
    STRUCTURES,
    TRUNCATED,
    Found,
    arise,
    chain_of,
    claims,
    targets_of,
)
from qjax.contrib.lab.study import Measurement, Prediction, Settings, Study, Table

COLOURS = ("#3b6ea5", "#d08a2e", "#4b8f5a", "#a0498c")


def predict(settings: Settings) -> list[Prediction]:
    return [prediction for prediction, _ in claims(settings)]


def measure(settings: Settings) -> Measurement:
    real = {
        name: {target: drift(chain_of(name, settings), target) for target in targets_of(name, settings)}
        for name in STRUCTURES
    }
    floor = {name: drift(chain_of(name, settings, True), FLOOR) for name in TRUNCATED}
    found = Found(real, floor, drift(chain_of("relu", settings, True), "single_round"))
    values = {prediction.name: read(found) for prediction, read in claims(settings)}
    return Measurement(values, _tables(found), _data(found, settings), _conclusion(found))


def _tables(found: Found) -> list[Table]:
    tables: list[Table] = []
    for name, drifts in found.real.items():
        depths = [depth for depth in (1, 8, 24, 48) if depth <= len(drifts["double_round"].share)]
        columns = [
            "target",
            "arise per product",
            *(f"differ behind {d}" for d in depths),
            f"bias, {depths[-1]} layers",
        ]
        rows = [
            [target, arise(d), *(float(d.share[depth - 1]) for depth in depths), float(d.bias[-1])]
            for target, d in drifts.items()
        ]
        tables.append(Table(f"{name}: share of codes that differ from nearest_even", columns, rows))
    rows = [[name, *(float(d.bias[depth - 1]) for depth in (1, 8, 24))] for name, d in found.floor.items()]
    tables.append(
        Table("Truncation, powers of two: bias in steps", ("chain", "behind 1 layer", "behind 8", "behind 24"), rows)
    )
    return tables


def _data(found: Found, settings: Settings) -> dict[str, Any]:
    return {
        "share": {n: {t: d.share.tolist() for t, d in drifts.items()} for n, drifts in found.real.items()},
        "bias": {n: {t: d.bias.tolist() for t, d in drifts.items()} for n, drifts in found.real.items()},
        "floor": {name: d.bias.tolist() for name, d in found.floor.items()},
        "expected share": {n: theory.spread(chain_of(n, settings)).share.tolist() for n in STRUCTURES},
        "expected floor": {n: theory.truncation_bias(chain_of(n, settings, True)).tolist() for n in TRUNCATED},
    }


def _conclusion(found: Found) -> str:
    linear = found.real["linear"]
    double, floats = linear["double_round"], linear["onnxruntime"]
    none = [target for target, d in linear.items() if not d.share.any()]
    half = {n: d["double_round"].share[23] for n, d in found.real.items()}
    floor = found.floor
    return (
        f"A target that differs in {arise(double):.2%} of the codes of one layer differs in {double.share[7]:.0%} "
        f"after 8 layers. After 24 layers it differs in {double.share[23]:.0%}. One differing code moves every "
        "output of the next layer by a fraction of a step, and rounding turns some of these fractions into whole "
        "steps. Differences therefore spread through every sample in which one has occurred. A target that differs "
        f"more rarely only starts later: float32 products (onnxruntime) differ in {floats.share[-1]:.2%} of the "
        f"codes after {len(floats.share)} layers. These differences originate in {floats.arise.count} of "
        f"{floats.arise.compared:,} products. The following targets never differ in the linear chain: "
        f"{', '.join(none)}.\n\n"
        f"After 24 layers, double_round differs in {half['relu']:.0%} of the codes with ReLU and "
        f"{half['residual']:.0%} with residual sums. With both it differs in {half['relu, residual']:.0%}. The "
        f"differences have almost no bias: their mean is {double.bias[-1]:+.3f} steps after {len(double.bias)} "
        f"layers, and {found.real['relu']['double_round'].bias[-1]:+.3f} with ReLU.\n\n"
        "Truncation does drift, although the weights have mean 0. After 24 layers the drift is "
        f"{floor['relu'].bias[-1]:.2f} steps with ReLU (published: {PUBLISHED_BIAS:.0f}). With residual sums it is "
        f"{floor['residual'].bias[-1]:.2f}, and with both {floor['relu, residual'].bias[-1]:.2f}. After a ReLU both "
        "the activations and the truncation error have a constant sign, so part of the error points along the "
        "activations, and the next layer propagates that part just as it propagates them. A theory that considers "
        "only the last truncation and what a residual sum adds would predict a quarter of a step for the plain ReLU "
        f"chain; the measured drift is {floor['relu'].bias[-1] / -0.25:.0f} times that."
    )


def draw(figure: Figure, data: Mapping[str, Any]) -> None:
    left, right = figure.subplots(1, 2)
    for colour, (name, drifts) in zip(COLOURS, data["share"].items(), strict=True):
        layers = np.arange(1, len(drifts["double_round"]) + 1)
        left.loglog(layers, drifts["double_round"], color=colour, label=name)
        left.loglog(layers, data["expected share"][name], color=colour, linestyle=":")
    linear = np.array(data["share"]["linear"]["onnxruntime"])
    seen = linear > 0
    left.loglog(np.arange(1, len(linear) + 1)[seen], linear[seen], color="#8a8a8a", label="linear, onnxruntime")
    left.plot(list(PUBLISHED), list(PUBLISHED.values()), "k^", label="published")
    left.set(xlabel="layers", ylabel="share of codes that differ", title="double rounding against half to even")
    left.set_xticks([1, 2, 4, 8, 16, 24, 48], ["1", "2", "4", "8", "16", "24", "48"])
    left.minorticks_off()
    left.legend(fontsize=8, title="dotted: predicted", title_fontsize=8)
    for colour, name in zip(COLOURS[1:], TRUNCATED, strict=True):
        bias = data["floor"][name]
        layers = np.arange(1, len(bias) + 1)
        right.plot(layers, bias, color=colour, label=name)
        right.plot(layers, data["expected floor"][name], color=colour, linestyle=":")
    right.plot([24], [PUBLISHED_BIAS], "k^", label="published, relu")
    right.set(xlabel="layers", ylabel="mean difference of codes, steps", title="truncation against half to even")
    right.legend(fontsize=8, title="dotted: predicted", title_fontsize=8)


STUDY = Study(
    name="depth",
    title="Drift with depth",
    question=(
        "Suppose two runtimes differ in one code in a thousand after one layer. How far apart are they after 48 "
        "layers, and which of them become biased?"
    ),
    method=(
        "The chains have 48 int8 layers of width 128; without `--full`, those with residual sums have 24. Weights "
        "are random with a scale per channel, and activation scales are calibrated on the chain itself. Each chain "
        "is converted once and then retargeted. Every target starts from the same input codes, and the codes after "
        "each layer are compared with those of `nearest_even`. *Arise* counts the products that differ although "
        "their inputs equal the reference's.\n\n"
        "Truncation needs power-of-two scales here, so its reference is `fpga`, which shifts once and rounds ties "
        "to even. Without `--full` the chains *relu* and *residual* run under only four targets. `onnxruntime_avx2` "
        "and `torch_*_avx2` get signed codes here, because another study covers their saturation."
    ),
    predict=predict,
    measure=measure,
    draw=draw,
    answer=(
        "Do not expect the codes of two runtimes to stay close in a deep network, because one difference in a "
        "thousand codes spreads to most of them. Compare decisions instead, or convert for the runtime that you "
        "ship to. Never truncate, because truncation is the only rule here whose error accumulates to whole steps "
        "in one direction."
    ),
    command="python -m experiments depth",
)
