"""A traced call runs as the model does, or with one thing changed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.fc1, self.norm, self.fc2 = (
            nnx.Linear(4, 6, rngs=rngs),
            nnx.BatchNorm(6, rngs=rngs),
            nnx.Linear(6, 3, rngs=rngs),
        )

    def __call__(self, x):
        return self.fc2(nnx.relu(self.norm(self.fc1(x))))


X = np.random.default_rng(0).uniform(-1, 1, (5, 4)).astype(np.float32)


@pytest.fixture(scope="module")
def models():
    model = Net()
    model.eval()
    qmodel = qjax.quantize(model, qjax.Recipe(), X)
    qmodel.eval()
    return model, qmodel


def test_a_call_is_the_models_own_or_the_float_models(models):
    model, qmodel = models
    call = qmodel.trace(X)
    assert np.array_equal(call.evaluate().output, qmodel(X))
    assert np.array_equal(call.evaluate(quantize=None).output, model(X))
    assert np.array_equal(call.evaluate(only=()).output, model(X))
    assert np.array_equal(call.evaluate(only=dict(qmodel.plan.quantizers)).output, qmodel(X))
    assert list(call.places) == ["input", "fc1", "fc2", "fc1/kernel", "fc2/kernel"]


def test_a_recorder_and_an_own_quantizer_see_every_tensor(models):
    _, qmodel = models
    call = qmodel.trace(X)
    kept = call.evaluate(
        record=lambda place, x, quantized: jnp.max(jnp.abs(x)) if place.kind == "weight" else None
    ).recorded
    assert {name: float(value) for name, value in kept.items()} == {
        f"{name}/kernel": float(np.abs(getattr(qmodel.model, name).kernel[...]).max()) for name in ("fc1", "fc2")
    }

    def towards_zero(place, params, x):
        quantized = call.quantize(place, params, x)
        codes, steps = quantized.codes, x / quantized.scale
        return dataclasses.replace(
            quantized, codes=jnp.where(jnp.abs(codes) > jnp.abs(steps), codes - jnp.sign(codes), codes)
        )

    output = call.evaluate(quantize=towards_zero, only=("fc1/kernel",)).output
    kernel, scale = models[0].fc1.kernel[...], qmodel.qparams()["fc1/kernel"].scale
    other = nnx.clone(models[0])
    other.fc1.kernel[...] = jnp.trunc(kernel / scale[None]) * scale[None]
    assert np.array_equal(output, other(X))


def test_gradients_and_jit_go_through_a_call(models):
    _, qmodel = models

    @nnx.jit
    def gradient(qmodel, x):
        return jax.grad(lambda x: jnp.sum(jnp.square(qmodel.trace(x).evaluate().output)))(x)

    assert np.any(gradient(qmodel, jnp.asarray(X)))


def test_statistics_move_only_when_they_are_written(models):
    qmodel = nnx.clone(models[1])
    qmodel.train()
    before = np.asarray(qmodel.model.norm.mean[...])
    call = qmodel.trace(X)
    evaluated = call.evaluate()
    assert np.array_equal(qmodel.model.norm.mean[...], before)
    call.write(evaluated)
    assert not np.array_equal(qmodel.model.norm.mean[...], before)


def test_a_quantizer_that_the_call_does_not_have_is_an_error(models):
    with pytest.raises(ValueError, match=r"names of this call's quantizers in `only`, got \['fc9'\]. It has: input, "):
        models[1].trace(X).evaluate(only={"fc9", "input"})
