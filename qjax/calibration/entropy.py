"""An observer that clips at the threshold with the least loss of information, as TensorRT chooses it."""

from dataclasses import dataclass

import numpy as np

from qjax.calibration.histogram import HistogramObserver, HistogramState, HostHistogram
from qjax.calibration.observer import Bounds
from qjax.numerics.affine import QSpec

_EMPTY = 1e-4


@dataclass(frozen=True)
class Entropy(HistogramObserver):
    """Clips |x| at the threshold whose quantized distribution has the least KL divergence from the data.

    Over the histogram of magnitudes, each number i of bins to keep is a candidate. P is the first i bins, with
    everything beyond added to the last of them. Q is the same bins merged evenly into as many groups as there are
    codes, and spread back over the bins of each group that P occupies. The threshold is i bin widths for the i with the
    least KL(P || Q) = sum P log(P / Q).

    Paper: S. Migacz, 8-bit Inference with TensorRT, GTC 2017. MXNet's calibrator does the same over both signs.

    Additions to the published procedure:

    - exact zeros are left out: every grid represents them, so they carry no information about the clipping (NVIDIA's
      pytorch-quantization overwrites the bin of zero for the same reason);
    - magnitudes have `2**bits` codes under a symmetric unsigned spec, or under an asymmetric one if the data lie on one
      side of zero, and `2**(bits - 1)` otherwise;
    - a bin that is empty in Q but not in P (clipped values alone in their group) counts as 1e-4 values, MXNet's
      smoothing, because otherwise one far outlier would forbid every threshold below it;
    - a threshold must keep more than half of the values, because for data far from zero the first occupied bin, with
      all the rest clipped onto it, would otherwise have no divergence at all;
    - of equal candidates the widest wins; if there are no more occupied bins than codes, nothing is clipped.

    The bounds are the data's own, clipped to plus and minus the threshold. The procedure needs many values per bin:
    with fewer than some tens of thousands of values in all it fits noise, so use `MSE` there.

    Args:
      bins: of the histogram, an even number from 16 to 65,536.

    Examples:
      >>> import qjax
      >>> recipe = qjax.Recipe(observer="entropy")
    """

    name = "entropy"

    def bounds(self, state: HistogramState, spec: QSpec) -> Bounds:
        """The data's bounds, clipped to the threshold."""
        ends: list[tuple[float, float]] = []
        for histogram in self.histograms(state):
            one_sided = not spec.signed if spec.symmetric else (histogram.lo >= 0.0 or histogram.hi <= 0.0)
            counts, width = magnitudes(histogram)
            threshold = entropy_threshold(counts, 2 ** (spec.bits - (0 if one_sided else 1))) * width
            ends.append((max(histogram.lo, -threshold), min(histogram.hi, threshold)))
        lo, hi = np.asarray(ends, np.float32).T
        return lo.reshape(state.lo.shape), hi.reshape(state.lo.shape)


def magnitudes(histogram: HostHistogram) -> tuple[np.ndarray, float]:
    """Float64 counts of the nonzero |x| up to the last occupied bin, and the width of each bin.

    Bins are aligned to zero, so bin `-1 - j` folds onto bin j. (A negative multiple of the width itself lies on the far
    edge of its bin.) If data far from zero need more bins than the histogram has, neighbours are merged until they fit.
    """
    index = histogram.first + np.arange(histogram.counts.size)
    counts = histogram.counts.astype(np.float64)
    counts[index == 0] -= float(histogram.zeros)
    occupied = counts > 0
    if not occupied.any():
        return np.zeros(1), histogram.width
    index, counts = index[occupied], counts[occupied]
    folded, width = np.where(index >= 0, index, -1 - index), histogram.width
    while folded.max() >= histogram.counts.size:
        folded, width = folded >> 1, width * 2.0
    return np.bincount(folded, weights=counts), width


def entropy_threshold(counts: np.ndarray, codes: int) -> int:
    """How many of the magnitude bins to keep; `counts` ends with an occupied bin.

    Returns `counts.size` when there are no more bins than codes.
    """
    best, best_divergence = counts.size, np.inf
    total = counts.sum()
    mass = np.cumsum(counts)
    for kept in range(counts.size, codes - 1, -1):
        if mass[kept - 1] <= total / 2:
            break
        divergence = _divergence(counts[:kept], total, codes)
        if divergence < best_divergence:
            best, best_divergence = kept, divergence
    return best


def _divergence(kept: np.ndarray, total: float, codes: int) -> float:
    """KL(P || Q) in nats. kept: the bins below the threshold. total: the mass of all bins."""
    p = kept.copy()
    p[-1] += total - kept.sum()
    starts = np.arange(codes) * kept.size // codes
    sizes = np.diff(np.append(starts, kept.size))
    occupied = p > 0
    mass = np.add.reduceat(kept, starts)
    spread = np.add.reduceat(occupied.astype(np.float64), starts)
    q = np.repeat(mass / np.maximum(spread, 1.0), sizes)[occupied]
    p = p[occupied]
    q = np.maximum(q, _EMPTY)
    return float(np.sum(p * np.log((p * q.sum()) / (q * p.sum()))) / p.sum())
