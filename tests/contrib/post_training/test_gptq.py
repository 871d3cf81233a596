"""GPTQ on layers small enough to know the answer, and a layer as a matrix product."""

import gc
import importlib
import itertools
import weakref

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax
from qjax.contrib.post_training import gptq_layer
from qjax.contrib.post_training.as_matmul import Matrix, moments
from qjax.contrib.post_training.gptq_layer import inverse_factor
from qjax.contrib.post_training.layerwise_runner import Stream, Walk
from qjax.contrib.post_training.simulated import set_qparams
from tests.analysis.models import data

gptq_module = importlib.import_module("qjax.contrib.post_training.gptq")
"""The module; `qjax.training.gptq` is the function."""


class Layers(nnx.Module):
    """Convolutions with every option, batch norm behind one, a product over several axes, a dense layer."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.grouped = nnx.Conv(4, 6, (3, 2), strides=(2, 1), kernel_dilation=(1, 2), feature_group_count=2, rngs=rngs)
        self.depthwise = nnx.Conv(6, 12, (2, 2), feature_group_count=6, use_bias=False, padding="VALID", rngs=rngs)
        self.norm = nnx.BatchNorm(12, rngs=rngs)
        self.many = nnx.LinearGeneral((2, 12), (3, 2), axis=(1, 3), rngs=rngs)
        self.head = nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.depthwise(self.grouped(x))))
        x = self.many(x)
        return self.head(x.reshape(x.shape[0], -1, 6))


IMAGES = [data(8, 6, 5, 4, seed=s) for s in range(16)]
FEW = qjax.Recipe(weights=qjax.QSpec(bits=3, axis=-1), activations=qjax.QSpec(bits=16, symmetric=False))


@pytest.fixture(scope="module")
def layers():
    before = qjax.quantize(Layers(), FEW, IMAGES[0])
    before.eval()
    after = nnx.clone(before)
    return before, after, qjax.training.gptq(after, IMAGES)


def test_rows_times_columns_is_the_product(layers):
    before, _, _ = layers
    walk = Walk(before, [(IMAGES[0],)])
    assert [item.name for item in walk.items] == [f"{name}/kernel" for name in ("grouped", "depthwise", "many", "head")]
    for item in walk.items:
        matrix, shape = Matrix(item), item.equation.in_shapes
        x, w = data(*shape[1 - item.weight]), data(*shape[item.weight], seed=1)
        columns = matrix.columns(np.asarray(w))
        assert np.array_equal(matrix.restored(columns), w)
        y = np.einsum("grk,gkn->grn", np.asarray(matrix.rows(x), np.float64), columns)
        expected = np.asarray(item(x, w), np.float64)
        if item.equation.primitive == "conv_general_dilated":
            groups, _, each = y.shape
            expected = expected.reshape(-1, groups, each).swapaxes(0, 1)
        np.testing.assert_allclose(y, expected.reshape(y.shape), rtol=1e-4, atol=1e-4)


def test_every_layer_gains_and_so_does_the_output(layers):
    before, after, found = layers
    assert [layer.name for layer in found.layers] == [
        "grouped/kernel",
        "depthwise/kernel",
        "many/kernel",
        "head/kernel",
    ]
    assert all(layer.solved <= layer.nearest * (1 + 1e-9) for layer in found.layers)
    # on other inputs too: what fits these inputs alone is not taken
    batches = [(data(8, 6, 5, 4, seed=s),) for s in range(100, 116)]
    walk = Walk(before, batches)
    streams = [Stream.of(before, quantized=False), Stream.of(before), Stream.of(after)]
    y, plain, solved = (np.concatenate(walk.outputs(stream, batches)) for stream in streams)
    assert np.sum((y - solved) ** 2) < 0.95 * np.sum((y - plain) ** 2)
    assert "nearest, dB" in str(found)


@pytest.mark.exhaustive
def test_what_was_solved_is_what_ships(layers):
    _, after, _ = layers
    x = IMAGES[0]
    assert np.array_equal(qjax.exact(after, x)(after, x), qjax.convert(after, x)(x))


@pytest.mark.exhaustive
def test_codes_are_near_the_best_of_all():
    class One(nnx.Module):
        def __init__(self):
            self.layer = nnx.Linear(4, 2, rngs=nnx.Rngs(1))

        def __call__(self, x):
            return self.layer(x)

    x = jnp.abs(data(64, 4)) + jnp.float32(0.5)
    qmodel = qjax.quantize(One(), FEW, x)
    w = np.asarray(qmodel.model.layer.kernel[...], np.float64)  # pyright: ignore[reportAttributeAccessIssue]
    found = qjax.training.gptq(qmodel, [x], rounds=8, damping=1e-6)
    scale = np.asarray(qmodel.qparams()["layer/kernel"].scale, np.float64)
    centred = np.asarray(x, np.float64) - np.asarray(x, np.float64).mean(0)
    ways = np.asarray(list(itertools.product(range(-3, 4), repeat=4)), np.float64).T
    best = [np.min(np.sum((centred @ (w[:, [n]] - ways * scale[n])) ** 2, 0)) for n in range(2)]
    signal = np.sum((centred @ w) ** 2)
    assert sum(best) / signal * 0.999 <= found.layers[0].solved <= 1.5 * sum(best) / signal
    # the bias takes the mean
    np.testing.assert_allclose(np.mean(np.asarray(qmodel(x)), 0), np.mean(np.asarray(One()(x)), 0), atol=5e-3)


@pytest.mark.parametrize("spec", [{"axis": None}, {"axis": -1, "group_size": 2, "group_axis": 0}])
def test_one_scale_for_all_and_scales_of_groups(spec):
    class Pair(nnx.Module):
        def __init__(self):
            self.layer = nnx.Linear(4, 3, use_bias=False, rngs=nnx.Rngs(1))

        def __call__(self, x):
            return self.layer(x)

    x = data(32, 4) @ data(4, 4, seed=3)
    qmodel = qjax.quantize(Pair(), qjax.Recipe(weights=qjax.QSpec(bits=3, **spec)), x)
    shape = qmodel.qparams()["layer/kernel"].scale.shape
    found = qjax.training.gptq(qmodel, [x], damping=0.01)
    assert found.layers[0].solved < found.layers[0].nearest
    assert qmodel.qparams()["layer/kernel"].scale.shape == shape


def test_a_model_without_a_layer_says_so():
    class Nothing(nnx.Module):
        def __call__(self, x):
            return nnx.relu(x) + x

    with pytest.raises(ValueError, match="expected a dense layer or a convolution"):
        qjax.training.gptq(qjax.quantize(Nothing(), qjax.Recipe(), data(4, 3)), [data(4, 3)])


def test_inputs_far_from_zero_keep_their_small_variance():
    class One(nnx.Module):
        def __init__(self):
            self.layer = nnx.Linear(8, 4, rngs=nnx.Rngs(1))

        def __call__(self, x):
            return self.layer(x)

    batches = [data(32, 8, seed=seed) * np.float32(0.01) + np.float32(1000) for seed in range(4)]
    pairs = [(x[None], x[None]) for x in batches]
    rows = np.concatenate([np.asarray(x, np.float64) for x in batches])
    rows = rows - rows.mean(0)
    weights = np.asarray(One().layer.kernel[...], np.float64)[None]
    seen = moments(pairs, weights, centred=True)
    np.testing.assert_allclose(seen.quantized[0], rows.T @ rows / len(rows), rtol=0, atol=1e-6 * np.mean(rows**2))
    qmodel = qjax.quantize(One(), FEW, batches[0])
    (layer,) = qjax.training.gptq(qmodel, batches).layers
    assert layer.solved <= layer.nearest


@pytest.mark.parametrize("bad", [-0.1, float("nan"), float("inf")])
def test_a_damping_that_is_none(layers, bad):
    with pytest.raises(ValueError, match="damping: expected a finite number"):
        qjax.training.gptq(layers[0], IMAGES, damping=bad)


@pytest.mark.exhaustive
def test_weights_are_held_once_where_every_layer_is_replaced(monkeypatch):
    """A decoder of a billion parameters has no room for the solved weights beside all float ones."""
    x = data(4, 6)
    layers = [nnx.Linear(6, 5, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(5, 5, rngs=nnx.Rngs(1)), nnx.relu]
    qmodel = qjax.quantize(nnx.Sequential(*layers, nnx.Linear(5, 3, rngs=nnx.Rngs(2))), FEW, x)
    del layers
    qmodel.eval()
    weights = {"/".join(map(str, path[1:])): v for path, v in nnx.to_flat_state(nnx.state(qmodel, nnx.Param))}
    held = {name: weakref.ref(v[...]) for name, v in weights.items() if name.endswith("kernel")}
    seen: dict[str, set[str]] = {}

    def look(model, name, qparams):
        gc.collect()
        seen[name] = {name for name, found in held.items() if found() is not None}
        return set_qparams(model, name, qparams)

    del weights
    monkeypatch.setattr(gptq_module, "set_qparams", look)
    qjax.training.gptq(qmodel, [x, 2 * x])
    order = list(held)
    order.sort(key=list(seen).index)
    assert seen == {name: set(order[i:]) for i, name in enumerate(order)}


def test_the_inverse_factor_is_that_of_the_inverse():
    # the greater one is transposed in blocks, the last of which is smaller
    rng = np.random.default_rng(0)
    for n in (7, 600):
        whole = rng.normal(size=(n, n))
        moved = whole.copy()
        gptq_layer._transpose(moved)
        assert np.array_equal(moved, whole.T)
    x = rng.normal(size=(40, 7))
    h, order = x.T @ x, rng.permutation(7)
    upper = inverse_factor(h, order)
    assert np.array_equal(upper, np.triu(upper))
    np.testing.assert_allclose(upper.T @ upper, np.linalg.inv(h)[np.ix_(order, order)], rtol=1e-9)
    with pytest.raises(np.linalg.LinAlgError):
        inverse_factor(-np.eye(3), np.arange(3))
