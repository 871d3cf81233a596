"""AdaRound and bias correction on layers small enough to know the answer."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax
from qjax.contrib.post_training.adaround import rectified_sigmoid
from tests.analysis.models import Deep, coarse, data


class One(nnx.Module):
    """A dense layer with five inputs."""

    def __init__(self):
        self.layer = nnx.Linear(5, 3, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.layer(x)


class Convs(nnx.Module):
    """A convolution with batch norm, a depthwise one with bias, flattened into a dense layer without any."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.stem = nnx.Conv(1, 4, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.depthwise = nnx.Conv(4, 4, (3, 3), strides=2, feature_group_count=4, rngs=rngs)
        self.head = nnx.Linear(16, 3, use_bias=False, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.stem(x)))
        x = nnx.relu(self.depthwise(x))
        return self.head(x.reshape(x.shape[0], -1))


BATCHES = [jnp.abs(data(64, 5, seed=s)) + jnp.float32(0.5) for s in range(2)]
IMAGES = [jnp.abs(data(32, 4, 4, 1, seed=s)) for s in range(2)]


def recipe(bits):
    """Few bits for weights, many for activations."""
    return qjax.Recipe(
        weights=qjax.QSpec(bits=bits, axis=-1),
        activations=qjax.QSpec(bits=16, symmetric=False),
        observer="minmax",
        weight_observer="minmax",
    )


def errors_of(x, w, codes, scale):
    """Mean squared error of each channel, float64."""
    return np.mean((x @ w - x @ (codes * scale)) ** 2, 0)


@pytest.fixture(scope="module")
def one():
    before = qjax.quantize(One(), recipe(3), jnp.concatenate(BATCHES))
    after = nnx.clone(before)
    return before, after, qjax.training.adaround(after, BATCHES, steps=300)


def test_learned_codes_are_the_best_of_all_roundings(one):
    before, after, found = one
    x = np.concatenate([np.asarray(b, np.float64) for b in BATCHES])
    w, scale = (
        np.asarray(a, np.float64) for a in (before.model.layer.kernel[...], before.qparams()["layer/kernel"].scale)
    )
    nearest, codes = (np.asarray(qjax.training.codes_of(m, ["layer/kernel"])["layer/kernel"]) for m in (before, after))
    floor = np.floor(w / scale)
    assert set(np.unique(codes - floor)) <= {0, 1}
    ways = [np.clip(floor + np.asarray(up)[:, None], -3, 3) for up in itertools.product((0, 1), repeat=5)]
    best = np.min([errors_of(x, w, way, scale) for way in ways], 0)
    base, learned = errors_of(x, w, nearest, scale), errors_of(x, w, codes, scale)
    assert np.all(learned <= base * (1 + 1e-5))
    assert np.sum(best) <= np.sum(learned) * (1 + 1e-9) < 1.3 * np.sum(best) < 0.7 * np.sum(base)
    # the report is of the quantized input
    q = before.qparams()["input"]
    x_codes = np.concatenate([np.asarray(before.codes(b)[1]["input"]) for b in BATCHES])
    x_q = (x_codes - np.asarray(q.zero_point)) * np.asarray(q.scale, np.float64)
    reported = [np.mean((x @ w - x_q @ (way * scale)) ** 2) for way in (nearest, codes)]
    (layer,) = found.layers
    np.testing.assert_allclose([layer.nearest, layer.learned], reported, rtol=1e-5)
    np.testing.assert_allclose(layer.signal, np.mean((x @ w) ** 2), rtol=1e-5)
    assert (layer.changed, layer.weights) == (int(np.sum(codes != nearest)), 15)
    assert "layer/kernel" in str(found)


@pytest.mark.exhaustive
def test_learned_codes_are_those_that_ship(one):
    _, after, _ = one
    x = BATCHES[0]
    graph = qjax.convert(after, x)
    codes = np.asarray(qjax.training.codes_of(after, ["layer/kernel"])["layer/kernel"])
    assert any(np.array_equal(c.value, codes) for c in graph.ir.constants() if c.shape == (5, 3))
    assert np.array_equal(qjax.exact(after, x)(after, x), graph(x))


@pytest.fixture(scope="module")
def convs():
    before = qjax.quantize(Convs(), recipe(2), IMAGES[0])
    after = nnx.clone(before)
    return before, after, qjax.training.adaround(after, IMAGES, steps=60)


def test_no_layer_gets_worse_and_only_weights_move(convs):
    before, after, found = convs
    assert [layer.name for layer in found.layers] == ["stem/kernel", "depthwise/kernel", "head/kernel"]
    assert all(layer.learned <= layer.nearest for layer in found.layers)
    assert sum(layer.changed for layer in found.layers) > 0
    flat = [dict(nnx.to_flat_state(nnx.state(model))) for model in (before, after)]
    moved = {path for path, v in flat[0].items() if not np.array_equal(v[...], flat[1][path][...])}
    assert moved == {("model", layer, "kernel") for layer in ("stem", "depthwise", "head")}


def test_what_cannot_be_rounded_is_named():
    shared = qjax.quantize(Deep(), coarse(3, scan="shared"), data(8, 3))
    found = qjax.training.adaround(shared, [data(8, 3)], steps=2)
    assert [layer.name for layer in found.layers] == ["stem/kernel", "head/kernel"]
    assert found.left == {"layers/kernel": "the layers of a scan share its scale"}
    with pytest.raises(ValueError, match="at least one batch"):
        qjax.training.adaround(qjax.quantize(One(), recipe(3), BATCHES[0]), [])


def test_the_rectified_sigmoid_reaches_both_ends():
    v = jnp.asarray([-10.0, 0.0, 10.0], jnp.float32)
    assert rectified_sigmoid(v).tolist() == [0.0, 0.5, 1.0]
    slope = jax.grad(lambda v: rectified_sigmoid(v))(jnp.float32(0))
    np.testing.assert_allclose(slope, 0.3, rtol=1e-6)


@pytest.mark.exhaustive
def test_a_bias_takes_the_mean_error_of_its_channel():
    before = qjax.quantize(One(), recipe(3), jnp.concatenate(BATCHES))
    after = nnx.clone(before)
    old: Any = before.model
    new: Any = after.model
    found = qjax.training.correct_bias(after, BATCHES)
    x, q = np.concatenate([np.asarray(b, np.float64) for b in BATCHES]), before.qparams()
    codes = np.asarray(qjax.training.codes_of(before, ["layer/kernel"])["layer/kernel"])
    w, scale = np.asarray(old.layer.kernel[...], np.float64), np.asarray(q["layer/kernel"].scale, np.float64)
    expected = x.mean(0) @ (w - codes * scale)
    where, shift = found.shifts["layer/kernel"]
    assert where == "layer/bias"
    assert np.max(np.abs(expected)) > 0.1
    np.testing.assert_allclose(shift, expected, rtol=0, atol=1e-5)
    assert np.array_equal(new.layer.bias[...], old.layer.bias[...] + shift)
    again = qjax.training.correct_bias(after, BATCHES, reference=before).shifts["layer/kernel"][1]
    assert np.max(np.abs(again)) < 1e-3 * np.max(np.abs(shift))


def test_batch_norm_takes_it_where_there_is_no_bias_and_a_layer_with_neither_is_left(convs):
    before, _, _ = convs
    after = nnx.clone(before)
    found = qjax.training.correct_bias(after, IMAGES)
    assert {name: where for name, (where, _) in found.shifts.items()} == {
        "stem/kernel": "norm/mean",
        "depthwise/kernel": "depthwise/bias",
    }
    assert list(found.left) == ["head/kernel"]
    assert "give the layer a bias" in str(found)
    shift = found.shifts["stem/kernel"][1]
    assert np.array_equal(after.model.norm.mean[...], before.model.norm.mean[...] - shift)
    again = qjax.training.correct_bias(nnx.clone(after), IMAGES, reference=before)
    for name, (_, first) in found.shifts.items():
        assert np.max(np.abs(again.shifts[name][1])) < 1e-3 * np.max(np.abs(first))


def test_a_model_without_any_bias_says_what_to_do():
    class Bare(nnx.Module):
        def __init__(self):
            self.layer = nnx.Linear(5, 3, use_bias=False, rngs=nnx.Rngs(1))

        def __call__(self, x):
            return self.layer(x)

    with pytest.raises(ValueError, match="give the layer a bias"):
        qjax.training.correct_bias(qjax.quantize(Bare(), recipe(3), BATCHES[0]), BATCHES)
