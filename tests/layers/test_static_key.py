"""Models that differ in what == calls one value, and values that change in place."""

import functools
import math
import sys

import jax
import numpy as np
import pytest
from flax import linen, nnx

import qjax
from qjax.layers.static_key import Definition, MayChangeError, key

X = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)


class Scaled(nnx.Module):
    """Doubles its result where its attribute is a float."""

    def __init__(self, factor):
        self.factor, self.inner = factor, nnx.Linear(3, 3, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.inner(x) * (2 if isinstance(self.factor, float) else 1)


class Config:
    factor = 1.0


class Configured(nnx.Module):
    """Reads a number of an object that anybody may change, and counts its calls."""

    calls = 0

    def __init__(self, config):
        self.config, self.inner = config, nnx.Linear(3, 3, rngs=nnx.Rngs(0))

    def __call__(self, x):
        Configured.calls += 1
        return self.inner(x) * self.config.factor


class Counted(nnx.Module):
    calls = 0

    def __init__(self):
        self.inner = nnx.Linear(3, 3, rngs=nnx.Rngs(0))

    def __call__(self, x):
        Counted.calls += 1
        return self.inner(x)


def closing(value):
    return lambda x: (x, value)


@pytest.mark.exhaustive
def test_models_that_are_equal_to_python_have_scales_and_outputs_of_their_own():
    outputs = []
    for factor in (1, 1.0):
        model = Scaled(factor)
        qmodel = qjax.quantize(model, qjax.Recipe(), X)
        qmodel.eval()
        graph = qjax.convert(qmodel, X)
        np.testing.assert_allclose(qmodel(X), model(X), atol=0.05)
        np.testing.assert_array_equal(graph(X), qmodel(X))
        assert qjax.verify(graph, qmodel, [X]).exact
        outputs.append(np.asarray(qmodel(X)))
    assert not np.array_equal(*outputs)


@pytest.mark.parametrize("other", [1.0, True, np.float32(1), (1,), None, "1"])
def test_definitions_tell_values_apart(other):
    one, two = (nnx.split(Scaled(factor))[0] for factor in (1, other))
    assert Definition.of(one) != Definition.of(two)
    assert key(one) != key(two)
    again = nnx.split(Scaled(other))[0]
    assert (key(again), Definition.of(again)) == (key(two), Definition.of(two))


@pytest.mark.parametrize(
    ("a", "b"), [(0.0, -0.0), ((1,), (True,)), (closing(1), closing(1.0)), (jax.nn.relu, jax.nn.elu)]
)
def test_keys_tell_values_apart(a, b):
    assert key(a) != key(b)


def test_keys_of_equal_values_are_equal():
    assert key(closing((1, "a"))) == key(closing((1, "a")))
    assert key(math.nan) == key(math.nan)
    assert key(functools.partial(jax.nn.gelu, approximate=True)) == key(
        functools.partial(jax.nn.gelu, approximate=True)
    )


@pytest.mark.parametrize(
    "value", [Config(), [1], closing(Config()), closing([1]), functools.partial(closing, Config())]
)
def test_what_may_change_has_no_key(value):
    with pytest.raises(MayChangeError):
        key(value)


def calling_itself():
    def count(n):
        return count(n - 1) if n else 0

    return count


class Dense(linen.Module):
    factor: float

    @linen.compact
    def __call__(self, x):
        return linen.Dense(3)(x) * (2 if isinstance(self.factor, float) else 1)


def test_linen_modules_that_are_equal_to_python_have_scales_and_outputs_of_their_own():
    assert Dense(1) == Dense(1.0)
    assert key(Dense(1)) != key(Dense(1.0))
    variables = Dense(1).init(jax.random.key(0), X)
    outputs = []
    for factor in (1, 1.0):
        qmodel = qjax.quantize(qjax.from_linen(Dense(factor), variables), qjax.Recipe(), X)
        qmodel.eval()
        np.testing.assert_array_equal(qjax.convert(qmodel, X)(X), qmodel(X))
        outputs.append(np.asarray(qmodel(X)))
    assert np.max(np.abs(outputs[1])) > 1.5 * np.max(np.abs(outputs[0]))


def test_a_model_that_holds_a_function_that_calls_itself():
    with pytest.raises(MayChangeError):
        key(calling_itself())
    model = Scaled(2.0)
    setattr(model, "function", calling_itself())  # noqa: B010
    qjax.convert(qjax.quantize(model, qjax.Recipe(), X), X)


@pytest.mark.exhaustive
def test_a_number_that_changes_in_place_is_read_again():
    config = Config()
    qmodel = qjax.quantize(Configured(config), qjax.Recipe(), X)
    first = qjax.convert(qmodel, X)
    calls = Configured.calls
    config.factor = 0.5
    second = qjax.convert(qmodel, X)
    assert Configured.calls > calls
    assert not np.array_equal(first(X), second(X))


FACTOR = 1.0


class OfNotebook(nnx.Module):
    """Reads a global variable."""

    def __init__(self):
        self.inner = nnx.Linear(3, 3, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.inner(x) * FACTOR


@pytest.mark.exhaustive
def test_quantize_reads_a_global_variable_again(monkeypatch):
    model = OfNotebook()
    outputs = []
    for factor in (1.0, 0.5):
        monkeypatch.setattr(sys.modules[__name__], "FACTOR", factor)
        qmodel = qjax.quantize(model, qjax.Recipe(), X)
        graph = qjax.convert(qmodel, X)
        # the graph is of the model as it was when it was quantized
        monkeypatch.setattr(sys.modules[__name__], "FACTOR", 100.0)
        assert np.array_equal(qjax.convert(qmodel, X)(X), graph(X))
        outputs.append(np.asarray(graph(X)))
    np.testing.assert_allclose(outputs[1], outputs[0] / 2, atol=0.02)


@pytest.mark.exhaustive
def test_a_model_is_traced_once_for_each_shape():
    qmodel = qjax.quantize(Counted(), qjax.Recipe(), X)
    assert Counted.calls == 1
    qjax.calibrate(qmodel, [X, X])
    graph = qjax.convert(qmodel, X)
    batches = Counted.calls
    assert batches <= 4  # the sample's batch, a larger one, and those that show that any batch will do
    assert qjax.verify(graph, qmodel, [X]).exact
    qjax.convert(qmodel, X)
    qjax.exact(qmodel, X)
    assert Counted.calls == batches
