"""Products of a loop's inputs stand in front of the loop: which ones do, with equal codes, and what checks them."""

import dataclasses
from collections import Counter
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax
from conformance.runtimes.litert_arm import LiteRTArm
from qjax import IntegerGraph
from tests.analysis.models import data

X = data(2, 4, 4)
STEPS = 4


class Recurrent(nnx.Module):
    def __init__(self, cell, features=4, hidden=6, **options):
        rngs = nnx.Rngs(0)
        self.rnn = nnx.RNN(cell(features, hidden, rngs=rngs), **options)
        self.head = nnx.Linear(hidden, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(jnp.asarray(self.rnn(x)))


class Loop(nnx.Module):
    """A loop of one's own over the frames; `step` is (model, state, frame) -> (state, result)."""

    def __init__(self, step):
        rngs = nnx.Rngs(0)
        self.step = step
        self.i, self.h, self.gate, self.first = (nnx.Linear(n, 6, rngs=rngs) for n in (4, 6, 4, 6))

    def __call__(self, x):
        start = jnp.zeros((x.shape[0], 6), x.dtype)
        return jax.lax.scan(lambda h, row: self.step(self, h, row), start, x.swapaxes(0, 1))[1]


def twice(x):
    return x, x


def own(m, h, x):
    return twice(nnx.relu(m.i(x) + m.h(h)))


def quantized(model, recipe=None, x: Any = X):
    qmodel = qjax.quantize(model, recipe or qjax.Recipe(), x)
    qjax.calibrate(qmodel, [x], progress=False)
    qmodel.eval()
    return qmodel


def in_the_loop(qmodel, x: Any = X, **options):
    """The graph as it is without this pass."""
    with mock.patch("qjax.lower.products_before_loops", lambda program, annotation: (program, annotation)):
        return qjax.convert(qmodel, x, **options)


def dots(graph: IntegerGraph) -> int:
    return Counter(node.op for node in graph.ir.nodes)["dot"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("cell", "before", "state"),
    [(nnx.GRUCell, 1, 1), (nnx.OptimizedLSTMCell, 1, 1), (nnx.LSTMCell, 4, 4), (nnx.SimpleCell, 1, 1)],
)
@pytest.mark.parametrize("target", ["nearest_even", "tflite_optimized_arm", "torch_qnnpack"])
def test_cells_multiply_all_frames_at_once(cell, before, state, target):
    qmodel = quantized(Recurrent(cell), qjax.Recipe(target=target))
    graph, slow = qjax.convert(qmodel, X), in_the_loop(qmodel)
    head = 1
    assert dots(graph) == before + state * STEPS + head
    assert dots(slow) == (before + state) * STEPS + head
    codes = np.asarray(graph.quantize(X))
    assert np.array_equal(graph.run(codes), slow.run(codes))
    assert np.array_equal(qjax.exact(qmodel, X)(qmodel, X), graph(X))


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [{"reverse": True}, {"reverse": True, "keep_order": True}])
def test_loops_that_run_backwards(options):
    qmodel = quantized(Recurrent(nnx.GRUCell, **options))
    graph, slow = qjax.convert(qmodel, X), in_the_loop(qmodel)
    assert dots(slow) - dots(graph) == STEPS - 1
    codes = np.asarray(graph.quantize(X))
    assert np.array_equal(graph.run(codes), slow.run(codes))


def summed(m, h, x):
    """The products meet as sums, before any quantizer."""
    return twice(nnx.relu(x @ m.i.kernel[...] + h @ m.h.kernel[...]))


def gated(m, h, x):
    """A second product reads the frame behind a function."""
    return twice(nnx.relu(m.i(x) + m.h(h)) * nnx.sigmoid(m.gate(nnx.relu(x))))


def two_layers(m, h, x):
    """A layer in front of the cell's own."""
    return twice(nnx.relu(m.first(nnx.relu6(m.gate(x))) + m.h(h)))


def of_the_state(m, h, x):
    return twice(nnx.relu(m.h(h + m.i(x))))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("step", "saved"), [(own, 1), (summed, 1), (gated, 1), (two_layers, 2), (of_the_state, 1)])
def test_loops_of_ones_own(step, saved):
    qmodel = quantized(Loop(step))
    graph, slow = qjax.convert(qmodel, X), in_the_loop(qmodel)
    assert dots(slow) - dots(graph) == saved * (STEPS - 1)
    codes = np.asarray(graph.quantize(X))
    assert np.array_equal(graph.run(codes), slow.run(codes))


class Varying(nnx.Module):
    """A loop whose steps have weights of their own: handed in one by one, or looked up by a counter."""

    def __init__(self, counted):
        self.counted = counted
        self.layers = nnx.Param(jnp.asarray(data(STEPS, 4, 6, seed=3)))
        self.bias = nnx.Param(jnp.asarray(data(STEPS, 6, seed=4)))
        self.h = nnx.Linear(6, 6, rngs=nnx.Rngs(0))

    def __call__(self, x):
        layers, bias = self.layers[...], self.bias[...]

        def step(carry, inputs):
            i, h = carry
            row, w, b = inputs if not self.counted else (inputs[0], layers[i], bias[i])
            h = nnx.relu(row @ w + b[None] + self.h(h))
            return (i + 1, h), h

        rows = (x.swapaxes(0, 1),) if self.counted else (x.swapaxes(0, 1), layers, bias)
        return jax.lax.scan(step, (0, jnp.zeros((x.shape[0], 6))), rows)[1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("counted", [False, True])
def test_weights_of_single_steps_stay_in_the_loop(counted):
    qmodel = quantized(Varying(counted))
    graph = qjax.convert(qmodel, X)
    assert dots(graph) == dots(in_the_loop(qmodel)) == 2 * STEPS
    assert qjax.verify(graph, qmodel, [X]).exact


class Biased(Varying):
    """One weight for all steps, and a bias for each."""

    def __call__(self, x):
        kernel, bias = self.layers[...][0], self.bias[...]

        def step(carry, row):
            i, h = carry
            h = nnx.relu(row @ kernel + bias[i][None] + self.h(h))
            return (i + 1, h), h

        return jax.lax.scan(step, (0, jnp.zeros((x.shape[0], 6))), x.swapaxes(0, 1))[1]


def test_a_bias_of_single_steps_stays_with_its_product():
    qmodel = quantized(Biased(counted=True))
    graph = qjax.convert(qmodel, X)
    assert dots(graph) == 2 * STEPS
    assert qjax.verify(graph, qmodel, [X]).exact


@pytest.mark.exhaustive
def test_a_float_layer_stays_in_the_loop():
    recipe = qjax.Recipe(overrides={"i": qjax.FLOAT})
    qmodel = quantized(Loop(own), recipe)
    assert dots(qjax.convert(qmodel, X)) == dots(in_the_loop(qmodel)) == STEPS


def test_verify_checks_it():
    qmodel = quantized(Recurrent(nnx.GRUCell))
    graph = qjax.convert(qmodel, X)
    assert qjax.verify(graph, qmodel, [X]).local == 0
    (node,) = (node for node in graph.ir.nodes if node.name == "rnn/cell/dense_i")
    bias = graph.ir.tensors[node.constants["bias"]]
    wrong = dataclasses.replace(bias, value=np.asarray(bias.value) + 10000)
    tensors = {**graph.ir.tensors, bias.name: wrong}
    report = qjax.verify(IntegerGraph(dataclasses.replace(graph.ir, tensors=tensors)), qmodel, [X])
    assert [row.name for row in report.nodes if row.local] == ["rnn/cell/dense_i"]


@pytest.mark.oracle
def test_litert_on_arm_multiplies_all_frames_at_once(tmp_path):
    """Its product of one row rounds otherwise than one of several. The graph has the codes of the file that ships."""
    x = np.random.default_rng(0).normal(size=(40, 20, 32)).astype(np.float32)
    qmodel = quantized(Recurrent(nnx.GRUCell, 32, hidden=64), qjax.Recipe(target="tflite_optimized_arm"), x)
    graph, slow = qjax.convert(qmodel, x), in_the_loop(qmodel, x)
    graph.emit("tflite", tmp_path / "m.tflite", batch=1)
    model = (tmp_path / "m.tflite").read_bytes()
    others = 0
    for row in np.asarray(graph.quantize(x)):
        found = LiteRTArm("optimized").run_model(model, [row[None]])
        assert np.array_equal(found, graph.run(row[None]))
        others += int(np.sum(found != np.asarray(slow.run(row[None]))))
    assert others > 0
