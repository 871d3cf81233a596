"""Scales that move between layers: the float function stays, what quantizes badly gets better."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax
from qjax.contrib.post_training import migration
from qjax.contrib.post_training.layerwise_runner import Stream, Walk
from qjax.contrib.post_training.pairs import find_pairs
from tests.analysis.models import data

SPREAD = np.asarray([300, 1, 0.02, 1, 5, 1, 0.3, 1], np.float32)


def scale(parameter, factors):
    parameter[...] = jnp.asarray(np.asarray(parameter[...]) * factors)


class Chain(nnx.Module):
    """Norm, dense, batch norm, relu6, depthwise, relu, 1x1; every tensor between with channels of unlike ranges."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.dense = nnx.Linear(8, 8, rngs=rngs)
        self.batch = nnx.BatchNorm(8, use_running_average=True, rngs=rngs)
        self.depthwise = nnx.Conv(8, 16, (2, 2), feature_group_count=8, rngs=rngs)
        self.point = nnx.Conv(16, 4, (1, 1), rngs=rngs)
        self.out = nnx.Linear(4, 3, rngs=rngs)
        scale(self.norm.scale, SPREAD)
        scale(self.dense.kernel, 1 / SPREAD[:, None])
        scale(self.batch.scale, np.minimum(SPREAD, 4))
        scale(self.depthwise.kernel, np.repeat(SPREAD, 2))
        scale(self.point.kernel, 1 / np.repeat(SPREAD, 2)[:, None])

    def __call__(self, x):
        x = jax.nn.relu6(self.batch(self.dense(self.norm(x))))
        x = self.point(nnx.relu(self.depthwise(x)))
        return self.out(x.mean((1, 2)) + x[:, 0, 0])


IMAGES = [data(8, 3, 3, 8, seed=s) for s in range(2)]


@pytest.fixture(scope="module")
def chain():
    before = qjax.quantize(Chain(), qjax.Recipe(), IMAGES[0])
    qjax.calibrate(before, IMAGES)
    after = nnx.clone(before)
    return before, after, qjax.training.smooth(after, IMAGES), qjax.training.equalize(after, IMAGES)


def test_pairs_are_found_by_what_flows_where(chain):
    before, _, smoothed, equalized = chain
    pairs, left = find_pairs(before.trace(IMAGES[0]), qjax.training.weights_of(before, IMAGES[0]).names)
    found = {pair.name: ([made.path for made in pair.made], pair.norm, pair.capped) for pair in pairs}
    assert found == {
        "dense/kernel": (["norm/scale", "norm/bias"], True, None),
        "depthwise/kernel": (["batch/scale", "batch/bias"], False, 6.0),
        "point/kernel": (["depthwise/kernel", "depthwise/bias"], False, None),
    }
    assert list(left) == ["out/kernel"]
    assert [m.read for m in smoothed.moved] == [("dense/kernel",)]
    assert ("point/kernel",) in [m.read for m in equalized.moved]
    assert all(m.after < m.before for m in (*smoothed.moved, *equalized.moved))
    assert "a norm makes its input (smooth)" in str(equalized)


def test_the_float_function_is_the_same_in_float64(chain):
    before, after, _, _ = chain
    with jax.enable_x64(True):
        x = np.concatenate([np.asarray(x, np.float64) for x in IMAGES])
        y, moved = (call(model.model, x) for model in (before, after))
        assert y.dtype == np.float64
        # the parameters are float32: each factor rounds them once
        np.testing.assert_allclose(moved, y, rtol=0, atol=1e-5 * np.max(np.abs(y)))
        # with factors that are powers of two nothing is rounded at all
        pairs, _ = find_pairs(before.trace(IMAGES[0]), qjax.training.weights_of(before, IMAGES[0]).names)
        model = nnx.clone(before)
        for pair in pairs:
            factors = 2.0 ** np.random.default_rng(0).integers(-3, 4, pair.channels)
            # what a clip bounds may only stay
            migration.move(model, pair, factors if pair.capped is None else np.ones(pair.channels))
        np.testing.assert_allclose(call(model.model, x), y, rtol=1e-12, atol=1e-12 * np.max(np.abs(y)))


def call(model, x):
    graphdef, state = nnx.split(model)
    wide = jax.tree.map(lambda a: np.asarray(a, np.float64) if a.dtype == np.float32 else a, state)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return np.asarray(nnx.merge(graphdef, wide)(x))


def test_what_quantizes_badly_gets_better(chain):
    before, after, _, _ = chain
    walk, batches = Walk(before, [(x,) for x in IMAGES]), [(x,) for x in IMAGES]
    streams = [Stream.of(before, quantized=False), Stream.of(before), Stream.of(after)]
    y, q, better = (np.concatenate(walk.outputs(stream, batches)) for stream in streams)
    assert np.sum((y - better) ** 2) < 0.25 * np.sum((y - q) ** 2)


@pytest.mark.exhaustive
def test_what_moved_is_exact(chain):
    _, after, _, _ = chain
    after.eval()
    x = IMAGES[0]
    assert np.array_equal(qjax.exact(after, x)(after, x), qjax.convert(after, x)(x))


def test_a_model_without_a_pair_says_why():
    class Residual(nnx.Module):
        def __init__(self):
            self.layer = nnx.Linear(3, 3, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return x + nnx.gelu(self.layer(x))

    x = data(4, 3)
    qmodel = qjax.quantize(Residual(), qjax.Recipe(), x)
    with pytest.raises(ValueError, match=r"equalize: expected layers .*layer/kernel: other operations read its input"):
        qjax.training.equalize(qmodel, [x])
