"""The growing histogram against exact rational arithmetic."""

import functools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from qjax.calibration import MSE, Percentile
from qjax.calibration.counter import LIMIT, Counter
from qjax.calibration.histogram import HistogramState, HostHistogram
from qjax.numerics.affine import QSpec

BINS = 32
OBSERVER = Percentile(bins=BINS)
SIZE = 24
PER_TENSOR = QSpec()
NORMAL = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False)
# Values of one magnitude, of all magnitudes, and neighbours far from zero.
DATA = st.one_of(
    st.lists(st.floats(-4.0, 4.0, width=32, allow_subnormal=False), min_size=SIZE, max_size=SIZE),
    st.lists(NORMAL, min_size=SIZE, max_size=SIZE),
    st.lists(st.integers(2**23, 2**23 + 99).map(float), min_size=SIZE, max_size=SIZE),
)


@functools.partial(jax.jit, static_argnums=2)
def update(state: HistogramState, x: jax.Array, spec: QSpec) -> HistogramState:
    return OBSERVER.update(state, x, spec)


def state_of(parts: list[np.ndarray], spec: QSpec = PER_TENSOR) -> HistogramState:
    state = OBSERVER.init(spec, parts[0].shape)
    for part in parts:
        state = update(state, jnp.asarray(part), spec)
    return state


def exact_bins(values: np.ndarray, width: Fraction) -> dict[int, int]:
    """How many values each bin of that width holds, by index from zero."""
    counted: dict[int, int] = {}
    for value in values.tolist():
        index = math.floor(Fraction(value) / width)
        counted[index] = counted.get(index, 0) + 1
    return counted


def host_bins(histogram: HostHistogram) -> dict[int, int]:
    return {histogram.first + j: int(n) for j, n in enumerate(histogram.counts) if n}


@pytest.mark.exhaustive
@settings(max_examples=25)
@given(DATA)
@example([0.0] * SIZE)
@example([-(2.0**-126)] + [2.0**100] * (SIZE - 1))
@example([-3.4028234663852886e38, 3.4028234663852886e38] + [1.0] * (SIZE - 2))
def test_counts_are_exact_at_the_least_width_that_fits(values: list[float]) -> None:
    data = np.array(values, np.float32)
    (histogram,) = OBSERVER.histograms(state_of([data]))
    width = Fraction(histogram.width)
    assert (histogram.lo, histogram.hi) == (min(values), max(values))
    assert histogram.zeros == values.count(0.0)
    assert host_bins(histogram) == exact_bins(data, width)
    # At half the width the bins would not do, or the documented floor of the width is reached.
    used = exact_bins(data, width / 2)
    magnitude = max(abs(v) for v in values)
    floor = max(Fraction(2) ** -126, Fraction(2) ** (math.frexp(magnitude)[1] - 24) if magnitude else 0)
    assert max(used) - min(used) >= BINS or width == floor


@pytest.mark.exhaustive
@settings(max_examples=25)
@given(DATA, st.sampled_from([2, 3, 4, 8]), st.randoms())
def test_batches_and_their_order_do_not_matter(values: list[float], parts: int, random) -> None:
    whole = state_of([np.array(values, np.float32)])
    random.shuffle(values)
    split = state_of(list(np.array(values, np.float32).reshape(parts, -1)))
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(split), strict=True))


@pytest.mark.exhaustive
@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1))
def test_each_channel_has_a_width_of_its_own(seed: int) -> None:
    rng = np.random.default_rng(seed)
    data = (rng.standard_normal((30, 4)) * 10.0 ** rng.uniform(-20, 20, 4)).astype(np.float32)
    for channel, histogram in enumerate(OBSERVER.histograms(state_of([data[:15], data[15:]], QSpec(axis=-1)))):
        assert host_bins(histogram) == exact_bins(data[:, channel], Fraction(histogram.width))


@pytest.mark.exhaustive
def test_eager_and_jit_agree_on_many_values() -> None:
    rng = np.random.default_rng(0)
    spec, observer = QSpec(axis=0), MSE()
    data = (rng.standard_normal((6, 3, 512)) * np.array([1e-3, 1, 50, 2, 1e4, 1]).reshape(6, 1, 1)).astype(np.float32)
    eager = jitted = observer.init(spec, data.shape[1:])
    step = jax.jit(lambda state, x: observer.update(state, x, spec))
    for x in data:
        eager, jitted = observer.update(eager, jnp.asarray(x), spec), step(jitted, x)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(eager), jax.tree.leaves(jitted), strict=True))
    for channel, histogram in enumerate(observer.histograms(eager)):
        assert host_bins(histogram) == exact_bins(data[:, channel].ravel(), Fraction(histogram.width))


def test_values_that_are_not_finite_are_in_no_bin() -> None:
    data = np.array([1.0, np.nan, np.inf, -np.inf, 2.0], np.float32)
    assert int(np.asarray(state_of([data]).counts.low).sum()) == 2


def test_more_values_than_can_be_counted_are_refused() -> None:
    state = state_of([np.ones(SIZE, np.float32)])
    words = np.uint64(LIMIT - 1)
    full = [jnp.array([half, 0, 0], jnp.uint32) for half in (words >> np.uint64(32), words & np.uint64(2**32 - 1))]
    state = HistogramState(**{**vars(state), "tally": type(state.tally)(Counter(*full))})
    OBSERVER.histograms(state)
    state = update(state, jnp.ones(SIZE, jnp.float32), PER_TENSOR)
    with pytest.raises(ValueError, match=r"observer 'percentile' has seen 2\*\*63 values or more"):
        OBSERVER.histograms(state)
