"""The study of stochastic rounding: its arithmetic, and a model that draws in training only."""

import jax
import numpy as np
import pytest
from flax import nnx

import qjax
from experiments.lab import stochastic as study
from experiments.lab.stochastic_network import StochasticTraining
from qjax.contrib.lab.study import Settings


def test_variance_of_the_squared_error() -> None:
    f = (np.arange(10_000) + 0.5) / 10_000
    fourth = f * (1 - f) ** 4 + (1 - f) * f**4
    assert abs(fourth.mean() - (f * (1 - f)).mean() ** 2 - study._VARIANCE) < 1e-8


def test_arithmetic_measures_what_is_predicted() -> None:
    count = 2**16
    values, shares = study.arithmetic(0, count)
    assert set(values) <= {p.name for p in study.predict(Settings())}
    assert shares[0] == 0
    assert np.abs(np.array(shares) - np.arange(16) / 16).max() < 5 * 0.5 / (count / 16) ** 0.5
    assert abs(values["requantize: share that is not the nearest"] - 1 / 4) < 0.01
    assert abs(values["fake_quant, two keys: share that differs"] - 1 / 3) < 0.01
    assert values["requantize, the same key twice: codes that differ"] == 0


@pytest.mark.exhaustive
def test_a_wrapped_model_draws_in_training_only() -> None:
    x = np.asarray(jax.random.normal(jax.random.key(0), (16, 6)))
    spec = qjax.QSpec(bits=3, axis=-1)
    qmodel = qjax.quantize(nnx.Linear(6, 4, rngs=nnx.Rngs(0)), qjax.Recipe(weights=spec), x)
    model = StochasticTraining(qmodel, nnx.Rngs(rounding=0))
    call = nnx.jit(lambda model, x: model(x))
    model.eval()
    assert np.array_equal(call(model, x), call(qmodel, x))
    model.train()
    first, second = call(model, x), call(model, x)
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, call(qmodel, x))


def test_every_prediction_has_a_name_of_its_own() -> None:
    names = [p.name for p in study.predict(Settings())]
    assert len(names) == len(set(names))
