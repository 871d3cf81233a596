"""Products that are rounded before they are read, and their derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qjax.numerics.unfused import unfused, unfused_in_training

RNG = np.random.default_rng(0)
A, B, C = (RNG.normal(size=10_000).astype(np.float32) for _ in range(3))


@pytest.mark.parametrize("function", [unfused, unfused_in_training])
def test_a_product_is_rounded_before_it_is_added(function) -> None:
    found = jax.jit(lambda a, b, c: function(a * b) + c)(A, B, C)
    assert np.array_equal(found, A * B + C)
    once = (A.astype(np.float64) * B + C).astype(np.float32)
    assert not np.array_equal(found, once)


def test_what_is_not_finite() -> None:
    x = np.array([np.nan, np.inf, -np.inf, -0.0], np.float32)
    lowest = np.finfo(np.float32).min
    for function in (unfused, unfused_in_training):
        found = np.asarray(jax.jit(function)(x))
        assert np.array_equal(found, np.array([np.nan, np.inf, lowest, 0], np.float32), equal_nan=True)


def test_both_have_one_derivative() -> None:
    def gradients(function):
        return jax.jit(jax.grad(lambda a, b: jnp.sum(jnp.sin(function(a * b))), (0, 1)))(A, B)

    for plain, ours in zip(gradients(unfused), gradients(unfused_in_training), strict=True):
        assert np.array_equal(plain, ours)
    _, tangent = jax.jvp(unfused_in_training, (A,), (B,))
    assert np.array_equal(tangent, B)


def test_training_compares_no_product_again() -> None:
    """The maximum's own derivative would keep what the product was computed from, and compare it."""

    def compared(function) -> int:
        text = str(jax.make_jaxpr(jax.grad(lambda a, b: jnp.sum(jnp.sin(function(a * b)))))(A, B))
        return text.count(" eq ")

    assert compared(unfused) > 0
    assert compared(unfused_in_training) == 0
