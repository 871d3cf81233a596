"""Averages in the training forward: the codes of the target's runtime, the gradient of fake quantization."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import qjax
from qjax import targets
from qjax.analysis.switched import SwitchedModel
from tests.layers.round_trip import data, train_step

X = data(8, 4, 4, 8)
COUNTS = np.float32(9) - 3 * np.isin(np.arange(4), (0, 3))[:, None] - 3 * np.isin(np.arange(4), (0, 3))
COUNTS = (COUNTS + np.outer(np.isin(np.arange(4), (0, 3)), np.isin(np.arange(4), (0, 3)))).reshape(1, 4, 4, 1)
"""How many elements of an image of 4 x 4 are in a window of 3 x 3 around each."""


def window_sum(x, size, stride, padding="VALID"):
    return lax.reduce_window(x, np.float32(0), lax.add, (1, size, size, 1), (1, stride, stride, 1), padding)


class Pool(nnx.Module):
    """Averages alone, so that whatever differs arises in one."""

    def __init__(self, function):
        self.function = function

    def __call__(self, x):
        return self.function(x)


POOLS = {
    "pool": lambda x: window_sum(x, 2, 2) / np.float32(4),
    "counted": lambda x: window_sum(x, 3, 1, "SAME") / jnp.broadcast_to(COUNTS.astype(np.float32), x.shape),
    "mean": lambda x: jnp.mean(x, axis=(1, 2)),
    "other axes": lambda x: jnp.mean(x, axis=3),
    "product": lambda x: jnp.sum(x, axis=(1, 2)) * np.float32(0.0625),
    "two": lambda x: jnp.mean(window_sum(x, 2, 2) / np.float32(4), axis=(1, 2)),
}

RUNTIMES = ("tflite_micro", "tflite_optimized_x86", "tflite_xnnpack_arm", "torch_fbgemm", "torch_qnnpack", "tosa")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", RUNTIMES)
@pytest.mark.parametrize("pool", POOLS)
def test_training_sees_the_runtimes_average(pool, name):
    unsigned = qjax.QSpec(bits=8, signed=False, symmetric=False)
    recipe = qjax.Recipe(target=name, activations=unsigned) if name.startswith("torch") else qjax.Recipe(target=name)
    qmodel = qjax.quantize(Pool(POOLS[pool]), recipe, X)
    qmodel.eval()
    report = qjax.verify(qjax.convert(qmodel, X), qmodel, [X, X * 2])
    assert report.compared > 0
    assert report.exact, str(report)


def test_training_sees_onnx_runtimes_average_over_a_whole_image():
    # the sum of all windows, and of one window that is the image: only of the latter the order does not matter
    pool = Pool(lambda x: window_sum(x, 4, 4) / np.float32(16))
    qmodel = qjax.quantize(pool, qjax.Recipe(target="onnxruntime"), X)
    qmodel.eval()
    report = qjax.verify(qjax.convert(qmodel, X), qmodel, [X, X * 2])
    assert report.compared > 0
    assert report.exact, str(report)


@pytest.mark.exhaustive
def test_the_gradient_is_that_of_fake_quantization():
    qmodel = qjax.quantize(Pool(POOLS["two"]), qjax.Recipe(target="tflite_optimized_x86"), X)
    qmodel.eval()
    weights = data(8, 8, seed=3)

    def outputs(params, x, averages):
        return qmodel.trace(x).evaluate(params=params, averages=averages).output

    def gradient(averages):
        return jax.grad(lambda p, x: jnp.sum(weights * outputs(p, x, averages)), (0, 1), allow_int=True)

    params = qmodel.quantizer_values()
    values = [np.asarray(outputs(params, X, averages)) for averages in (True, False)]
    assert np.any(values[0] != values[1])
    (runtimes, x), (nearest, x2) = gradient(True)(params, X), gradient(False)(params, X)
    assert np.any(x)
    assert np.array_equal(x, x2)
    # the learned scales read the codes of what flows in, which differ
    assert jax.tree.structure(runtimes) == jax.tree.structure(nearest)


@pytest.mark.exhaustive
def test_switches_compute_the_same_averages():
    qmodel = qjax.quantize(Pool(POOLS["two"]), qjax.Recipe(target="tflite_optimized_x86"), X)
    qmodel.eval()
    switched = SwitchedModel(qmodel)
    assert np.array_equal(switched(switched.names, (X,)), qmodel(X))
    assert np.array_equal(switched((), (X,)), POOLS["two"](X))


def test_what_is_not_a_number_stays_so():
    qmodel = qjax.quantize(Pool(POOLS["pool"]), qjax.Recipe(target="tflite_micro"), X)
    qmodel.eval()
    y = np.asarray(qmodel(X.at[1].set(jnp.nan)))
    assert np.array_equal(np.isnan(y), np.arange(8).reshape(8, 1, 1, 1) == np.full(y.shape, 1))


@pytest.mark.exhaustive
def test_without_a_formula_nothing_changes():
    target = targets.get("tflite_micro").replace(
        name="no averages", mean=None, average_pool=None, same_grid=frozenset()
    )
    model, recipe = Pool(POOLS["two"]), qjax.Recipe()
    plain = qjax.quantize(model, recipe, X)
    other = qjax.quantize(model, dataclasses.replace(recipe, target=target.replace(quantize="reciprocal")), X)
    assert np.array_equal(plain(X), other(X))


class Looped(nnx.Module):
    """An average within a scan and within remat."""

    def __init__(self):
        self.kernel = nnx.Param(data(3, 8, 8, seed=2))

    def __call__(self, x):
        @jax.checkpoint
        def layer(x, w):
            y = nnx.relu(x @ w)
            return x + jnp.mean(y, axis=(1, 2), keepdims=True), None

        return lax.scan(layer, x, self.kernel[...])[0]


@pytest.mark.exhaustive
def test_within_loops_and_rematerialisation():
    qmodel = qjax.quantize(Looped(), qjax.Recipe(target="tflite_optimized_x86"), X)
    assert np.isfinite(train_step(qmodel, X))
    report = qjax.verify(qjax.convert(qmodel, X), qmodel, [X])
    means = [node for node in report.nodes if node.op == "sum"]
    assert len(means) == 3
    assert [node.local for node in means] == [0, 0, 0]
