"""Functions that are infinitely steep somewhere: the derivative that training takes at such a code."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qjax.numerics.elementary import Expression, is_steep, with_finite_slope

STEP = np.float32(0.25)
CODES = np.arange(-4, 5, dtype=np.float32) * STEP
SCALE = jnp.full((1,), STEP)


def derivative(function, x=CODES, parameters=()):
    return jax.vmap(jax.grad(lambda x: with_finite_slope(function, x[None], SCALE, parameters)[0]))(x)


def signed_root(x):
    return jnp.sign(x) * jnp.sqrt(jnp.abs(x))


@pytest.mark.parametrize(("function", "steep"), [(signed_root, 4), (jnp.cbrt, 4), (jnp.reciprocal, 4)])
def test_beside_the_code(function, steep):
    plain = jax.vmap(jax.grad(function))(CODES)
    assert not np.isfinite(plain[steep])
    found = derivative(function)
    assert found[steep] == jax.grad(function)(STEP / 2)
    # all others keep their bits, and so do the values
    assert np.array_equal(np.delete(found, steep), np.delete(plain, steep))
    assert np.array_equal(with_finite_slope(function, jnp.asarray(CODES), SCALE, ()), function(CODES), equal_nan=True)


def test_inside_of_the_domain():
    found = derivative(jnp.arccos)
    assert np.isfinite(found).all()
    assert found[-1] == jax.grad(jnp.arccos)(np.float32(1) - STEP / 2)
    assert found[0] == jax.grad(jnp.arccos)(np.float32(-1) + STEP / 2)


def test_both_directions_and_parameters():
    def function(x, exponent, positive):
        return jnp.where(positive, jnp.abs(x) ** exponent, x)

    parameters = jnp.float32(0.5), jnp.asarray(True)
    moving = np.linspace(1, 2, len(CODES)).astype(np.float32)

    def ours(x, exponent):
        return with_finite_slope(function, x, SCALE, (exponent, parameters[1]))

    value, tangent = jax.jvp(ours, (CODES, parameters[0]), (moving, jnp.float32(0)))
    dx, d_exponent = jax.vjp(ours, CODES, parameters[0])[1](jnp.ones_like(value))
    assert np.isfinite(tangent).all()
    assert np.array_equal(tangent, dx * moving)
    assert np.isfinite(d_exponent)


def test_which_functions_are_steep():
    assert is_steep(Expression((("abs", (0,)), ("sqrt", (1,)))))
    assert not is_steep(Expression((("logistic", (0,)), ("mul", (0, 1)))))
