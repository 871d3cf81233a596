"""Histograms against numpy: every value and every code falls into one bar, and both share an axis."""

import jax.numpy as jnp
import numpy as np
import pytest

from qjax import QSpec
from qjax.analysis.statistics import fine_counts, merged


@pytest.mark.parametrize("bits", [2, 4, 8, 12])
def test_bars_are_numpys(bits):
    spec = QSpec(bits=bits, symmetric=False)
    rng = np.random.default_rng(bits)
    # quarters of a step, so that float32 has every edge exactly
    steps = rng.integers(4 * spec.qmin * 3, 4 * spec.qmax * 3, 5000) / 4 + 1 / 16
    scale, zero = np.float32(0.5), np.int32(1)
    x = ((steps - zero) * scale).astype(np.float32)
    before = np.asarray(fine_counts(jnp.asarray(x), jnp.asarray(scale), jnp.asarray(zero), spec))
    codes = np.clip(np.rint(steps).astype(int), spec.qmin, spec.qmax)
    found = merged(np.bincount(codes - spec.qmin, minlength=spec.levels), before)
    assert sum(found.after) == sum(found.before) == 5000
    edges = spec.qmin + found.before_start + found.before_width * np.arange(len(found.before) + 1)
    inside = np.clip(steps, edges[0], edges[-1] - found.before_width / 2)
    np.testing.assert_array_equal(found.before, np.histogram(inside, edges)[0])
    assert len(found.after) <= 128
    assert found.after[0] == np.sum(codes < spec.qmin + found.width)
