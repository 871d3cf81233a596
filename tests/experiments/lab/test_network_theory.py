"""The mean-field theory of real networks, against random differences through the same layers."""

import numpy as np
import pytest
from flax import nnx

import qjax
from experiments.lab.chains import codes_of
from experiments.lab.network_theory import Spread, carried, decisions, exactly


def graph_of(model, x):
    qmodel = qjax.quantize(model, qjax.Recipe(), x)
    qjax.calibrate(qmodel, [x], progress=False)
    qmodel.eval()
    graph = qjax.convert(qmodel, x, target="nearest_even")
    return graph, codes_of(graph, graph.quantize(x))


def arising(graph, codes, first):
    """Differences that arise in the first node only."""
    zero = {node.output: np.zeros_like(codes[node.output], np.int32) for node in graph.ir.nodes}
    return {**zero, graph.ir.nodes[0].output: first}


@pytest.fixture(scope="module")
def chain():
    """Two dense layers with a relu between them, and what happens to the second one's codes on other inputs."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2048, 32)).astype(np.float32)
    model = nnx.Sequential(nnx.Linear(32, 48, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(48, 40, rngs=nnx.Rngs(1)))
    return *graph_of(model, x), rng


@pytest.mark.sampled(2)
@pytest.mark.parametrize("share", [0.01, 0.1, 0.9])
def test_a_product_spreads_differences_as_predicted(chain, share):
    graph, codes, rng = chain
    first, last = graph.ir.nodes
    d = rng.choice([-1, 0, 1], codes[first.output].shape, p=[share / 2, 1 - share, share / 2]).astype(np.int32)
    d[codes[first.output] <= -128] = 0  # closed relus
    moved = np.clip(codes[first.output] + d, -128, 127)
    runner = qjax.run.stepwise.Runner(graph.ir, graph.target, graph.interpreter.constants)
    found = np.asarray(runner.output(last, [moved.astype(codes[first.output].dtype)]))
    differences = found.astype(np.int32) - codes[last.output]
    own = np.subtract(moved, codes[first.output], dtype=np.int32)
    expected = carried(graph.ir, codes, arising(graph, codes, own)).last
    # a fifth is what the theory states; the rest is chance
    assert expected.share == pytest.approx(np.mean(differences != 0), rel=0.25)
    assert np.mean(expected.square) == pytest.approx(np.mean(differences**2), rel=0.25)


def test_nothing_that_arises_is_nothing_that_differs(chain):
    graph, codes, _ = chain
    spreads = carried(graph.ir, codes, arising(graph, codes, np.zeros_like(codes[graph.ir.nodes[0].output], np.int32)))
    assert list(spreads.shares.values()) == [0, 0]
    assert not spreads.last.square.any()


def test_decisions_change_where_margins_are_small():
    codes = np.array([[0, 100], [50, 51]])
    sure = Spread(*np.zeros((3, 2, 2), np.float32))
    assert decisions(codes, sure, np.random.default_rng(0)) == 0
    wide = exactly(np.full((2, 2), 3))
    assert 0.1 < decisions(codes, wide, np.random.default_rng(0)) < 0.5


@pytest.mark.exhaustive
def test_an_operation_without_a_theory_is_an_error():
    x = np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)
    graph, codes = graph_of(nnx.Sequential(nnx.Linear(16, 4, rngs=nnx.Rngs(0)), nnx.softmax), x)
    own = {node.output: np.zeros_like(codes[node.output], np.int32) for node in graph.ir.nodes}
    with pytest.raises(ValueError, match="expected operations of conv, dot, add, sum, reshape; got 'softmax'"):
        carried(graph.ir, codes, own)
