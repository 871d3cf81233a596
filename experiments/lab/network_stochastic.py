"""Stochastic rounding of real networks: at inference, and in training for a deployment with rounding to nearest."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.lab.stochastic_outcomes import WAYS, Inference, Plan, Trained, inference, trained
from qjax.contrib.lab.study import Measurement, Prediction, Settings, Study, Table

AT_INFERENCE = ("W8A8", "W4A4", "W3A3")
IN_TRAINING = ("W4A4", "W2A2")
DISAGREE = {"W8A8": 0.01, "W4A4": 0.04, "W2A2": 0.08}
"""Share of images that two such networks, or two runs of one, judge differently."""


def plans(settings: Settings) -> tuple[Plan, ...]:
    if settings.full:
        resnet = Plan("ResNet", 3000, 16, ("W2A2",), 20_000, 1, 2)
        return resnet, Plan("GRU", 10_000, 16, IN_TRAINING, 60_000, 1, 2)
    return (Plan("CNN on digits", 500, 16, IN_TRAINING, 1297, 20, 2),)


def _noise(bits: str, images: int) -> float:
    """5 standard errors in points of a difference between two that judge a share of the images differently."""
    return 5 * 100 * (DISAGREE[bits] / images) ** 0.5


Claim = tuple[Prediction, Callable[[], float]]


def claims(settings: Settings) -> list[Claim]:
    return [claim for plan in plans(settings) for claim in (*_at_inference(plan, settings), *_trained(plan, settings))]


def _at_inference(plan: Plan, settings: Settings) -> list[Claim]:
    def read(bits: str, of: Callable[[Inference], float]) -> Callable[[], float]:
        return lambda: of(inference(plan, bits, settings.seed))

    name = plan.network
    found: list[Claim] = []
    width = _noise("W8A8", plan.images)
    found.append(
        (
            Prediction(
                f"{name}, W8A8: points that a stochastic run loses against nearest",
                -width,
                width,
                "the loss grows with the error's variance, a factor of 4 a bit: 2 points at 4 bits are 0.01 at 8; 5 "
                f"standard errors of {plan.images:,} images of which 1% are judged differently",
            ),
            read("W8A8", lambda one: one.nearest - one.single),
        )
    )
    for bits in AT_INFERENCE:
        found.append(
            (
                Prediction(
                    f"{name}, {bits}: squared error of the scores, a stochastic run over nearest",
                    1,
                    4,
                    "2: E f(1-f) = 1/6 against 1/12 for a fraction f that is uniform. With nearest, the errors of "
                    "the weights are a single draw, and clipping is the same in both, so the interval spans one "
                    "bit: 1 is nearest, 4 is one bit less",
                ),
                read(bits, lambda one: one.squared_single),
            )
        )
        found.append(
            (
                Prediction(
                    f"{name}, {bits}: squared error of the scores, the mean of {plan.draws} runs over nearest",
                    1 / plan.draws,
                    1 if bits == "W3A3" else 0.6,
                    f"2/{plan.draws} from rounding, or half of that if nearest's one draw is twice as bad as usual. "
                    "Averaging removes neither clipping nor the bias that a ReLU makes of noise: half of nearest's "
                    "error, with 3 bits all of it",
                ),
                read(bits, lambda one: one.squared_mean),
            )
        )
    for bits in ("W4A4", "W3A3") if settings.full else ("W3A3",):
        found.append(
            (
                Prediction(
                    f"{name}, {bits}: points that a stochastic run loses, of those that a bit less loses",
                    0,
                    1,
                    "twice the error's variance is half a bit; (2 - 1)/(4 - 1) if loss is proportional to variance",
                ),
                read(bits, lambda one: one.share),
            )
        )
    if settings.full:
        what = f"the part that the mean of {plan.draws} runs has again"
        found.append(
            (
                Prediction(
                    f"{name}, W3A3: of the points that nearest loses to float, {what}",
                    0,
                    1.3,
                    f"1 - 2/{plan.draws} of what rounding loses; averaging does not remove clipping and biases, as "
                    "above; above 1 by chance",
                ),
                read("W3A3", lambda one: one.recovered),
            )
        )
    return found


def _trained(plan: Plan, settings: Settings) -> list[Claim]:
    def read(bits: str) -> Trained:
        return trained(plan, bits, settings.seed)

    name, images = plan.network, 10_000 if settings.full else 500
    four, two = (_noise(bits, images * plan.seeds) for bits in IN_TRAINING)
    why = f"5 standard errors of {plan.seeds} pairs that judge {{}} of {images:,} images differently"
    title = "{}, {}, trained: stochastic less nearest, points"
    cost = (
        "it trains with twice the noise that it is deployed with, and gains nothing by that. `stochastic` lost 4 "
        "points, and the interval allows twice that"
    )
    bands = {
        "W4A4": (-four, four, f"no effect, as in `stochastic`; {why.format('4%')}"),
        "W2A2": (-8 - two, two, f"{cost}; {why.format('8%')}"),
    }
    found: list[Claim] = [
        (
            Prediction(title.format(name, bits), *bands[bits]),
            lambda bits=bits: float(read(bits).differences.mean()),
        )
        for bits in plan.trained
    ]
    found.append(
        (
            Prediction(
                f"{name}, trained: images for which an integer graph chooses another class than its model",
                0,
                5,
                "the graph computes the model; [accuracy](../accuracy-trained.md) counts up to 2 near ties in 10,000",
            ),
            lambda: float(sum(read(bits).unequal for bits in plan.trained)),
        )
    )
    return found


def predict(settings: Settings) -> list[Prediction]:
    return [prediction for prediction, _ in claims(settings)]


def measure(settings: Settings) -> Measurement:
    values = {prediction.name: read() for prediction, read in claims(settings)}
    judged = {(p.network, b): inference(p, b, settings.seed) for p in plans(settings) for b in AT_INFERENCE}
    runs = {(p.network, b): trained(p, b, settings.seed) for p in plans(settings) for b in p.trained}
    draws = plans(settings)[0].draws
    columns = ["network", "bits", "float", "nearest", "a bit less", "one run", "one run less nearest"]
    first = [
        [
            name,
            bits,
            *(f"{value:.2f}" for value in (one.unrounded, one.nearest, one.less, one.single)),
            _with_error(one.single - one.nearest, one.error),
            f"{one.mean:.2f}",
        ]
        for (name, bits), one in judged.items()
    ]
    second = [
        [name, bits, one.squared_single, one.squared_mean, one.squared_less] for (name, bits), one in judged.items()
    ]
    third = [
        [
            name,
            bits,
            f"{one.before:.2f}",
            *(_each(of[way]) for of in (one.raw, one.after) for way in WAYS),
            _with_error(float(one.differences.mean()), one.error),
        ]
        for (name, bits), one in runs.items()
    ]
    squared = ["network", "bits", "one run", f"mean of {draws}", "a bit less, to nearest"]
    ways = [f"{way}{what}" for what in (", as trained", "") for way in WAYS]
    tables = [
        Table("Inference after calibration, accuracy in %", [*columns, f"mean of {draws}"], first),
        Table("Inference: squared error of the scores, nearest = 1", squared, second),
        Table("Trained, rounded to nearest, accuracy in %", ["network", "bits", "before", *ways, "difference"], third),
    ]
    data: dict[str, dict[str, Any]] = {"inference": {}, "trained": {}}
    for (name, bits), one in judged.items():
        kinds = {"nearest": one.nearest, "one stochastic run": one.single, f"mean of {draws} runs": one.mean}
        data["inference"].setdefault(name, {})[bits] = {k: value - one.unrounded for k, value in kinds.items()}
    for (name, bits), one in runs.items():
        data["trained"][f"{name}\n{bits}"] = [float(value) for value in one.differences]
    return Measurement(values, tables, data, _conclusion(judged, runs, draws))


def _with_error(value: float, error: float) -> str:
    return f"{value:+.2f} ± {error:.2f}"


def _each(points: list[float]) -> str:
    return " ".join(f"{value:.2f}" for value in points)


def _conclusion(
    judged: Mapping[tuple[str, str], Inference], runs: Mapping[tuple[str, str], Trained], draws: int
) -> str:
    lines: list[str] = []
    for (name, bits), one in judged.items():
        lines.append(
            f"- {name}, {bits}, calibrated: rounding to nearest reaches {one.nearest:.2f} %. One stochastic run "
            f"changes this by {one.single - one.nearest:+.2f} points (standard error {one.error:.2f}). The mean of "
            f"{draws} runs changes it by {one.mean - one.nearest:+.2f}."
        )
    for (name, bits), one in runs.items():
        lines.append(
            f"- {name}, {bits}: training with stochastic rounding changes the deployed accuracy by "
            f"{one.differences.mean():+.2f} points (standard error {one.error:.2f})."
        )
    return "\n".join(lines)


def draw(figure: Figure, data: Mapping[str, Any]) -> None:
    panels = figure.subplots(1, len(data["inference"]) + 1, squeeze=False)[0]
    for panel, (name, found) in zip(panels, data["inference"].items(), strict=False):
        for marker, kind in zip("os^", next(iter(found.values())), strict=True):
            panel.plot(list(found), [one[kind] for one in found.values()], f"{marker}-", label=kind)
        panel.axhline(0, color="#8a8a8a", linewidth=0.8)
        panel.set(title=f"{name}, calibrated", ylabel="accuracy less float's, points")
        panel.legend(fontsize=8)
    last = panels[-1]
    for index, differences in enumerate(data["trained"].values()):
        last.plot([index] * len(differences), differences, "o", color="#3b6ea5")
        last.plot(index, np.mean(differences), "_", color="#3b6ea5", markersize=18)
    last.axhline(0, color="#8a8a8a", linewidth=0.8)
    last.set(title="trained, deployed to nearest", ylabel="stochastic less nearest, points")
    last.set(xticks=range(len(data["trained"])), xlim=(-0.5, len(data["trained"]) - 0.5))
    last.set_xticklabels(list(data["trained"]), fontsize=8)


STUDY = Study(
    name="network_stochastic",
    title="Stochastic rounding of real networks",
    question=(
        "Stochastic rounding rounds up with a probability equal to the fraction. What does it cost a ResNet and a "
        "GRU at inference, and does training with it help a network that is deployed with rounding to nearest?"
    ),
    method=(
        "The network is trained in float and calibrated. The operands of products have few bits, and everything "
        "else, including the first and the last layer, has 8. With `--full` it is a ResNet and a GRU on "
        "Fashion-MNIST, otherwise a CNN on digits. At inference weights and activations are rounded stochastically "
        "by `qjax.training.stochastic_forward`, with 16 keys. All time steps of the GRU share their draws. Every "
        "way is evaluated on the same test images: the first 3,000 for the ResNet, all 10,000 for the GRU. Removing "
        "a bit means, for example, rounding to nearest with 3 bits instead of 4. Squared errors of the class scores "
        "are measured against the float network.\n\n"
        "Then clones of the calibrated network train further in two ways, with the same batches, optimizer and "
        "epochs: one with the stochastic forward and a key for each step, the other with the usual forward. The GRU "
        "sees all images once, the ResNet a third of them. For both, the statistics of batch norm are then "
        "re-estimated with rounding to nearest, and integer graphs are evaluated on all test images. An error with "
        "± is a standard error: of images at inference, of 2 seeds in training."
    ),
    predict=predict,
    measure=measure,
    draw=draw,
    answer=(
        "Round to nearest at inference, because at 3 or 4 bits a single stochastic run lost up to 29% of what "
        "removing a bit loses. If you can afford 16 times the work, the mean of 16 runs is up to 1.1 points better "
        "than nearest there. Train with the rounding that you deploy: for nearest, training with stochastic "
        "rounding lost 2 to 4 points at 2 bits."
    ),
    command="python -m experiments network_stochastic",
)
