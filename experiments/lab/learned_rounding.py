"""Rounding to nearest, at random, and learned: what post-training quantization gains by choosing up or down."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from flax import nnx
from matplotlib.figure import Figure

import qjax
from experiments.data import Digits, digits
from experiments.lab.roundings import OneLayer, patches, penalty
from experiments.models import CNN
from experiments.training import Schedule, accuracy, one_hot, scores, train
from qjax.contrib.lab.study import Measurement, Prediction, Settings, Study, Table

WAYS = ("nearest", "bias correction", "AdaRound", "AdaRound, bias correction")
DRAWS = 1000
LARGEST = "convs/2/kernel"

WORSE = "layers whose error AdaRound made greater, calibration data"
LAYERS = "gain of AdaRound over nearest in a layer's error, mean over layers, dB"
OUTPUT = "gain of AdaRound over nearest in the SQNR of class scores, test images, mean over runs, dB"
BIAS = "gain of bias correction over nearest in the SQNR of class scores, test images, mean over runs, dB"
BOTH = "gain of bias correction after AdaRound over AdaRound alone, the same, dB"
LEFT = "greatest mean error of a channel after bias correction, as a part of the layer's greatest before"
ACCURACY = "test accuracy of AdaRound minus nearest, mean over runs"
RANDOM = f"squared error of {LARGEST} rounded at random over rounded to nearest, dB"
LUCKY = "first layer: share of random roundings with less error than nearest, mean over channels"
OPTIMUM = "first layer: error of AdaRound over the least of all 2^9 roundings of each channel, dB"


def _runs(settings: Settings) -> list[tuple[int, int]]:
    """(bits of weights, seed)."""
    seeds = range(settings.seed, settings.seed + (2 if settings.full else 1))
    return [(bits, seed) for bits in ((4, 3, 2) if settings.full else (4,)) for seed in seeds]


def predict(settings: Settings) -> Sequence[Prediction]:
    """From the quadratic form that a layer's error is."""
    # two models that are equally good and disagree on 4% of the images
    noise = 5 * (0.04 / (500 * len(_runs(settings)))) ** 0.5
    mean = "a layer's error is d^T G d, G the second moment of its inputs. After a ReLU of a normal variable the mean "
    mean += (
        "alone accounts for E[x]^2 / E[x^2] = 1/pi of G's trace; choosing ups and downs so that d cancels there gains "
    )
    mean += "10 log10(1 / (1 - 1/pi)) = 1.66 dB and more where inputs are correlated"
    worth = "above: 12 dB is what two more bits would give"
    channels = 5 * 0.28 / 16**0.5
    return (
        Prediction(WORSE, 0, 0, "exact: a channel uses the learned codes only if its error is smaller"),
        Prediction(LAYERS, 1.66, 12, f"{mean}; {worth}"),
        Prediction(
            OUTPUT, 1.66, 12, f"as for layers, if what is learned on 1,024 images generalises to others; {worth}"
        ),
        Prediction(
            BIAS,
            -0.1,
            6.02,
            "squared error is variance plus squared mean, and the mean goes (Nagel et al. 2019); below: a mean that is "
            "that of the calibration data; above: it would be three quarters of the error, as much as one more bit",
        ),
        Prediction(BOTH, -1, 1, "AdaRound's objective contains the mean error, so little of it is left to correct"),
        Prediction(
            LEFT, 0, 0.01, "zero, apart from float32 and the rounding of the bias to whole steps of the accumulator"
        ),
        Prediction(ACCURACY, -noise, 0.5, "not lower, by 5 standard errors of equal models that disagree on 4%"),
        Prediction(
            RANDOM,
            10 * np.log10(2) - 0.4,
            10 * np.log10(2) + 0.4,
            "a uniform fraction f has E[f (1 - f)] = 1/6 at random, E[min(f, 1 - f)^2] = 1/12 to nearest; width: 5 "
            "standard errors of 9,216 weights (0.27) and fractions that are not quite uniform",
        ),
        Prediction(
            LUCKY,
            0.005,
            0.392 + channels,
            "Nagel et al. 2020, figure 1: some random roundings beat nearest. If G had one direction only, the share "
            "of a channel would be 2/pi arctan(sqrt(1/2)) = 0.392 in the mean, with white inputs 0; width: 5 standard "
            "errors of 16 channels whose shares are spread by 0.28",
        ),
        Prediction(OPTIMUM, -1e-3, 1.0, "below 0 is impossible (but for float32); gradient descent may miss the best"),
    )


def _sqnr(reals: np.ndarray, found: np.ndarray) -> float:
    """dB, in float64."""
    reals, found = reals.astype(np.float64), found.astype(np.float64)
    return float(10 * np.log10(np.sum(reals**2) / np.sum((reals - found) ** 2)))


def _run(model: CNN, bits: int, data: Digits, steps: int) -> dict[str, Any]:
    """One model at one number of bits, rounded in all four ways."""
    batches = [data.train_images[i : i + 256] for i in range(0, 1024, 256)]
    reals = np.asarray(scores(model, data.test_images))
    nearest = qjax.quantize(model, qjax.Recipe(weights=qjax.QSpec(bits=bits, axis=-1)), batches[0])
    qjax.calibrate(nearest, batches)
    nearest.eval()
    models = {name: nnx.clone(nearest) for name in WAYS}
    first = qjax.training.correct_bias(models["bias correction"], batches)
    # correcting once more finds what the first time has left
    again = qjax.training.correct_bias(nnx.clone(models["bias correction"]), batches, reference=nearest)
    learned = qjax.training.adaround(models["AdaRound"], batches, steps=steps)
    nnx.update(models["AdaRound, bias correction"], nnx.state(models["AdaRound"]))
    qjax.training.correct_bias(models["AdaRound, bias correction"], batches, reference=nearest)
    found = {name: np.asarray(scores(one, data.test_images)) for name, one in models.items()}
    return {
        "models": models,
        "float": accuracy(reals, data.test_labels),
        "accuracy": {name: accuracy(one, data.test_labels) for name, one in found.items()},
        "sqnr": {name: _sqnr(reals, one) for name, one in found.items()},
        "layers": learned.layers,
        "left": max(np.max(np.abs(again.shifts[n][1])) / np.max(np.abs(d)) for n, (_, d) in first.shifts.items()),
    }


def first_layer(nearest: Any, learned: Any, images: np.ndarray, seed: int) -> dict[str, Any]:
    """dB against nearest of random roundings, of AdaRound and of the best; and how often random ones are better."""
    name, rng = "convs/0/kernel", np.random.default_rng(seed)
    kernel = np.asarray(nearest.model.convs[0].kernel[...], np.float64).reshape(9, -1)
    grid = nearest.qparams()[name]
    layer = OneLayer.of(
        patches(images),
        patches(np.asarray(qjax.fake_quant(images, nearest.qparams()["input"]))),
        kernel,
        np.asarray(grid.scale, np.float64),
        grid.spec.qmin,
        grid.spec.qmax,
    )
    codes = [np.asarray(qjax.training.codes_of(one, [name])[name]).reshape(kernel.shape) for one in (nearest, learned)]
    base, ada = (layer.errors(c) for c in codes)
    drawn = layer.errors(layer.random(DRAWS, rng))

    def decibels(error: Any) -> Any:
        return 10 * np.log10(np.sum(error, -1) / np.sum(base))

    return {
        "draws": decibels(drawn),
        "AdaRound": float(decibels(ada)),
        "best": float(decibels(layer.best())),
        "lucky": float(np.mean(drawn < base)),
    }


def measure(settings: Settings) -> Measurement:
    """Every run, then the first layer of the first run by itself."""
    data = digits()
    models: dict[int, CNN] = {}
    runs: dict[tuple[int, int], dict[str, Any]] = {}
    for bits, seed in _runs(settings):
        if seed not in models:
            models[seed] = CNN(rngs=nnx.Rngs(seed))
            schedule = Schedule(30 if settings.full else 12)
            train(models[seed], data.train_images, one_hot(data.train_labels), schedule, seed=seed)
        runs[bits, seed] = _run(models[seed], bits, data, 1000 if settings.full else 500)
    one = next(iter(runs.values()))
    quantized = one["models"]
    alone = first_layer(quantized["nearest"], quantized["AdaRound"], data.train_images[:1024], settings.seed)
    grid = quantized["nearest"].qparams()[LARGEST]
    # output channels are the last axis of a flax kernel
    steps = np.asarray(quantized["nearest"].model.convs[2].kernel[...], np.float64) / np.asarray(grid.scale, np.float64)
    layers = [layer for run in runs.values() for layer in run["layers"]]

    def gain(name: str, over: str, what: str = "sqnr") -> float:
        return float(np.mean([run[what][name] - run[what][over] for run in runs.values()]))

    values = {
        WORSE: float(sum(layer.learned > layer.nearest for layer in layers)),
        LAYERS: float(np.mean([10 * np.log10(layer.nearest / layer.learned) for layer in layers])),
        OUTPUT: gain("AdaRound", "nearest"),
        BIAS: gain("bias correction", "nearest"),
        BOTH: gain("AdaRound, bias correction", "AdaRound"),
        LEFT: float(max(run["left"] for run in runs.values())),
        ACCURACY: gain("AdaRound", "nearest", "accuracy"),
        RANDOM: penalty(steps, grid.spec.qmin, grid.spec.qmax, 20, np.random.default_rng(settings.seed)),
        LUCKY: alone["lucky"],
        OPTIMUM: alone["AdaRound"] - alone["best"],
    }
    named = {f"W{bits}A8, seed {seed}": run for (bits, seed), run in runs.items()}
    whole = [
        (name, way, f"{100 * run['accuracy'][way]:.1f}", f"{run['sqnr'][way]:.2f}")
        for name, run in named.items()
        for way in WAYS
    ]
    each = [
        (name, layer.name, *(f"{_layer(layer, error):.2f}" for error in (layer.nearest, layer.learned)), changed(layer))
        for name, run in named.items()
        for layer in run["layers"]
    ]
    tables = (
        Table(
            f"Digits, float accuracy {100 * one['float']:.1f}%",
            ("run", "rounding", "test accuracy, %", "SQNR of class scores, dB"),
            whole,
        ),
        Table(
            "Layers on calibration data",
            ("run", "weight", "nearest, dB", "AdaRound, dB", "codes that are not the nearest"),
            each,
        ),
    )
    picture = {
        "first": alone,
        "runs": {name: run["sqnr"] for name, run in named.items()},
        "layers": {layer.name: [_layer(layer, layer.nearest), _layer(layer, layer.learned)] for layer in one["layers"]},
        "run": next(iter(named)),
    }
    return Measurement(values, tables, picture, _conclusion(values, one, alone))


def changed(layer: qjax.training.RoundedLayer) -> str:
    """How many codes, and their share."""
    return f"{layer.changed} of {layer.weights} ({100 * layer.changed / layer.weights:.0f}%)"


def _layer(layer: qjax.training.RoundedLayer, error: float) -> float:
    return float(10 * np.log10(layer.signal / error))


def _conclusion(values: Mapping[str, float], run: Mapping[str, Any], alone: Mapping[str, Any]) -> str:
    moved = sum(layer.changed for layer in run["layers"]) / sum(layer.weights for layer in run["layers"])
    beat = float(np.mean(np.asarray(alone["draws"]) < 0))
    points = f"{100 * values[ACCURACY]:+.1f} points"
    return (
        "AdaRound rounds each weight up or down so that the layer's output has the least error. It gains "
        f"{values[OUTPUT]:.1f} dB of SQNR in the class scores and {values[LAYERS]:.1f} dB in the average layer, with "
        f"the same scales and the same cost at run time. In the first run, {100 * moved:.0f}% of the codes are not "
        f"the nearest ones. Bias correction alone gains {values[BIAS]:.1f} dB, and after AdaRound "
        f"{values[BOTH]:+.1f} dB. Accuracy changes by {points}, where one image of 500 is 0.2. On this easy task "
        "accuracy hardly reflects the gain in SQNR.\n\n"
        f"Rounding at random costs {values[RANDOM]:.2f} dB in the weights. Nevertheless, {100 * beat:.1f}% of the "
        f"random roundings of the whole first layer are better than nearest, and {100 * values[LUCKY]:.0f}% in the "
        "average channel. The first layer is small enough to try all roundings, and AdaRound is within "
        f"{values[OPTIMUM]:.2f} dB of the best."
    )


def draw(figure: Figure, data: Mapping[str, Any]) -> None:
    """Random roundings of the first layer, layers before and after, and the class scores."""
    left, middle, right = figure.subplots(1, 3)
    first = data["first"]
    left.hist(first["draws"], bins=40, color="0.7", label=f"{len(first['draws'])} random roundings")
    left.axvline(0, color="C0", label="nearest")
    left.axvline(first["AdaRound"], color="C1", label="AdaRound")
    left.axvline(first["best"], color="black", ls="--", label="best of all")
    left.set(
        xlabel="error of the first layer against nearest, dB", ylabel="roundings", title=f"First layer, {data['run']}"
    )
    left.margins(x=0.08)
    left.set_ylim(0, 1.3 * left.get_ylim()[1])
    left.legend(fontsize=8, loc="upper right")
    names, places = list(data["layers"]), np.arange(len(data["layers"]))
    for i, label in enumerate(("nearest", "AdaRound")):
        middle.bar(places + 0.4 * (i - 0.5), [data["layers"][n][i] for n in names], 0.4, label=label)
    middle.set_xticks(places, [n.removesuffix("/kernel") for n in names])
    middle.set(ylabel="SQNR of the layer's output, dB", title="Layers, calibration data")
    middle.set_ylim(0, 1.25 * max(max(pair) for pair in data["layers"].values()))
    middle.legend(fontsize=8, loc="upper center", ncols=2)
    runs = list(data["runs"])
    for i, way in enumerate(WAYS):
        right.bar(np.arange(len(runs)) + 0.2 * (i - 1.5), [data["runs"][r][way] for r in runs], 0.2, label=way)
    right.set_xticks(np.arange(len(runs)), [r.replace(", seed ", "\nseed ") for r in runs])
    right.set(ylabel="SQNR of class scores, dB", title="Whole network, test images")
    right.set_ylim(0, 1.35 * max(max(ways.values()) for ways in data["runs"].values()))
    right.legend(fontsize=8, loc="upper center")


STUDY = Study(
    name="learned_rounding",
    title="Nearest or learned rounding of weights",
    question=(
        "Rounding each weight to the nearest code minimises the error of the weights, but does it minimise the "
        "error of what the layer computes? And what do learned rounding (AdaRound, Nagel et al. 2020, arXiv "
        "2004.10568) and bias correction (Nagel et al. 2019, arXiv 1906.04721) achieve with the same scales?"
    ),
    method=(
        "A convolutional network on 8x8 digits is trained in float and quantized after training. Weights have few "
        "bits with a scale per output channel, activations have 8 bits, and 1,024 training images are used for "
        "calibration. With the same scales we compare nearest rounding, `qjax.training.correct_bias`, "
        "`qjax.training.adaround`, and both. SQNR is that of the class scores on the 500 test images against the "
        "float network.\n\n"
        f"For the first convolution (9 weights a channel) we also try {DRAWS} random roundings, up with the "
        "probability of the fractional part, and all 512 roundings of each channel. Their errors are computed in "
        "float64 from the second moments of the layer's inputs."
    ),
    predict=predict,
    measure=measure,
    draw=draw,
    answer=(
        "If 4-bit weights lose accuracy, try `qjax.training.adaround` on calibration data before you train. Use "
        "`qjax.training.correct_bias` where you do not use AdaRound, because after AdaRound it adds little. Neither "
        "changes the scales or the cost at run time."
    ),
    command="python -m experiments learned_rounding",
)
