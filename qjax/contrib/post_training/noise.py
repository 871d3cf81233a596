"""The noise of a model's output relative to its signal; every float array of the output counts equally."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np


def float_leaves(output: Any) -> list[np.ndarray]:
    """The float arrays of an output, in float64."""
    leaves = [leaf for leaf in jax.tree.leaves(output) if jax.dtypes.issubdtype(leaf.dtype, np.floating)]
    return [np.asarray(leaf).astype(np.float64) for leaf in leaves]


def power(output: Any) -> np.ndarray:
    """float64 [arrays]: `sum y^2` of each float array of an output, without infinite elements (a mask)."""
    return np.asarray([np.sum(np.square(y[np.isfinite(y)])) for y in float_leaves(output)], np.float64)


def distance(a: Any, b: Any) -> np.ndarray:
    """float64 [arrays]: `sum (a - b)^2` of each float array; equal infinities contribute nothing."""
    pairs = zip(float_leaves(a), float_leaves(b), strict=True)
    return np.asarray([np.sum(np.square(x[x != y] - y[x != y])) for x, y in pairs], np.float64)


def ratio(noise: np.ndarray, signal: np.ndarray) -> float:
    """The mean of noise / signal over the arrays of an output, so that each counts equally whatever its unit.

    An array that is all zeros has no ratio; any noise in it counts as 1.
    """
    safe = np.where(signal > 0, signal, 1.0)
    return float(np.mean(np.where(signal > 0, noise / safe, noise > 0))) if signal.size else 0.0


def noise_of(truth: Sequence[Any], outputs: Sequence[Any]) -> float:
    """`ratio` of the errors of another model's outputs for all batches to the float model's outputs."""
    signal = sum(map(power, truth), np.zeros(()))
    noise = sum((distance(y, y_q) for y, y_q in zip(truth, outputs, strict=True)), np.zeros(()))
    return ratio(np.atleast_1d(noise), np.atleast_1d(signal))
