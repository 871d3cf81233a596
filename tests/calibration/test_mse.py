"""MSE: its integrals against exact rational integration, its choice against brute force."""

import math
from fractions import Fraction
from itertools import pairwise

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qjax.calibration import MSE, MinMax, Observer
from qjax.calibration.histogram import HostHistogram
from qjax.calibration.mse import SquaredError, best_grid, candidates
from qjax.numerics.affine import QSpec, dequantize, quantize


def histogram_of(counts: list[int], first: int, zeros: int = 0, width: float = 0.25) -> HostHistogram:
    used = [j for j, n in enumerate(counts) if n]
    lo, hi = (first + used[0]) * width, (first + used[-1] + 1) * width
    return HostHistogram(lo=lo, hi=hi, width=width, first=first, counts=np.array(counts, np.uint64), zeros=zeros)


def exact_error(histogram: HostHistogram, scale: float, zero_point: int, spec: QSpec) -> Fraction:
    """The integral of (x - nearest value)**2, piece by piece between bin edges and decision thresholds."""
    s, width = Fraction(scale), Fraction(histogram.width)
    values = [(k - zero_point) * s for k in range(spec.qmin, spec.qmax + 1)]
    thresholds = [(a + b) / 2 for a, b in pairwise(values)]
    total = Fraction(0)
    for j, n in enumerate(histogram.counts.tolist()):
        left = (histogram.first + j) * width
        n -= histogram.zeros if histogram.first + j == 0 else 0
        cuts = [left, *(t for t in thresholds if left < t < left + width), left + width]
        for a, b in pairwise(cuts):
            value = min(values, key=lambda v: abs(v - (a + b) / 2))
            total += n / width * ((b - value) ** 3 - (a - value) ** 3) / 3
    return total


HISTOGRAMS = st.builds(
    lambda counts, first, zeros: histogram_of(
        [n + (zeros if first + j == 0 else 0) for j, n in enumerate(counts)],
        first,
        zeros if -16 < first <= 0 else 0,
    ),
    st.lists(st.integers(0, 1000), min_size=16, max_size=16).filter(any),
    st.integers(-24, 8),
    st.sampled_from([0, 7, 5000]),
)
SPECS = [
    QSpec(bits=2),
    QSpec(bits=3, narrow_range=False),
    QSpec(bits=3, symmetric=False),
    QSpec(bits=4, signed=False, symmetric=False),
    QSpec(bits=6, symmetric=False),
]


@pytest.mark.exhaustive
@settings(max_examples=40)
@given(HISTOGRAMS, st.sampled_from(SPECS), st.floats(0.01, 2.0), st.floats(0.0, 1.0))
def test_the_integral_is_exact(histogram: HostHistogram, spec: QSpec, scale: float, position: float) -> None:
    zero_point = 0 if spec.symmetric else round(spec.qmin + position * (spec.qmax - spec.qmin))
    (got,), _ = SquaredError(histogram)(scale, np.array([spec.qmin - zero_point]), np.array([spec.qmax - zero_point]))
    expected = exact_error(histogram, scale, zero_point, spec)
    # float64: 20 rounded terms, none above 2**20 (21,000 values, squared distances below 2**6).
    assert abs(Fraction(float(got)) - expected) <= Fraction(1, 2**25)


@settings(max_examples=15)
@given(HISTOGRAMS, st.sampled_from(SPECS[:3]))
@pytest.mark.exhaustive
def test_no_candidate_is_better(histogram: HostHistogram, spec: QSpec) -> None:
    scale, zero_point = best_grid(histogram, spec)
    chosen = exact_error(histogram, scale, zero_point, spec)
    reach = max(-histogram.lo, histogram.hi, 0.0) if spec.symmetric else max(histogram.hi, 0) - min(histogram.lo, 0)
    levels = spec.qmax if spec.symmetric else spec.qmax - spec.qmin
    for i in range(0, 321, 8):  # a quarter octave apart
        other = reach / levels * 2.0 ** (-i / 32)
        for z in [0] if spec.symmetric else range(spec.qmin, spec.qmax + 1):
            assert chosen <= exact_error(histogram, other, z, spec) + Fraction(1, 2**30)


def test_zero_points_reach_from_one_end_to_the_other() -> None:
    spec = QSpec(bits=4, symmetric=False)
    for scale, zero_points in candidates(-1.0, 3.0, spec):
        assert zero_points.size <= 257
        low, high = sorted(
            min(max(end, spec.qmin), spec.qmax)
            for end in (round(spec.qmin + 1.0 / scale), round(spec.qmax - 3.0 / scale))
        )
        assert zero_points.tolist() == list(range(low, high + 1))


def error_on(data: np.ndarray, observer: Observer, spec: QSpec) -> float:
    state = observer.update(observer.init(spec, data.shape), jnp.asarray(data), spec)
    qparams = observer.qparams(state, spec)
    real = np.asarray(dequantize(quantize(data, qparams), qparams))
    return math.fsum(((data.astype(np.float64) - real) ** 2).tolist())


@pytest.mark.exhaustive
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", ["normal", "laplace", "relu", "shifted"])
def test_near_the_best_of_a_brute_force_search_on_the_data_itself(kind: str, bits: int) -> None:
    """Nearest values by search over all codes, 300 scales by all zero points; no histogram, no formula."""
    # Many values, so that the brute force cannot fit the noise of a sample.
    rng, n = np.random.default_rng(bits), 40_000
    data = {
        "normal": rng.standard_normal(n),
        "laplace": rng.laplace(size=n),
        "relu": np.maximum(rng.standard_normal(n), 0),
        "shifted": rng.standard_normal(n) + 2,
    }[kind].astype(np.float32)
    spec = QSpec(bits=bits, symmetric=kind in ("normal", "laplace"))
    best = math.inf
    wide = np.sort(data.astype(np.float64))
    prefix = [np.concatenate([[0.0], np.cumsum(wide**k)]) for k in range(3)]
    low, high = min(wide[0], 0.0), max(wide[-1], 0.0)
    reach = max(-low, high) / spec.qmax if spec.symmetric else (high - low) / (spec.qmax - spec.qmin)
    for scale in reach * np.linspace(0.02, 1.0, 300):
        for z in [0] if spec.symmetric else range(spec.qmin, spec.qmax + 1, 1 if bits < 8 else 16):
            values = (np.arange(spec.qmin, spec.qmax + 1) - z) * scale
            cut = np.concatenate([[0], np.searchsorted(wide, (values[1:] + values[:-1]) / 2), [wide.size]])
            count, first, second = (np.diff(p[cut]) for p in prefix)
            best = min(best, float(np.sum(second - 2 * values * first + values**2 * count)))
    # 2,048 bins and steps of 2.2%: within 2% of the optimum, and never worse than the whole range.
    assert error_on(data, MSE(), spec) <= 1.02 * best
    assert error_on(data, MSE(), spec) <= error_on(data, MinMax(), spec)


@pytest.mark.exhaustive
def test_many_exact_zeros_do_not_pull_the_scale_down() -> None:
    rng = np.random.default_rng(0)
    data = rng.standard_normal(4096).astype(np.float32)
    spec, observer = QSpec(bits=4), MSE()
    start = observer.init(spec, data.shape)
    dense = observer.update(start, jnp.asarray(data), spec)
    sparse = dense
    for _ in range(20):
        sparse = observer.update(sparse, jnp.zeros_like(data), spec)
    assert np.array_equal(observer.qparams(dense, spec).scale, observer.qparams(sparse, spec).scale)
