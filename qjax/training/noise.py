"""Noise of a model's output beside its signal: each float array of the output counts alike, whatever its unit is."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np


def float_leaves(output: Any) -> list[np.ndarray]:
    """The float arrays of an output, in float64."""
    leaves = [leaf for leaf in jax.tree.leaves(output) if jax.dtypes.issubdtype(leaf.dtype, np.floating)]
    return [np.asarray(leaf).astype(np.float64) for leaf in leaves]


def power(output: Any) -> np.ndarray:
    """`sum y^2` of each float array of an output, what is infinite (a mask) left out: float64 [arrays]."""
    return np.asarray([np.sum(np.square(y[np.isfinite(y)])) for y in float_leaves(output)], np.float64)


def distance(a: Any, b: Any) -> np.ndarray:
    """`sum (a - b)^2` of each float array; equal infinities differ by nothing: float64 [arrays]."""
    pairs = zip(float_leaves(a), float_leaves(b), strict=True)
    return np.asarray([np.sum(np.square(x[x != y] - y[x != y])) for x, y in pairs], np.float64)


def ratio(noise: np.ndarray, signal: np.ndarray) -> float:
    """The mean of noise / signal over the arrays of an output, so that each counts alike whatever its unit is.

    An array of zeros alone has no ratio; there any noise counts as 1.
    """
    safe = np.where(signal > 0, signal, 1.0)
    return float(np.mean(np.where(signal > 0, noise / safe, noise > 0))) if signal.size else 0.0


def noise_of(truth: Sequence[Any], outputs: Sequence[Any]) -> float:
    """`ratio` of the float model's outputs for all batches and those of another model."""
    signal = sum(map(power, truth), np.zeros(()))
    noise = sum((distance(y, y_q) for y, y_q in zip(truth, outputs, strict=True)), np.zeros(()))
    return ratio(np.atleast_1d(noise), np.atleast_1d(signal))
