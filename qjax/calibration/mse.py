"""An observer that chooses the grid with the least expected squared error over the histogram."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from qjax.calibration.histogram import HistogramObserver, HistogramState, HostHistogram
from qjax.calibration.observer import Bounds
from qjax.numerics.affine import QSpec

_STEPS_PER_OCTAVE = 32
_OCTAVES = 10
_MAX_ZERO_POINTS = 257


@dataclass(frozen=True)
class MSE(HistogramObserver):
    """Searches scale and zero point for the least mean of `(x - dequantize(quantize(x)))**2`, per scale.

    Both kinds of error count: the rounding inside the range and the clipping beyond it. The values in a bin of the
    histogram are assumed to be spread evenly over it, except for exact zeros. Under this assumption the integral of the
    squared error is exact.

    Scales go down from the one that covers the data, in steps of `2**(1/32)` over 10 octaves. A symmetric spec has one
    zero point for each. An asymmetric one tries those between covering the lowest and covering the highest value, at
    most 257. Of equal candidates the widest wins.

    Paper: Banner et al. 2019, Post-Training 4-bit Quantization of Convolution Networks for Rapid-Deployment (arXiv
    1810.05723), whose criterion this is; here it is searched over the data's histogram.

    Args:
      bins: of the histogram, an even number from 16 to 65,536.

    Examples:
      >>> import qjax
      >>> recipe = qjax.Recipe(observer="mse", activations=qjax.QSpec(bits=4, symmetric=False))
    """

    name = "mse"

    def bounds(self, state: HistogramState, spec: QSpec) -> Bounds:
        """The values of the lowest and the highest code of the best grid."""
        ends: list[tuple[float, float]] = []
        for histogram in self.histograms(state):
            scale, zero_point = best_grid(histogram, spec)
            lo, hi = (spec.qmin - zero_point) * scale, (spec.qmax - zero_point) * scale
            # A symmetric scale depends only on the largest magnitude divided by qmax.
            ends.append((-hi if spec.symmetric and spec.signed else lo, hi))
        lo, hi = np.asarray(ends, np.float32).T
        return lo.reshape(state.lo.shape), hi.reshape(state.lo.shape)


def best_grid(histogram: HostHistogram, spec: QSpec) -> tuple[float, int]:
    """The scale and zero point of the least expected squared error; scale 0 if all data are zero."""
    error = SquaredError(histogram)
    best = (np.inf, 0.0, 0)
    for scale, zero_points in candidates(histogram.lo, histogram.hi, spec):
        costs, clipping = error(scale, spec.qmin - zero_points, spec.qmax - zero_points)
        i = int(np.argmin(costs))
        if costs[i] < best[0]:
            best = (float(costs[i]), scale, int(zero_points[i]))
        # With one zero point, clipping grows as the scale falls, so nothing narrower can be better.
        if spec.symmetric and clipping[0] > best[0]:
            break
    return best[1], best[2]


def candidates(lo: float, hi: float, spec: QSpec) -> list[tuple[float, np.ndarray]]:
    """(scale, zero points) to try for data in [lo, hi], widest first; empty if all data are zero."""
    lo, hi = min(lo, 0.0), max(hi, 0.0)
    if spec.symmetric:
        widest = (max(-lo, hi) if spec.signed else hi) / spec.qmax
    else:
        widest = (hi - lo) / (spec.qmax - spec.qmin)
    if widest == 0.0:
        return []
    scales = [widest * 2.0 ** (-i / _STEPS_PER_OCTAVE) for i in range(_STEPS_PER_OCTAVE * _OCTAVES + 1)]
    if spec.symmetric:
        return [(scale, np.zeros(1, np.int64)) for scale in scales]
    return [(scale, _zero_points(lo, hi, scale, spec)) for scale in scales]


def _zero_points(lo: float, hi: float, scale: float, spec: QSpec) -> np.ndarray:
    """Zero points from the one that covers `lo` to the one that covers `hi`, at most 257 of them."""
    ends = np.rint([spec.qmin - lo / scale, spec.qmax - hi / scale])
    low, high = np.sort(np.clip(ends, spec.qmin, spec.qmax))
    count = min(int(high - low) + 1, _MAX_ZERO_POINTS)
    return np.unique(np.rint(np.linspace(low, high, count)).astype(np.int64))


class SquaredError:
    """Integrals of a histogram's squared quantization error, for any scale and range of codes.

    With density rho constant within a bin, the error of the grid `k * s`, `k` from `kmin` to `kmax`,
    is the integral of rho times: `(x - a)**2` below `a = kmin * s`, `(x - b)**2` above `b = kmax * s`,
    and the squared distance to the nearest multiple of s between. Each part follows from cumulative integrals at the
    edges; everything is float64, in units of the bin width.
    """

    def __init__(self, histogram: HostHistogram) -> None:
        counts = histogram.counts.astype(np.float64)
        index = histogram.first + np.arange(counts.size)
        counts[index == 0] -= float(histogram.zeros)
        used = np.flatnonzero(counts)
        span = slice(int(used[0]), int(used[-1]) + 1) if used.size else slice(0, 0)
        self._width = histogram.width
        self._rho = counts[span]
        self._edges = np.append(index[span], index[span][-1:] + 1).astype(np.float64)
        # Moments of the density about zero: integral of x**k rho up to each edge.
        self._moments = [self._cumulate(self._edges ** (k + 1) / (k + 1)) for k in range(3)]

    def __call__(self, scale: float, kmin: np.ndarray, kmax: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Total squared error for each (kmin, kmax), and the part beyond them; float64, data squared."""
        if not self._rho.size:
            return np.zeros(kmin.shape), np.zeros(kmin.shape)
        s = scale / self._width
        a, b = kmin * s, kmax * s
        inside = self._cumulate(_rounding_integral(self._edges, s))
        rounding = self._at(inside, lambda t: _rounding_integral(t, s), np.stack([a, b]))
        below = [self._moment(k, a) for k in range(3)]
        above = [self._moments[k][-1] - self._moment(k, b) for k in range(3)]
        clipping = below[2] - 2 * a * below[1] + a * a * below[0]
        clipping = clipping + (above[2] - 2 * b * above[1] + b * b * above[0])
        unit = self._width**2
        return (rounding[1] - rounding[0] + clipping) * unit, clipping * unit

    def _cumulate(self, antiderivative: np.ndarray) -> np.ndarray:
        """The integral of rho * f up to each edge, from f's antiderivative at the edges."""
        return np.concatenate([[0.0], np.cumsum(self._rho * np.diff(antiderivative))])

    def _moment(self, k: int, t: np.ndarray) -> np.ndarray:
        return self._at(self._moments[k], lambda u: u ** (k + 1) / (k + 1), t)

    def _at(
        self, cumulative: np.ndarray, antiderivative: Callable[[np.ndarray], np.ndarray], t: np.ndarray
    ) -> np.ndarray:
        """The integral of rho * f up to each t, interpolated within the bin that contains t."""
        t = np.clip(t, self._edges[0], self._edges[-1])
        j = np.clip(np.floor(t - self._edges[0]).astype(np.int64), 0, self._rho.size - 1)
        return cumulative[j] + self._rho[j] * (antiderivative(t) - antiderivative(self._edges[j]))


def _rounding_integral(t: np.ndarray, s: float) -> np.ndarray:
    """The integral from 0 to t of the squared distance to the nearest multiple of s.

    Each whole step contributes s**3 / 12, and the rest, from the nearest multiple n on, (u - n)**3 / 3 of s**3.
    """
    u = t / s
    n = np.rint(u)
    return s**3 * (n / 12.0 + (u - n) ** 3 / 3.0)
