"""Products that are rounded before they are read."""

import jax
import numpy as np

from qjax.numerics.unfused import unfused

RNG = np.random.default_rng(0)
A, B, C = (RNG.normal(size=10_000).astype(np.float32) for _ in range(3))


def test_a_product_is_rounded_before_it_is_added() -> None:
    found = jax.jit(lambda a, b, c: unfused(a * b) + c)(A, B, C)
    assert np.array_equal(found, A * B + C)
    once = (A.astype(np.float64) * B + C).astype(np.float32)
    assert not np.array_equal(found, once)


def test_what_is_not_finite() -> None:
    x = np.array([np.nan, np.inf, -np.inf, -0.0], np.float32)
    found = np.asarray(jax.jit(unfused)(x))
    assert np.array_equal(found, np.array([np.nan, np.inf, np.finfo(np.float32).min, 0], np.float32), equal_nan=True)
