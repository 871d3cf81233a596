"""Distillation: what is compared, what moves, and a small real task."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from sklearn.datasets import load_digits

import qjax
from qjax.training import Distillation, distill


@pytest.fixture(autouse=True)
def users_promotion():
    """optax mixes dtypes, as JAX allows by default."""
    with jax.numpy_dtype_promotion("standard"):
        yield


class Net(nnx.Module):
    def __init__(self, seed=0):
        self.first, self.second = nnx.Linear(64, 96, rngs=nnx.Rngs(seed)), nnx.Linear(96, 10, rngs=nnx.Rngs(seed + 1))

    def __call__(self, x):
        return self.second(nnx.relu(self.first(x)))


PIXELS, CLASSES = (
    np.asarray(part)[np.random.default_rng(0).permutation(1797)] for part in load_digits(return_X_y=True)
)
BATCHES = [jnp.asarray(PIXELS[i : i + 64] / 16, jnp.float32) for i in range(0, 1024, 64)]
TEST, WANTED = jnp.asarray(PIXELS[1024:] / 16, jnp.float32), CLASSES[1024:]


@pytest.fixture(scope="module")
def model():
    """A float network that reads digits: least squares on fixed random features, which takes no training."""
    net = Net()
    x, y = PIXELS[:1024] / 16, np.eye(10)[CLASSES[:1024].astype(int)]
    hidden: Any = np.asarray(nnx.relu(net.first(jnp.asarray(x, jnp.float32))), np.float64)
    hidden = np.concatenate([hidden, np.ones((len(hidden), 1))], axis=1)
    solved = np.linalg.solve(hidden.T @ hidden + 0.1 * np.eye(hidden.shape[1]), hidden.T @ y)
    head: Any = net.second
    head.kernel.set_value(jnp.asarray(10 * solved[:-1], jnp.float32))
    head.bias.set_value(jnp.asarray(10 * solved[-1], jnp.float32))
    return net


def quantized(model, bits=2):
    spec = qjax.QSpec(bits=bits, axis=-1)
    recipe = qjax.Recipe(weights=spec, activations=qjax.QSpec(bits=bits + 1, symmetric=False))
    qmodel = qjax.quantize(model, recipe, BATCHES[0])
    qjax.calibrate(qmodel, BATCHES, progress=False)
    qmodel.eval()
    return qmodel


def accuracy(model):
    return float(np.mean(np.asarray(model(TEST)).argmax(-1) == WANTED))


@pytest.mark.exhaustive
def test_the_default_recipe_on_digits(model):
    qmodel = quantized(model)
    before = accuracy(qmodel)
    report = distill(qmodel, BATCHES, teacher=model, measure="classes", progress=False)
    assert report.kept
    assert report.after < 0.6 * report.before
    assert report.held_out == 4
    assert before < 0.5
    assert accuracy(qmodel) > before + 0.8 * (accuracy(model) - before)
    assert "kept" in str(report)
    graph = qjax.convert(qmodel, BATCHES[0])
    np.testing.assert_array_equal(qjax.exact(qmodel, BATCHES[0])(qmodel, BATCHES[1]), graph(BATCHES[1]))


@pytest.mark.exhaustive
def test_the_loss_is_what_it_says(model):
    qmodel = quantized(model)
    x = BATCHES[0]
    y, t = (np.asarray(net(x), np.float64) for net in (qmodel, model))
    noise = ((y - t) ** 2).sum() / (t**2).sum()
    plain = Distillation.start(qmodel, x)
    np.testing.assert_allclose(plain.loss(qmodel, x), noise, rtol=1e-5)
    with_tensors = Distillation.start(qmodel, x, tensors=["fir.*"], share=0.5)
    assert with_tensors.tensors == ("first",)
    hidden = np.asarray(nnx.relu(model.first(x)), np.float64)
    params = qmodel.qparams()["first"]
    codes = qmodel.codes(x)[1]["first"]
    coded = (np.asarray(codes) - np.asarray(params.integer_zero_point())) * np.asarray(params.scale, np.float64)
    own = ((coded - hidden) ** 2).sum() / (hidden**2).sum()
    np.testing.assert_allclose(with_tensors.loss(qmodel, x), noise + 0.5 * own, rtol=1e-5)
    p, q = (np.exp(z) / np.exp(z).sum(-1, keepdims=True) for z in (t, y))
    classes = Distillation.start(qmodel, x, measure="classes")
    np.testing.assert_allclose(classes.loss(qmodel, x), (p * np.log(p / q)).sum(-1).mean(), rtol=1e-4)


@pytest.mark.exhaustive
def test_the_teacher_stands_still_in_a_loop_of_ones_own(model):
    qmodel = quantized(model)
    distillation = Distillation.start(qmodel, BATCHES[0])
    optimizer = distillation.optimizer(qmodel, steps=3)
    first = np.asarray(distillation.teach(BATCHES[0])[0])
    start = nnx.clone(qmodel)

    @nnx.jit
    def step(qmodel, optimizer, distillation, x):
        loss, gradients = nnx.value_and_grad(distillation.loss)(qmodel, x)
        optimizer.update(qmodel, gradients)
        return loss

    for x in BATCHES[:2]:
        step(qmodel, optimizer, distillation, x)
    np.testing.assert_array_equal(distillation.teach(BATCHES[0])[0], first)
    np.testing.assert_allclose(first, model(BATCHES[0]), rtol=1e-5, atol=1e-6)
    # the first step of Adam is the rate itself: a small part of the tensor's size, whatever the network
    before, after = (np.asarray(net.model.first.kernel[...]) for net in cast("list[Any]", [start, qmodel]))
    moved, size = np.abs(after - before).max(), np.sqrt((before**2).mean())
    assert 1e-3 * size < moved < 3e-2 * size


def test_what_is_no_better_is_taken_back(model):
    qmodel = quantized(model, bits=8)
    state = [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(qmodel, nnx.Param))]
    report = distill(qmodel, BATCHES[:4], learning_rate=1.0, epochs=1, progress=False)
    assert not report.kept
    assert "undone" in str(report)
    for before, after in zip(state, jax.tree.leaves(nnx.state(qmodel, nnx.Param)), strict=True):
        np.testing.assert_array_equal(before, after)


def test_mistakes(model):
    qmodel = quantized(model)
    x = BATCHES[0]
    with pytest.raises(ValueError, match=r"'block.*' matches none of the tensors 'first', 'second'"):
        Distillation.start(qmodel, x, tensors=["block.*"])
    with pytest.raises(TypeError, match=r"Write \['first'\]"):
        Distillation.start(qmodel, x, tensors="first")
    with pytest.raises(ValueError, match="expected one of 'noise', 'classes', got 'mse'"):
        Distillation.start(qmodel, x, measure="mse")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="expected a teacher with the parameters of the quantized model, got"):
        Distillation.start(qmodel, x, teacher=nnx.Linear(64, 10, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="at least one batch"):
        distill(qmodel, [])
    with pytest.raises(ValueError, match="the loss is NaN"):
        distill(qmodel, [x * jnp.nan], epochs=1)
    with pytest.raises(TypeError, match="expected a quantized model"):
        distill(model, [x])
