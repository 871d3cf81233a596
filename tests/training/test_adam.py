"""The optimizer of the default recipe: what moves by how much, and what does not."""

# pyright: reportAttributeAccessIssue=false

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax
from qjax.training import optimizer
from tests.layers.round_trip import data


@pytest.fixture(autouse=True)
def users_promotion():
    """optax mixes dtypes, as JAX allows by default."""
    with jax.numpy_dtype_promotion("standard"):
        yield


class Net(nnx.Module):
    def __init__(self):
        self.a = nnx.Linear(6, 8, rngs=nnx.Rngs(0))
        self.b = nnx.Linear(8, 3, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.b(nnx.relu(self.a(x)))


def quantized(method="lsq", factor=1.0):
    return nnx.clone(made(method, factor))


@functools.cache
def made(method, factor):
    model = Net()
    model.a.kernel[...] = model.a.kernel[...] * factor
    model.b.kernel[...] = model.b.kernel[...] / factor
    return qjax.quantize(model, qjax.Recipe(method=method), data(16, 6))


def numbers(qmodel):
    return {"/".join(map(str, path)): np.asarray(v[...]) for path, v in nnx.to_flat_state(nnx.state(qmodel, nnx.Param))}


def moved(qmodel, transform, steps=1):
    """How far each parameter moves."""
    before = numbers(qmodel)
    opt = nnx.Optimizer(qmodel, transform, wrt=nnx.Param)
    gradients = jax.tree.map(jnp.ones_like, nnx.state(qmodel, nnx.Param))
    for _ in range(steps):
        opt.update(qmodel, gradients)
    return {name: np.abs(after - before[name]).max() for name, after in numbers(qmodel).items()}


def moved_after(qmodel, transform, steps, name):
    """How far a parameter has moved after so many steps each."""
    before = numbers(qmodel)[name]
    opt = nnx.Optimizer(qmodel, transform, wrt=nnx.Param)
    gradients = jax.tree.map(jnp.ones_like, nnx.state(qmodel, nnx.Param))
    found = []
    for step in range(1, max(steps) + 1):
        opt.update(qmodel, gradients)
        if step in steps:
            found.append(np.abs(numbers(qmodel)[name] - before).max())
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("factor", [1.0, 64.0])
def test_the_first_step_is_a_part_of_each_tensors_size(factor):
    qmodel = quantized(factor=factor)
    size = float(np.sqrt(np.mean(np.square(numbers(qmodel)["model/a/kernel"]))))
    found = moved(qmodel, optimizer(qmodel, 100, learning_rate=1e-2))
    assert found["model/a/kernel"] == pytest.approx(1e-2 * size, rel=1e-3)
    assert found["quantizers/learned_log2_scale"] == pytest.approx(1e-2, rel=1e-3)


@pytest.mark.parametrize("method", ["lsq", "lsq_plus", "pact", "tqt"])
@pytest.mark.sampled(2)
def test_the_parameters_of_quantizers_have_a_rate_of_their_own(method):
    qmodel = quantized(method)
    found = moved(qmodel, optimizer(qmodel, 10, scale_rate=0.0))
    still = {name for name, by in found.items() if by == 0}
    assert still == {name for name in found if name.startswith("quantizers/")}


def test_weights_decay_and_scales_do_not():
    """With a gradient of zero only the decay moves."""
    qmodel = quantized()
    before = numbers(qmodel)
    opt = nnx.Optimizer(qmodel, optimizer(qmodel, 10, weight_decay=0.25), wrt=nnx.Param)
    opt.update(qmodel, jax.tree.map(jnp.zeros_like, nnx.state(qmodel, nnx.Param)))
    for name, after in numbers(qmodel).items():
        kept = 1.0 if name.startswith("quantizers/") else 0.75
        np.testing.assert_allclose(after, kept * before[name], rtol=1e-6)


@pytest.mark.exhaustive
@pytest.mark.compiled
def test_the_rate_grows_and_falls_to_zero():
    qmodel = quantized()
    opt = optimizer(qmodel, 8, warmup=4)
    by = moved_after(qmodel, opt, (1, 2, 4, 8, 9), "model/a/kernel")
    assert by[0] == 0, "the first step of a warm-up has the rate 0"
    assert 0 < by[1] < by[2] < by[3]
    assert by[4] == by[3], "no step beyond the last one moves anything"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"steps": 0}, r"steps: expected an integer of at least 1, got 0"),
        ({"steps": 2.5}, r"steps: expected an integer of at least 1, got 2\.5"),
        ({"warmup": 10}, r"warmup: expected fewer than the 10 steps, got 10"),
        ({"learning_rate": -1.0}, r"learning_rate: expected a number of 0 or more, got -1\.0"),
        ({"scale_rate": float("nan")}, r"scale_rate: expected a number of 0 or more, got nan"),
    ],
)
def test_mistakes_are_named(options, said):
    with pytest.raises(ValueError, match=said):
        optimizer(quantized(), **{"steps": 10, **options})


def test_a_float_model_is_refused():
    with pytest.raises(TypeError, match=r"optimizer: expected .*quantize"):
        optimizer(cast("Any", Net()), 10)
