"""Fused activations as bounds of codes.

TFLite's kernels round a bound to a code half away from zero (CalculateActivationRangeQuantized), XNNPACK half to even.
"""

import math
from typing import Any

import numpy as np

BOUNDS: dict[str, tuple[float, float | None]] = {
    "RELU6": (0.0, 6.0),
    "RELU_N1_TO_1": (-1.0, 1.0),
    "RELU_0_TO_1": (0.0, 1.0),
    "RELU": (0.0, None),
}
"""By activation: the least and the greatest real; None: there is none."""


def activation_codes(activation: str, scale: Any, zero_point: Any, low: int, high: int) -> tuple[int, int] | None:
    """The codes of an activation's bounds, within [low, high]; None where the runtimes disagree about them."""
    step, zero = np.float32(np.asarray(scale)), int(np.asarray(zero_point))
    found: list[int] = []
    for bound, end in zip(BOUNDS[activation], (low, high), strict=True):
        if bound is None:
            found.append(end)
            continue
        with np.errstate(over="ignore"):
            quotient = float(np.float32(bound) / step)
        if not math.isfinite(quotient):
            return None
        away = math.floor(abs(quotient) + 0.5) * (1 if quotient >= 0 else -1)
        if away != round(quotient):
            return None
        found.append(min(max(away + zero, low), high))
    return found[0], found[1]
