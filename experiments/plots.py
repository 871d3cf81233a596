"""The demo's picture: training curves, and what the grids of a quantized model do to its tensors."""

import re
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from flax import nnx
from matplotlib.figure import SubFigure
from matplotlib.ticker import MaxNLocator

import qjax
from experiments.training import History

matplotlib.use("Agg")  # draws to files; works without a display

from matplotlib import pyplot as plt

BLUE, ORANGE, GREY = "#3b6ea5", "#d08a2e", "#8a8a8a"
DRAWN = 17
"""Grids of more codes than this are too dense to draw line by line; only their ends are."""
COLUMNS = 7

Histograms = dict[str, tuple[np.ndarray, qjax.QSpec]]
"""Quantizer -> values in steps of its scale, and its spec."""


def demo_picture(
    path: Path, histories: dict[str, History], title: str, qmodel: qjax.QuantizedModel, images: np.ndarray
) -> None:
    """Write the picture: curves of all trainings, histograms of one model, whose configuration `title` names."""
    weights, activations = weights_in_steps(qmodel), activations_in_steps(qmodel, images)
    rows = [-(-len(part) // COLUMNS) for part in (weights, activations)]
    figure = plt.figure(figsize=(15, 4 + 2.1 * sum(rows)), layout="constrained")
    heights = (3.4, 2.1 * rows[0], 2.1 * rows[1])
    top, middle, bottom = np.ravel(figure.subfigures(3, 1, squeeze=False, height_ratios=heights))
    _curves(top, histories)
    middle.suptitle(f"{title}: weights / scale of their channel; lines are the codes, or their ends")
    bottom.suptitle(f"{title}: activations / scale + zero point, before rounding, test images; lines are the codes")
    _histograms(middle, weights, BLUE)
    _histograms(bottom, activations, ORANGE)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _curves(figure: SubFigure, histories: dict[str, History]) -> None:
    left, right = figure.subplots(1, 2)
    for name, history in histories.items():
        epochs = np.arange(1, len(history.loss) + 1)
        left.semilogy(epochs, history.loss, label=name, marker=".")
        right.plot(epochs, history.test_accuracy, label=name, marker=".")
    lowest = min(min(history.test_accuracy[len(history.test_accuracy) // 3 :]) for history in histories.values())
    left.set(title="training loss", xlabel="epoch", ylabel="cross entropy")
    right.set(title="test accuracy", xlabel="epoch", ylim=(lowest - 0.02, 1.0))
    for axes in (left, right):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend()


def _histograms(figure: SubFigure, parts: Histograms, colour: str) -> None:
    grid = figure.subplots(-(-len(parts) // COLUMNS), COLUMNS, squeeze=False)
    for axes in grid.flat[len(parts) :]:
        axes.set_visible(False)
    for axes, (name, (values, spec)) in zip(grid.flat, parts.items(), strict=False):
        dense = spec.qmax - spec.qmin >= DRAWN
        step = (spec.qmax - spec.qmin) / 40 if dense else max(0.1, (spec.qmax - spec.qmin) / 75)
        low = min(np.quantile(values, 0.0005), spec.qmin) - 2 * step
        high = max(np.quantile(values, 0.9995), spec.qmax) + 2 * step
        axes.hist(values, bins=np.arange(low, high, step), color=colour)
        for code in (spec.qmin, spec.qmax) if dense else range(spec.qmin, spec.qmax + 1):
            axes.axvline(code, color=GREY, linewidth=0.6)
        axes.set(yscale="log", xlim=(low, high))
        axes.set_title(f"{name}, {spec.bits} bits", fontsize=9)
        axes.tick_params(labelsize=7)


def weights_in_steps(qmodel: qjax.QuantizedModel) -> Histograms:
    """Quantizer -> its weights divided by their scales: the grid's lines are the integers."""
    found: Histograms = {}
    parameters = {
        "/".join(str(part) for part in path): np.asarray(value[...])
        for path, value in nnx.to_flat_state(nnx.state(qmodel.model, nnx.Param))
    }
    for name, qparams in qmodel.qparams().items():
        if name in parameters:
            scale = np.asarray(qparams.scale)
            found[name] = ((parameters[name] / scale).ravel(), qparams.spec)
    return found


def activations_in_steps(qmodel: qjax.QuantizedModel, images: np.ndarray) -> Histograms:
    """Quantizer -> the values that it rounds, in steps from code 0.

    They are read from a twin: the same weights on the same grids, with activations of 16 bits in place of the
    model's, which is as good as real numbers for a picture.
    """
    weights = {name: qparams.spec for name, qparams in qmodel.qparams().items() if name.endswith("/kernel")}
    recipe = qjax.Recipe(
        activations=qjax.QSpec(bits=16, symmetric=False),
        overrides={re.escape(name): spec for name, spec in weights.items()},
    )
    make: Any = type(qmodel.model)
    twin_model = make(rngs=nnx.Rngs(0))
    nnx.update(twin_model, nnx.state(qmodel.model))
    twin = qjax.quantize(twin_model, recipe, images)
    known = qmodel.quantizers.named()
    twin.quantizers.write({name: known[name] for name in weights})
    twin.eval()
    fine = twin.qparams()
    _, codes = nnx.jit(lambda model, x: model.codes(x))(twin, images)
    found: Histograms = {}
    for name, qparams in qmodel.qparams().items():
        if name in codes:
            scale, zero_point = np.asarray(fine[name].scale), np.asarray(fine[name].zero_point)
            real = (np.asarray(codes[name]) - zero_point) * scale
            steps = real / np.asarray(qparams.scale) + np.asarray(qparams.zero_point)
            found[name] = (steps.ravel(), qparams.spec)
    return found
