"""Stochastic rounding: what it is, and what it does to a network at inference and in training."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from experiments.lab.stochastic_network import Size, run_seed
from qjax.contrib.lab.study import Measurement, Prediction, Settings, Study, Table, binomial_band, mean_band
from qjax.numerics import QParams, QSpec, fake_quant, requantize, rounding_right_shift

BITS = 4
"""Of the right shift whose 16 fractions are drawn one by one."""
_VARIANCE = 1 / 15 - 1 / 36
"""Var(e^2) of a uniform fraction f: E f(1-f)(1-3f(1-f)) - (E f(1-f))^2."""


def samples(settings: Settings) -> int:
    """Draws in all."""
    return 2**23 if settings.full else 2**20


def size_of(settings: Settings) -> Size:
    """How much training."""
    return Size(8, 60, 16) if settings.full else Size(3, 25, 8)


def predict(settings: Settings) -> Iterator[Prediction]:
    count, averaged = samples(settings), size_of(settings).averaged
    yield Prediction("16 fractions: greatest |z| of the share that goes up", 0, 5, "P(up) = f; in standard errors")
    yield Prediction("fractions of 0 that move, codes", 0, 0, "P(up) = 0")
    why = "unbiased; error variance 1/6; 5 standard errors"
    yield Prediction("requantize: bias, LSB", *mean_band(0, 6**-0.5, count), why)
    why = "E f(1-f) = 1/6, twice the nearest integer's 1/12; 5 standard errors"
    yield Prediction("requantize: error variance, LSB^2", *mean_band(1 / 6, _VARIANCE**0.5, count), why)
    for name in ("requantize", "fake_quant"):
        why = "E min(f, 1-f) = 1/4; 5 standard errors"
        yield Prediction(f"{name}: share that is not the nearest", *binomial_band(1 / 4, count), why)
        why = "E 2f(1-f) = 1/3; 5 standard errors"
        yield Prediction(f"{name}, two keys: share that differs", *binomial_band(1 / 3, count), why)
        yield Prediction(f"{name}, the same key twice: codes that differ", 0, 0, "the key decides everything")
    why = "twice the error variance is half a bit (a bit is a factor of 4), so it lies between b and b - 1 bits"
    for bits in (4, 3):
        yield Prediction(_lost(bits), 0, 1, why)
    why = "a bit less multiplies the points lost by 5 or so, half a bit by 2.3: 15 lost points become 35"
    yield Prediction("2 bits, inference: points that stochastic rounding loses against nearest", 5, 50, why)
    why = f"the noise of {averaged} draws is {averaged}/2 times less than that of nearest, apart from ReLU and clipping"
    yield Prediction(f"2 bits, inference: points that the mean of {averaged} draws gains over one", 3, 60, why)
    why = "no effect expected at 4 bits; 3 standard deviations of a mean of 3 paired differences (0.65 points each run)"
    yield Prediction("4 bits, trained: stochastic less nearest, points", -1.6, 1.6, why)
    why = "it trains with more noise than it is deployed with; what that costs is a guess: less than half of 15 points"
    yield Prediction("2 bits, trained: stochastic less nearest, points", -7.5, 1, why)
    yield Prediction("deployed graph, 2 bits: outputs that are not the exact forward's", 0, 0, "both round to nearest")


def _lost(bits: int) -> str:
    return f"{bits} bits, inference: points that stochastic rounding loses, of those that a bit less loses"


def measure(settings: Settings) -> Measurement:
    values, shares = arithmetic(settings.seed, samples(settings))
    size = size_of(settings)
    runs = [run_seed(settings.seed + i, size, deploy=i == 0) for i in range(size.seeds)]
    values["deployed graph, 2 bits: outputs that are not the exact forward's"] = runs[0].pop("outputs that differ")
    mean = {name: float(np.mean([run[name] for run in runs])) for name in runs[0]}

    def lost(bits: int, what: str = "stochastic") -> float:
        return mean[f"{bits} bits, inference, nearest"] - mean[f"{bits} bits, inference, {what}"]

    for bits in (4, 3):
        step = mean[f"{bits} bits, inference, nearest"] - mean[f"{bits - 1} bits, inference, nearest"]
        values[_lost(bits)] = lost(bits) / step if step else float("nan")
    together = f"mean of {size.averaged} draws"
    values["2 bits, inference: points that stochastic rounding loses against nearest"] = lost(2)
    values[f"2 bits, inference: points that the {together} gains over one"] = lost(2) - lost(2, together)
    for bits in (4, 2):
        difference = mean[f"{bits} bits, trained, stochastic"] - mean[f"{bits} bits, trained, nearest"]
        values[f"{bits} bits, trained: stochastic less nearest, points"] = difference
    rows = [[name, value, " ".join(f"{run[name]:.1f}" for run in runs)] for name, value in mean.items()]
    table = Table("Accuracy on 500 digits, percent", ("run", "mean", "per seed"), rows)
    data = {"shares": shares, "accuracy": mean, "together": together}
    return Measurement(values, [table], data, _conclusion(values, mean, together))


def _conclusion(values: Mapping[str, float], mean: Mapping[str, float], together: str) -> str:
    def at(bits: int, what: str) -> str:
        return f"{mean[f'{bits} bits, {what}']:.1f}"

    return (
        f"Stochastic rounding is unbiased ({values['requantize: bias, LSB']:+.5f} LSB) and twice as noisy as "
        f"rounding to nearest ({values['requantize: error variance, LSB^2']:.4f} LSB^2). "
        f"{values['requantize: share that is not the nearest']:.1%} of the codes are not the nearest ones.\n\n"
        "A single run at inference only adds this noise. The accuracy of a network quantized after training falls "
        f"from {at(4, 'inference, nearest')} to {at(4, 'inference, stochastic')} percent at 4 bits. At 3 bits it "
        f"falls from {at(3, 'inference, nearest')} to {at(3, 'inference, stochastic')}. At 2 bits it falls from "
        f"{at(2, 'inference, nearest')} to {at(2, 'inference, stochastic')}. Removing a bit costs more: at 4 bits "
        f"stochastic rounding loses {values[_lost(4)]:.2f} of what one bit less loses. At 3 bits it loses "
        f"{values[_lost(3)]:.2f} of that. The noise of separate draws averages out, whereas the error of rounding to "
        f"nearest does not. The {together} reaches {at(2, f'inference, {together}')} percent at 2 bits, for as many "
        "times the work.\n\n"
        "The last comparison trains with stochastic rounding and deploys with rounding to nearest. At 4 bits the "
        f"network reaches {at(4, 'trained, stochastic')} percent, and {at(4, 'trained, nearest')} when trained with "
        f"rounding to nearest. At 2 bits it reaches {at(2, 'trained, stochastic')} and {at(2, 'trained, nearest')} "
        "percent. These are means over few seeds, and one image is 0.2 points."
    )


def arithmetic(seed: int, count: int) -> tuple[dict[str, float], list[float]]:
    """The values of the predictions about numbers, and the share that goes up of each of the 16 fractions."""
    keys = jax.random.split(jax.random.key(seed), 5)
    fractions, each = 2**BITS, count // 2**BITS
    x = np.repeat(np.arange(fractions, dtype=np.int32), each)
    up = np.asarray(rounding_right_shift(x, BITS, "stochastic", key=keys[0])).reshape(fractions, each)
    shares = up.mean(1)
    f = np.arange(1, fractions) / fractions
    values: dict[str, float] = {
        "16 fractions: greatest |z| of the share that goes up": float(
            np.max(np.abs(shares[1:] - f) / (f * (1 - f) / each) ** 0.5)
        ),
        "fractions of 0 that move, codes": int(np.count_nonzero(up[0])),
    }
    rng = np.random.default_rng(seed)
    acc, scale = rng.integers(-(2**20), 2**20, (count // 1024, 1024), dtype=np.int32), rng.uniform(0.01, 0.02, 1024)

    def codes(rule: str, key: jax.Array | None = None) -> np.ndarray:
        wide = {"qmin": -(2**30), "qmax": 2**30 - 1}
        return np.asarray(requantize(acc, scale, rule=rule, key=key, **wide)).astype(np.int64)

    drawn = codes("stochastic", keys[1])
    error = drawn - acc * scale
    values["requantize: bias, LSB"] = float(error.mean())
    values["requantize: error variance, LSB^2"] = float((error**2).mean())
    values |= _draws(
        "requantize", drawn, codes("stochastic", keys[1]), codes("stochastic", keys[2]), codes("nearest_even")
    )

    params = QParams(jnp.float32(1), jnp.int32(0), QSpec(bits=16))
    # far from both ends, and 2^10 fractions per step: as good as uniform
    reals = jax.random.randint(keys[3], (count,), -(2**20), 2**20).astype(jnp.float32) / 2**10

    def steps(key: jax.Array) -> jax.Array:
        return fake_quant(reals, params, rounding="stochastic", key=key)

    values |= _draws("fake_quant", steps(keys[4]), steps(keys[4]), steps(keys[0]), fake_quant(reals, params))
    return values, [float(share) for share in shares]


def _draws(name: str, first: Any, again: Any, other: Any, nearest: Any) -> dict[str, float]:
    return {
        f"{name}: share that is not the nearest": float(np.mean(first != nearest)),
        f"{name}, two keys: share that differs": float(np.mean(first != other)),
        f"{name}, the same key twice: codes that differ": int(np.count_nonzero(first != again)),
    }


def draw(figure: Figure, data: Mapping[str, Any]) -> None:
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.3))
    f = np.arange(2**BITS) / 2**BITS
    left.plot(f, data["shares"], "o", label="stochastic, measured")
    left.plot([0, 1], [0, 1], "-", linewidth=0.8, color="C0", label="P(up) = f")
    left.step(f, f > 0.5, "--", where="mid", color="C1", label="nearest, ties to even")
    left.set(xlabel="fraction f of a step", ylabel="share that is rounded up", title="One number")
    left.legend(fontsize=9, loc="upper left")
    kinds = ("inference, nearest", "inference, stochastic", f"inference, {data['together']}", "trained, nearest")
    kinds = (*kinds, "trained, stochastic")
    for index, kind in enumerate(kinds):
        bits = [b for b in (4, 3, 2) if f"{b} bits, {kind}" in data["accuracy"]]
        place = [(4, 3, 2).index(b) + (index - 2) * 0.17 for b in bits]
        bars = right.bar(place, [data["accuracy"][f"{b} bits, {kind}"] for b in bits], 0.16, label=kind)
        right.bar_label(bars, fmt="%.0f", fontsize=8)
    right.axhline(data["accuracy"]["float"], color="black", linewidth=0.8, linestyle=":", label="float32")
    right.set_xticks(range(3), ["4 bits", "3 bits", "2 bits"])
    right.set(
        ylabel="accuracy on the digits, %", title="A network (64-48-48-10)", ylim=(50, 115), yticks=range(50, 101, 10)
    )
    right.legend(fontsize=7, ncols=3, loc="upper center")


STUDY = Study(
    "stochastic",
    "Stochastic rounding at inference and in training",
    "Stochastic rounding goes up with a probability equal to the fraction (Gupta et al. 2015, arXiv 1502.02551). Do "
    "the kernels do that, what does it cost at inference, and does a network trained with it perform better when "
    "deployed?",
    "First we test the kernels on numbers: the 16 fractions of a shift by 4, products with real-valued scales under "
    "the rule `stochastic`, and `fake_quant`.\n\n"
    "Then we test a perceptron on scikit-learn's digits (64-48-48-10) with every layer at 4, 3 or 2 bits. It is "
    "quantized after training and run with either rounding of weights and activations. Stochastic rounding runs "
    "with several keys, and also with the scores averaged over 16. The perceptron is also trained further with "
    "either rounding in the forward pass (`qjax.training.stochastic_forward` with a key per step), and evaluated as "
    "it is deployed, with rounding to nearest. For the first seed, the integer graph is compared with the exact "
    "forward. There are 500 test images, and the last epoch counts.",
    predict,
    measure,
    draw,
    answer=(
        "Round to nearest at inference, because a single stochastic run only adds noise. If you can afford to "
        "average many runs, stochastic rounding recovers accuracy at 2 and 3 bits. Do not train with it for a "
        "deployment that rounds to nearest: that did not help here."
    ),
    command="python -m experiments stochastic",
)
