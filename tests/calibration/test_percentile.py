"""Percentile against the order statistics of all the data."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qjax.calibration import MinMax, Observer, Percentile
from qjax.calibration.observer import State
from qjax.numerics.affine import QSpec

SPEC = QSpec(symmetric=False)


def observe(observer: Observer, data: np.ndarray, parts: int = 4) -> State:
    state, step = observer.init(SPEC, ()), jax.jit(lambda state, x: observer.update(state, x, SPEC))
    for part in data.reshape(parts, -1):
        state = step(state, part)
    return state


@pytest.mark.parametrize("percentile", [51.0, 90.0, 99.0, 99.9, 99.99, 100.0])
@pytest.mark.parametrize("kind", ["normal", "exponential", "student", "constant", "offset"])
@pytest.mark.sampled(8)
def test_within_one_bin_of_the_quantiles(kind: str, percentile: float) -> None:
    rng = np.random.default_rng(3)
    n = 19_996  # no percentage of it is whole, so numpy's float product cannot step over one
    data = {
        "normal": rng.standard_normal(n),
        "exponential": rng.exponential(size=n),
        "student": rng.standard_t(2, n),
        "constant": np.full(n, -0.3),
        "offset": rng.uniform(100.0, 101.0, n),
    }[kind].astype(np.float32)
    observer = Percentile(percentile, bins=256)
    state = observe(observer, data)
    lo, hi = (float(v) for v in observer.bounds(state, SPEC))
    width = observer.histograms(state)[0].width
    # The k-th smallest and the k-th largest, k = ceil(percentile / 100 * n), in exact arithmetic.
    k = -(-Fraction(str(percentile)) * n // 100)
    ordered = np.sort(data)
    top, bottom = float(ordered[int(k) - 1]), float(ordered[n - int(k)])
    assert top == float(np.quantile(data, percentile / 100, method="inverted_cdf"))
    assert top <= hi <= top + width
    assert bottom - width <= lo <= bottom


def test_percentile_100_is_minmax() -> None:
    data = np.random.default_rng(0).standard_normal(4096).astype(np.float32)
    assert Percentile(100.0).bounds(observe(Percentile(100.0), data), SPEC) == MinMax().bounds(
        observe(MinMax(), data), SPEC
    )


def test_an_outlier_does_not_set_the_scale() -> None:
    data = np.random.default_rng(0).uniform(-1, 1, 40_000).astype(np.float32)
    data[0] = 10.0
    observer = Percentile(99.99)
    state = observer.update(observer.init(SPEC, data.shape), jnp.asarray(data), SPEC)
    assert float(observer.bounds(state, SPEC)[1]) <= 1.0 + observer.histograms(state)[0].width
