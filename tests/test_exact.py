"""qjax.exact: training through the integer graph's own bits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import qjax
from qjax import Recipe
from tests.layers.round_trip import assert_same, data


class Perceptron(nnx.Module):
    """Two linear layers."""

    def __init__(self):
        self.a = nnx.Linear(6, 5, rngs=nnx.Rngs(0))
        self.b = nnx.Linear(5, 3, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.b(nnx.relu(self.a(x)))


def test_training_through_the_exact_forward():
    x = data(16, 6)
    qmodel = qjax.quantize(Perceptron(), Recipe(), x)
    qmodel.eval()
    forward = qjax.exact(qmodel, x)
    optimizer = nnx.Optimizer(qmodel, optax.adam(3e-2), wrt=nnx.Param)
    target = data(16, 3, seed=7)

    @nnx.jit
    def step(qmodel, optimizer, x):
        def loss(m):
            y = forward(m, x)
            return jnp.mean(jnp.square(y - target)), y

        (value, y), grads = nnx.value_and_grad(loss, has_aux=True)(qmodel)
        with jax.numpy_dtype_promotion("standard"):
            optimizer.update(qmodel, grads)
        return value, y

    losses = []
    for _ in range(10):
        graph = qjax.convert(qmodel, x)
        value, y = step(qmodel, optimizer, x)
        assert np.array_equal(y, graph(x))
        losses.append(float(value))
    assert losses[-1] < 0.8 * losses[0]


def test_gradient_of_the_exact_forward_is_the_training_forwards():
    x = data(16, 6)
    qmodel = qjax.quantize(Perceptron(), Recipe(), x)
    qmodel.eval()
    forward = qjax.exact(qmodel, x)
    weights = data(16, 3, seed=7)

    @nnx.jit
    def grads(qmodel, x):
        exact = nnx.grad(lambda m: jnp.sum(forward(m, x) * weights))(qmodel)
        training = nnx.grad(lambda m: jnp.sum(m(x) * weights))(qmodel)
        return exact, training

    exact, training = grads(qmodel, x)
    assert_same(exact, training)
    assert all(np.any(np.asarray(g) != 0) for g in jax.tree.leaves(exact["model"]))


@pytest.mark.exhaustive
def test_the_exact_forward_of_a_model_with_tables_trains():
    """What is made on the host from a scale (a softmax's table, an activation's) has no derivative, and needs none."""

    class Attention(nnx.Module):
        def __init__(self):
            self.up = nnx.Linear(4, 6, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return jax.nn.softmax(jnp.tanh(self.up(x)))

    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4)), jnp.float32)
    qmodel = qjax.quantize(Attention(), qjax.Recipe(), x)
    qmodel.eval()
    forward = qjax.exact(qmodel, x)
    weights = jnp.arange(18.0).reshape(3, 6)

    def gradient(call):
        return nnx.grad(lambda m: jnp.sum(call(m, x) * weights))(qmodel)

    exact, fake = gradient(forward), gradient(lambda m, x: m(x))
    for a, b in zip(jax.tree.leaves(exact), jax.tree.leaves(fake), strict=True):
        assert np.array_equal(a, b)
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(exact)) > 0


class Pooled(nnx.Module):
    """An average pooling, which TFLite computes on its input's grid."""

    def __init__(self):
        self.a = nnx.Conv(2, 3, (3, 3), rngs=nnx.Rngs(0))

    def __call__(self, x):
        return nnx.avg_pool(nnx.relu(self.a(x)), (2, 2), (2, 2))


def test_an_average_on_its_inputs_grid_is_one_inside_of_jit_too():
    """Where the scales are tracers, one grid is the same two arrays."""
    x = data(3, 4, 4, 2)
    with jax.numpy_dtype_promotion("standard"):  # flax divides by an integer count
        qmodel = qjax.quantize(Pooled(), Recipe(target="tflite_micro"), x)
        qmodel.eval()
        graph = qjax.convert(qmodel, x)
        exact = nnx.jit(qjax.exact(qmodel, x))(qmodel, x)
    assert "formula" in graph.ir.nodes[-1].attributes
    assert_same(exact, graph(x))


def test_codes_keep_their_range_where_nothing_changes_their_sign():
    """-128 has no opposite: behind a factor the range must be symmetric, behind a bias and a relu it need not be."""
    x = data(4, 6)
    spec = qjax.QSpec(bits=8, axis=-1, narrow_range=False)
    qmodel = qjax.quantize(Perceptron(), Recipe(weights=spec), x)
    qmodel.eval()
    kernel = qjax.convert(qmodel, x).ir.tensors["a/kernel"].quantization
    assert kernel is not None
    assert (kernel.qmin, kernel.qmax) == (-128, 127)


class Entropy(nnx.Module):
    """Its tables are made on the host; a matrix of literals is the weight of a second product."""

    def __init__(self) -> None:
        self.dense = nnx.Linear(6, 4, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.dense(x) @ jnp.linalg.inv(jnp.eye(4) * 2)
        return -jnp.sum(jax.nn.softmax(y) * jax.nn.log_softmax(y), axis=-1)


def test_made_within_a_gradient():
    x = jax.random.normal(jax.random.key(0), (4, 6))
    qmodel = qjax.quantize(Entropy(), qjax.Recipe(), x)
    forward = qjax.exact(qmodel, x)
    outside = nnx.grad(lambda m: forward(m, x).sum())(qmodel)
    inside = nnx.grad(lambda m: qjax.exact(m, x)(m, x).sum())(qmodel)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(outside), jax.tree.leaves(inside), strict=True))


def test_a_batch_that_the_model_treats_otherwise_is_refused():
    class Squeezed(nnx.Module):
        def __init__(self) -> None:
            self.dense = nnx.Linear(6, 4, rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.dense(x)[:, None].squeeze()

    x = jax.random.normal(jax.random.key(0), (4, 6))
    qmodel = qjax.quantize(Squeezed(), qjax.Recipe(), x)
    with pytest.warns(
        UserWarning, match=r"On a batch of 1 the model returns the shape \(4,\), and on one of 4 \(4, 4\)"
    ):
        forward = qjax.exact(qmodel, x)
    assert forward(qmodel, x[:3]).shape == (3, 4)
    with pytest.raises(ValueError, match=r"the model returns shape \(4,\) on this batch, but its graph \(1, 4\)"):
        forward(qmodel, x[:1])
