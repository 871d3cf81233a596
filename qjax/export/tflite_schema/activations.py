"""Fused activations as bounds of codes.

    RELU6 on a grid with scale 0.05 and zero point -128    ->    codes -128 to -8

TFLite's kernels round a bound to a code half away from zero (CalculateActivationRangeQuantized), XNNPACK half to even.
"""

import functools

import numpy as np
from jax.typing import ArrayLike

from qjax.numerics.rounding import Rounding, round_float

_AWAY, _EVEN = Rounding.NEAREST_AWAY, Rounding.NEAREST_EVEN

BOUNDS: dict[str, tuple[float, float | None]] = {
    "RELU6": (0.0, 6.0),
    "RELU_N1_TO_1": (-1.0, 1.0),
    "RELU_0_TO_1": (0.0, 1.0),
    "RELU": (0.0, None),
}
"""Activation -> its lower and upper bound as real numbers; None if there is none."""


def activation_codes(
    activation: str, scale: ArrayLike, zero_point: ArrayLike, low: int, high: int
) -> tuple[int, int] | None:
    """The codes of an activation's bounds, within [low, high]; None if the runtimes disagree about them."""
    return _codes(activation, float(np.float32(np.asarray(scale))), int(np.asarray(zero_point)), low, high)


@functools.lru_cache(maxsize=4096)
def _codes(activation: str, scale: float, zero: int, low: int, high: int) -> tuple[int, int] | None:
    step = np.float32(scale)
    found: list[int] = []
    for bound, end in zip(BOUNDS[activation], (low, high), strict=True):
        if bound is None:
            found.append(end)
            continue
        with np.errstate(over="ignore"):
            quotient = np.float32(bound) / step
        if not np.isfinite(quotient):
            return None
        away, even = (int(round_float(quotient, rounding)) for rounding in (_AWAY, _EVEN))
        if away != even:
            return None
        found.append(min(max(away + zero, low), high))
    return found[0], found[1]
