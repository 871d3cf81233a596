"""The bias that ships, in the training forward: batch norm in training mode, and targets that keep biases in floats."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportOptionalSubscript=false

import haiku as hk
import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import qjax
from tests.analysis.models import data

X = data(64, 6, seed=3)
GAMMA, BETA = np.linspace(0.5, 2, 8, dtype=np.float32), np.linspace(-1, 1, 8, dtype=np.float32)
KERNEL = data(6, 8, seed=4)
MASK = np.arange(64)[:, None] % 4 > 0
MODES = {"evaluation": {"train": False}, "training": {"train": True}}


@pytest.fixture(autouse=True)
def default_promotion():
    """Haiku and Keras rely on JAX's default rules."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


class Normed(nnx.Module):
    def __init__(self, *, momentum: float = 0.0, axis: int = -1):
        self.dense = nnx.Linear(6, 8, use_bias=False, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(8, momentum=momentum, rngs=nnx.Rngs(0))
        self.dense.kernel[...] = jnp.asarray(KERNEL)
        self.norm.scale[...], self.norm.bias[...] = jnp.asarray(GAMMA), jnp.asarray(BETA)

    def __call__(self, x, mask=None):
        return self.norm(self.dense(x), mask=mask)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x, mask=None, *, train):
        return nn.BatchNorm(momentum=0.0, use_running_average=not train)(nn.Dense(8, use_bias=False)(x), mask=mask)


def linen():
    module = Linen()
    variables = module.init(jax.random.key(0), X, train=False)
    variables["params"] = {"Dense_0": {"kernel": KERNEL}, "BatchNorm_0": {"scale": GAMMA, "bias": BETA}}
    return qjax.from_linen(module, variables, **MODES)


def haiku():
    def network(x, train):
        return hk.BatchNorm(True, True, 0.0, name="norm")(hk.Linear(8, with_bias=False, name="dense")(x), train)

    net = hk.transform_with_state(network)
    params, state = net.init(jax.random.key(0), X, True)
    params = {"dense": {"w": KERNEL}, "norm": {"scale": GAMMA[None], "offset": BETA[None]}}

    def run(params, state, x, train):
        return net.apply(params, state, None, x, train)

    return qjax.from_function(run, params, state=state, **MODES)


def keras_model():
    norm = keras.layers.BatchNormalization(momentum=0.0, epsilon=1e-5)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, use_bias=False), norm])
    model.layers[0].set_weights([KERNEL])
    norm.set_weights([GAMMA, BETA, np.zeros(8, np.float32), np.ones(8, np.float32)])
    return qjax.from_keras(model)


def quantized(model, target, sample):
    recipe = qjax.Recipe(
        weights=qjax.QSpec(bits=2, axis=-1),
        activations=qjax.QSpec(bits=2, symmetric=False),
        other_bits=8,
        target=target,
    )
    return qjax.quantize(model, recipe, sample)


def both_modes(model, target="nearest_even", args=(X,)):
    """Outputs of a training step, and of evaluation with the statistics that the step left; the model."""
    qmodel = quantized(model, target, args)
    qmodel.train()
    trained = np.asarray(qmodel(*args))
    qmodel.eval()
    return trained, np.asarray(qmodel(*args)), qmodel


def output_step(qmodel):
    """The scale of the outputs' codes: the last quantizer of the table that is no weight's."""
    return next(
        float(q.scale) for q in reversed(qmodel.qparams().values()) if np.ndim(q.scale) == 0 and q.spec.bits == 8
    )


@pytest.mark.parametrize(
    ("make", "target", "args"),
    [
        (Normed, "nearest_even", (X,)),
        (Normed, "torch_fbgemm", (X,)),
        (Normed, "nearest_even", (X, MASK)),
        (linen, "nearest_even", (X,)),
        (linen, "nearest_even", (X, MASK)),
        (haiku, "nearest_even", (X,)),
        (keras_model, "nearest_even", (X,)),
    ],
)
@pytest.mark.sampled(1)
def test_training_sees_the_bias_of_the_statistics_that_it_leaves(make, target, args):
    trained, evaluated, qmodel = both_modes(make(), target, args)
    grid = output_step(qmodel)
    # both compute the same in another order; an output at the boundary of two codes may take the other one
    assert np.mean(trained == evaluated) > 0.98
    assert np.max(np.abs(trained - evaluated)) < 1.01 * grid


@pytest.mark.exhaustive
def test_what_a_mask_hides_is_not_in_the_statistics():
    hidden = both_modes(Normed(), args=(X, MASK))[2].model.norm
    everything = both_modes(Normed())[2].model.norm
    qmodel = quantized(Normed(), "nearest_even", X)
    qmodel.train()
    qmodel(X[MASK[:, 0]])
    alone = qmodel.model.norm
    for name in ("mean", "var"):
        np.testing.assert_allclose(getattr(hidden, name)[...], getattr(alone, name)[...], rtol=1e-5, atol=1e-6)
        assert not np.allclose(getattr(everything, name)[...], getattr(alone, name)[...], rtol=1e-3, atol=1e-3)


def test_the_shift_is_that_of_the_rounded_bias():
    float_bias, _, _ = both_modes(Normed(), "torch_fbgemm")
    trained, _, qmodel = both_modes(Normed())
    q, norm = qmodel.qparams(), qmodel.model.norm
    step = np.asarray(q["input"].scale, np.float64) * np.asarray(q["dense/kernel"].scale, np.float64).reshape(-1)
    k = GAMMA / np.sqrt(np.asarray(norm.var[...], np.float64) + norm.epsilon)
    bias = BETA - norm.mean[...] * k
    shift = (np.rint(bias / (step * k)) - bias / (step * k)) * step * k
    assert np.ptp(shift) > 0.2
    grid = output_step(qmodel)
    inside = np.abs(trained) < 0.9 * np.max(np.abs(trained))
    moved = np.where(inside, trained - float_bias, shift)
    np.testing.assert_allclose(moved.mean(0), shift, atol=grid / 2)
    assert np.max(np.abs(moved - shift)) < 1.01 * grid


@pytest.mark.exhaustive
def test_gradients_are_those_of_the_float_bias():
    """The sample is wider than what trains, so that the shift moves no output beyond the codes, where gradients end."""

    def gradients(target):
        qmodel = quantized(Normed(momentum=0.9), target, 4 * X)
        qmodel.train()

        def loss(model):
            return jnp.sum(model(X) * np.linspace(0, 1, 8, dtype=np.float32))

        return nnx.grad(loss)(qmodel)["model"]

    found, wanted = (jax.tree_util.tree_leaves_with_path(gradients(t)) for t in ("nearest_even", "torch_fbgemm"))
    assert [path for path, _ in found] == [path for path, _ in wanted]
    for (path, got), (_, value) in zip(found, wanted, strict=True):
        assert np.array_equal(got, value), path
    assert max(float(jnp.max(jnp.abs(value))) for _, value in wanted) > 1


@pytest.mark.parametrize(
    ("target", "floats"),
    [("torch_onednn", True), ("openvino_cpu", True), ("tflite_micro", False), ("torch_qnnpack", False)],
)
@pytest.mark.sampled(1)
def test_evaluation_has_the_bias_of_the_recipes_target(target, floats):
    _, evaluated, qmodel = both_modes(Normed(), target)
    same, other = ("torch_onednn", "nearest_even") if floats else ("nearest_even", "torch_onednn")
    outputs = {name: np.asarray(qjax.convert(qmodel, X, target=name)(X)) for name in (same, other)}
    assert np.mean(outputs[same] == evaluated) > 0.98
    assert np.mean(outputs[other] == evaluated) < 0.8
