"""The weight by itself against fractions, and the shape of the network's run."""

from fractions import Fraction

import jax
import numpy as np
import pytest
from flax import nnx

import qjax
from experiments.lab.oscillating import Separable, Way, toy_codes, tracked, train_tracked, turns
from experiments.lab.oscillations import STUDY
from qjax.contrib.lab.study import Settings


@pytest.mark.exhaustive
def test_one_weight_follows_the_recurrence_in_fractions():
    codes, weights = toy_codes(np.asarray([3 / 16, 8 / 16]), 1 / 64, 0.5 + 2.0**-11, 100)
    for i, goal in enumerate((Fraction(3, 16), Fraction(8, 16))):
        w = Fraction(1, 2) + Fraction(1, 2**11)
        for code, weight in zip(codes[:, i], weights[:, i], strict=True):
            assert Fraction(float(weight)) == w
            assert code == round(w)
            w -= (round(w) - goal) / 64


def test_turns_and_the_tracker_count_the_same():
    codes = np.random.default_rng(0).integers(0, 3, size=(20, 6))
    counted = turns(codes)
    # with a tiny momentum the moving average is momentum times the count
    found = np.asarray(tracked(codes, 1e-6).frequency["w"]) / 1e-6
    assert np.array_equal(np.rint(found), counted)
    assert turns(np.asarray([[0], [1], [1], [2], [0]])).tolist() == [1]


def test_schedules_end_where_they_say():
    assert Way(damping=0.5).at(1.0) == (0.5, float("inf"))
    assert Way(threshold=(0.04, 0.015)).at(0.0) == (0.0, 0.04)
    assert abs(Way(threshold=(0.04, 0.015)).at(1.0)[1] - 0.015) < 1e-12


@pytest.mark.exhaustive
def test_a_tracked_training_follows_the_low_bits_only_and_freezes():
    rng = np.random.default_rng(0)
    images = rng.random((32, 8, 8, 1), np.float32)
    targets = np.eye(10, dtype=np.float32)[rng.integers(0, 10, 32)]
    recipe = qjax.Recipe(weights=qjax.QSpec(bits=3), first_last_bits=8, observer="minmax", weight_observer="minmax")
    qmodel = qjax.quantize(Separable(4, 1, rngs=nnx.Rngs(0)), recipe, images)
    way = Way(threshold=(0.005, 0.005))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # optax's own arithmetic needs it
        found = train_tracked(qmodel, images, targets, way, epochs=10, rate=0.3, batch=8, seed=0)
    assert found.tracker.names == ("convs/0/kernel", "convs/1/kernel")
    assert len(found.shares) == len(found.frozen) == 10
    assert found.frozen == sorted(found.frozen)
    assert found.frozen[-1] > 0
    codes = qjax.training.codes_of(qmodel, found.tracker.names)
    assert all(np.array_equal(codes[name], found.tracker.codes[name]) for name in codes)


def test_predictions_do_not_depend_on_a_measurement_and_can_fail():
    predictions = list(STUDY.predict(Settings()))
    assert len({p.name for p in predictions}) == len(predictions)
    assert all(p.low <= p.high < 1 for p in predictions)
