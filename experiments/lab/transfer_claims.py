"""What the study of transfer claims before it measures, each claim with the way to read its figure."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import qjax
from experiments.data import TEST_IMAGES
from experiments.lab.deployments import (
    HIDDEN,
    Deployed,
    FineTuned,
    deploy,
    fine_tune,
    flips,
    float_network,
    judged,
    quantized_network,
    teacher,
)
from qjax.contrib.lab.study import Prediction, Settings

BITS = (8, 4, 2)
DOUBLE = "tflite_micro"
SINGLE = ("single_round", "tosa", "tvm")
SATURATING = ("onnxruntime_avx2", "torch_fbgemm_avx2", "torch_onednn_avx2")
FLIPS = {8: (0.0, 0.01), 4: (0.0, 0.04), 2: (0.01, 0.20)}
"""Bits -> the band of the greatest share of images that two targets judge differently."""
DISAGREE = {8: 0.01, 4: 0.02, 2: 0.05}
"""Bits -> how many images two fine-tunings from one start may judge differently, at most, as a share."""


def epochs(settings: Settings) -> tuple[int, int, int]:
    """Of the float training, of the quantized one, of the fine-tuning."""
    return (60, 40, 8) if settings.full else (30, 15, 4)


def tuned(settings: Settings) -> list[tuple[int, str]]:
    """Bits and target of every fine-tuning through a target's integers: each compiles for many seconds."""
    if settings.full:
        return [(bits, name) for bits in BITS for name in (DOUBLE, "torch_fbgemm", "onnxruntime_avx2")]
    return [(8, DOUBLE), (2, DOUBLE)]


def seeds(settings: Settings) -> Sequence[int]:
    """Of the fine-tunings."""
    return range(32 if settings.full else 16)


@functools.lru_cache(maxsize=8)
def network(bits: int, settings: Settings) -> Any:
    """The trained network; made once for the prediction, which reads its shifts, and the measurement."""
    first, second, _ = epochs(settings)
    return quantized_network(bits, settings.seed, first, second)


def expected(bits: int, settings: Settings) -> tuple[float, float]:
    """The mean of 2^-(r+1) over the first layer's multipliers, and the share of its codes within their range."""
    _, data = float_network(settings.seed, epochs(settings)[0])
    graph = qjax.convert(network(bits, settings), data.train_images[:4], target="nearest_even")
    node = next(node for node in graph.ir.nodes if node.op == "dot")
    right = np.maximum(-np.asarray(graph.ir.constant(node, "shift"), np.int64), 0)
    _, codes = network(bits, settings).codes(data.train_images)
    hidden = np.asarray(codes[node.output])
    quantization = graph.ir.tensors[node.output].quantization
    assert quantization is not None
    inside = (hidden > quantization.qmin) & (hidden < quantization.qmax)
    return float(np.mean(2.0 ** -(right + 1.0))), float(np.mean(inside))


class Found:
    """What was measured. deployed: bits -> groups of targets. tuned: (bits, target) -> fine-tunings."""

    def __init__(self, settings: Settings) -> None:
        self.deployed: dict[int, list[Deployed]] = {}
        self.refused: dict[int, dict[str, str]] = {}
        self.tuned: dict[tuple[int, str], FineTuned] = {}
        first, _, more = epochs(settings)
        _, data = float_network(settings.seed, first)
        names = ["nearest_even", *(name for name in qjax.targets.names() if name != "nearest_even")]
        for bits in BITS:
            found, self.refused[bits] = deploy(network(bits, settings), data.test_images, names)
            self.deployed[bits] = judged(found, data.test_labels)
        targets = teacher(settings.seed, first)
        for bits, name in tuned(settings):
            self.tuned[bits, name] = fine_tune(network(bits, settings), data, targets, name, seeds(settings), more)

    def group(self, bits: int, name: str) -> Deployed:
        """The group that a target belongs to."""
        return next(one for one in self.deployed[bits] if name in one.names)

    def plain(self, bits: int) -> list[Deployed]:
        """The groups in which no sum saturates on the way."""
        return [one for one in self.deployed[bits] if not set(one.names) <= set(SATURATING)]

    def most_flips(self, bits: int) -> float:
        """Between any two of those."""
        return max((flips(a, b) for a, b in itertools.combinations(self.plain(bits), 2)), default=0.0)


Claim = tuple[Prediction, Callable[[Found], float]]


def claims(settings: Settings) -> list[Claim]:
    found: list[Claim] = []
    for bits in BITS:
        share, inside = expected(bits, settings)
        count = TEST_IMAGES * HIDDEN
        error = 5 * (share / count) ** 0.5
        found.append(
            (
                Prediction(
                    f"{bits} bits: share of the hidden layer's codes in which {DOUBLE} differs, same inputs",
                    max(0.0, 0.7 * share * inside - error),
                    1.3 * share + error,
                    "the mean of 2^-(r+1) over the layer's shifts, at least in codes within their range and at most in "
                    "all; 30% as sums of few products are not distributed evenly, and 5 standard errors",
                ),
                lambda f, bits=bits: f.group(bits, DOUBLE).hidden.count / f.group(bits, DOUBLE).hidden.compared,
            )
        )
        found.append(
            (
                Prediction(
                    f"{bits} bits: output codes in which {', '.join(SINGLE)} differ from nearest_even",
                    0,
                    0,
                    "the same exact products rounded once; 31-bit multipliers make no ties",
                ),
                lambda f, bits=bits: float(
                    sum(np.sum(f.group(bits, n).outputs != f.group(bits, "nearest_even").outputs) for n in SINGLE)
                ),
            )
        )
        low, high = FLIPS[bits]
        found.append(
            (
                Prediction(
                    f"{bits} bits: greatest share of images that two targets judge differently, saturating ones aside",
                    low,
                    high,
                    "an order of magnitude: scores move by a hidden step times a weight, and 1 image in 100 has its "
                    "two best scores within 2 of 255 codes; a hidden step is 17 times an 8-bit step at 4 bits and 85 "
                    "times at 2, where most images have a hidden code that differs",
                ),
                lambda f, bits=bits: f.most_flips(bits),
            )
        )
    for bits, name in tuned(settings):
        error = 5 * (DISAGREE[bits] / TEST_IMAGES / len(seeds(settings))) ** 0.5
        found.append(
            (
                Prediction(
                    f"{bits} bits, {name}: accuracy trained through the target less the control's, points",
                    -100 * error,
                    100 * error,
                    f"no effect: McNemar's error of {TEST_IMAGES} images of which {DISAGREE[bits]:.0%} are judged "
                    f"differently, 5 standard errors of the mean over {len(seeds(settings))} pairs",
                ),
                lambda f, key=(bits, name): 100 * gain(f.tuned[key]),
            )
        )
    found.append(
        (
            Prediction(
                "outputs in which the exact forward differs from the graph that is deployed",
                0,
                0,
                "it computes the graph",
            ),
            lambda f: float(sum(one.unequal for one in f.tuned.values())),
        )
    )
    return found


def gain(one: FineTuned) -> float:
    """Mean deployed accuracy, trained through the target, less the control's."""
    return float(np.mean(one.exact) - np.mean(one.control))
