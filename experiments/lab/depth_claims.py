"""What the study of depth claims before it measures, each claim with the way to read its figure."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

import qjax
from experiments.lab import chain_theory as theory
from experiments.lab.chains import Drift, Quantized, quantized
from qjax.contrib.lab.study import Prediction, Settings, binomial_band

WIDTH = 128
STRUCTURES = {
    "linear": {"relu": False, "residual": False},
    "relu": {"relu": True, "residual": False},
    "residual": {"relu": False, "residual": True},
    "relu, residual": {"relu": True, "residual": True},
}
COMPLETE = ("linear", "relu, residual")
"""The structures that the quick form runs under every target; the others under `FEW`."""
FEW = ("double_round", "onnxruntime", "single_round", "tvm_neon")
SINGLE = ("single_round", "tosa", "tvm")
"""One rounding of the exact product each, which differs from half to even at ties only."""
FLOOR = qjax.targets.Target("floor", "power_of_two:TRN:SAT", qjax.numerics.Rounding.FLOOR)
"""Truncation everywhere, for scales that are powers of two."""
PUBLISHED = {1: 0.0007, 8: 0.23, 24: 0.67}
"""Layers -> the share of codes that differ, double rounding against one, as published for chains of int8 layers."""
PUBLISHED_BIAS = -3.0
"""In steps: truncation after 24 layers with relu."""
DEPTHS = (8, 24, 48)
TRUNCATED = ("relu", "residual", "relu, residual")


def samples(settings: Settings) -> int:
    """Samples per chain."""
    return 1024 if settings.full else 512


def depth_of(structure: str, settings: Settings) -> int:
    """Layers of a chain; the codes behind every layer are read from one chain."""
    return 48 if settings.full or not STRUCTURES[structure]["residual"] else 24


@functools.lru_cache(maxsize=8)
def chain_of(structure: str, settings: Settings, powers_of_two: bool = False) -> Quantized:
    """The chain of a structure; made once, for the prediction and the measurement."""
    depth = 24 if powers_of_two else depth_of(structure, settings)
    kind = STRUCTURES[structure]
    return quantized(depth, WIDTH, samples(settings), **kind, powers_of_two=powers_of_two, seed=2 * settings.seed)


def targets_of(structure: str, settings: Settings) -> Sequence[str]:
    """The targets that run a chain: all but `fpga`, which takes scales that are powers of two only."""
    if not settings.full and structure not in COMPLETE:
        return FEW
    return [name for name in qjax.targets.names() if name not in ("fpga", "nearest_even")]


@dataclasses.dataclass(frozen=True)
class Found:
    """What was measured. real: structure -> target -> its drift. floor: truncation, for scales that are powers of two.

    ties: `single_round` under the same.
    """

    real: Mapping[str, Mapping[str, Drift]]
    floor: Mapping[str, Drift]
    ties: Drift

    def double(self, structure: str) -> Drift:
        """Double rounding under scales of any value."""
        return self.real[structure]["double_round"]


Claim = tuple[Prediction, Callable[[Found], float]]


def claims(settings: Settings) -> list[Claim]:
    """All of them."""
    return [*_arising(settings), *_spreading(settings), *_published(), *_truncating(settings)]


def arise(drift: Drift) -> float:
    """The share of products that differ although their inputs are the reference's."""
    return drift.arise.count / drift.arise.compared


def _arising(settings: Settings) -> Iterator[Claim]:
    codes = samples(settings) * WIDTH
    linear, relu, ties = chain_of("linear", settings), chain_of("relu", settings), chain_of("relu", settings, True)
    low, high = binomial_band(_mean_share(linear, 1), codes * len(linear.layers))
    yield (
        Prediction(
            "linear: share of codes in which double_round differs on the same inputs, mean over layers",
            low,
            high,
            "the mean of 2^-(r+1) over the right shifts r in use; 5 standard errors of a binomial share",
        ),
        lambda found: arise(found.double("linear")),
    )
    low, high = binomial_band(_mean_share(relu, 1), codes * len(relu.layers))
    yield (
        Prediction(
            "relu: share of codes in which double_round differs on the same inputs, mean over layers",
            0.9 * low,
            1.1 * high,
            "half of the mean of 2^-(r+1); 5 standard errors, and 10% for ReLUs that are not active half of the time",
        ),
        lambda found: arise(found.double("relu")),
    )
    low, high = binomial_band(_mean_share(ties, 2), codes * len(ties.layers))
    yield (
        Prediction(
            "relu, powers of two: share of codes in which single_round differs on the same inputs",
            0.9 * low,
            1.1 * high,
            "n = r + 1 bits are dropped: one accumulator in 2^n is a tie, and half of the ties go to the other side; "
            "5 standard errors, and 10% for the ReLUs",
        ),
        lambda found: arise(found.ties),
    )
    yield (
        Prediction(
            "linear: codes that differ behind the last layer under single_round, tosa or tvm",
            0,
            0,
            "they round the same exact product once, and a tie needs the product of an accumulator with a multiplier "
            "of 31 bits to end in a one and some 39 zeros",
        ),
        lambda found: float(sum(found.real["linear"][name].share[-1] for name in SINGLE) * codes),
    )


def _mean_share(chain: Quantized, more: int) -> float:
    """The mean of 2^-(r + more) over the outputs of a chain whose relu, if any, is open."""
    shares = [np.mean(2.0 ** -(layer.right + float(more))) for layer in chain.layers]
    return theory.open_share(chain) * float(np.mean(shares))


def _spreading(settings: Settings) -> Iterator[Claim]:
    for name, kind in STRUCTURES.items():
        expected = theory.spread(chain_of(name, settings))
        tolerance, neglected = 0.15, "a finite width, ReLUs that are not active half of the time"
        if kind["residual"]:
            tolerance, neglected = 0.4, "a residual stream contains each output's own past; ReLU and stream correlate"
        for depth in (d for d in DEPTHS if d <= len(expected.share)):
            share, touched = float(expected.share[depth - 1]), float(expected.touched[depth - 1])
            error = 5 * (touched * (1 - touched) / samples(settings)) ** 0.5 * share / touched
            yield (
                Prediction(
                    f"{name}: share under double_round, {depth} layers",
                    share * (1 - tolerance) - error,
                    min(1.0, share * (1 + tolerance) + error),
                    f"mean field from the chain's scales; {tolerance:.0%} for what that neglects ({neglected}), and 5 "
                    "standard errors of the share of samples that were touched",
                ),
                lambda found, name=name, depth=depth: float(found.double(name).share[depth - 1]),
            )
    steps = (1, 2, 4, 8, 16, 24)
    yield (
        Prediction(
            f"linear: steps from {', '.join(map(str, steps))} layers at which the share under double_round falls",
            0,
            0,
            "differences do not disappear: after a sample's first differing code, the next layer has about nine",
        ),
        lambda found: float(np.sum(np.diff([found.double("linear").share[d - 1] for d in steps]) < 0)),
    )
    square = float(theory.spread(chain_of("linear", settings)).square[-1])
    error = 5 * (square / (WIDTH * samples(settings))) ** 0.5
    yield (
        Prediction(
            "linear: bias under double_round behind the last layer, steps",
            -error,
            error,
            "rounding ties away from zero has no bias if the signs of the codes balance; 5 standard errors of the mean "
            "of differences whose mean square is the mean field's",
        ),
        lambda found: float(found.double("linear").bias[-1]),
    )


def _published() -> Iterator[Claim]:
    for depth in (8, 24):
        yield (
            Prediction(
                f"linear: share under double_round at {depth} layers, over the published {PUBLISHED[depth]:.0%}",
                0.6,
                1.6,
                "width and shifts of the published chain are not known; one bit of shift halves or doubles what "
                "arises, and what has spread by then changes by less",
            ),
            lambda found, depth=depth: float(found.double("linear").share[depth - 1] / PUBLISHED[depth]),
        )


def _truncating(settings: Settings) -> Iterator[Claim]:
    for name in TRUNCATED:
        bias = float(theory.truncation_bias(chain_of(name, settings, True))[-1])
        width = 0.25 * abs(bias) + 0.3
        yield (
            Prediction(
                f"{name}: bias of truncation behind 24 layers, steps",
                bias - width,
                bias + width,
                "each rounding loses half a step, and later layers propagate the part of the error that lies along the "
                "activations; 25%, and 0.3 steps for what random weights of 128 outputs do to the rest",
            ),
            lambda found, name=name: float(found.floor[name].bias[-1]),
        )
