"""Entropy against a literal, bin-by-bin reading of the published procedure."""

import math
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qjax.calibration import Entropy
from qjax.calibration.entropy import entropy_threshold, magnitudes
from qjax.calibration.histogram import HostHistogram
from qjax.numerics.affine import QSpec


def literal_divergence(bins: list[int], kept: int, codes: int) -> float:
    """Migacz's slide: P = bins[:kept] with the outliers in its last bin, Q = its quantized, expanded form."""
    p = [Fraction(n) for n in bins[:kept]]
    p[-1] += sum(bins[kept:])
    q = [Fraction(0)] * kept
    group_of = [max(g for g in range(codes) if g * kept // codes <= j) for j in range(kept)]
    for g in range(codes):
        members = [j for j in range(kept) if group_of[j] == g]
        occupied = [j for j in members if p[j] > 0]
        for j in occupied:
            q[j] = Fraction(sum(bins[m] for m in members), len(occupied))
    # MXNet's smoothing: an empty bin of Q where P has mass.
    q = [max(b, Fraction(1, 10_000)) if a > 0 else b for a, b in zip(p, q, strict=True)]
    total_p, total_q = sum(p), sum(q)
    divergence = 0.0
    for a, b in zip(p, q, strict=True):
        if a > 0:
            divergence += float(a / total_p) * math.log((a / total_p) / (b / total_q))
    return divergence


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 50), min_size=4, max_size=40).filter(lambda b: b[-1] > 0),
    st.sampled_from([2, 4, 8]),
)
def test_the_threshold_has_the_least_divergence(bins: list[int], codes: int) -> None:
    kept = entropy_threshold(np.array(bins, np.float64), codes)
    assert codes <= kept <= len(bins) or kept == len(bins) < codes
    candidates = [i for i in range(codes, len(bins) + 1) if 2 * sum(bins[:i]) > sum(bins)]
    if candidates:
        assert kept in candidates
        chosen = literal_divergence(bins, kept, codes)
        # Equal but for the float64 rounding of a sum of at most 40 logarithms.
        assert all(chosen <= literal_divergence(bins, i, codes) + 1e-12 for i in candidates)


@pytest.mark.exhaustive
def test_data_far_from_zero_keeps_its_range() -> None:
    data = np.random.default_rng(0).uniform(100.0, 101.0, 50_000).astype(np.float32)
    lo, hi = observe(data, QSpec(), Entropy())
    assert lo == data.min()
    assert hi > 100.9


def test_magnitudes_fold_the_sign_and_leave_out_zeros() -> None:
    histogram = HostHistogram(
        lo=-0.75,
        hi=0.99,
        width=0.25,
        first=-3,
        counts=np.array([1, 2, 3, 14, 5, 6, 7, 0], np.uint64),
        zeros=10,
    )
    counts, width = magnitudes(histogram)
    assert counts.tolist() == [4 + 3, 5 + 2, 6 + 1, 7]
    assert width == 0.25


def test_magnitudes_far_from_zero_use_wider_bins() -> None:
    histogram = HostHistogram(
        lo=20.0, hi=20.99, width=0.25, first=80, counts=np.array([1, 2, 3, 4], np.uint64), zeros=0
    )
    counts, width = magnitudes(histogram)
    assert counts.tolist() == [0, 0, 10]
    assert width == 8.0


def observe(data: np.ndarray, spec: QSpec, observer: Entropy) -> tuple[float, float]:
    state = observer.update(observer.init(spec, data.shape), jnp.asarray(data), spec)
    lo, hi = observer.bounds(state, spec)
    return float(lo), float(hi)


@pytest.mark.exhaustive
def test_an_outlier_is_clipped() -> None:
    data = np.random.default_rng(0).standard_normal(200_000).astype(np.float32)
    data[0] = 100.0
    lo, hi = observe(data, QSpec(), Entropy())
    assert -6.0 < lo < -3.0
    # The width of a bin is 1/8 or less: 8-bit codes cannot go below 128 bins.
    assert hi <= 128 * 0.125


def test_with_more_codes_than_bins_nothing_is_clipped() -> None:
    data = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    assert observe(data, QSpec(bits=16), Entropy()) == (data.min(), data.max())


@pytest.mark.exhaustive
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_one_sided_data_has_all_the_codes_of_an_asymmetric_spec(sign: float) -> None:
    data = (sign * np.random.default_rng(0).exponential(size=20_000)).astype(np.float32)
    asymmetric = observe(data, QSpec(bits=8, symmetric=False), Entropy())
    nine_bits = observe(data, QSpec(bits=9), Entropy())  # 2**8 codes of magnitude
    assert asymmetric == nine_bits
