"""MinMax and MovingAverage against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qjax.calibration import MinMax, MovingAverage
from qjax.calibration.weights import weight_qparams
from qjax.numerics.affine import QSpec

FLOATS = st.floats(-(2.0**90), 2.0**90, width=32, allow_subnormal=False)


@pytest.mark.exhaustive
@settings(max_examples=25)
@given(st.lists(FLOATS, min_size=1, max_size=40), st.integers(1, 5))
def test_minmax_is_the_range_however_the_data_is_split(values: list[float], parts: int) -> None:
    data, spec = np.array(values, np.float32), QSpec(symmetric=False)
    state = MinMax().init(spec, data.shape)
    for part in np.array_split(data, parts):
        if part.size:
            state = MinMax().update(state, jnp.asarray(part), spec)
    lo, hi = MinMax().bounds(state, spec)
    assert (float(lo), float(hi)) == (min(data.tolist()), max(data.tolist()))


@pytest.mark.exhaustive
def test_minmax_of_one_batch_is_the_weights_minmax() -> None:
    w = np.random.default_rng(0).standard_normal((3, 3, 5, 7)).astype(np.float32)
    for spec in (
        QSpec(axis=-1),
        QSpec(bits=4, symmetric=False, axis=(2, 3)),
        QSpec(group_size=5, group_axis=2),
    ):
        state = MinMax().update(MinMax().init(spec, w.shape), jnp.asarray(w), spec)
        observed, weight = MinMax().qparams(state, spec), weight_qparams(w, spec)
        assert np.array_equal(observed.scale, weight.scale)
        assert np.array_equal(observed.zero_point, weight.zero_point)


@pytest.mark.exhaustive
@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9, 0.99])
def test_moving_average_rounds_each_step_as_numpy_does(decay: float) -> None:
    """20,000 channels, 20 batches: a fused multiply-add would differ in about a quarter of them."""
    rng = np.random.default_rng(1)
    data = rng.standard_normal((20, 2, 20_000)).astype(np.float32)
    observer, spec = MovingAverage(decay), QSpec(axis=-1, symmetric=False)
    start = observer.init(spec, data.shape[1:])
    step = jax.jit(lambda state, x: observer.update(state, x, spec))
    eager = jitted = start
    for x in data:
        eager, jitted = observer.update(eager, jnp.asarray(x), spec), step(jitted, x)
    scanned, _ = jax.jit(lambda s, xs: jax.lax.scan(lambda s, x: (observer.update(s, x, spec), None), s, xs))(
        start, data
    )
    past, now = np.float32(decay), np.float32(1.0 - decay)
    lo, hi = data[0].min(0), data[0].max(0)
    for x in data[1:]:
        lo, hi = past * lo + now * x.min(0), past * hi + now * x.max(0)
    for state in (eager, jitted, scanned):
        got = observer.bounds(state, spec)
        assert np.array_equal(got[0], lo)
        assert np.array_equal(got[1], hi)


def test_moving_average_starts_at_the_first_batch_and_not_at_zero() -> None:
    observer, spec = MovingAverage(0.99), QSpec()
    state = observer.update(observer.init(spec, (3,)), jnp.asarray([1.0, -2.0, 3.0]), spec)
    lo, hi = observer.bounds(state, spec)
    assert (float(lo), float(hi)) == (-2.0, 3.0)
