"""Float64 intervals as pairs of arrays: exact numbers, and results widened by more than their rounding error."""

from collections.abc import Callable
from typing import Any

import numpy as np
from jax.typing import ArrayLike

Interval = tuple[Any, Any]
"""(low, high); the same object twice for exact numbers. nan in both if there is no value."""

ULP = 2.0**-52
"""Relative; at least the rounding error of one operation."""
TINY = 5e-324
"""The smallest float64: keeps a widened zero open on both sides."""
_SPLIT = 2.0**27 + 1


def point(value: Any) -> Interval:
    """An exact number."""
    value = np.float64(value) if np.ndim(value) == 0 else value
    return value, value


def pair(low: Any, high: Any) -> Interval:
    """Two ends; None for the high one of an exact number."""
    return low, low if high is None else high


def is_exact(*intervals: Interval) -> bool:
    """Whether all are known to be single numbers."""
    return all(low is high for low, high in intervals)


def widened(low: ArrayLike, high: ArrayLike, relative: float) -> Interval:
    """Both ends moved outwards; a number too large for float64 lies between the largest one and infinity."""
    largest = np.finfo(np.float64).max
    low = np.where(low == np.inf, largest, low - np.abs(low) * relative - TINY)
    high = np.where(high == -np.inf, -largest, high + np.abs(high) * relative + TINY)
    return low, high


def unless_exact(value: ArrayLike, exact: Any) -> Interval:
    """An exact number if that is known for all elements; otherwise an interval."""
    if np.all(exact):
        return value, value
    low, high = widened(value, value, ULP)
    return np.where(exact, value, low), np.where(exact, value, high)


def exact_product(a: Any, b: Any) -> tuple[Any, Any]:
    """The float64 product, and whether it is known to be exact (Dekker; only if nothing over- or underflows)."""
    product = a * b
    a_high = a * _SPLIT - (a * _SPLIT - a)
    b_high = b * _SPLIT - (b * _SPLIT - b)
    a_low, b_low = a - a_high, b - b_high
    error = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
    safe = (np.abs(product) > 2.0**-900) | (a == 0) | (b == 0)
    return product, (error == 0) & safe


def each(function: Callable[[float], float]) -> Callable[[Any], Any]:
    """A function of one float, on arrays."""

    def apply(x: ArrayLike) -> Any:
        return np.asarray([function(v) for v in np.ravel(x).tolist()], np.float64).reshape(np.shape(x))

    return apply
