"""Claims about learned rounding on real networks: from single products, noise on float scores, and papers."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from experiments.lab.learned_networks import (
    BITS,
    SEQUENCE,
    WAYS,
    Outcome,
    network,
    outcome,
    paired,
    plan,
    ready,
    theory,
)
from experiments.lab.rounding_theory import changed, decibels, points
from qjax.contrib.lab.study import Prediction, Settings

BIAS, ADA, BOTH = WAYS[1:]
OUT_OF_REACH = "GRU"
"""Its cell's weights are computed from parameters: neither AdaRound nor bias correction takes them."""
LOST = {"ResNet": 1.0, "depthwise CNN": 2.5, "CNN on digits": 1.0}
"""Points that AdaRound loses to float at W4A8 at most: Nagel et al. 2020, ResNet-18 and MobileNet V2 on ImageNet."""
WIDE = {4: (3.0, 3.0, 0.5), 3: (3.0, 3.0, 0.5), 2: (5.0, 6.0, 0.25)}
"""Bits -> half the width for the SQNR of nearest, dB; dB of gain above the theory; least part of expected changes."""
UNEQUAL = "images for which an integer graph and its model choose different classes"
LEVELS = np.arange(-10.0, 51.0)
"""dB at which the float scores get noise."""

Claim = tuple[Prediction, Callable[[], float]]


def _gain(name: str, bits: int, settings: Settings, way: str, over: str = "nearest") -> float:
    """dB of the class scores."""
    ways = outcome(name, bits, settings).ways
    return ways[way].sqnr - ways[over].sqnr


def _points(name: str, bits: int, settings: Settings, way: str) -> float:
    ways = outcome(name, bits, settings).ways
    return paired(ways[way].right, ways["nearest"].right)[0]


@functools.lru_cache(maxsize=4)
def curves(name: str, settings: Settings) -> tuple[np.ndarray, np.ndarray]:
    """At each of `LEVELS`: points lost to float, and the share of classes that change, under normal noise."""
    known, rng = network(name, settings), np.random.default_rng(settings.seed)
    labels = known.data.test_labels
    whole = 100 * float(np.mean(known.scores.argmax(-1) == labels))
    lost = [whole - points(known.scores, labels, level, rng) for level in LEVELS]
    return np.array(lost), np.array([changed(known.scores, level, rng) for level in LEVELS])


def at(curve: np.ndarray, level: Any) -> Any:
    return np.interp(level, LEVELS, curve)


def _noise(share: float, images: int) -> float:
    """5 standard errors, points, of two ways that each change that share of the classes."""
    return 5 * 100 * (2 * share / images) ** 0.5


def claims(settings: Settings) -> Iterator[Claim]:
    for name in plan(settings).networks:
        if name == OUT_OF_REACH:
            yield from _unreachable(name, settings)
            continue
        for bits in BITS:
            yield from _scores(name, bits, settings)
            yield from _classes(name, bits, settings)
        yield (
            Prediction(
                f"{name}: bias correction after AdaRound, over AdaRound alone, mean over bits, dB",
                -1,
                2,
                "AdaRound's objective contains the mean error, so little of it is left to correct",
            ),
            lambda name=name: float(np.mean([_gain(name, bits, settings, BOTH, ADA) for bits in BITS])),
        )
        yield (
            Prediction(
                f"{name}, W4: AdaRound less float, points",
                -LOST[name] - _noise(0.02, _images(name, settings)),
                _noise(0.02, _images(name, settings)),
                f"the paper loses at most {LOST[name]:g} points on a network of this kind, with one scale a tensor; "
                "5 standard errors of networks that differ on 4% of the images",
            ),
            lambda name=name: outcome(name, 4, settings).ways[ADA].points - float_points(name, settings),
        )
    yield (
        Prediction("layers whose error AdaRound made greater", 0, 0, "a channel takes what is better only"),
        lambda: float(sum(one.learned > one.nearest for _, _, found in every(settings) for one in found.layers)),
    )
    yield (
        Prediction(UNEQUAL, 0, 0, "it computes it"),
        lambda: float(sum(way.unequal for _, _, found in every(settings) for way in found.ways.values())),
    )


def every(settings: Settings) -> Iterator[tuple[str, int, Outcome]]:
    for name in plan(settings).networks:
        for bits in BITS:
            yield name, bits, outcome(name, bits, settings)


def _images(name: str, settings: Settings) -> int:
    return len(network(name, settings).data.test_labels)


def float_points(name: str, settings: Settings) -> float:
    known = network(name, settings)
    return 100 * float(np.mean(known.scores.argmax(-1) == known.data.test_labels))


def _scores(name: str, bits: int, settings: Settings) -> Iterator[Claim]:
    known, (half, more, _) = theory(name, bits, settings), WIDE[bits]
    yield (
        Prediction(
            f"{name}, W{bits}: SQNR of the class scores, nearest, dB",
            known.nearest - half,
            known.nearest + half,
            "each weight rounded alone in the float network, squared errors added up; width: errors of layers that are "
            "not independent, and at 2 bits not small",
        ),
        lambda: outcome(name, bits, settings).ways["nearest"].sqnr,
    )
    # at half of what the theory says, what is learned would not hold on other images, or 8-bit codes would hide it
    for way, gain, extra in (
        (ADA, known.gain, "; above: it also makes up for errors of earlier layers"),
        (BIAS, known.corrected, "; above: mean errors of successive layers have common signs"),
    ):
        method = "best single changes of codes, by d^T G d" if way == ADA else "(E[x] d)^2 of d^T G d goes"
        why = f"{method}, in each layer alone, then as for nearest; below: half of these dB{extra}, {more:g} dB"
        yield (
            Prediction(f"{name}, W{bits}: gain of {way} in that SQNR, dB", gain / 2, gain + more, why),
            lambda way=way: _gain(name, bits, settings, way),
        )
    first = ready(name, bits, settings).few[0]

    def measured() -> float:
        (layer,) = (one for one in outcome(name, bits, settings).layers if one.name == first)
        return decibels(layer.nearest / layer.learned)

    why = "best single changes of codes by d^T G d; less, as its inputs have 8 bits; a quarter more, as AdaRound may "
    why += "find better ones"
    title = f"{name}, W{bits}: gain of AdaRound in the first product with few bits, dB"
    yield Prediction(title, known.first / 2, 1.25 * known.first, why), measured


def _classes(name: str, bits: int, settings: Settings) -> Iterator[Claim]:
    known, (half, more, least) = theory(name, bits, settings), WIDE[bits]
    lost, shares = curves(name, settings)
    levels = known.nearest + np.linspace(-half, half, 21)
    gains = np.linspace(known.gain / 2, known.gain + more, 21)
    differences = at(lost, levels) - at(lost, levels + gains[:, None])
    noise = _noise(float(at(shares, levels[0])), _images(name, settings))
    why = (
        "points that normal noise takes from the float scores, at all predicted SQNRs of both ways; "
        f"times {least:g} to 2, as errors are not normal; 5 standard errors"
    )
    yield (
        Prediction(
            f"{name}, W{bits}: AdaRound less nearest, points",
            least * float(differences.min()) - noise,
            2 * float(differences.max()) + noise,
            why,
        ),
        lambda: _points(name, bits, settings, ADA),
    )

    def measured() -> float:
        ways = outcome(name, bits, settings).ways
        found = [float(np.mean(way.classes != network(name, settings).scores.argmax(-1))) for way in ways.values()]
        return sum(found) / float(sum(at(shares, way.sqnr) for way in ways.values()))

    few = 5 / (_images(name, settings) * float(at(shares, known.nearest))) ** 0.5
    why = "normal noise of the same SQNR; less where an error lies along the scores; 5 standard errors of the changes"
    yield (
        Prediction(
            f"{name}, W{bits}: images whose class changes, all ways, as a part of those expected from their SQNR",
            max(0.0, least - few),
            2 + few,
            why,
        ),
        measured,
    )


def _unreachable(name: str, settings: Settings) -> Iterator[Claim]:
    noise = _noise(0.02, _images(name, settings))
    for bits in BITS:
        yield (
            Prediction(
                f"{name}, W{bits}: gain of AdaRound in the SQNR of the class scores, dB",
                -0.5,
                0.5,
                "it reaches the first and the last layer only, which have 8 bits",
            ),
            lambda bits=bits: _gain(name, bits, settings, ADA),
        )
        yield (
            Prediction(
                f"{name}, W{bits}: AdaRound less nearest, points",
                -noise,
                noise,
                "as above; 5 standard errors of ways that differ on 4% of the images",
            ),
            lambda bits=bits: _points(name, bits, settings, ADA),
        )
        yield (
            Prediction(
                f"{name}, W{bits}: gain of {SEQUENCE} in that SQNR, dB",
                0,
                12,
                "a step that makes held-out outputs worse is taken back; 12 dB is what two more bits would give",
            ),
            lambda bits=bits: _gain(name, bits, settings, SEQUENCE),
        )
