"""Oscillations against a plain loop over one weight at a time."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import qjax
from tests.analysis.models import Small, coarse, data

NAMES = ("first/kernel", "middle/kernel", "last/kernel")


def by_hand(codes, momentum):
    """frequency and average of one weight's codes, in float32 as the tracker's."""
    m, f, average, last = np.float32(momentum), np.float32(0), np.float32(codes[0]), 0
    for before, now in itertools.pairwise(codes):
        turn = int(np.sign(now - before))
        f = m * np.float32(turn * last == -1) + (np.float32(1) - m) * f
        average = m * np.float32(now) + (np.float32(1) - m) * average
        last = turn or last
    return f, average


@pytest.mark.exhaustive
def test_the_tracker_is_the_loop():
    codes = np.random.default_rng(0).integers(-2, 3, size=(40, 3, 4))
    tracker = qjax.training.Oscillations.of({"w": codes[0]}, momentum=0.125)
    for now in codes[1:]:
        tracker = tracker.advance({"w": now})
    for index in np.ndindex(3, 4):
        f, average = by_hand(codes[(slice(None), *index)], 0.125)
        assert tracker.frequency["w"][index] == f > 0
        assert tracker.average["w"][index] == average
    expected = np.mean(np.asarray(tracker.frequency["w"]) > 0.4)
    assert 0 < expected < 1
    assert float(tracker.share(0.4)) == np.float32(expected)


@pytest.mark.parametrize(
    ("codes", "turns"),
    [([0, 1, 2, 3], 0), ([0, 1, 0], 1), ([0, 1, 1, 0], 1), ([0, 1, 0, 1], 2), ([1, 1, 1], 0), ([3, 0, 2, 5, 5, 1], 2)],
)
def test_a_turn_is_a_change_against_the_last_one(codes, turns):
    tracker = qjax.training.Oscillations.of({"w": np.asarray(codes[:1])}, momentum=0.5)
    found = 0
    for now in codes[1:]:
        before = tracker.frequency["w"][0]
        tracker = tracker.advance({"w": np.asarray([now])})
        found += bool(tracker.frequency["w"][0] > before / 2)
    assert found == turns


@pytest.fixture(scope="module")
def small():
    return qjax.quantize(Small(), coarse(3), data(8, 4))


def trained(qmodel, steps, threshold):
    """A few large steps on noise, all jitted: codes after every step, and the tracker."""
    tracker = qjax.training.Oscillations.start(qmodel, data(8, 4), momentum=0.1)
    optimizer = nnx.Optimizer(qmodel, optax.sgd(0.3), wrt=nnx.Param)

    @nnx.jit
    def step(qmodel, optimizer, tracker, x, y):
        optimizer.update(qmodel, nnx.grad(lambda q: jnp.mean(jnp.square(q(x) - y)))(qmodel))
        return tracker.update(qmodel).freeze(qmodel, threshold)

    history = []
    for i in range(steps):
        tracker = step(qmodel, optimizer, tracker, data(8, 4, seed=i), data(8, 3, seed=100 + i))
        history.append((qjax.training.codes_of(qmodel, NAMES), tracker))
    return history


def test_frozen_weights_stay_at_their_code_while_others_and_scales_move(small):
    history = trained(nnx.clone(small), 18, 0.15)
    _, last = history[-1]
    assert 0 < float(last.share_frozen()) < 1
    for name in NAMES:
        assert np.array_equal(
            last.frequency[name][~last.frozen[name]] > 0.15, [False] * int((~last.frozen[name]).sum())
        )
    for codes, tracker in history:
        for name in NAMES:
            frozen = np.asarray(tracker.frozen[name])
            assert np.array_equal(codes[name][frozen], tracker.held[name][frozen])
            assert np.array_equal(codes[name], tracker.codes[name])
            # once held, always held, at one code
            assert np.array_equal(np.asarray(last.held[name])[frozen], np.asarray(tracker.held[name])[frozen])


def test_a_weight_is_held_at_its_rounded_average(small):
    qmodel = nnx.clone(small)
    start = qjax.training.codes_of(qmodel, NAMES)
    tracker = qjax.training.Oscillations.of(start, momentum=0.25)
    first = np.asarray(start["first/kernel"])
    for up in (2, -1, 2, 2):
        tracker = tracker.advance({**start, "first/kernel": np.where(first > 0, first - up, first)})
    tracker = tracker.freeze(qmodel, 0.1)
    # the average of 0 and then -2, 1, -2, -2 by quarters: 0, -0.5, -0.125, -0.59375, -0.9453125
    held = np.where(first > 0, first - 1, first)
    assert np.array_equal(tracker.frozen["first/kernel"], first > 0)
    assert float(tracker.share(0.1)) == 0  # what is held no longer counts
    assert np.max(tracker.frequency["first/kernel"]) > 0.1
    assert np.array_equal(np.asarray(tracker.held["first/kernel"])[first > 0], held[first > 0])
    assert np.array_equal(qjax.training.codes_of(qmodel, NAMES)["first/kernel"], held)
    same = (before.model.middle.kernel[...] for before in (small, qmodel))
    assert np.array_equal(*same)


def test_without_a_threshold_nothing_is_changed(small):
    plain, tracked = nnx.clone(small), nnx.clone(small)
    tracker = qjax.training.Oscillations.start(tracked, data(8, 4)).update(tracked).freeze(tracked, np.inf)
    assert float(tracker.share_frozen()) == float(tracker.share()) == 0
    leaves = (jax.tree.leaves(nnx.state(model)) for model in (plain, tracked))
    assert all(np.array_equal(a, b) for a, b in zip(*leaves, strict=True))


def test_errors_say_what_to_do(small):
    with pytest.raises(ValueError, match="first/kernel: 3 bits, more than 2"):
        qjax.training.Oscillations.start(small, data(8, 4), max_bits=2)
    with pytest.raises(ValueError, match="between 0 and 1, got 1"):
        qjax.training.Oscillations.of({"w": np.zeros(1)}, momentum=1)


def test_dampening_is_the_distance_to_the_grid_and_its_gradient_is_the_way_there(small):
    qmodel = nnx.clone(small)
    kernel = qmodel.model.first.kernel
    kernel[...] = kernel[...].at[0, 0].set(1e3)  # far beyond the grid
    loss, gradient = nnx.value_and_grad(lambda q: qjax.training.dampening(q, NAMES))(qmodel)
    total = 0.0
    codes, qparams = qjax.training.codes_of(qmodel, NAMES), qmodel.qparams()
    for name in NAMES:
        w = np.asarray(dict(nnx.to_flat_state(nnx.state(qmodel.model)))[tuple(name.split("/"))][...], np.float64)
        scale = np.asarray(qparams[name].scale, np.float64)
        difference = np.clip(w, -3 * scale, 3 * scale) - np.asarray(codes[name]) * scale
        total += np.sum(difference**2)
        if name == "first/kernel":
            expected = 2 * difference * (np.abs(w) < 3 * scale)
            np.testing.assert_allclose(gradient.model.first.kernel[...], expected, rtol=0, atol=1e-6)
            assert gradient.model.first.kernel[0, 0] == 0
    np.testing.assert_allclose(float(loss), total, rtol=1e-5)
    by_name = qmodel.quantizers.named(gradient.quantizers)
    scales = [by_name[name]["log2_scale"] for name in NAMES]
    assert scales
    assert all(not np.any(leaf) for leaf in scales)
