"""The studies of real networks, on a small network with random weights."""

from unittest.mock import Mock

import numpy as np
import pytest
from flax import nnx
from matplotlib.figure import Figure

from experiments.lab import (
    network_accumulators,
    network_depth,
    network_drift,
    network_oscillations,
    network_transfer,
)
from experiments.models.small import CNN
from qjax.contrib.lab.study import Settings

IMAGES = np.random.default_rng(0).standard_normal((64, 8, 8, 1)).astype(np.float32)


@pytest.fixture(scope="module")
def network():
    """`CNN on digits` stands for a network that nobody has trained; its images are noise."""
    model = CNN(8, rngs=nnx.Rngs(0))
    model.eval()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network_drift, "_trained", lambda name, seed: (model, [IMAGES], IMAGES))
        yield "CNN on digits"
    for cached in (network_drift.prepared, network_drift.alone, network_drift.end_to_end, network_depth._expected):
        cached.cache_clear()


@pytest.mark.exhaustive
def test_what_differs_in_the_first_node_is_what_arises_there(network):
    own, whole = network_drift.alone(network, 0, "double_round"), network_drift.end_to_end(network, 0, "double_round")
    nodes = network_drift.prepared(network, 0).ir.nodes
    assert list(own) == list(whole.shares) == [node.output for node in nodes]
    assert whole.shares[nodes[0].output] == np.mean(own[nodes[0].output] != 0) > 0


@pytest.mark.exhaustive
def test_without_differences_nothing_arises_and_nothing_is_predicted(network):
    assert not any(d.any() for d in network_drift.alone(network, 0, "single_round").values())
    whole = network_drift.end_to_end(network, 0, "single_round")
    assert set(whole.shares.values()) == {0.0}
    assert not whole.last.any()
    assert set(network_depth._expected(network, 0, "single_round").shares.values()) == {0.0}


@pytest.mark.exhaustive
def test_the_last_difference_is_that_of_the_graphs(network):
    known = network_drift.prepared(network, 0)
    before, after = known.graph(IMAGES), known.graph.retarget("double_round")(IMAGES)
    grid = known.ir.tensors[known.ir.outputs[0]].quantization
    assert grid is not None
    steps = np.round((np.asarray(after) - np.asarray(before)) / np.asarray(grid.scale))
    assert steps.any()
    assert np.array_equal(steps, network_drift.end_to_end(network, 0, "double_round").last)


@pytest.mark.exhaustive
def test_a_study_of_depth_measures_what_it_predicts(network):
    predictions, found = network_depth.predict(Settings()), network_depth.measure(Settings())
    assert {prediction.name for prediction in predictions} == set(found.values)
    assert f"- {network}: double_round changes " in found.conclusion
    network_depth.draw(Figure(), found.data)


def test_gains_of_the_exact_forward_are_paired():
    ways = {"exact": [92.0, 91.0], "fake-quantized": [91.5, 91.1]}
    one = network_transfer.Trained(90.0, ways, 0)
    assert one.differences == pytest.approx([0.5, -0.1])
    text = network_transfer._conclusion("ResNet", {"W4A4": one})
    assert text == (
        "- ResNet, W4A4: training through the target's integers changes accuracy by +0.20 points (standard error 0.30)."
    )
    network_transfer.draw(Figure(), {"W4A4": {"before": one.before, **one.ways}})


def test_gains_of_the_cures_are_paired():
    def outcome(oscillating, after):
        return network_oscillations.Outcome(oscillating, 0.0, after - 1, after, 0)

    found = {
        "plain": [outcome(0.2, 90.0), outcome(0.3, 91.0)],
        "damping": [outcome(0.1, 90.4), outcome(0.1, 91.2)],
        "freezing": [outcome(0.0, 89.0), outcome(0.0, 90.6)],
    }
    assert network_oscillations.gains(found, "damping") == pytest.approx([0.4, 0.2])
    values = {p.name: read(found) for p, read in network_oscillations._claims("W3A3", Settings())}
    assert values["W3A3, damping: oscillating share as a part of plain training's"] == pytest.approx(0.4)
    assert values["W3A3, freezing minus plain, both re-estimated, points"] == pytest.approx(-0.7)
    text = network_oscillations._conclusion("depthwise CNN", {"W3A3": found})
    assert (
        "- depthwise CNN, W3A3: damping changes accuracy by +0.30 points (standard error 0.10) against plain training."
        in text
    )


def test_the_cures_follow_a_cosine():
    assert [float(network_oscillations._risen(p)) for p in (0.0, 0.5, 1.0)] == pytest.approx([0, 0.5, 1], abs=1e-6)


def test_gaps_of_accumulators_are_differences_of_the_runs(monkeypatch):
    points = {("free", 32): 92.0, ("A2Q", 13): 91.0, ("A2Q+", 13): 91.5, ("A2Q", 11): 89.0, ("A2Q+", 11): 90.0}
    points |= {("A2Q", 9): 70.0, ("A2Q+", 9): 85.0}
    runs = {key: network_accumulators.Run(value, 50.0, key[1] - 1, key[1] - 2, 0.5) for key, value in points.items()}
    monkeypatch.setattr(network_accumulators, "trained", lambda method, bits, settings: runs[method, bits])
    known = network_accumulators.Network(Mock(), Mock(), (), 93.0)
    monkeypatch.setattr(network_accumulators, "network", lambda settings: known)
    found = network_accumulators.measure(Settings())
    assert found.values["9 bits, A2Q+ less A2Q, points"] == 15
    assert found.values["13 bits, A2Q+ less trained freely, points"] == -0.5
    assert found.values["trained freely, points less the float network's"] == -1
    assert found.values["bits of the worst case above those asked for, greatest"] == -1
    assert all(
        prediction.holds(found.values[prediction.name]) for prediction in network_accumulators.predict(Settings())
    )
    assert "may overflow 9 bits, accuracy changes by (points): A2Q -22.00, A2Q+ -7.00." in found.conclusion
    network_accumulators.draw(Figure(), found.data)
