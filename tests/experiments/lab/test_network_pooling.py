"""Exact results of a graph's additions and pools, their ties, and networks in which a target computes only them."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx
from matplotlib.figure import Figure

from experiments.accuracy.data import Data
from experiments.lab import exact_ties, network_pooling, pooled_networks
from experiments.lab import pooling_cases as cases
from experiments.models.small import ResNet
from qjax.contrib.lab.study import Settings

BY_NAME = {case.name: case for case in cases.CASES}


@pytest.fixture(autouse=True, scope="module")
def promotion():
    """Flax divides an average by a numpy integer."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def graph_of(name):
    case = BY_NAME[name]
    ir = cases.graph(case, "nearest_even").ir
    return case, ir, next(node for node in ir.nodes if exact_ties.kind_of(node))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["pool 2x2, dark half behind a relu", "add, scales 1 : 1/4 : 2", "pool 2x2"])
def test_results_are_those_of_the_cases(name):
    case, ir, node = graph_of(name)
    inputs = cases.codes(case, 0, 2**13)
    numerator, denominator = cases.exact(case, inputs)
    found = exact_ties.exact(ir, node, inputs)
    assert (numerator.shape, denominator) == (found.numerator.shape, found.denominator)
    assert np.array_equal(found.numerator, numerator)
    for ties in pooled_networks.WAYS:
        wanted = np.clip(cases.rounded(case, numerator, denominator, ties) + case.zero_point, -128, 127)
        assert np.array_equal(exact_ties.settled(ir, node, found, ties), wanted)


def test_ties_count_where_they_decide_a_code():
    case, ir, node = graph_of("add, equal scales")
    # sums of 1, 3 and -255 halves: the last lies below the least code
    found = exact_ties.exact(ir, node, [np.array([1, 2, -127, 2]), np.array([0, 1, -128, 2])])
    assert case.ratio == (1, 1, 2)
    assert list(exact_ties.tied(ir, node, found)) == [True, True, True, False]
    assert list(exact_ties.settled(ir, node, found, "even")) == [0, 2, -128, 2]


@pytest.mark.parametrize(
    ("name", "changed"), [("add, equal scales", {"subtract": True}), ("pool 2x2", {"strides": [1] * 4})]
)
def test_what_is_not_counted_is_refused(name, changed):
    case, ir, node = graph_of(name)
    other = dataclasses.replace(node, attributes={**node.attributes, **changed})
    with pytest.raises(ValueError, match="expected a sum of two tensors, a 2x2 pool"):
        exact_ties.exact(ir, other, cases.codes(case, 0, 2**13))


def test_ties_of_real_valued_scales_need_equal_ones():
    _, ir, node = graph_of("add, equal real-valued scales")
    found = exact_ties.exact(ir, node, [np.array([1]), np.array([2])])
    assert (found.factors, found.denominator) == ((1, 1), 2)


@pytest.mark.parametrize("name", ["pool 2x2", "add, scales 1 : 1/4 : 2"])
def test_ties_of_independent_codes_are_expected(name):
    _, ir, node = graph_of(name)
    rng = np.random.default_rng(0)
    # three of four codes are even, and a third is 0
    shape = (256, 2, 4, 16) if "pool" in name else (64, 256)
    inputs = []
    for _ in node.inputs:
        codes = 2 * rng.integers(-40, 40, shape) + (rng.random(shape) < 0.25)
        inputs.append(np.where(rng.random(shape) < 1 / 3, 0, codes))
    found = exact_ties.exact(ir, node, inputs)
    ties, count = exact_ties.tied(ir, node, found).sum(), found.numerator.size
    expected = exact_ties.independent(ir, node, found)
    assert abs(ties - expected) < 5 * (count / 4) ** 0.5
    alike = exact_ties.uniform(ir, node, found)
    assert abs(ties - alike) > 5 * (count / 4) ** 0.5


@pytest.fixture(scope="module", params=["", pooled_networks.POWERS], ids=["real", "powers"])
def network(request):
    """`ResNet on digits` stands for a network that nobody has trained; its images are noise."""
    rng = np.random.default_rng(0)
    images, labels = rng.standard_normal((32, 8, 8, 1)).astype(np.float32), rng.integers(0, 10, 32)
    model = ResNet(4, rngs=nnx.Rngs(0))
    model.eval()
    caches = (pooled_networks.prepared, pooled_networks.counted, network_pooling.changes)
    for cached in caches:
        cached.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pooled_networks, "_float", lambda name, seed: (model, Data(images, labels, images, labels)))
        yield f"ResNet on digits{request.param}"
    for cached in caches:
        cached.cache_clear()


@pytest.mark.exhaustive
def test_the_reference_gives_the_exact_codes(network):
    known = pooled_networks.prepared(network, Settings())
    ir, seen = known.graph.ir, []
    for _, env in pooled_networks.runs(known, 32):
        for node in (node for node in ir.nodes if exact_ties.kind_of(node)):
            found = exact_ties.exact(ir, node, [env[key] for key in node.inputs])
            assert np.array_equal(exact_ties.settled(ir, node, found, "even"), env[node.output])
            seen.append(exact_ties.kind_of(node))
    assert seen == ["additions", "additions", "pools"]


@pytest.mark.exhaustive
def test_a_target_that_computes_nothing_else_changes_nothing_else(network):
    known = pooled_networks.prepared(network, Settings())
    same = pooled_networks.mixed(network, Settings(), ("nearest_even", "tflite_micro"))
    assert np.array_equal(same["nearest_even"], known.classes)
    assert same["tflite_micro"].shape == known.classes.shape
    tallies = pooled_networks.counted(network, Settings(), ("single_round",))
    pool = tallies["window_sum"]
    assert pool.ties > 0
    assert pool.targets["single_round"][:2] == pool.rules["up"]
    assert pool.targets["single_round"][2] == 0
    assert pool.rules["even"] == [0, 0]


@pytest.mark.exhaustive
def test_what_is_measured_is_what_is_predicted_and_drawn(network, monkeypatch):
    targets = ("tflite_micro", "tosa")
    monkeypatch.setattr(network_pooling, "TARGETS", targets)
    monkeypatch.setattr(network_pooling, "names", lambda settings: (network,))
    predictions, found = network_pooling.predict(Settings()), network_pooling.measure(Settings())
    assert [prediction.name for prediction in predictions] == list(found.values)
    exact = [p for p in predictions if p.low == p.high]
    assert len(exact) >= 2
    assert all(p.holds(found.values[p.name]) for p in exact)
    assert f"- {network}, pools: " in found.conclusion
    network_pooling.draw(Figure(), found.data)
