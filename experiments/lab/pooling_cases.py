"""Averages and sums whose exact results are known: codes in, numerator and denominator out, and graphs that do them."""

import dataclasses
import functools
from typing import Any

import numpy as np
from flax import nnx

import qjax

TIES: dict[str, dict[str, str]] = {
    "pool": {
        "tflite_average_pool": "away from code 0",
        # apply_scale_32 rounds ties up, but the reciprocal ((2^30 + 1) << k) / n is a little more than 1 / n: it moves
        # every tie away from zero before that
        "tosa_average_pool": "away",
        "onnx_average_pool": "even",
        "torch_average_pool": "even",
        "torch_qnnpack_average": "even",
        "float32": "even",
    },
    "add": {
        "tflite_add": "away",
        "tflite_add_neon": "away",
        "xnnpack_add": "up",
        "tosa_add": "up",
        "onnx_add": "even",
        "torch_add": "even",
        "torch_qnnpack_add": "away",
        "openvino_add": "even",
    },
}
"""Where each runtime's formula sends a tie, read off its source (see the modules of `qjax.ops.formulas`)."""
_ROUNDINGS = {"nearest_even": "even", "nearest_up": "up", "nearest_away": "away"}
_FIRST = ("nearest_even", "single_round", "tflite_micro", "tflite_optimized_x86")
"""Whose names stand for targets of the same formula."""
REAL = 0.0237
"""A scale that is no power of two."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One operation on given codes.

    op: "pool" or "add". size: of a pool's window. scales: of the inputs and the output. zero_point: of all of them.
    ratio: of an addition: (ratio[0] a + ratio[1] b) / ratio[2] on centred codes is the exact sum.
    low, high: the codes that occur.
    """

    name: str
    op: str
    size: int = 2
    scales: tuple[float, ...] = (2.0**-5, 2.0**-5)
    zero_point: int = 0
    ratio: tuple[int, int, int] = (1, 1, 2)
    low: int = -128
    high: int = 127


_S = 2.0**-5
CASES = (
    Case("pool 2x2", "pool"),
    Case("pool 2x2, dark half behind a relu", "pool", zero_point=-128, high=-1),
    Case("pool 3x3", "pool", size=3, low=-126, high=125),
    Case("pool 2x2, real-valued scale", "pool", scales=(REAL, REAL)),
    Case("add, equal scales", "add", scales=(_S, _S, 2 * _S)),
    Case("add, equal scales, behind a relu", "add", scales=(_S, _S, 2 * _S), zero_point=-128),
    Case("add, scales 1 : 1/4 : 2", "add", scales=(_S, _S / 4, 2 * _S), ratio=(4, 1, 8)),
    Case("add, equal real-valued scales", "add", scales=(REAL, REAL, 2 * REAL)),
)


class Pool(nnx.Module):
    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, x: Any) -> Any:
        return nnx.avg_pool(x, (self.size, self.size), (self.size, self.size))


class Add(nnx.Module):
    def __call__(self, a: Any, b: Any) -> Any:
        return a + b


def ties_of(op: str, target: str) -> str:
    """Where a target sends ties, by its formula or by the rounding of its exact sums."""
    chosen = qjax.targets.get(target)
    formula = chosen.formula("average_pool" if op == "pool" else "add")
    return _ROUNDINGS[chosen.rounding] if formula is None else TIES[op][formula]


def chosen_targets(op: str, everything: bool) -> list[str]:
    """All targets, or the first of each formula: the others compute the same."""
    found: dict[Any, str] = {}
    for name in sorted(qjax.targets.names(), key=lambda name: (name not in _FIRST, name)):
        target = qjax.targets.get(name)
        formula = target.formula("average_pool" if op == "pool" else "add")
        found.setdefault(name if everything else (formula, formula is None and target.rounding), name)
    return sorted(found.values())


def codes(case: Case, seed: int, windows: int) -> tuple[np.ndarray, ...]:
    """The inputs, int8: [n, k, 2k, 16] for a pool, twice [256, 256] for an addition: all pairs.

    In a pool's window all elements but the last are drawn; the last runs over all codes for each draw, so that the sums
    fill every residue alike. A window is never the whole image, for which ONNX Runtime has another kernel.
    """
    every = np.arange(case.low, case.high + 1, dtype=np.int8)
    if case.op == "add":
        first, second = np.meshgrid(every, every, indexing="ij")
        return first, second
    rng, elements = np.random.default_rng(seed), case.size**2
    draws = max(32, windows // every.size // 32 * 32)
    rest = rng.integers(case.low, case.high + 1, (draws, 1, elements - 1), dtype=np.int8)
    whole = np.concatenate(
        [np.repeat(rest, every.size, 1), np.broadcast_to(every[None, :, None], (draws, every.size, 1))], -1
    )
    tiles = whole.reshape(-1, 2, 16, case.size, case.size)
    # [n, 2, 16, k, k] -> [n, k, 2, k, 16]
    return (np.ascontiguousarray(tiles.transpose(0, 3, 1, 4, 2)).reshape(-1, case.size, 2 * case.size, 16),)


def exact(case: Case, inputs: tuple[np.ndarray, ...]) -> tuple[np.ndarray, int]:
    """The result on centred codes as integers: numerator int64 in the layout of the output, and denominator."""
    centred = [x.astype(np.int64) - case.zero_point for x in inputs]
    if case.op == "add":
        first, second, denominator = case.ratio
        return first * centred[0] + second * centred[1], denominator
    (x,) = centred
    n, k, _, channels = x.shape
    return x.reshape(n, k, 2, k, channels).sum(axis=(1, 3))[:, None], k * k


def rounded(case: Case, numerator: np.ndarray, denominator: int, ties: str) -> np.ndarray:
    """The nearest integers to numerator / denominator in exact arithmetic, ties as named; int64."""
    # floor(x + 1/2): ties up
    up = (2 * numerator + denominator) // (2 * denominator)
    tie = (2 * numerator + denominator) % (2 * denominator) == 0
    down = {
        "up": np.zeros_like(tie),
        "even": up % 2 == 1,
        "away": numerator < 0,
        "away from code 0": numerator + denominator * case.zero_point < 0,
    }[ties]
    return up - (tie & down)


def graph(case: Case, target: str) -> qjax.IntegerGraph:
    """The operation under a target, on the scales and zero points of the case."""
    qmodel, sample = _quantized(case.op, case.size, target)
    # in the order of the tensors; a target that keeps a pool's grid has one quantizer for both
    pairs = zip(qmodel.quantizers, case.scales, strict=case.op == "add")
    qmodel.quantizers.write({name: {"scale": scale, "zero_point": case.zero_point} for name, scale in pairs})
    return qjax.convert(qmodel, sample)


@functools.cache
def _quantized(op: str, size: int, target: str) -> tuple[Any, Any]:
    """The model with quantizers, whose numbers the caller sets, and a sample."""
    model = Pool(size) if op == "pool" else Add()
    shape = (4, size, 2 * size, 16) if op == "pool" else (4, 256)
    x = np.linspace(-1, 1, int(np.prod(shape)), dtype=np.float32).reshape(shape)
    sample = x if op == "pool" else (x, x)
    recipe = qjax.Recipe(target=target, method="static", observer="minmax")
    qmodel = qjax.quantize(model, recipe, sample)
    qmodel.eval()
    return qmodel, sample
