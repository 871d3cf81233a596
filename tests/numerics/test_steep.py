"""Functions that are infinitely steep somewhere: the derivative that training takes at such a code."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax
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


class Model(nnx.Module):
    def __init__(self, function):
        self.linear = nnx.Linear(6, 6, rngs=nnx.Rngs(0))
        self.function = function

    def __call__(self, x):
        return self.function(self.linear(x))


X = np.asarray(jax.random.normal(jax.random.key(0), (32, 6)))


def gradient(model):
    return nnx.grad(lambda model: jnp.mean(model(X) ** 2))(model)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("function", [signed_root, jnp.cbrt, lambda y: jnp.log(jnp.mean(jnp.exp(4 * y), axis=-1))])
@pytest.mark.sampled(2)
def test_a_model_trains_where_a_code_has_no_slope(function, half):
    """The float model has no such number: its gradient is finite."""
    model = Model(function)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(jax.jit(gradient)(model)))
    if half:
        model.linear.dtype = jnp.bfloat16
    qmodel = qjax.quantize(model, qjax.Recipe(), X)
    # outside of jit the call is compiled, too: test_compiled_call
    gradients = jax.jit(gradient)(qmodel)
    found = gradients["model"]["linear"]
    assert np.isfinite(found["kernel"][...]).all()
    assert np.abs(found["kernel"][...]).max() > 0
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients["quantizers"]))


def test_a_backward_of_the_model_s_own_stays():
    @jax.custom_vjp
    def root(x):
        return jnp.sqrt(jnp.abs(x))

    root.defvjp(lambda x: (root(x), x), lambda x, g: (jnp.where(x == 0, 7.0, 1.0) * g,))
    qmodel = qjax.quantize(Model(root), qjax.Recipe(), X)

    def loss(x):
        return jnp.sum(qmodel(x))

    text = str(jax.make_jaxpr(jax.grad(loss))(X))
    assert " 7.0" in text
    assert "is_finite" not in text
