"""The study's building blocks against brute force and unbounded integers."""

import itertools

import numpy as np
import pytest
from matplotlib.figure import Figure

import qjax
from experiments.data import digits
from experiments.lab import accumulators
from experiments.lab.accumulators_conclusion import conclusion
from experiments.lab.accumulators_pairs import measured_share, normal_weights, saturating_share, uniform_weights
from experiments.lab.accumulators_training import NARROW, Run, schedule_rows
from experiments.lab.accumulators_widths import Widths, pairs, under_widths
from experiments.models import MLP
from experiments.training import Schedule
from qjax.contrib.lab.study import Settings, binomial_band


def test_share_of_clamped_pairs_by_counting_all_of_them():
    weights = np.zeros(256)
    chosen = (-128, -127, 5, 127)
    weights[[w + 128 for w in chosen]] = 1 / 4
    codes = range(256)
    products = [x * w for x, w in itertools.product(codes, chosen)]
    count = sum(int(((np.array(products) + p > 32767) | (np.array(products) + p < -32768)).sum()) for p in products)
    assert count > 0
    assert saturating_share(weights, 256) == pytest.approx(count / len(products) ** 2, rel=1e-12)


def test_published_shares():
    assert saturating_share(uniform_weights(), 256) == pytest.approx(0.036, abs=5e-4)
    assert saturating_share(normal_weights(32), 256) == pytest.approx(1.2e-4, abs=1e-5)
    assert saturating_share(uniform_weights(), 128) == 0


def test_normal_weights_are_a_distribution_and_its_deviation():
    p, w = normal_weights(16), np.arange(-128, 128)
    assert p.sum() == pytest.approx(1)
    assert np.sqrt((p * w**2).sum()) == pytest.approx(np.sqrt(16**2 + 1 / 12), rel=1e-6)


def test_kernel_counts_what_is_predicted():
    low, high = binomial_band(saturating_share(uniform_weights(), 256), 2**16)
    assert low <= measured_share(np.random.default_rng(0), None, 256, 2**16) <= high
    assert measured_share(np.random.default_rng(0), None, 128, 2**16) == 0


def test_narrowest_width_from_which_on_nothing_is_lost():
    found = Widths(12, 0.9, [13, 12, 11, 10, 9], {"wrap": [0.9, 0.9, 0.895, 0.5, 0.9], "saturate": [0.9] * 5}, 0)
    assert found.narrowest("wrap") == 11
    assert found.narrowest("saturate") == 9


@pytest.fixture(scope="module")
def graph():
    from flax import nnx

    activations = qjax.QSpec(bits=8, signed=False, symmetric=False)
    recipe = qjax.Recipe(weights=qjax.QSpec(bits=8, axis=-1), activations=activations)
    images = digits().test_images[:40]
    qmodel = qjax.quantize(MLP((6,), rngs=nnx.Rngs(0)), recipe, images)
    return qjax.convert(qmodel, images[:1])


def test_registers_of_the_worst_case_change_nothing_and_narrow_ones_do(graph):
    data = digits()
    images, labels = data.test_images[:40], data.test_labels[:40]
    worst = qjax.accumulators(graph).bits
    found = under_widths(graph, images, labels, [worst, 9])
    assert (found.worst, found.differing) == (worst, 0)
    assert found.accuracies["wrap"][0] == found.accuracies["saturate"][0] == found.exact
    share, accuracy = pairs(graph, images, labels)
    assert 0 <= share < 0.05
    assert 0 <= accuracy <= 1


def test_every_epoch_shows_every_image_once():
    rows = schedule_rows(Schedule(3, batch_size=4), 12, seed=1)
    assert rows.shape == (9, 4)
    for epoch in rows.reshape(3, 12):
        assert sorted(epoch) == list(range(12))


def test_predictions_can_fail_and_are_named_once():
    found = accumulators.predict(Settings())
    assert len({p.name for p in found}) == len(found)
    assert all(p.low <= p.high and p.why for p in found)
    full = {p.name: p for p in accumulators.predict(Settings(full=True))}
    name = "pairs clamped, uint8 codes, sigma 32"
    assert full[name].high - full[name].low < next(p.high - p.low for p in found if p.name == name)


def test_picture_and_words():
    names = {p.name: p.low for p in accumulators.predict(Settings())}
    widths = [13, *range(12, 5, -1)]
    eight = {"worst": 21, "exact": 0.97, "widths": [21, 8], "wrap": [0.97, 0.1], "saturate": [0.97, 0.1]}
    four = {"worst": 12, "exact": 0.97, "widths": widths, "wrap": [0.97] * 8, "saturate": [0.97] * 8}
    curves = {m: [[b, 0.9] for b in NARROW] for m in ("A2Q", "A2Q+")}
    data = {
        "sigmas": [20, 32], "measured_pairs": [0.0, 1e-4], "uniform": 0.036, "float": 0.98, "free": 0.97,
        "widths": {"8": eight, "4": four}, "trained": curves, "before": curves, "calibrated": 0.3,
        "clamped": {"share": 0.01, "accuracy": 0.97, "exact": 0.97},
    }  # fmt: skip
    figure = Figure()
    accumulators.draw(figure, data)
    assert [axes.get_ylabel() for axes in figure.axes][1:] == ["test accuracy, %"] * 2
    seen = Widths(21, 0.97, [21, 8], {"wrap": [0.97, 0.1], "saturate": [0.97, 0.1]}, 0)
    runs = [Run(m, b, 0, 0.9, 0.5, b, 0.5, 0) for m in ("A2Q", "A2Q+") for b in NARROW]
    text = conclusion(names, data, seen, runs)
    assert "need more than 21 bits" in text
    assert "more accurate than A2Q+" in text
