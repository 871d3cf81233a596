"""Train under A, deploy under B: what another target's rounding costs, and whether training through it pays."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.lab.deployments import FineTuned, flips, squared
from experiments.lab.transfer_claims import BITS, DOUBLE, SATURATING, Found, claims, gain
from qjax.contrib.lab.study import Measurement, Prediction, Settings, Study, Table


def predict(settings: Settings) -> list[Prediction]:
    return [prediction for prediction, _ in claims(settings)]


def measure(settings: Settings) -> Measurement:
    found = Found(settings)
    values = {prediction.name: read(found) for prediction, read in claims(settings)}
    return Measurement(values, list(_tables(found)), _data(found), _conclusion(found))


def _tables(found: Found) -> list[Table]:
    tables: list[Table] = []
    for bits, groups in found.deployed.items():
        even = groups[0]
        rows = [
            [
                ", ".join(g.names),
                g.accuracy,
                flips(even, g),
                float(np.mean(even.outputs != g.outputs)),
                squared(even, g),
            ]
            for g in groups
        ]
        columns = ("targets of equal output codes", "accuracy", "images", "output codes", "mean square, steps")
        tables.append(Table(f"{bits} bits: accuracy, and what differs from nearest_even", columns, rows))
        names = [g.names[0] for g in groups]
        rows = [[a.names[0], *(f"{flips(a, b):.1%} / {squared(a, b):.3g}" for b in groups)] for a in groups]
        tables.append(Table(f"{bits} bits: images judged differently / mean square of outputs", ("", *names), rows))
    rows = [
        [bits, name, one.before, float(np.mean(one.exact)), float(np.mean(one.control)), 100 * gain(one), _error(one)]
        for (bits, name), one in found.tuned.items()
    ]
    columns = ("bits", "target", "before", "through the target", "control", "difference, points", "standard error")
    return [*tables, Table("Deployed accuracy after the same further epochs", columns, rows)]


def _error(one: FineTuned) -> float:
    """Standard error of the gain over seeds, in points."""
    differences = 100 * (np.array(one.exact) - np.array(one.control))
    return float(differences.std(ddof=1) / len(differences) ** 0.5)


def _data(found: Found) -> dict[str, Any]:
    matrices = {
        str(bits): {
            "names": [list(g.names) for g in groups],
            "flips": [[flips(a, b) for b in groups] for a in groups],
            "squared": [[squared(a, b) for b in groups] for a in groups],
        }
        for bits, groups in found.deployed.items()
    }
    fine = [
        {"bits": bits, "target": name, "before": one.before, "exact": one.exact, "control": one.control}
        for (bits, name), one in found.tuned.items()
    ]
    return {"matrices": matrices, "tuned": fine}


def _conclusion(found: Found) -> str:
    lines: list[str] = []
    for bits in BITS:
        groups, double = found.deployed[bits], found.group(bits, DOUBLE)
        accuracies = [g.accuracy for g in groups]
        changed = float(np.mean(double.outputs != groups[0].outputs))
        lines.append(
            f"- {bits} bits: {len(groups)} different sets of output codes, accuracies {min(accuracies):.3f} to "
            f"{max(accuracies):.3f}. Targets that do not saturate disagree on up to {found.most_flips(bits):.1%} of "
            f"the images. {DOUBLE} differs in {double.hidden.count / double.hidden.compared:.2%} of the hidden codes "
            f"and in {changed:.1%} of the output codes."
        )
    gains = " ".join(
        f"At {bits} bits under {name}, accuracy changes by {100 * gain(one):+.2f} points (standard error "
        f"{_error(one):.2f})."
        for (bits, name), one in found.tuned.items()
    )
    pays = [key for key, one in found.tuned.items() if gain(one) > 0.0 and 100 * gain(one) > 3 * _error(one)]
    costs = [key for key, one in found.tuned.items() if gain(one) < 0.0 and -100 * gain(one) > 3 * _error(one)]
    verdict = "Training through the deployed integers makes no difference beyond sampling noise here"
    if pays or costs:
        named = [f"{b} bits, {n}: {'gains' if (b, n) in pays else 'loses'}" for b, n in (*pays, *costs)]
        verdict = f"Training through the deployed integers makes a difference here ({', '.join(named)})"
    saturating = found.group(8, SATURATING[0])
    saturated = (
        f"At 8 bits, saturating sums of pairs change more than any rounding does: {SATURATING[0]} classifies "
        f"{flips(found.group(8, 'nearest_even'), saturating):.1%} of the images differently from nearest_even "
        f"(accuracy {saturating.accuracy:.3f}). At 4 and 2 bits its sums are too small to saturate."
    )
    refused = {name: why for one in found.refused.values() for name, why in one.items()}
    without = "; ".join(f"`{name}`: {why}" for name, why in refused.items())
    few = sorted({name for bits in (4, 2) for name in found.refused[bits]} - set(found.refused[8]))
    lower = f"Only at 4 or 2 bits: {', '.join(few)}." if few else "No further target refuses 4 or 2 bits."
    return (
        "\n".join(lines) + "\n\n"
        "Rounding matters more, not less, with fewer bits. An accumulator of low-bit products is small, so its "
        "multiplier shifts right by few bits r, and two roundings differ from one in 2^-(r+1) of the codes. One "
        "step of a hidden code is also a larger part of its range. What changes is mainly which images are "
        "misclassified, hardly how many.\n\n"
        f"{saturated}\n\n"
        f"{verdict}. {gains} The reference trains for the same additional epochs with the fake-quantized forward. "
        "We count a difference from 3 standard errors; the seeds vary only the fine-tuning, from one start, and "
        "are judged on the same 500 images. In every case the outputs of the exact forward equal those of the "
        "deployed graph.\n\n"
        f"These targets cannot take this network: {without}. {lower} Whether a runtime has kernels for 4 or 2 bits "
        "is a separate question, because only its rounding is computed here."
    )


def draw(figure: Figure, data: Mapping[str, Any]) -> None:
    figure.set_size_inches(13, 4.8)
    axes = figure.subplots(1, 4, width_ratios=[1, 1, 1, 1.1])
    for a, (bits, matrix) in zip(axes, data["matrices"].items(), strict=False):
        values = 100 * np.array(matrix["flips"])
        most = max(1.0, float(values.max()))
        a.imshow(values, cmap="Blues", vmin=0, vmax=most)
        for row, column in itertools.product(range(len(values)), repeat=2):
            colour = "white" if values[row, column] > 0.6 * most else "black"
            a.text(column, row, f"{values[row, column]:.1f}", ha="center", va="center", fontsize=9, color=colour)
        names = [_short(names) for names in matrix["names"]]
        a.set_xticks(range(len(names)), names, rotation=90, fontsize=8)
        a.set_yticks(range(len(names)), names, fontsize=8)
        a.set_title(f"{bits} bits: images\njudged differently, %", fontsize=10)
    _draw_tuned(axes[-1], data["tuned"])


def _short(names: Sequence[str]) -> str:
    more = f" + {len(names) - 1}" if len(names) > 1 else ""
    return (DOUBLE if DOUBLE in names else names[0]) + more


def _draw_tuned(axes: Any, tuned: Sequence[Mapping[str, Any]]) -> None:
    labels = {"control": "fake-quantized forward", "exact": "through the target"}
    for place, one in enumerate(tuned):
        for shift, way, colour in ((-0.15, "control", "#d08a2e"), (0.15, "exact", "#3b6ea5")):
            values = 100 * np.array(one[way])
            label = labels[way] if place == 0 else None
            axes.plot(np.full(len(values), place + shift), values, "o", color=colour, alpha=0.5, label=label)
            axes.plot([place + shift - 0.1, place + shift + 0.1], [values.mean()] * 2, color=colour)
        axes.plot([place - 0.3, place + 0.3], [100 * one["before"]] * 2, "k:", label=None if place else "before")
    axes.set_xticks(range(len(tuned)), [f"{one['bits']} bits\n{one['target']}" for one in tuned], fontsize=8)
    if len(tuned) > 3:
        axes.tick_params(axis="x", rotation=90)
    axes.set_title("deployed accuracy after\nfurther epochs, %", fontsize=10)
    axes.margins(x=0.15, y=0.25)
    axes.legend(fontsize=8, loc="center left")


STUDY = Study(
    name="transfer",
    title="Train under one rounding, deploy under another",
    question=(
        "A network is trained with one rounding rule and deployed under another. How many of its answers change, "
        "and does it pay to train through the integers of the target that it will run on?"
    ),
    method=(
        "A 64-32-10 perceptron classifies scikit-learn's digits, with 500 test images. All layers and the images "
        "have 8, 4 or 2 bits, but outputs always have eight. The network is trained in float, then with fake "
        "quantization to match the float network's probabilities, and converted for every target. Targets with the "
        "same output codes for all test images share one row.\n\n"
        "For some targets, clones are trained for a few more epochs through the target's integers (`qjax.exact`). "
        "The control uses the fake-quantized forward, with the same start, batches, learning rate and number of "
        "epochs, for several seeds. Both are evaluated as deployed under that target. `*_avx2` targets saturate "
        "sums of pairs, which is not a rounding effect, so the tables list them but the intervals exclude them."
    ),
    predict=predict,
    measure=measure,
    draw=draw,
    answer=(
        "Convert for the target that you ship to; fine-tuning under its rounding gained nothing beyond noise here. "
        "Between runtimes, hardly any decision changes at 8 bits, and a few percent change at 2 bits. Avoid 8-bit "
        "kernels that saturate sums of two products (`onnxruntime_avx2`), or give them 7-bit activations."
    ),
    command="python -m experiments transfer",
)
