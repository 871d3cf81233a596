"""Pooling and additions, where ties are common: what each runtime's rule makes of them."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.lab.pooling_cases import CASES, Case, chosen_targets, codes, exact, graph, rounded, ties_of
from qjax.contrib.lab.study import Measurement, Prediction, Settings, Study, Table

KINDS = {"pool": ("even", "up", "away", "away from code 0"), "add": ("even", "up", "away")}
NOISY = {"pool 2x2, real-valued scale": "onnxruntime", "add, equal real-valued scales": "torch"}
"""Whose float32 steps round before the tie is met, so that noise breaks it."""
_SHARES = {
    "pool 2x2": 1 / 4,
    "pool 2x2, dark half behind a relu": 1 / 4,
    "pool 3x3": 0.0,
    "pool 2x2, real-valued scale": 1 / 4,
    "add, equal scales": 1 / 2,
    "add, equal scales, behind a relu": 1 / 2,
    "add, scales 1 : 1/4 : 2": 1 / 8,
    "add, equal real-valued scales": 1 / 2,
}
"""P(tie): of the residues modulo 4, 9, 2 and 8 of the numerators, all equally frequent, one is a tie, or none."""


def windows(settings: Settings) -> int:
    """Averages per case and target, about."""
    return 2**19 if settings.full else 2**16


def noisy(case: Case, target: str) -> bool:
    """Whether a target breaks this case's ties by the last bits of float32."""
    engine = NOISY.get(case.name)
    return engine is not None and target.startswith(engine) and not (case.op == "add" and "qnnpack" in target)


def targets_of(case: Case, settings: Settings) -> list[str]:
    """One target for each formula, all in the full form; of real-valued scales, in the quick one, what they change."""
    everything = chosen_targets(case.op, settings.full)
    if settings.full or case.name not in NOISY:
        return everything
    return [name for name in everything if name == "nearest_even" or noisy(case, name)]


def bias_of(case: Case, kind: str, numerator: np.ndarray, denominator: int) -> float:
    """The mean error, LSB: half the difference between the shares of ties that go up and of those that go down.

    0 for even, as the floors of ties are even and odd alike; P(tie) / 2 for up; for the others the signs are counted.
    """
    if kind == "even":
        return 0.0
    if kind == "up":
        return _SHARES[case.name] / 2
    ties = numerator[(2 * numerator + denominator) % (2 * denominator) == 0]
    position = ties + denominator * case.zero_point if kind == "away from code 0" else ties
    return float((position > 0).sum() - (position < 0).sum()) / 2 / numerator.size


def predict(settings: Settings) -> Iterator[Prediction]:
    for case in CASES:
        numerator, denominator = exact(case, codes(case, settings.seed, windows(settings)))
        share = _SHARES[case.name]
        yield Prediction(f"{case.name}: share of ties", share, share, "residues of the sum, all alike; exact")
        quiet = {ties_of(case.op, t) for t in targets_of(case, settings) if not noisy(case, t)}
        for kind in [kind for kind in KINDS[case.op] if kind in quiet]:
            bias = bias_of(case, kind, numerator, denominator)
            why = _WHY[kind] + (_TOSA if (case.op, kind) == ("pool", "away") else "") + "; exact, for every such target"
            yield Prediction(_bias(case, kind), bias, bias, why)
            differing = 0.0 if kind == "even" else share / 2
            low, high = (differing, differing) if kind in ("even", "up") else _around(case, differing, numerator)
            yield Prediction(_differ(case, kind), low, high, "half of the ties are even as they are, half would be")
    for case in CASES:
        if case.name not in NOISY:
            continue
        why = (
            "float32 errors change sign with the codes, which are symmetric except for -128, so the bias cancels "
            "except where -128 occurs"
        )
        yield Prediction(f"{case.name}, {NOISY[case.name]}: bias, LSB", -0.004, 0.004, why)
        why = "more than none, at most all ties that it could move: P(tie)"
        yield Prediction(
            f"{case.name}, {NOISY[case.name]}: codes that are not half-even", 0.001, _SHARES[case.name], why
        )


_TOSA = ". TOSA is one of these: its reciprocal exceeds 1 / n, which moves a tie away from zero before it is rounded up"
_WHY = {
    "even": "as many ties go up as down",
    "up": "P(tie) / 2",
    "away": "(P(tie > 0) - P(tie < 0)) / 2, counted in integers",
    "away from code 0": "the sign is that of the sum of stored codes, counted in integers",
}


def _around(case: Case, share: float, numerator: np.ndarray) -> tuple[float, float]:
    """The negative numbers' parities are those of another residue; drawn sums need not balance them."""
    spread = 5 * (share * (1 - share) / numerator.size) ** 0.5 if case.op == "pool" else 1 / 256
    return (share, share) if share == 0 else (share - spread, share + spread)


def _bias(case: Case, kind: str) -> str:
    return f"{case.name}, ties {kind}: bias, LSB"


def _differ(case: Case, kind: str) -> str:
    return f"{case.name}, ties {kind}: codes that are not half-even"


def measure(settings: Settings) -> Measurement:
    values: dict[str, float] = {}
    rows: list[list[Any]] = []
    biases: dict[str, dict[str, float]] = {case.name: {} for case in CASES}
    for case in CASES:
        inputs = codes(case, settings.seed, windows(settings))
        numerator, denominator = exact(case, inputs)
        even = rounded(case, numerator, denominator, "even")
        values[f"{case.name}: share of ties"] = float(np.mean((2 * numerator + denominator) % (2 * denominator) == 0))
        for target in targets_of(case, settings):
            out = np.asarray(graph(case, target).run(*inputs)).astype(np.int64) - case.zero_point
            # in integers, so that no mean rounds
            bias = int((out * denominator - numerator).sum()) / (denominator * out.size)
            differing = float(np.mean(out != even))
            biases[case.name][target] = bias
            kind = ties_of(case.op, target)
            rows.append([case.name, target, "float32 noise" if noisy(case, target) else kind, bias, differing])
            if noisy(case, target):
                names = (
                    f"{case.name}, {NOISY[case.name]}: bias, LSB",
                    f"{case.name}, {NOISY[case.name]}: codes that are not half-even",
                )
                values |= dict(zip(names, (bias, differing), strict=True))
                continue
            expected = bias_of(case, kind, numerator, denominator)
            # of all targets of a kind the one that is farthest from the prediction stands
            _farthest(values, _bias(case, kind), bias, expected)
            _farthest(values, _differ(case, kind), differing, 0 if kind == "even" else _SHARES[case.name] / 2)
    table = Table(
        "Every target: bias in LSB, and codes that differ from the exact half-even result",
        ("operation", "target", "ties", "bias", "not half-even"),
        rows,
    )
    return Measurement(values, [table], {"biases": biases}, _conclusion(values, biases))


def _farthest(values: dict[str, float], name: str, found: float, expected: float) -> None:
    if name not in values or abs(found - expected) > abs(values[name] - expected):
        values[name] = found


def _conclusion(values: Mapping[str, float], biases: Mapping[str, Mapping[str, float]]) -> str:
    dark, relu = CASES[1], CASES[5]
    pool, add = CASES[3], CASES[7]
    return (
        "Half of all sums of two tensors with equal scales are ties, and a quarter of all averages over 2x2. An "
        "average over 3x3 is never a tie, and there every target gave the same codes "
        f"({values[_differ(CASES[2], 'up')]:.0%} differ). Half-up raises an addition by "
        f"{values[_bias(relu, 'up')]:.3g} LSB and a 2x2 average by {values[_bias(dark, 'up')]:.3g}. Rounding ties "
        "away from zero does the same after a ReLU, where all numbers are positive. TOSA's average pool behaves "
        "like this, although its RESCALE rounds ties up, because it multiplies by a reciprocal that is slightly "
        "more than 1/4, which moves every tie away from zero before it is rounded.\n\n"
        "TFLite's average pool is different, because it rounds the stored codes away from the code 0, whatever the "
        "zero point is. After a ReLU the code of 0.0 is -128, and small activations have negative codes. Their "
        f"averages had a downward bias of {values[_bias(dark, 'away from code 0')]:+.3g} LSB, where rounding away "
        f"from the value 0.0 has {values[_bias(dark, 'away')]:+.3g}.\n\n"
        "If the scale is not a power of two, the float32 steps of some runtimes are off by a bit before they reach "
        "the tie. ONNX Runtime rounds half to even, but "
        f"{values[f'{pool.name}, onnxruntime: codes that are not half-even']:.1%} of the codes of its 2x2 average "
        "then differed from exact half-even. For PyTorch's addition it was "
        f"{values[f'{add.name}, torch: codes that are not half-even']:.1%}. The biases were near zero "
        f"({values[f'{pool.name}, onnxruntime: bias, LSB']:+.4f} and {values[f'{add.name}, torch: bias, LSB']:+.4f} "
        "LSB), so this is noise, but exact arithmetic cannot reproduce these codes."
    )


def draw(figure: Figure, data: Mapping[str, Any]) -> None:
    for axes, op in zip(figure.subplots(1, 2), ("pool", "add"), strict=True):
        cases = [case for case in CASES if case.op == op and case.name not in NOISY]
        targets = list(data["biases"][cases[0].name])
        place = np.arange(len(targets))
        height = 0.8 / len(cases)
        for index, case in enumerate(cases):
            bars = [data["biases"][case.name][target] for target in targets]
            # a bar of no length is still to be seen
            axes.barh(place + (index - 1) * height, bars, height * 0.85, label=case.name)
            zero = [i for i, bar in enumerate(bars) if abs(bar) < 1e-3]
            axes.plot(np.zeros(len(zero)), place[zero] + (index - 1) * height, ".", markersize=3, color=f"C{index}")
        axes.set_yticks(place, targets, fontsize=8)
        axes.invert_yaxis()
        axes.axvline(0, color="black", linewidth=0.6)
        axes.set(xlabel="bias, LSB of the output", title="Average pooling" if op == "pool" else "Additions")
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=len(cases), columnspacing=0.8)


STUDY = Study(
    "pooling",
    "Pooling and additions: where ties are common",
    "Averages over four elements, and sums of tensors with equal scales, divide by small powers of two, so exact "
    "halves are not rare there. What do the runtimes' rules do with them?",
    "A model of one operation is converted for each target (one target for each formula; `--full`: all of them). "
    "Its scales and zero points are fixed, and its graph runs on 8-bit codes. Additions run on all pairs of codes. "
    "Averages run on random windows whose last element takes all codes, so that every residue of the sum is equally "
    "frequent.\n\n"
    "The exact result is a ratio of integers, and errors are in steps of the output. Codes are compared with the "
    "half-even result in exact arithmetic. If several targets treat ties alike, the one farthest from the "
    "prediction is shown.",
    predict,
    measure,
    draw,
    answer=(
        "Expect runtimes to disagree in 2x2 average pools and in additions with equal scales, because a quarter to "
        "a half of these sums are ties. Convert for the right target there, or use 3x3 pools, which have no ties. "
        "If you port a model, check the mean of pooled activations, because some runtimes are biased by an eighth "
        "of a step."
    ),
    command="python -m experiments pooling",
)
