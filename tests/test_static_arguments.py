"""Python values as arguments: a graph refuses others than it was made with; `exact` computes a graph for each."""

# pyright: reportPrivateUsage=false

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax
from qjax.graph.structure import describe_arguments, flatten_arguments, split_arguments
from tests.layers.round_trip import data


class Forked(nnx.Module):
    """Every argument but x changes the program."""

    def __init__(self):
        self.a = nnx.Linear(6, 5, rngs=nnx.Rngs(0))
        self.b = nnx.Linear(5, 3, rngs=nnx.Rngs(1))

    def __call__(self, x, negate=True, factor=1.0, mode=None):
        x = -x if negate else x
        if mode is not None:
            x = nnx.relu(x)
        return self.b(nnx.relu(self.a(x))) * factor


X = data(4, 6)
OTHERS = [(False,), (True, 2.0), (True, 1), (1, 1.0), (True, 1.0, "relu"), (True, 1.0, jnp.ones(3)), (None,)]


@pytest.fixture(scope="module")
def qmodel():
    model = qjax.quantize(Forked(), qjax.Recipe(), (X, True, 1.0, None))
    model.eval()
    return model


@pytest.fixture(scope="module")
def graph(qmodel):
    return qjax.convert(qmodel, (X, True, 1.0, None))


@pytest.mark.parametrize("rest", OTHERS, ids=str)
def test_a_graph_refuses_python_values_that_it_was_not_converted_with(graph, rest):
    for call in (graph, graph.quantize, lambda x, *rest: jax.jit(lambda x: graph(x, *rest))(x)):
        with pytest.raises(TypeError, match=r"argument \d: expected (True|1\.0|None), with which .*convert a graph"):
            call(X, *rest)


def test_the_values_of_the_conversion_may_be_repeated_or_left_out(graph):
    wanted = graph(X)
    for rest in [(True,), (np.bool_(True), 1.0), (True, np.float64(1), None)]:
        assert np.array_equal(graph(X, *rest), wanted)


def test_a_traced_flag_is_refused(graph):
    with pytest.raises(TypeError, match="expected True, with which the model was converted"):
        jax.jit(graph)(X, True)


def test_a_loaded_graph_refuses_them_too(graph, tmp_path):
    graph.save(tmp_path / "model.qjax")
    loaded = qjax.load(tmp_path / "model.qjax")
    assert np.array_equal(loaded(X, True), graph(X))
    with pytest.raises(TypeError, match="expected True, with which the model was converted, got False"):
        loaded(X, False)
    with pytest.raises(TypeError, match="expected True, with which the model was converted, got False"):
        loaded.retarget("tflite_micro")(X, False)


def test_verify_and_compare_refuse_them(graph, qmodel):
    with pytest.raises(TypeError, match="got False"):
        qjax.verify(graph, qmodel, [(X, False, 1.0, None)])
    with pytest.raises(TypeError, match="got False"):
        qjax.compare(graph, graph, [(X, False, 1.0, None)])


@pytest.mark.exhaustive
def test_the_exact_forward_computes_the_graph_of_every_value(qmodel):
    forward = qjax.exact(qmodel, (X, True, 1.0, None))
    jitted = nnx.jit(forward, static_argnums=(2, 3, 4))
    values = [jitted(qmodel, X, *rest) for rest in [(True, 1.0, None), (False, 1.0, "relu")]]
    for value, rest in zip(values, [(True,), (False, 1.0, "relu")], strict=True):
        assert np.array_equal(value, qjax.convert(qmodel, (X, *rest))(X))
    assert not np.array_equal(*values)
    # where the arrays stand decides the sample's shapes: the default of the flag is the model's own
    assert np.array_equal(nnx.jit(forward)(qmodel, X), values[0])


@pytest.mark.exhaustive
def test_the_gradient_is_that_of_the_same_value(qmodel):
    forward = qjax.exact(qmodel, (X, True, 1.0, None))
    weights = data(4, 3, seed=3)

    def gradient(call):
        return nnx.grad(lambda m: jnp.sum(call(m, X, False) * weights))(qmodel)

    exact, training = gradient(forward), gradient(lambda m, x, flag: m(x, flag))
    for a, b in zip(jax.tree.leaves(exact), jax.tree.leaves(training), strict=True):
        assert np.array_equal(a, b)


def test_a_value_with_tensors_of_its_own_is_refused_by_name():
    class Fork(nnx.Module):
        def __init__(self):
            self.a = nnx.Linear(6, 3, rngs=nnx.Rngs(0))
            self.b = nnx.Linear(6, 3, rngs=nnx.Rngs(0))

        def __call__(self, x, other=False):
            return self.b(x) if other else self.a(x)

    qmodel = qjax.quantize(Fork(), qjax.Recipe(), X)
    qmodel.eval()
    forward = qjax.exact(qmodel, X)
    for call in (lambda: forward(qmodel, X, True), lambda: qjax.convert(qmodel, (X, True))):
        with pytest.raises(ValueError, match=r"tensor 'b.*was not there when the model was quantized"):
            call()


A, B = np.zeros(2), np.ones(2)
STRUCTURES = [
    (({"x": A, "mask": None},), ({"x": A, "mask": B},), r"argument 0\['mask'\]: expected None, .* got ndarray"),
    (({"x": A},), ({"x": A, "mask": B},), "converted without mask"),
    (([A, True],), ([A, 1],), r"argument 0\[1\]: expected True, .* got 1\."),
    ((A, 0.0), (A, -0.0), r"expected 0\.0, .* got -0\.0"),
    ((A, float("nan")), (A, 0.0), r"expected nan, .* got 0\.0"),
    ((A, 1), (A, 1.0), r"expected 1, .* got 1\.0"),
    ((A, "mean"), (A, "sum"), r"expected 'mean', .* got 'sum'"),
    ((A, None), (A, B), r"argument 1: expected None, .* got ndarray"),
]


@pytest.mark.parametrize(("sample", "call", "message"), STRUCTURES, ids=[m for *_, m in STRUCTURES])
def test_every_place_of_a_python_value(sample, call, message):
    described = json.loads(json.dumps(describe_arguments(sample, [0])))
    assert [a is A for a in flatten_arguments(described, sample, 1)] == [True]
    with pytest.raises(TypeError, match=message):
        flatten_arguments(described, call, 1)


def test_an_array_that_the_graph_does_not_read_is_an_array():
    described = describe_arguments((A, B), [0, None])
    assert flatten_arguments(described, (A,), 1) == flatten_arguments(described, (A, B), 1)
    for other in (None, False, [B]):
        with pytest.raises(TypeError, match=r"argument 1: expected an array .one that the graph does not read"):
            flatten_arguments(described, (A, other), 1)


def test_the_key_of_a_cache_keeps_values_of_other_types_apart():
    keys = [split_arguments((A, value))[1] for value in (True, 1, 1.0, 0, False, 0.0, -0.0, "1", None)]
    assert all((a == b) == (i == j) for i, a in enumerate(keys) for j, b in enumerate(keys))
