"""What the trainer's arithmetic should do to real networks: a recursion over layers, and bands for trainings."""

from collections.abc import Callable, Mapping

import numpy as np

from experiments.lab import precision_theory as theory
from experiments.lab.machines import FLOAT32, Machine
from experiments.lab.precision_outcomes import (
    CLASSIC,
    DTYPES,
    EMULATED,
    INTEGER,
    Forwards,
    Plan,
    Trained,
    differences,
    forwards,
    trainings,
)
from experiments.lab.trainer_forward import scales
from qjax.contrib.lab.study import Prediction, Settings

TERMS = {"ResNet": 144, "GRU": 64, "CNN on digits": 144}
"""Products in a typical sum."""
DEPTH = {"ResNet": 8, "GRU": 30, "CNN on digits": 4}
"""Products that an image passes one after the other; each step of the GRU is one."""


def plan(settings: Settings) -> Plan:
    if settings.full:
        return Plan(("ResNet", "GRU"), 4000, "GRU", 30_000, 1, 2)
    return Plan(("CNN on digits",), 500, "CNN on digits", 1297, 10, 2)


def own_share(machine: Machine, terms: int) -> float:
    """The share of a layer's codes that the classic way gets wrong from right inputs.

    Its bias, or the shift of its norm, is a float. The graph's is an integer of the sum's scale: an error that is
    uniform within half a unit, of which a step of the output has SPREAD^2 sqrt(K) / OUTPUT_SPREAD.
    """
    bias = theory.OUTPUT_SPREAD / (4 * theory.SPREAD**2 * terms**0.5)
    s_x, s_w, _ = scales(terms)
    return bias + theory.classic_operands(float(s_x), float(s_w), machine.operand_bits)


def last_share(own: float, terms: int, depth: int, passed: float) -> float:
    """The share of wrong codes after so many layers.

    Wrong input codes are off by a step. A share s of them gives an output error of deviation sqrt(s) OUTPUT_SPREAD /
    SPREAD steps, and as many wrong codes as its mean is large. If they are rare, a sum sees at most one: s sqrt(K) in
    the place of sqrt(s). passed: the part of a difference that relus and clipping let through.
    """
    gain, share = (2 / np.pi) ** 0.5 * theory.OUTPUT_SPREAD / theory.SPREAD, own
    for _ in range(depth - 1):
        share = min(1.0, own + passed * gain * min(share * terms**0.5, share**0.5))
    return share


Claim = tuple[Prediction, Callable[[], float]]


def claims(settings: Settings) -> list[Claim]:
    chosen = plan(settings)
    found = [claim for name in chosen.evaluated for claim in _evaluation(chosen, name, settings)]
    return [*found, *_training(chosen, settings)]


def _evaluation(chosen: Plan, name: str, settings: Settings) -> list[Claim]:
    def read(of: Callable[[Forwards], float]) -> Callable[[], float]:
        return lambda: of(forwards(chosen, name, settings.seed))

    terms, depth = TERMS[name], DEPTH[name]
    found: list[Claim] = []
    for machine in EMULATED:
        own, key = own_share(machine, terms), (CLASSIC, machine.name)
        least, most = (last_share(own, terms, depth, passed) for passed in (0.5, 1.0))
        found.append(
            (
                Prediction(
                    f"{name}, classic, {machine.name}: share of wrong output codes",
                    least / 2,
                    min(1.0, 1.25 * most),
                    f"{own:.2g} of a layer's codes: the float bias, and operands of {machine.significant} significant "
                    f"bits. {depth} layers of {terms} terms pass between half and all of it on; for real weights half "
                    "of that to 1.25 of it",
                ),
                read(lambda one, key=key: one.ways[key].codes),
            )
        )
    images = chosen.images
    bfloat16 = (CLASSIC, EMULATED[-1].name)
    noise = 5 * 100 * (0.01 / images) ** 0.5
    found += [
        (
            Prediction(
                f"{name}, classic, bfloat16: share of changed decisions",
                0,
                0.02 + 5 * (0.02 / images) ** 0.5,
                "wrong codes are off by a step or two of 8 bits; at most 2% of the images have their two best scores "
                "so close; 5 standard errors",
            ),
            read(lambda one: one.ways[bfloat16].decisions / images),
        ),
        (
            Prediction(
                f"{name}, classic, bfloat16: accuracy less the integers', points",
                -noise,
                noise,
                f"no bias; 5 standard errors of {images:,} images of which 1% are judged differently",
            ),
            read(lambda one: one.ways[bfloat16].points),
        ),
        (
            Prediction(
                f"{name}, integer-valued, float32: share of wrong output codes",
                0,
                0.02,
                "only sums within some 1e-6 steps of a tie; `network_depth` has 0.6% of the ResNet's outputs from as "
                "rare differences, three times that is allowed for",
            ),
            read(lambda one: one.ways[INTEGER, FLOAT32.name].codes),
        ),
        (
            Prediction(
                f"{name}, integer-valued: output codes that differ between float32, TF32 and bfloat16",
                0,
                0,
                "codes of 8 bits less their zero point have 8 significant bits, which each machine holds",
            ),
            read(lambda one: float(one.parted)),
        ),
        (
            Prediction(f"{name}: codes of `qjax.exact` that differ from the graph", 0, 0, "it computes the graph"),
            read(lambda one: float(one.exact)),
        ),
    ]
    return found


def _training(chosen: Plan, settings: Settings) -> list[Claim]:
    def trained() -> Mapping[str, Trained]:
        return trainings(chosen, settings.seed)

    name, images = chosen.trained, 10_000 if settings.full else 500
    noise = 5 * 100 * (0.04 / (images * chosen.seeds)) ** 0.5
    why = f"5 standard errors of {chosen.seeds} pairs that judge 4% of {images:,} images differently"
    activations, throughout = DTYPES[1:]
    return [
        (
            Prediction(
                f"{name}, W4A4, {activations}: accuracy less that of float32, points",
                -noise,
                noise,
                "gradients have errors of 2^-9, far less than the noise of batches; products of codes stay exact; "
                + why,
            ),
            lambda: float(differences(trained(), activations).mean()),
        ),
        (
            Prediction(
                f"{name}, W4A4, {throughout}: accuracy less that of float32, points",
                -3 - noise,
                noise,
                "a step of Adam below 2^-9 of its weight is lost, so training ends when the rate has fallen to a "
                f"third; 3 points are a guess; {why}",
            ),
            lambda: float(differences(trained(), throughout).mean()),
        ),
        *(
            (
                Prediction(
                    f"{name}, W4A4, {dtype}: codes of `qjax.exact` that differ from the graph",
                    0,
                    0,
                    "it computes the graph, whatever the dtype of the model",
                ),
                lambda dtype=dtype: float(trained()[dtype].exact),
            )
            for dtype in DTYPES
        ),
        (
            Prediction(
                f"{name}, W4A4, float32: share of outputs in which the model's own call is not the graph",
                0,
                0.02,
                "near ties alone, as above",
            ),
            lambda: float(np.mean([one.codes for one in trained()[DTYPES[0]].own])),
        ),
        (
            Prediction(
                f"{name}, W4A4, {activations}: share of decisions in which the model's own call is not the graph",
                0,
                0.05,
                "what no product reads is rounded to 8 significant bits, an error of a step at most of 8-bit codes. At "
                "the few codes of 4 bits a difference is rare, but large",
            ),
            lambda: float(np.mean([one.decisions / images for one in trained()[activations].own])),
        ),
    ]
