"""Models with a function that is infinitely steep at a code train: no gradient is infinite or NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax


def signed_root(x):
    return jnp.sign(x) * jnp.sqrt(jnp.abs(x))


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
@pytest.mark.sampled(1)
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
