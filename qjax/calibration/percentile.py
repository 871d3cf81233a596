"""An observer of the range of the data without its outliers."""

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from qjax.calibration.histogram import HistogramObserver, HistogramState, HostHistogram
from qjax.calibration.observer import Bounds
from qjax.numerics.affine import QSpec


@dataclass(frozen=True)
class Percentile(HistogramObserver):
    """Clips at the percentiles `100 - percentile` and `percentile` of the data, per scale.

    The k-th smallest of n values, with `k = ceil(percentile / 100 * n)`, lies in some bin of the histogram. The upper
    bound is that bin's upper edge, or the maximum if that is smaller. It is therefore at most one bin above the
    quantile (numpy's "inverted_cdf") and never below it. The lower bound mirrors this. A symmetric spec uses the bound
    that is farther from zero.

    Paper: Wu et al. 2020, Integer Quantization for Deep Learning Inference: Principles and Empirical Evaluation (arXiv
    2004.09602), section 4.

    Args:
      percentile: in (50, 100]. 100 is the exact minimum and maximum. It is interpreted as the decimal number that
        Python prints, so 99.99 is 9999/10000.
      bins: of the histogram, an even number from 16 to 65,536.

    Examples:
      >>> import qjax
      >>> recipe = qjax.Recipe(observer=qjax.calibration.Percentile(99.9))
    """

    percentile: float = 99.99
    name = "percentile"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 50.0 < self.percentile <= 100.0:
            raise ValueError(f"percentile: expected a number in (50, 100], got {self.percentile}; 99.99 is usual.")

    def bounds(self, state: HistogramState, spec: QSpec) -> Bounds:
        """The bounds without both tails."""
        fraction = Fraction(str(self.percentile)) / 100
        ends = [percentile_bounds(h, fraction) for h in self.histograms(state)]
        lo, hi = np.asarray(ends, np.float32).T
        return lo.reshape(state.lo.shape), hi.reshape(state.lo.shape)


def percentile_bounds(histogram: HostHistogram, fraction: Fraction) -> tuple[float, float]:
    """Bounds that keep `fraction` of the values at or below hi, and as many at or above lo."""
    below = np.cumsum(histogram.counts, dtype=np.uint64)
    n = int(below[-1])
    # Exact integers: ceil(fraction * n), at least 1.
    k = max(1, -(-fraction.numerator * n // fraction.denominator))
    edges = histogram.edges
    top = int(np.searchsorted(below, np.uint64(k), side="left"))
    # The (n + 1 - k)-th smallest is the k-th largest.
    bottom = int(np.searchsorted(below, np.uint64(n + 1 - k), side="left"))
    return max(histogram.lo, float(edges[bottom])), min(histogram.hi, float(edges[top + 1]))
