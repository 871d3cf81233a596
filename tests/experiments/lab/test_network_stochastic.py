"""Stochastic rounding of real networks: the statistics on made-up scores, and draws of a small network."""

import numpy as np
import pytest
from flax import nnx
from matplotlib.figure import Figure

import qjax
from experiments.accuracy.methods import Setting
from experiments.lab import network_stochastic, stochastic_outcomes
from experiments.models.small import MLP
from qjax.contrib.lab.study import Settings

LABELS = np.array([0, 1, 0, 1])
RIGHT = np.eye(2, dtype=np.float32)[LABELS]


def wrong(*images):
    """Class scores of which these images are judged wrongly."""
    scores = RIGHT.copy()
    scores[list(images)] = scores[list(images), ::-1]
    return scores


def test_statistics_of_runs():
    runs = np.stack([wrong(0), wrong(0, 1), wrong(2), wrong(0, 2)])
    one = stochastic_outcomes.compared(RIGHT, wrong(0), wrong(0, 1, 2), runs, LABELS)
    assert (one.unrounded, one.nearest, one.less) == (100, 75, 25)
    assert one.single == pytest.approx(100 - 100 * 6 / 16)
    assert one.mean == pytest.approx(75)  # image 0 is wrong in three runs of four, 2 in two: the first class wins a tie
    # per image: runs' share that is right, less nearest's
    assert one.error == pytest.approx(100 * np.std([0.25, -0.25, -0.5, 0], ddof=1) / 2)
    assert one.squared_less == pytest.approx(3)
    assert one.squared_single == pytest.approx(6 / 4)
    assert one.squared_mean == pytest.approx(((3 / 4) ** 2 + (1 / 4) ** 2 + (2 / 4) ** 2) / 1)
    assert one.share == pytest.approx((75 - 62.5) / 50)
    assert one.recovered == 0


def test_nothing_lost_has_no_share():
    one = stochastic_outcomes.compared(RIGHT, RIGHT + 0.1, RIGHT, RIGHT[None], LABELS)
    assert np.isnan(one.share)
    assert np.isnan(one.recovered)


@pytest.mark.exhaustive
def test_draws_are_runs_of_one_key_each():
    images = np.random.default_rng(0).standard_normal((6, 8, 8, 1)).astype(np.float32)
    model = MLP((8,), rngs=nnx.Rngs(0))
    model.eval()
    qmodel = qjax.quantize(model, Setting(3, 3).recipe(), images)
    qmodel.eval()
    runs = stochastic_outcomes.drawn(qmodel, images, 3, 0)
    assert runs.shape == (3, 6, 10)
    assert np.array_equal(runs, stochastic_outcomes.drawn(qmodel, images, 3, 0))
    assert len({run.tobytes() for run in runs}) == 3
    nearest = np.asarray(qmodel(images))
    assert not any(np.array_equal(run, nearest) for run in runs)


def test_a_study_measures_what_it_predicts(monkeypatch):
    one = stochastic_outcomes.Inference(97.0, 95.0, 92.0, 94.0, 96.5, 0.1, 2.0, 0.3, 4.0)
    ways = {"nearest": [96.0, 96.4], "stochastic": [96.0, 96.8]}
    trained = stochastic_outcomes.Trained(95.0, {way: [] for way in ways}, ways, 0)
    monkeypatch.setattr(network_stochastic, "inference", lambda plan, bits, seed: one)
    monkeypatch.setattr(network_stochastic, "trained", lambda plan, bits, seed: trained)
    for settings in (Settings(), Settings(full=True)):
        found = network_stochastic.measure(settings)
        predictions = network_stochastic.predict(settings)
        assert {prediction.name for prediction in predictions} == set(found.values)
        left = [p.name for p in predictions if not p.holds(found.values[p.name])]
        assert all("W8A8: points" in name for name in left)  # no run may lose a point at 8 bits
        network_stochastic.draw(Figure(), found.data)
    assert found.values["GRU, W4A4, trained: stochastic less nearest, points"] == pytest.approx(0.2)
    assert found.values["GRU, W3A3: points that a stochastic run loses, of those that a bit less loses"] == 1 / 3
    assert "changes the deployed accuracy by +0.20 points (standard error 0.20)" in found.conclusion
