"""What single products predict of a network with rounded weights, and how ways are compared."""

import numpy as np
import pytest
from flax import nnx
from matplotlib.figure import Figure

import qjax
from experiments.accuracy.data import Data
from experiments.accuracy.train import scores
from experiments.lab import learned_claims, learned_networks, network_learned_rounding
from experiments.lab import rounding_theory as theory
from experiments.models.small import MLP
from qjax.contrib.lab.study import Settings


def layer_of(rng, inputs=6, channels=3):
    """Correlated inputs, with what they were made from."""
    x = rng.random((500, 1)) + 0.5 * rng.normal(size=(500, inputs))
    w = rng.normal(size=(1, inputs, channels))
    gram, mean = np.matmul(x.T, x) / len(x), x.mean(0)
    return x, theory.Inputs(gram[None], mean[None], w, None)  # pyright: ignore[reportArgumentType]


def test_the_error_of_a_product_follows_from_second_moments():
    x, layer = layer_of(np.random.default_rng(0))
    scale = np.full_like(layer.weights, 0.4)
    codes = np.clip(np.rint(layer.weights / scale), -3, 3)
    found = theory.rounded(layer, codes, scale, -3, 3)
    error = np.matmul(x, codes[0] * 0.4 - layer.weights[0])
    assert found.noise == pytest.approx(np.mean(error**2))
    assert found.mean == pytest.approx(np.mean(error.mean(0) ** 2))
    left = np.matmul(x, found.learned[0] - layer.weights[0])
    assert found.left == pytest.approx(np.mean(left**2))
    assert found.left < found.noise


def test_no_single_change_makes_the_learned_codes_better():
    rng = np.random.default_rng(1)
    _, layer = layer_of(rng)
    scale = np.full_like(layer.weights, 0.4)
    nearest = np.clip(np.rint(layer.weights / scale), -3, 3)
    found = theory.descended(layer, nearest, scale, -3, 3)
    floor = np.clip(np.floor(layer.weights / scale), -3, 3)
    assert np.all((found == floor) | (found == np.clip(floor + 1, -3, 3)))

    def error(codes, channel):
        d = (codes * scale - layer.weights)[0, :, channel]
        return float(np.sum(d * np.matmul(layer.gram[0], d)))

    for channel in range(3):
        best = error(found, channel)
        assert best <= error(nearest, channel)
        for index in range(6):
            other = found.copy()
            low = floor[0, index, channel]
            other[0, index, channel] = low if found[0, index, channel] > low else min(low + 1, 3)
            assert error(other, channel) >= best - 1e-12


def test_noise_has_the_sqnr_that_was_asked_for():
    rng = np.random.default_rng(0)
    reals = rng.normal(size=(20_000, 10))
    found = theory.noisy(reals, 6.0, rng)
    assert theory.decibels(np.mean(reals**2) / np.mean((found - reals) ** 2)) == pytest.approx(6, abs=0.05)
    assert theory.changed(reals, 200.0, rng) == 0
    assert theory.points(reals, reals.argmax(-1), 200.0, rng) == 100
    assert theory.changed(reals, -60.0, rng) == pytest.approx(0.9, abs=0.01)


def test_differences_of_ways_are_paired():
    one, other = np.zeros(100, bool), np.zeros(100, bool)
    one[:8], other[6:10] = True, True
    points, error = learned_networks.paired(one, other)
    assert points == pytest.approx(4)  # 6 gained and 2 lost
    assert error == pytest.approx((6 + 2 - 16 / 100) ** 0.5)
    assert learned_networks.paired(one, one) == (0, 0)


@pytest.fixture
def network(monkeypatch):
    """`CNN on digits` stands for a perceptron that nobody has trained."""
    rng = np.random.default_rng(0)
    images, labels = rng.standard_normal((256, 8, 8, 1)).astype(np.float32), rng.integers(0, 10, 256)
    model = MLP((16, 16), rngs=nnx.Rngs(0))
    known = learned_networks.Network(model, Data(images, labels, images, labels), scores(model, images), 1e-3)
    caches = (learned_networks.ready, learned_networks._inputs, learned_networks.theory, learned_networks.outcome)
    for cached in (*caches, learned_claims.curves):
        cached.cache_clear()
    for module in (learned_networks, learned_claims, network_learned_rounding):
        monkeypatch.setattr(module, "network", lambda name, settings: known)
    monkeypatch.setattr(learned_networks, "SEQUENCES", {"CNN on digits": ()})
    plan = learned_networks.Plan(("CNN on digits",), 200, 128)
    monkeypatch.setattr(learned_networks, "plan", lambda settings: plan)
    yield "CNN on digits"
    for cached in (*caches, learned_claims.curves):
        cached.cache_clear()


@pytest.mark.exhaustive
def test_inputs_are_those_of_the_float_network(network):
    one = learned_networks.ready(network, 3, Settings())
    assert one.few == ("layers/1/kernel",)  # the first and the last layer have 8 bits
    (layer,) = learned_networks._inputs(network, Settings()).values()
    model = one.start.model
    x = np.maximum(np.asarray(model.layers[0](one.start.data.train_images.reshape(256, -1))), 0).astype(np.float64)
    np.testing.assert_allclose(layer.gram[0], np.matmul(x.T, x) / len(x), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(layer.mean[0], x.mean(0), rtol=1e-4)
    assert np.array_equal(layer.matrix.restored(layer.weights), np.asarray(model.layers[1].kernel[...], np.float64))


@pytest.mark.exhaustive
def test_all_ways_of_a_small_network_are_measured(network):
    before = np.asarray(learned_networks.ready(network, 2, Settings()).start.model.layers[1].kernel[...])
    expected = learned_networks.theory(network, 2, Settings())
    found = learned_networks.outcome(network, 2, Settings())
    after = np.asarray(learned_networks.ready(network, 2, Settings()).start.model.layers[1].kernel[...])
    assert np.array_equal(before, after)
    assert [way.unequal for way in found.ways.values()] == [0, 0, 0, 0]
    assert found.ways["nearest"].sqnr == pytest.approx(expected.nearest, abs=1.5)
    assert found.ways["AdaRound"].sqnr > found.ways["nearest"].sqnr + expected.gain / 2
    one = qjax.convert(learned_networks.ready(network, 2, Settings()).qmodel, np.zeros((1, 8, 8, 1), np.float32))
    data = learned_networks.ready(network, 2, Settings()).start.data
    assert np.array_equal(found.ways["nearest"].classes, np.asarray(one(data.test_images)).argmax(-1))


@pytest.mark.exhaustive
def test_what_is_measured_is_what_is_predicted_and_drawn(network):
    predictions = network_learned_rounding.predict(Settings())
    found = network_learned_rounding.measure(Settings())
    assert [prediction.name for prediction in predictions] == list(found.values)
    assert "- CNN on digits, W4A8: nearest rounding changes" in found.conclusion
    network_learned_rounding.draw(Figure(), found.data)
