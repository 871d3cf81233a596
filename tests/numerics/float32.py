"""float32 arithmetic in fractions: the operation exactly, then one rounding. No float decides anything."""

from fractions import Fraction

import numpy as np


def nearest(q: Fraction) -> Fraction:
    """The float32 nearest to q, ties to even, for results in the normal range (and zero)."""
    if q == 0:
        return q
    exponent = abs(q).numerator.bit_length() - abs(q).denominator.bit_length()
    if abs(q) < Fraction(2) ** exponent:
        exponent -= 1
    step = Fraction(2) ** (exponent - 23)
    return round(q / step) * step


def code(x: Fraction, scale: Fraction, zero_point: int, qmin: int, qmax: int) -> int:
    """`clip(round(fl(x * fl(1/scale))) + zero_point, qmin, qmax)`."""
    steps = round(nearest(x * nearest(1 / scale)))
    return min(max(steps + zero_point, qmin), qmax)


def choose(lo: Fraction, hi: Fraction, qmin: int, qmax: int, mode: str) -> tuple[Fraction, int]:
    """Scale and zero point that cover [lo, hi] and 0; mode: symmetric, unsigned (symmetric) or asymmetric."""
    lo, hi = min(lo, Fraction(0)), max(hi, Fraction(0))
    if mode == "asymmetric":
        scale = nearest(nearest(hi - lo) * nearest(Fraction(1, qmax - qmin)))
    else:
        span = hi if mode == "unsigned" else max(-lo, hi)
        scale = nearest(span * nearest(Fraction(1, qmax)))
    scale = scale or Fraction(1)
    if mode != "asymmetric":
        return scale, 0
    return scale, min(max(qmin - round(nearest(lo * nearest(1 / scale))), qmin), qmax)


def exact_ties(scale: np.ndarray | np.floating, count: int) -> np.ndarray:
    """float32 `fl((k + 1/2) * scale)` for `count` whole k around zero, in rows as long as scale."""
    k = np.arange(count, dtype=np.float64) - count // 2 + 0.5
    return (k.reshape(-1, max(scale.size, 1)) * scale.astype(np.float64)).astype(np.float32)
