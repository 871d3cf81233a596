"""One rounding or two: how often a high product that is rounded before its shift gives another code."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.data import digits
from experiments.lab.digit_sums import Accumulators, distinct, quantized_digits
from qjax import convert
from qjax.contrib.lab.study import Measurement, Prediction, Settings, Study, Table, binomial_band
from qjax.numerics import get_rule, requantize

SHIFTS = tuple(range(13))
MAP_SHIFT = 4
CLASSES = {
    "one": (
        "nearest_even",
        "nearest_away",
        "single_round",
        "tvm_tonearest",
        "tvm",
        "ruy",
        "tflite_arm_gemm",
        "xnnpack_rndnu",
        "tosa_single",
    ),
    "two, away": ("double_round", "tosa_double"),
    "two, up": ("neon", "tflite_depthwise_neon", "tflite_arm_depthwise", "tflite_arm_depthwise_3x3"),
    "15 bits": ("int16x8",),
}
"""The library's fixed-point rules by what is known of them: how often they round, and where the second sends ties."""
LEFT_OUT = ("nvdla",)
"""Rules of a scale with 15 bits, as `int16x8`, but with ties away from zero: a class without a prediction."""
RULES = tuple(rule for rules in CLASSES.values() for rule in rules)
_LEAST_EVENTS = 1000
"""Differing codes that the network is expected to show at least: 1,797 images give some 10^6 distinct accumulators, and
layers of 8 bits shift by about 9."""


def class_of(rule: str) -> str:
    """The class of a rule."""
    return next(name for name, rules in CLASSES.items() if rule in rules)


def differing_share(first: str, second: str, shift: int) -> float:
    """P(the codes differ) of two classes under a right shift by `shift` >= 1, for uniform fractions of either sign.

    With h = floor(p / 2^31 + 1/2), two roundings part from one where h is a tie of the shift (2^-r of all h) and
    p / 2^31 lies on the other side of it: half of these. The two kinds of two roundings part where h is a negative tie.
    A multiplier of 15 bits is off by 2^14 of 2^31 on average, so outputs of 8 bits (64 on average for the greatest
    multiplier) move by 64 * 2^-17.
    """
    if first == second:
        return 0.0
    if "15 bits" in (first, second):
        return 2.0**-11
    return 2.0 ** -(shift + 1)


def samples(settings: Settings) -> int:
    """Products per right shift."""
    return 2**23 if settings.full else 2**20


def predict(settings: Settings) -> Iterator[Prediction]:
    count = samples(settings)
    yield Prediction(
        "double_round against single_round, r = 0: share that differs", 0, 0, "there is no second rounding"
    )
    for shift in SHIFTS[1:]:
        why = "2^-(r+1): h is a tie (2^-r), p on its other side (1/2); 5 standard errors"
        yield Prediction(_share(shift), *binomial_band(2.0 ** -(shift + 1), count), why)
    yield Prediction("neon against single_round, r = 1..12: greatest |z|", 0, 5, "the same share; in standard errors")
    yield Prediction("greatest difference, steps", 1, 1, "a rounding moves h by 1/2 at most, so the code by one step")
    yield Prediction("neon below single_round, codes", 0, 0, "its ties go up, so it only ever errs upward")
    yield Prediction("double_round nearer to zero than single_round, codes", 0, 0, "its ties go away from zero")
    yield Prediction(
        "pairs within a class: greatest share that differs", 0, 0, "the same function where nothing is a tie"
    )
    why = f"2^-{MAP_SHIFT + 1} for each of the pairs; in standard errors"
    yield Prediction("pairs of one rounding and two, or of two kinds of two: greatest |z|", 0, 5, why)
    low, high = binomial_band(2.0**-11, count)
    why = "64 * 2^-17, its multiplier's 15 bits; 5 standard errors, and 0.2% as multipliers and codes are discrete"
    yield Prediction("int16x8 against one rounding: share that differs", low * 0.998, high * 1.002, why)
    spread = 5 / _LEAST_EVENTS**0.5
    for rule in ("double_round", "neon"):
        why = f"sum of 2^-(r+1) over distinct accumulators; 5 standard errors of the least expected, {_LEAST_EVENTS}"
        yield Prediction(_real(rule), 1 - spread, 1 + spread, why)
    yield Prediction("digits network: greatest difference, steps", 1, 1, "as above")
    why = "no more ties than among uniform accumulators: none"
    yield Prediction("digits network, pairs within a class: greatest share that differs", 0, 0, why)


def _share(shift: int) -> str:
    return f"double_round against single_round, r = {shift}: share that differs"


def _real(rule: str) -> str:
    return f"digits network, {rule} against single_round: codes that differ, of those predicted"


def measure(settings: Settings) -> Measurement:
    rng, count = np.random.default_rng(settings.seed), samples(settings)
    values: dict[str, float] = {}
    shares: dict[str, list[float]] = {"double_round": [], "neon": []}
    steps = below = nearer = 0
    for shift in SHIFTS:
        once, away, up = codes_of(("single_round", "double_round", "neon"), *uniform(rng, count, shift, 2**20))
        for rule, codes in (("double_round", away), ("neon", up)):
            shares[rule].append(float(np.mean(codes != once)))
            steps = max(steps, int(np.abs(codes - once).max()))
        below += int((up < once).sum())
        nearer += int((np.abs(away) < np.abs(once)).sum())
    values["double_round against single_round, r = 0: share that differs"] = shares["double_round"][0]
    values |= {_share(shift): shares["double_round"][shift] for shift in SHIFTS[1:]}
    values["neon against single_round, r = 1..12: greatest |z|"] = max(
        _score(shares["neon"][shift], 2.0 ** -(shift + 1), count) for shift in SHIFTS[1:]
    )
    values["greatest difference, steps"] = steps
    values["neon below single_round, codes"] = below
    values["double_round nearer to zero than single_round, codes"] = nearer
    drawn = pair_shares(codes_of(RULES, *uniform(rng, count, MAP_SHIFT, 2 ** (7 + MAP_SHIFT))))
    values |= _pairs(drawn, count)
    nodes = _network(settings)
    rows, found, real = _real_rows(nodes)
    values |= found
    tables = [
        Table(
            "Uniform accumulators: share of codes that differ from one rounding",
            ("r", "2^-(r+1)", "double_round", "neon"),
            [[r, 2.0 ** -(r + 1) if r else 0, shares["double_round"][r], shares["neon"][r]] for r in SHIFTS],
        ),
        Table(
            "Digits network, distinct accumulators",
            ("node", "right shifts", "accumulators", "predicted", "double_round", "neon"),
            rows,
        ),
    ]
    data = {"shares": shares, "uniform": drawn, "real": real}
    functions = len({tuple(share == 0 for share in row) for row in drawn})
    return Measurement(values, tables, data, _conclusion(values, rows, functions))


def _conclusion(values: Mapping[str, float], rows: Sequence[Sequence[Any]], functions: int) -> str:
    predicted, double, accs = (sum(row[i] for row in rows) for i in (3, 4, 2))
    return (
        f"Two roundings never differ from one by more than {values['greatest difference, steps']:g} step. They "
        f"change {values[_share(1)]:.2%} of the codes where r is 1, but only {values[_share(10)]:.3%} where it is "
        f"ten. The last table shows by how many bits the layers of the digits network shift. Of its {accs:,} "
        f"distinct accumulators, gemmlowp's two roundings changed {double:,}, where {predicted:.0f} were predicted. "
        "The change is therefore rare in an 8-bit network, but it is not noise, because all these codes are off in "
        "the same direction, away from zero or upward.\n\n"
        f"On these products the {len(RULES)} rules reduce to {functions} different functions. All rules that round "
        "once agreed, because real-valued scales produce no ties. gemmlowp's two roundings equalled TOSA's "
        "DOUBLE_ROUND, which approximates them. NEON's pair differs from both when the first rounding produces a "
        "negative tie. The 15-bit multiplier of `int16x8` represents a slightly different scale, which changes "
        f"{values['int16x8 against one rounding: share that differs']:.3%} of the 8-bit codes."
    )


def uniform(rng: np.random.Generator, count: int, shift: int, bound: int) -> tuple[np.ndarray, np.ndarray]:
    """Accumulators int32 in [-bound, bound), and for each a float32 scale in [2^-(r+1), 2^-r); both [n]."""
    scale = rng.uniform(0.5, 1, count).astype(np.float32)
    # a float32 just below 1 may have been rounded to 1, which belongs to the next shift
    scale = np.minimum(scale, np.nextafter(np.float32(1), np.float32(0)))
    return rng.integers(-bound, bound, count, dtype=np.int32), scale * np.float32(2.0**-shift)


def codes_of(rules: Sequence[str], acc: np.ndarray, scale: np.ndarray) -> list[np.ndarray]:
    """Codes int64 under each rule, before any clamp to 8 bits.

    acc and scale are laid out in rows of 16: some rules ask how many channels there are (a multiple of 8 here) and
    whether there is one row only.
    """
    rows, factors = acc.reshape(-1, 16), scale.reshape(-1, 16)
    prepared: dict[Any, Any] = {}
    found: list[np.ndarray] = []
    for rule in rules:
        prepare = get_rule(rule).prepare
        if prepare not in prepared:
            prepared[prepare] = prepare(factors)
        codes = requantize(rows, prepared[prepare], rule=rule, qmin=-(2**30), qmax=2**30 - 1)
        found.append(np.asarray(codes).astype(np.int64).ravel())
    return found


def pair_shares(codes: Sequence[np.ndarray]) -> list[list[float]]:
    """The share of codes that differ, for every pair."""
    return [[float(np.mean(a != b)) for b in codes] for a in codes]


def _score(share: float, expected: float, count: int) -> float:
    return abs(share - expected) / (expected * (1 - expected) / count) ** 0.5


def _classes(shares: list[list[float]]) -> Iterator[tuple[str, str, float]]:
    """(class, class, share) of every pair of different rules."""
    for i, first in enumerate(RULES):
        for j, second in enumerate(RULES[:i]):
            yield class_of(first), class_of(second), shares[i][j]


def _pairs(shares: list[list[float]], count: int) -> dict[str, float]:
    inside, scores, narrow = 0.0, 0.0, list[float]()
    for first, second, share in _classes(shares):
        if first == second:
            inside = max(inside, share)
        elif "15 bits" not in (first, second):
            scores = max(scores, _score(share, differing_share(first, second, MAP_SHIFT), count))
        elif "one" in (first, second):
            narrow.append(share)
    return {
        "pairs within a class: greatest share that differs": inside,
        "pairs of one rounding and two, or of two kinds of two: greatest |z|": scores,
        "int16x8 against one rounding: share that differs": float(np.mean(narrow)),
    }


def _network(settings: Settings) -> list[Accumulators]:
    data = digits()
    qmodel = quantized_digits(data, 20 if settings.full else 5, settings.seed)
    graph = convert(qmodel, data.train_images[:16])
    return distinct(graph, np.concatenate([data.train_images, data.test_images]))


def _real_rows(nodes: Sequence[Accumulators]) -> tuple[list[list[Any]], dict[str, float], list[list[float]]]:
    """The table's rows, the measured values, and the shares of every pair over all nodes."""
    rows: list[list[Any]] = []
    every: list[list[np.ndarray]] = []
    for node in nodes:
        kept = node.acc.size - node.acc.size % 16
        # as float32: one scale for all rules, XNNPACK's among them
        acc, scale = node.acc[:kept], node.scale[:kept].astype(np.float32)
        codes = codes_of(RULES, acc, scale)
        right = np.maximum(-(np.frexp(scale)[1]), 0)
        predicted = float(np.where(right > 0, 2.0 ** -(right + 1.0), 0).sum())
        once, double, neon = (codes[RULES.index(rule)] for rule in ("single_round", "double_round", "neon"))
        counts = [int((codes != once).sum()) for codes in (double, neon)]
        rows.append([node.name, f"{right.min()} to {right.max()}", kept, predicted, *counts])
        every.append(codes)
    joined = [np.concatenate(parts) for parts in zip(*every, strict=True)]
    shares = pair_shares(joined)
    once, double, neon = (joined[RULES.index(rule)] for rule in ("single_round", "double_round", "neon"))
    expected = sum(row[3] for row in rows)
    values = {
        _real("double_round"): sum(row[4] for row in rows) / expected,
        _real("neon"): sum(row[5] for row in rows) / expected,
        "digits network: greatest difference, steps": int(max(np.abs(c - once).max() for c in (double, neon))),
        "digits network, pairs within a class: greatest share that differs": max(
            share for first, second, share in _classes(shares) if first == second
        ),
    }
    return rows, values, shares


def draw(figure: Figure, data: Mapping[str, Any]) -> None:
    line, uniform_map, real_map = figure.subplots(1, 3, width_ratios=(0.85, 1.2, 1.2))
    line.semilogy(SHIFTS[1:], [2.0 ** -(r + 1) for r in SHIFTS[1:]], "-", base=2, color="black", label="$2^{-(r+1)}$")
    for rule, mark in (("double_round", "o"), ("neon", "x")):
        line.semilogy(SHIFTS[1:], data["shares"][rule][1:], mark, base=2, label=rule)
    line.set(
        xlabel="right shift r, bits",
        ylabel="share of codes that differ from one rounding",
        title="Two roundings against one",
    )
    line.set_xticks(SHIFTS[2::2])
    line.legend(fontsize=8, loc="upper right")
    titles = (f"Uniform, r = {MAP_SHIFT}", "Digits network")
    for axes, shares, title in zip((uniform_map, real_map), (data["uniform"], data["real"]), titles, strict=True):
        percent = 100 * np.asarray(shares)
        picture = axes.imshow(percent, cmap="viridis")
        axes.set_xticks(range(len(RULES)), RULES, rotation=90, fontsize=7)
        axes.set_yticks(range(len(RULES)), RULES if axes is uniform_map else [""] * len(RULES), fontsize=7)
        axes.set_title(title)
        figure.colorbar(picture, ax=axes, shrink=0.6, label="codes that differ, %")


STUDY = Study(
    "double_rounding",
    "One rounding or two",
    "gemmlowp, NEON and the runtimes built on them round the high half of a product, and round again when they "
    "shift it right by r bits. How often does the result differ from a single rounding of the exact product, and by "
    "how much?",
    "21-bit accumulators are drawn uniformly, each with its own float32 scale from 2^-(r+1) to 2^-r, and "
    "requantized from one multiplier under each of the library's fixed-point rules. The map shows all pairs of "
    f"rules, for r = {MAP_SHIFT} and outputs of 8 bits.\n\n"
    "The third panel shows what a real network rounds: every distinct pair of accumulator and channel of a "
    "convolutional network on the 1,797 digits, quantized to 8 bits after training. Clamps and ReLUs are omitted, "
    "because they can hide differences but never create any.",
    predict,
    measure,
    draw,
    answer=(
        "Emulate two roundings only if your runtime rounds twice; otherwise your graph differs from it in the codes "
        "counted below. If you write a kernel, round the exact product once, because two roundings push every code "
        "that they change to the same side. Such changes are rare in 8-bit networks, but frequent where only a few "
        "bits are shifted out."
    ),
    command="python -m experiments double_rounding",
)
