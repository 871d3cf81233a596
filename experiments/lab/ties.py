"""Ties: how often a rounding meets exactly one half, and what each rule makes of it."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure

from qjax.contrib.lab.study import Measurement, Prediction, Settings, Study, Table, mean_band
from qjax.numerics import Multiplier, quantize_multiplier, requantize, rounding_right_shift

SHIFTS = tuple(range(1, 13))
ROUNDINGS = ("nearest_even", "nearest_up", "nearest_away", "toward_zero", "floor", "ceil")
DOMAINS = ("signed", "after relu")
BITS = tuple(range(1, 12))
"""Significant bits of a scale in [1/16, 1/8)."""
RULES = ("nearest_even", "single_round", "neon", "double_round")
RIGHT_SHIFT = 3
"""Of the real-valued scales, which lie in [2^-(r+1), 2^-r)."""
_CHANNELS = 4096


def bias_of_shift(rounding: str, shift: int, domain: str) -> float:
    """The mean of rounded(x / 2^s) - x / 2^s over whole periods of x, in LSB.

    A fraction k / 2^s is a tie for one k of 2^s. Ties apart, the nearest integer errs to both sides alike, so a rule
    that sends every tie up has the mean error 2^-s * 1/2. floor errs by -(2^s - 1) / 2^(s+1), the mean of k / 2^s.
    """
    tie, down = 2.0 ** -(shift + 1), 0.5 - 2.0 ** -(shift + 1)
    relu = domain == "after relu"
    return {
        "nearest_even": 0.0,
        "nearest_up": tie,
        "nearest_away": tie if relu else 0.0,
        "toward_zero": -down if relu else 0.0,
        "floor": -down,
        "ceil": down,
    }[rounding]


def samples(settings: Settings) -> int:
    """Products that are drawn with real-valued scales, a multiple of the channels."""
    return 2**24 if settings.full else 2**21


def predict(settings: Settings) -> Iterator[Prediction]:
    yield Prediction(
        "share of ties, all shifts: greatest departure from 2^-s", 0, 0, "every period holds 2^s fractions"
    )
    for rounding in ROUNDINGS:
        for domain in DOMAINS:
            why = "whole periods: no sampling error. " + _WHY[rounding]
            yield Prediction(_departure(rounding, domain), 0, 0, why)
    yield Prediction("nearest_up, s = 1: bias, LSB", 0.25, 0.25, "2^-(s+1), exact")
    yield Prediction("floor, s = 8: bias, LSB", -0.498046875, -0.498046875, "-(1/2 - 2^-(s+1)), exact")
    n, count = 2**8, samples(settings)
    second = (n * n - 1) / (6 * n * n)
    # Var(e^2) of a uniform fraction f: E f(1-f)(1-3f(1-f)) - (1/6)^2 = 1/15 - 1/36
    yield Prediction("stochastic, s = 8: bias, LSB", *mean_band(0, second**0.5, count), "unbiased; 5 standard errors")
    yield Prediction(
        "stochastic, s = 8: error variance, LSB^2",
        *mean_band(second, (1 / 15 - 1 / 36) ** 0.5, count),
        "E f(1-f) = (1 - 4^-s) / 6; 5 standard errors",
    )
    nearest = (n * n + 2) / (12 * n * n)
    yield Prediction("nearest_up, s = 8: mean squared error, LSB^2", nearest, nearest, "1/12 + 4^-s / 6, exact")
    yield Prediction(
        "scales of 1 to 11 bits: greatest departure of the share of ties from 2^-t",
        0,
        0,
        "e = m 2^-t with m odd has a tie where acc = 2^(t-1) modulo 2^t; whole periods",
    )
    yield Prediction(
        "real-valued scales: exact ties",
        0,
        0,
        f"such a scale has t = {31 + RIGHT_SHIFT} fraction bits or a few less, an accumulator 21 bits: about "
        f"{samples(settings) * 21 * 2.0 ** -(32 + RIGHT_SHIFT):.0e} ties expected",
    )
    yield Prediction(
        "real-valued scales: codes that half-up and half-even give differently", 0, 0, "no ties, no choice"
    )
    for rule in RULES:
        for domain in DOMAINS:
            tie = 2.0 ** -(RIGHT_SHIFT + 1)
            bias = {"neon": tie, "double_round": tie if domain == "after relu" else 0.0}.get(rule, 0.0)
            why = "no ties" if rule in ("nearest_even", "single_round") else _TWICE[rule]
            # a rounding to nearest has the mean square 1/12; one before it adds 4^-r / 12, the ties behind it 4^-r / 6
            spread = (1 / 12 + 4.0**-RIGHT_SHIFT / 4) ** 0.5
            yield Prediction(_real(rule, domain), *mean_band(bias, spread, count), why + "; 5 standard errors")


_WHY = {
    "nearest_even": "one half of the ties goes up, one half down",
    "nearest_up": "every tie goes up: 2^-(s+1)",
    "nearest_away": "ties away from zero: 0 where signs balance, 2^-(s+1) where all are positive",
    "toward_zero": "0 where signs balance, floor's where all are positive",
    "floor": "-(1/2 - 2^-(s+1))",
    "ceil": "1/2 - 2^-(s+1)",
}
_TWICE = {
    "neon": "the first rounding leaves an integer, whose shift by r meets ties again and sends them up: 2^-(r+1)",
    "double_round": "the same ties, away from zero: 2^-(r+1) where all are positive, 0 where signs balance",
}


def _departure(rounding: str, domain: str) -> str:
    return f"{rounding}, {domain}: greatest departure of the bias from the formula, LSB"


def _real(rule: str, domain: str) -> str:
    return f"real-valued scales, {rule}, {domain}: bias, LSB"


def measure(settings: Settings) -> Measurement:
    values: dict[str, float] = {}
    biases = {domain: shift_biases(domain) for domain in DOMAINS}
    shares = [tie_share(np.arange(-(2**15), 2**15), 1, shift) for shift in SHIFTS]
    found = max(abs(share - 2.0**-shift) for share, shift in zip(shares, SHIFTS, strict=True))
    values["share of ties, all shifts: greatest departure from 2^-s"] = found
    for domain in DOMAINS:
        for rounding in ROUNDINGS:
            pairs = zip(biases[domain][rounding], SHIFTS, strict=True)
            values[_departure(rounding, domain)] = max(abs(b - bias_of_shift(rounding, s, domain)) for b, s in pairs)
    values["nearest_up, s = 1: bias, LSB"] = biases["signed"]["nearest_up"][0]
    values["floor, s = 8: bias, LSB"] = biases["signed"]["floor"][SHIFTS.index(8)]
    values |= _stochastic(settings)
    by_bits = [tie_share(np.arange(2**15), 2 ** (bits - 1) + (bits > 1), 3 + bits) for bits in BITS]
    values["scales of 1 to 11 bits: greatest departure of the share of ties from 2^-t"] = max(
        abs(share - 2.0 ** -(3 + bits)) for share, bits in zip(by_bits, BITS, strict=True)
    )
    real, ties, differing = real_scales(settings)
    values["real-valued scales: exact ties"] = ties
    values["real-valued scales: codes that half-up and half-even give differently"] = differing
    values |= {_real(rule, domain): bias for (rule, domain), bias in real.items()}
    rows = [
        [s, share, *(biases["signed"][r][i] for r in ROUNDINGS)]
        for i, (s, share) in enumerate(zip(SHIFTS, shares, strict=True))
    ]
    tables = [
        Table("Right shifts, signed accumulators: bias in LSB", ("s", "share of ties", *ROUNDINGS), rows),
        Table(
            "Real-valued scales, the same products: bias in LSB",
            ("rule", *DOMAINS),
            [[rule, *(real[rule, domain] for domain in DOMAINS)] for rule in RULES],
        ),
    ]
    data = {"biases": biases, "by_bits": by_bits, "real": {f"{r}, {d}": b for (r, d), b in real.items()}}
    return Measurement(values, tables, data, _conclusion(values, samples(settings)))


def _conclusion(values: Mapping[str, float], count: int) -> str:
    return (
        "How much tie-breaking matters depends on the number of fractional bits in the scale. A shift by one bit "
        f"meets a tie every second time, so half-up is {values['nearest_up, s = 1: bias, LSB']:g} LSB too high on "
        "average. Every further bit of the shift or of the scale halves that bias.\n\n"
        f"With real-valued scales of 31 bits {values['real-valued scales: exact ties']:g} of {count:,} products were "
        "ties. Half-up and half-even differed in "
        f"{values['real-valued scales: codes that half-up and half-even give differently']:g} codes, so with such "
        "scales you may choose either. The choice matters for shifts, power-of-two scales, averages over 2 or 4 "
        "elements, and sums of tensors with equal scales.\n\n"
        "Rules that round twice are the exception, because they create ties of their own: the first rounding leaves "
        f"an integer, and shifting it by r = {RIGHT_SHIFT} bits meets ties like any power-of-two scale. NEON's two "
        f"instructions have a bias of {values[_real('neon', 'signed')]:+.4f} LSB. The bias of gemmlowp's is "
        f"{values[_real('double_round', 'signed')]:+.4f} on signed accumulators but "
        f"{values[_real('double_round', 'after relu')]:+.4f} after a ReLU, although every scale was real-valued.\n\n"
        "Stochastic rounding has no bias, but its variance of "
        f"{values['stochastic, s = 8: error variance, LSB^2']:.4f} LSB^2 is twice the "
        f"{values['nearest_up, s = 8: mean squared error, LSB^2']:.4f} of rounding to nearest."
    )


def shift_biases(domain: str) -> dict[str, list[float]]:
    """Per rounding: the bias for each of SHIFTS, over whole periods of every shift; exact, as the counts are 2^n."""
    x = np.arange(0 if domain == "after relu" else -(2**15), 2**15, dtype=np.int32)

    def bias(rounding: str, shift: int) -> float:
        rounded = rounding_right_shift(x, shift, rounding).astype(np.int64)
        return int(((rounded << shift) - x).sum()) / (x.size << shift)

    return {rounding: [bias(rounding, shift) for shift in SHIFTS] for rounding in ROUNDINGS}


def tie_share(acc: np.ndarray, multiplier: int, shift: int) -> float:
    """The share of acc * multiplier / 2^shift whose fraction is one half: half-up and half-down part there only."""
    product = (acc * multiplier).astype(np.int32)
    up = rounding_right_shift(product, shift, "nearest_up")
    # floor(x + 1/2) and ceil(x - 1/2) = -floor(-x + 1/2)
    return float(np.mean(up != -rounding_right_shift(-product, shift, "nearest_up")))


def _stochastic(settings: Settings) -> dict[str, float]:
    keys = jax.random.split(jax.random.key(settings.seed))
    x = jax.random.randint(keys[0], (samples(settings),), -(2**20), 2**20, np.int32)
    rounded = np.asarray(rounding_right_shift(x, 8, "stochastic", key=keys[1])).astype(np.int64)
    error = ((rounded << 8) - np.asarray(x)) / 2**8
    period = np.arange(2**8, dtype=np.int32)
    nearest = ((rounding_right_shift(period, 8, "nearest_up") << 8) - period) / 2**8
    return {
        "stochastic, s = 8: bias, LSB": float(error.mean()),
        "stochastic, s = 8: error variance, LSB^2": float((error**2).mean()),
        "nearest_up, s = 8: mean squared error, LSB^2": float((nearest**2).mean()),
    }


def real_scales(settings: Settings) -> tuple[dict[tuple[str, str], float], int, int]:
    """Bias by rule and domain, the number of exact ties, and of codes in which half-up and half-even differ.

    The exact product acc * M needs 21 + 31 bits: int64 holds it.
    """
    rng = np.random.default_rng(settings.seed)
    biases: dict[tuple[str, str], float] = {}
    ties = differing = 0
    for domain in DOMAINS:
        totals, count = dict.fromkeys(RULES, 0.0), 0
        for acc, scale in _batches(rng, samples(settings), 0 if domain == "after relu" else -(2**20)):
            m = quantize_multiplier(scale)
            product, t = acc.astype(np.int64) * m.multiplier, 31 - m.shift.astype(np.int64)
            ties += int(((product & ((1 << t) - 1)) == 1 << (t - 1)).sum())
            codes = {rule: _codes(acc, m, rule) for rule in RULES}
            differing += int((codes["nearest_even"] != codes["single_round"]).sum())
            for rule in RULES:
                totals[rule] += float((codes[rule] - product / 2.0**t).sum())
            count += acc.size
        biases |= {(rule, domain): totals[rule] / count for rule in RULES}
    return biases, ties, differing


def _batches(rng: np.random.Generator, count: int, low: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Accumulators int32 [rows, channels], uniform in [low, 2^20), and a scale per channel, as doubles."""
    rows = min(count // _CHANNELS, 512)
    for _ in range(count // (rows * _CHANNELS)):
        acc = rng.integers(low, 2**20, (rows, _CHANNELS), dtype=np.int32)
        yield acc, rng.uniform(2.0 ** -(RIGHT_SHIFT + 1), 2.0**-RIGHT_SHIFT, _CHANNELS)


def _codes(acc: np.ndarray, m: Multiplier, rule: str) -> np.ndarray:
    return np.asarray(requantize(acc, m, rule=rule, qmin=-(2**30), qmax=2**30 - 1)).astype(np.int64)


def draw(figure: Figure, data: Mapping[str, Any]) -> None:
    shifts, bits, rest = figure.subplots(1, 3, width_ratios=(1.2, 1, 1.1))
    marks = dict(zip(ROUNDINGS, "oDs^v>", strict=True))
    for rounding in ROUNDINGS:
        measured = data["biases"]["after relu"][rounding]
        line = shifts.plot(SHIFTS, measured, marks[rounding], markersize=5, label=rounding, alpha=0.8)[0]
        formula = [bias_of_shift(rounding, s, "after relu") for s in SHIFTS]
        shifts.plot(SHIFTS, formula, "-", color=line.get_color(), linewidth=0.8)
    shifts.set(xlabel="right shift s, bits", ylabel="bias, LSB", title="Shifts, sums ≥ 0 (lines: formulas)")
    shifts.set_xticks(SHIFTS[1::2])
    shifts.legend(fontsize=8, loc=(0.45, 0.54))
    bits.semilogy(BITS, data["by_bits"], "o", base=2, label="counted")
    bits.semilogy(BITS, [2.0 ** -(3 + b) for b in BITS], "-", base=2, linewidth=0.8, label="$2^{-t}$")
    bits.set(
        xlabel="significant bits of a scale in [1/16, 1/8)", ylabel="share of ties", title="One bit more halves them"
    )
    bits.set_xticks(BITS[::2])
    bits.legend()
    place = np.arange(len(RULES))
    for offset, domain in ((-0.2, "signed"), (0.2, "after relu")):
        rest.barh(place + offset, [data["real"][f"{rule}, {domain}"] for rule in RULES], 0.36, label=domain)
    rest.axvline(2.0 ** -(RIGHT_SHIFT + 1), color="black", linewidth=0.8, linestyle="--", label="$2^{-(r+1)}$")
    rest.set_yticks(place, RULES)
    rest.set(xlabel=f"bias, LSB, r = {RIGHT_SHIFT}", title="Real-valued scales")
    rest.legend(fontsize=8)


STUDY = Study(
    "ties",
    "Ties: when the tie-breaking rule matters",
    "A quantized network rounds after every sum, and rounding rules differ in what they do when a value lies "
    "exactly halfway between two codes. How often do such ties occur, what bias does each rule have, and when does "
    "the choice not matter?",
    "Right shifts are applied to every signed 16-bit accumulator, or to the nonnegative ones (after a ReLU). These "
    "ranges cover whole periods of the fraction, so the counts are exact and the predicted intervals have no width. "
    "The same holds for scales with few significant bits.\n\n"
    "Real-valued scales, one per channel, are drawn uniformly from 2^-4 to 2^-3 and multiply uniform 21-bit "
    "accumulators. Ties are counted in the exact 64-bit products, and errors are measured against the exact "
    "product.\n\n"
    "The kernels are `rounding_right_shift` and `requantize`. The rules `nearest_even` and `single_round` (half-up) "
    "round once, `neon` and `double_round` (gemmlowp) round twice.",
    predict,
    measure,
    draw,
    answer=(
        "Convert with your runtime's rule, and ties cannot cause a mismatch. If you design the arithmetic yourself, "
        "any tie-breaking will do with real-valued scales, because they almost never produce ties. With "
        "power-of-two scales, round half to even, because half-up adds a bias of a quarter of a step to a shift by "
        "one bit."
    ),
    command="python -m experiments ties",
)
