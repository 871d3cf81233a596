"""Precision of the trainer: fake quantization on scaled values and on integer-valued operands, on several machines."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.lab import precision_theory as theory
from experiments.lab.machines import BFLOAT16, FLOAT16_SUMS, FLOAT32, MACHINES, TF32, Machine
from experiments.lab.trainer_forward import (
    TERMS,
    WAYS,
    WEIGHTS,
    Shares,
    first_inexact_bits,
    first_inexact_terms,
    rows,
    rows_in_order,
    scales,
)
from qjax.contrib.lab.study import Measurement, Prediction, Settings, Study, Table, binomial_band

PUBLISHED = {"TF32": 0.009, "bfloat16": 0.06}
"""Share of wrong codes of classic fake quantization, as published."""
Claim = tuple[Prediction, Callable[[Shares], float]]


def _claims(settings: Settings) -> list[Claim]:
    s_x, s_w, _ = scales(TERMS[0])
    total = len(TERMS) * rows(settings) ** 2
    few = rows_in_order(settings) ** 2
    found: list[Claim] = []
    for machine in (TF32, BFLOAT16):
        share = theory.classic_operands(float(s_x), float(s_w), machine.operand_bits)
        low, high = binomial_band(share, total)
        found.append(
            (
                Prediction(
                    f"classic, {machine.name}: share of wrong codes",
                    0.9 * low,
                    1.1 * high,
                    f"operands rounded to {machine.significant} significant bits, a normal error: 0.8 of its deviation "
                    f"in steps (published {PUBLISHED[machine.name]:.1%}); 5 standard errors, and 10% as an error is a "
                    "function of the code, and the rows of one product share codes",
                ),
                lambda s, machine=machine: s.share("classic", machine),
            )
        )
    least, most = theory.scaling(2) / 8, _float32_most()
    found.append(
        (
            Prediction(
                "classic, float32: share of wrong codes",
                max(least - 5 * (least / total) ** 0.5, 1 / total),
                most + 5 * (most / total) ** 0.5,
                "from an eighth of what two roundings can do to a finished sum, to operands, running sums in order and "
                "four roundings at their greatest (published 1e-6 to 1e-5); 5 standard errors of a Poisson count",
            ),
            lambda s: s.share("classic", FLOAT32),
        )
    )
    most = float(np.mean([theory.near_ties(_effective(terms), terms) for terms in TERMS]))
    found.append(
        (
            Prediction(
                "integer-valued, bfloat16: share of wrong codes",
                0,
                most + 5 * (most / total) ** 0.5,
                "the sum is exact; four float32 roundings scale it (s_x s_w, the product, 1 / s_y, the product), each "
                "by at most 2^-24 of it, and can move only sums that are so near to a tie (published 2e-6 or less); 5 "
                "standard errors",
            ),
            lambda s: s.share("integer-valued", BFLOAT16),
        )
    )
    found.append(
        (
            Prediction(
                "integer-valued: codes that differ between float32, TF32 and bfloat16",
                0,
                0,
                "codes up to 127 have 7 significant bits: every machine multiplies the same integers, and sums of "
                "random products stay below 2^24",
            ),
            lambda s: float(s.parted),
        )
    )
    for machine in (BFLOAT16, TF32):
        for symmetric in (True, False):
            # the greatest code is 2^(b-1) - 1, or 2^b - 1 less a zero point at the other end
            bits = machine.significant + (2 if symmetric else 1)
            kind = "symmetric" if symmetric else "asymmetric"
            found.append(
                (
                    Prediction(
                        f"{machine.name}: least bits of an inexact {kind} operand",
                        bits,
                        bits,
                        f"{machine.significant} significant bits hold every integer up to 2^{machine.significant}; "
                        + ("codes reach 2^(b-1) - 1" if symmetric else "codes less their zero point reach 2^b - 1"),
                    ),
                    lambda s, m=machine, y=symmetric: float(first_inexact_bits(m, y)),
                )
            )
    found.append(
        (
            Prediction(
                "float32: least K whose sum of products 127 * 127 is inexact",
                1041,
                1041,
                "K * 127^2 first exceeds 2^24 for K = 1041, and is odd there",
            ),
            lambda s: float(first_inexact_terms()),
        )
    )
    for terms in (16, 256, 4096):
        deviation = theory.running_sum(terms, 10, WEIGHTS)
        operands_alone = theory.classic_operands(float(s_x), float(s_w), 10)
        share = theory.share_of(float(np.hypot(deviation, operands_alone / theory.share_of(1e-3) * 1e-3)))
        low, high = binomial_band(share, few)
        found.append(
            (
                Prediction(
                    f"classic, float16 sums: share of wrong codes, K = {terms}",
                    0.9 * low,
                    1.1 * high,
                    "a rounding to 11 significant bits per term, of partial sums that grow as sqrt(k), and operands as "
                    "in TF32; 5 standard errors, and 10% for errors that one product's rows share",
                ),
                lambda s, terms=terms: s.share("classic", FLOAT16_SUMS, terms),
            )
        )
    for terms in (1024, 4096):
        over = theory.overflow(terms)
        share = over + (1 - over) * theory.share_of(theory.running_sum(terms, 10, theory.SPREAD**2, integers=True))
        low, high = binomial_band(share, few)
        found.append(
            (
                Prediction(
                    f"integer-valued, float16 sums: share of wrong codes, K = {terms}",
                    0.9 * low,
                    1.1 * high,
                    f"{over:.1%} of the running sums exceed 65,504 on the way, by the reflection principle; the others "
                    "round as classic ones do; 5 standard errors and 10% as above",
                ),
                lambda s, terms=terms: s.share("integer-valued", FLOAT16_SUMS, terms),
            )
        )
    return found


def _effective(terms: int) -> float:
    s_x, s_w, s_y = (float(scale) for scale in scales(terms))
    return s_x * s_w / s_y


def _float32_most() -> float:
    s_x, s_w, _ = scales(TERMS[0])
    sums = float(np.mean([theory.share_of(theory.running_sum(terms, 23, WEIGHTS)) for terms in TERMS]))
    return theory.classic_operands(float(s_x), float(s_w), 23) + sums + theory.scaling(4)


def predict(settings: Settings) -> list[Prediction]:
    return [prediction for prediction, _ in _claims(settings)]


def measure(settings: Settings) -> Measurement:
    shares = Shares(settings)
    values = {prediction.name: read(shares) for prediction, read in _claims(settings)}
    data = {
        way: {machine.name: [shares.share(way, machine, terms) for terms in TERMS] for machine in MACHINES}
        for way in WAYS
    }
    table = Table(
        "Share of wrong output codes",
        ("operands", "machine", *(f"K = {terms}" for terms in TERMS), "codes each"),
        [[way, m.name, *data[way][m.name], shares.codes[m.name]] for way in WAYS for m in MACHINES],
    )
    return Measurement(values, [table], data, _conclusion(shares))


def _conclusion(shares: Shares) -> str:
    classic, integer = WAYS
    sums = FLOAT16_SUMS

    def wrong(way: str, machine: Machine) -> str:
        return f"{sum(shares.wrong[way, machine.name]):,}"

    total = len(TERMS) * shares.codes["float32"]
    return (
        f"In float32 it hardly matters how a trainer multiplies: of {total:,} codes, {wrong(classic, FLOAT32)} are "
        f"wrong with scaled floats and {wrong(integer, FLOAT32)} with integer-valued operands. On the hardware that "
        f"people train on, it does matter. Scaled floats get {shares.share(classic, TF32):.2%} of the codes wrong "
        f"under TF32 and {shares.share(classic, BFLOAT16):.1%} under bfloat16, because their rounded operands are no "
        f"longer codes times a scale. Integer-valued operands get {wrong(integer, TF32)} and "
        f"{wrong(integer, BFLOAT16)} wrong, and produce the same codes in all three formats. The reason is that "
        "bfloat16 represents every 8-bit code exactly, even after an 8-bit zero point is subtracted, and sums of "
        "such products are exact. Only the final scaling in float32 can still go wrong, for sums within some 1e-6 "
        "steps of a tie. If the scales have a simple ratio there are many such sums, and both ways get them wrong "
        "on every machine.\n\n"
        "This has limits. Symmetric operands of 10 bits and asymmetric ones of 9 are no longer exact in bfloat16. "
        "The same limits for TF32 are 13 and 12. For this reason qjax requests full float32 precision where a code "
        "can exceed 256. A float32 sum can become inexact once K * 127^2 exceeds 2^24, at K = 1,041, and from there "
        "qjax splits each weight into digits.\n\n"
        "Running sums in float16 are worse, and for long sums integer-valued operands are the worse choice. At K = "
        f"4096 {shares.share(integer, sums, 4096):.0%} of their codes are wrong, most of them because the sum "
        f"overflowed at 65,504. Scaled floats get {shares.share(classic, sums, 4096):.0%} wrong, because they do not "
        "overflow but are rounded just as often. No way of multiplying helps, because 11 significant bits represent "
        "integers only up to 2,048. A single product of two 8-bit codes already reaches 16,129. With 4 bits "
        f"(products up to 49) a sum is safe for K up to {2048 // 49}. With 2 bits (products up to 1) it is safe for "
        "K up to 2,048."
    )


def draw(figure: Figure, data: Mapping[str, Any]) -> None:
    left, right = figure.subplots(1, 2, sharey=True)
    colours = ("#3b6ea5", "#d08a2e", "#a0498c", "#8a8a8a")
    markers = ("o", "s", "^", "x")
    for axes, way in ((left, "classic"), (right, "integer-valued")):
        for (name, shares), colour, marker in zip(data[way].items(), colours, markers, strict=True):
            _line(axes, shares, colour, marker, name)
        axes.set(xscale="log", yscale="log", xlabel="products in a sum, K", title=f"{way} operands", ylim=(3e-7, 1.3))
        axes.set_xticks(TERMS, [str(terms) for terms in TERMS])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    left.set_ylabel("share of output codes that are wrong")
    left.legend(fontsize=9)


def _line(axes: Any, shares: Sequence[float], colour: str, marker: str, name: str) -> None:
    # a share of 0 has no place on a logarithmic axis: it is drawn on the lower edge
    shown = [max(share, 4e-7) for share in shares]
    size = {"float32": 11, "TF32": 8, "bfloat16": 5}.get(name, 7)
    axes.plot(TERMS, shown, color=colour, marker=marker, markersize=size, label=name)


STUDY = Study(
    name="trainer_precision",
    title="Precision of the trainer",
    question=(
        "During training, the forward pass computes in floats what will ship as integers. How many output codes are "
        "wrong when it multiplies fake-quantized floats, and how many when it multiplies the codes themselves? And "
        "how many on hardware that keeps fewer bits than float32?"
    ),
    method=(
        "A single 8-bit layer sums K products, with K from 16 to 4,096. Its inputs and weights are normal, and its "
        "scales cover 4 standard deviations. *Classic*: `fake_quant` of both operands, their product, `quantize`. "
        "*Integer-valued*: the product of `fake_quant_codes`, times s_x s_w, `quantize`. Both are compared with "
        "int32 sums through `requantize`.\n\n"
        "Only the hardware is emulated. TF32 and bfloat16 round operands to 11 and 8 significant bits and "
        "accumulate in float32. The float16 machine rounds the operands, and then every running sum in order, to 11 "
        "bits within float16's range."
    ),
    predict=predict,
    measure=measure,
    draw=draw,
    answer=(
        "Train with the integer-valued forward of `qjax.quantize`, whose products are exact in float32, TF32 and "
        "bfloat16. Code that multiplies scaled floats instead gets a few percent of the codes wrong in bfloat16, "
        "the default of TPUs. Never accumulate in float16, because long sums overflow it."
    ),
    command="python -m experiments trainer_precision",
)
