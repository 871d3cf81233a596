"""A quantized Keras model under `compile` and `fit`: what it predicts is what the graph computes."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

import os
import subprocess
import sys

import jax
import keras
import numpy as np
import pytest
from flax import nnx
from keras import layers

import qjax
from qjax.contrib.keras.trainer import decode, encode
from tests.layers.round_trip import assert_same, data

# of Keras itself, under numpy 2.5
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
X = np.asarray(data(48, 5))
Y = (X[:, 0] > 0).astype(np.int32)


@pytest.fixture(autouse=True)
def default_promotion():
    """Keras relies on JAX's default rules."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def quantized(bits=8):
    keras.utils.set_random_seed(2)
    first = layers.Dense(6, kernel_regularizer="l2", kernel_constraint="non_neg", name="first")
    model = keras.Sequential(
        [keras.Input((5,)), first, layers.BatchNormalization(name="norm"), layers.ReLU(), layers.Dense(2, name="head")]
    )
    spec = qjax.QSpec(bits=bits, axis=-1)
    return model, qjax.quantize(qjax.from_keras(model), qjax.Recipe(weights=spec), X[:4])


@pytest.mark.exhaustive
def test_what_fit_trains_is_what_ships(tmp_path):
    model, qmodel = quantized()
    before = [np.array(variable.value) for variable in model.variables]
    scales = qmodel.qparams()
    trainer = qjax.to_keras(qmodel, exact=X[:4])
    assert len(trainer.losses) == 1
    trainer.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    seen = []
    callback = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(logs["loss"]))
    trainer.fit(X, Y, batch_size=16, epochs=2, verbose=0, callbacks=[callback])
    assert len(seen) == 2
    predicted = trainer.predict(X, batch_size=48, verbose=0)
    trained = trainer.qmodel
    assert trained is qmodel
    graph = qjax.convert(trained, X[:4])
    assert np.array_equal(graph(X), predicted)
    accuracy = trainer.evaluate(X, Y, batch_size=48, verbose=0)[1]
    assert accuracy == pytest.approx(np.mean(np.argmax(graph(X), 1) == Y))
    # the scales and the statistics moved, the constraint held, and the float model is as it was
    assert any(not np.array_equal(q.scale, scales[name].scale) for name, q in trained.qparams().items())
    assert np.any(np.asarray(trained.model.norm.moving_mean[...]) != 0)
    assert np.min(trained.model.first.kernel[...]) >= 0
    assert_same([np.array(variable.value) for variable in model.variables], before)
    float_model = trained.model.update_keras()
    assert np.array_equal(float_model.get_layer("head").kernel.value, trained.model.head.kernel[...])

    trainer.save(tmp_path / "run.keras")
    whole = qjax.load_keras(tmp_path / "run.keras")
    assert np.array_equal(whole.predict(X, batch_size=48, verbose=0), predicted)
    assert int(whole.optimizer.iterations.value) == 6
    assert np.array_equal(qjax.convert(whole.qmodel, X[:4])(X), predicted)

    path = str(tmp_path / "run.weights.h5")
    trainer.save_weights(path)
    other = qjax.to_keras(quantized()[1])
    other.load_weights(path)
    assert np.array_equal(qjax.convert(other.qmodel, X[:4])(X), predicted)
    wider = keras.Sequential([keras.Input((5,)), layers.Dense(7, name="first"), layers.Dense(2, name="head")])
    with pytest.raises(ValueError, match=r"first|variable|shape"):
        qjax.to_keras(qjax.quantize(qjax.from_keras(wider), qjax.Recipe(), X[:4])).load_weights(path)
    third = qjax.to_keras(quantized(bits=4)[1])
    with pytest.raises(ValueError, match="first/kernel"):
        third.load_weights(path)


DISTRIBUTED = """
import jax, keras, numpy as np, qjax
keras.distribution.set_distribution(keras.distribution.DataParallel())
keras.utils.set_random_seed(0)
x = np.random.default_rng(0).normal(size=(32, 5)).astype(np.float32)
layers = [keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dense(2)]
model = keras.Sequential([keras.Input((5,)), *layers])
trainer = qjax.to_keras(qjax.quantize(qjax.from_keras(model), qjax.Recipe(), x[:2]), exact=x[:2])
trainer.compile("adam", "mse")
trainer.fit(x, x[:, :2], batch_size=16, epochs=2, verbose=0)
graph = qjax.convert(trainer.qmodel, x[:2])
print(len(trainer.variables[0].value.devices()), int(np.sum(np.asarray(graph(x)) != trainer.predict(x, verbose=0))))
"""


@pytest.mark.exhaustive
def test_data_parallel():
    environment = {**os.environ, "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
    environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    command = [sys.executable, "-c", DISTRIBUTED]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.split() == ["2", "0"], done.stderr


def test_mistakes_say_what_was_expected():
    model, _ = quantized()
    with pytest.raises(TypeError, match="to_keras: expected a quantized model, got the float model KerasModule"):
        qjax.to_keras(qjax.from_keras(model))
    other = qjax.quantize(nnx.Linear(5, 2, rngs=nnx.Rngs(0)), qjax.Recipe(), X)
    with pytest.raises(TypeError, match=r"that qjax\.from_keras made, got one of Linear.*nnx\.Optimizer"):
        qjax.to_keras(other)


def test_weights_of_another_recipe_are_refused(tmp_path):
    """At once: `fit` and `predict` would compute with them, under `jit`, where nothing is compared."""
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2, name="dense")])
    eight, four = (
        qjax.to_keras(qjax.quantize(qjax.from_keras(model), qjax.Recipe(weights=qjax.QSpec(bits=bits)), X[:, :4]))
        for bits in (8, 4)
    )
    eight.save_weights(tmp_path / "eight.weights.h5")
    with pytest.raises(ValueError, match="'dense/kernel': 4 bits in the model, 8 bits in the state"):
        four.load_weights(tmp_path / "eight.weights.h5")


def test_losses_that_a_layer_adds_are_left_out():
    regular = layers.Dense(2, activity_regularizer=keras.regularizers.L2(1.0))
    model = keras.Sequential([keras.Input((4,)), regular])
    trainer = qjax.to_keras(qjax.quantize(qjax.from_keras(model), qjax.Recipe(), X[:, :4]))
    model(X[:, :4])
    trainer(X[:, :4])
    assert (len(model.losses), len(trainer.losses)) == (1, 0)


def test_files_of_other_models(tmp_path):
    model, qmodel = quantized()
    model.save(tmp_path / "float.keras")
    with pytest.raises(TypeError, match=r"has saved, .*float\.keras holds a Sequential"):
        qjax.load_keras(tmp_path / "float.keras")
    with pytest.raises(TypeError, match="cannot hold object of the recipe"):
        encode({"observer": object()})
    with pytest.raises(ValueError, match="expected a plan that this version of qjax has saved"):
        decode({"class": "System", "fields": {}})
    assert decode(encode(qmodel.plan)) == qmodel.plan
