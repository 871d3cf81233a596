"""A call outside of a trace is one compiled program, with the bits of the same call inside `jit`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import qjax

pytestmark = pytest.mark.compiled
READ: list[bool] = []


class Model(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(1, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.head = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        READ.append(True)
        return self.head(jnp.mean(nnx.relu(self.norm(self.first(x))), axis=(1, 2)))


def quantized():
    x = jax.random.normal(jax.random.key(0), (4, 6, 6, 1))
    return qjax.quantize(Model(nnx.Rngs(0)), qjax.Recipe(), x), x


@pytest.mark.exhaustive
def test_the_bits_and_the_statistics_are_those_under_jit():
    eager, x = quantized()
    jitted, _ = quantized()
    for mode in ("train", "eval"):
        getattr(eager, mode)()
        getattr(jitted, mode)()
        a, b = eager(x), nnx.jit(lambda model, x: model(x))(jitted, x)
        np.testing.assert_array_equal(a, b)
        for one, other in zip(jax.tree.leaves(nnx.state(eager)), jax.tree.leaves(nnx.state(jitted)), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.exhaustive
def test_a_second_call_reads_the_model_no_more_but_its_new_numbers():
    qmodel, x = quantized()
    qmodel.eval()
    before, reads = qmodel(x), len(READ)
    model: Any = qmodel.model
    model.head.bias[...] = model.head.bias[...] - 0.1
    after = qmodel(x)
    assert len(READ) == reads
    assert np.any(after != before)


def test_gradients_outside_of_jit():
    qmodel, x = quantized()

    def loss(model):
        return jnp.sum(model(x) ** 2)

    optimizer = nnx.Optimizer(qmodel, optax.sgd(1e-2), wrt=nnx.Param)
    before, grads = nnx.value_and_grad(loss)(qmodel)
    for layer in ("first", "head"):
        assert np.any(np.asarray(grads["model"][layer]["kernel"][...]) != 0)
    optimizer.update(qmodel, grads)
    # the value of the same program: the forward alone would be another one
    assert nnx.value_and_grad(loss)(qmodel)[0] < before
