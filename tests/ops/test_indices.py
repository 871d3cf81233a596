"""Indices below zero and out of range: as JAX has them, in training, in the graph and in its files."""

# pyright: reportArgumentType=false, reportCallIssue=false

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import qjax

ROWS = 5
TABLE = np.linspace(-1, 1, ROWS * 3).reshape(ROWS, 3).astype(np.float32)
GOOD = jnp.asarray([[0], [1], [2], [3], [4], [0]])
BAD = jnp.asarray([[-1], [-ROWS], [-ROWS - 1], [ROWS], [2**31 - 1], [2]])
LAST = ROWS - 1
WRAPPED, CLIPPED = [LAST, 0, 0, LAST, LAST, 2], [0, 0, 0, LAST, LAST, 2]
"""The rows that a graph reads."""


class Layer(nnx.Module):
    def __init__(self):
        self.embed = nnx.Embed(ROWS, 3, rngs=nnx.Rngs(0))
        self.embed.embedding[...] = jnp.asarray(TABLE)

    def __call__(self, i):
        return self.embed(i)


class Written(nnx.Module):
    def __init__(self, function):
        self.table = nnx.Param(jnp.asarray(TABLE))
        self.function = function

    def __call__(self, i):
        return self.function(self.table[...], i)


class Data(nnx.Module):
    def __init__(self, function):
        self.function = function

    def __call__(self, x, i):
        return self.function(x, i)


def linen_embed():
    module = linen.Embed(ROWS, 3)
    return qjax.from_linen(module, {"params": {"embedding": jnp.asarray(TABLE)}})


def took(mode, t, i):
    return jnp.take(t, i, axis=0, mode=mode)


def got(mode, t, i):
    return t.at[i].get(mode=mode)


def along(mode, x, i):
    return jnp.take_along_axis(x, jnp.broadcast_to(i[:, :, None], (*i.shape, x.shape[2])), axis=1, mode=mode)


CASES = {
    "nnx.Embed": (Layer, WRAPPED, True),
    "linen.Embed": (linen_embed, WRAPPED, True),
    "table[i]": (lambda: Written(lambda t, i: t[i]), WRAPPED, False),
    "take": (lambda: Written(functools.partial(took, None)), WRAPPED, True),
    "take, clip": (lambda: Written(functools.partial(took, "clip")), CLIPPED, False),
    "get, fill": (lambda: Written(functools.partial(got, "fill")), WRAPPED, True),
    "get, drop": (lambda: Written(functools.partial(got, "drop")), WRAPPED, True),
    "get, promise_in_bounds": (lambda: Written(functools.partial(got, "promise_in_bounds")), WRAPPED, False),
    "take_along_axis": (lambda: Data(functools.partial(along, None)), WRAPPED, True),
    "take_along_axis, clip": (lambda: Data(functools.partial(along, "clip")), WRAPPED, False),
}


@pytest.mark.parametrize("name", CASES)
def test_every_mode_is_jaxs(name, tmp_path):
    make, rows, fills = CASES[name]
    model = make()
    data = () if not isinstance(model, Data) else (jnp.broadcast_to(jnp.asarray(TABLE), (6, ROWS, 3)),)
    qmodel = qjax.quantize(model, qjax.Recipe(), (*data, GOOD))
    qmodel.eval()
    graph = qjax.convert(qmodel, (*data, GOOD))
    wanted = np.asarray(graph(*data, jnp.asarray(rows)[:, None]))
    real, trained = np.asarray(model(*data, BAD)), np.asarray(qmodel(*data, BAD))
    assert np.array_equal(np.isnan(trained), np.isnan(real))
    assert np.isnan(real).any() == fills
    assert np.array_equal(trained[~np.isnan(real)], wanted[~np.isnan(real)])
    assert np.array_equal(jax.jit(graph)(*data, BAD), wanted)
    graph.save(tmp_path / "model.qjax")
    loaded = qjax.load(tmp_path / "model.qjax")
    assert np.array_equal(loaded.dequantize(loaded.run(*jax.tree.leaves(loaded.quantize(*data, BAD)))), wanted)
    for one in (graph, loaded):
        if not fills:
            assert np.array_equal(one(*data, BAD), wanted)
            continue
        with pytest.raises(ValueError, match=r"3 indices are out of range|9 indices are out of range"):
            one(*data, BAD)
        assert np.array_equal(one(*data, BAD.at[2:5].set(0))[:2], wanted[:2])


def test_the_exact_forward_is_the_graphs_below_zero_and_nan_out_of_range():
    qmodel = qjax.quantize(Layer(), qjax.Recipe(), GOOD)
    qmodel.eval()
    forward = nnx.jit(qjax.exact(qmodel, GOOD))
    below = jnp.asarray([[-1], [-ROWS], [-2], [0], [3], [4]])
    graph = qjax.convert(qmodel, GOOD)
    assert np.array_equal(forward(qmodel, below), graph(below))
    assert np.array_equal(np.isnan(forward(qmodel, BAD)), np.isnan(Layer()(BAD)))


@pytest.mark.parametrize("fill", [lambda t, i: t.at[i].get(mode="fill", fill_value=0.0)])
@pytest.mark.filterwarnings("ignore:quantize. the model trains, but convert will refuse it")
def test_another_number_than_nan_out_of_range_is_refused(fill):
    qmodel = qjax.quantize(Written(fill), qjax.Recipe(), GOOD)
    qmodel.eval()
    with pytest.raises(ValueError, match=r"'gather' .* has no integer form.*fill_value"):
        qjax.convert(qmodel, GOOD)


def test_integers_of_more_than_32_bits_are_not_cut():
    qmodel = qjax.quantize(Layer(), qjax.Recipe(), GOOD)
    qmodel.eval()
    graph = qjax.convert(qmodel, GOOD)
    for large in (np.full((6, 1), 2**32 + 3), np.full((6, 1), -(2**32) - 3), np.full((6, 1), 2**32 - 1, np.uint32)):
        for call in (graph, graph.quantize):
            with pytest.raises(ValueError, match=f"expected integers within int32, got {large.min()}"):
                call(large)
    for call in (qmodel, lambda x: qjax.calibrate(qmodel, [x]), lambda x: qjax.verify(graph, qmodel, [x])):
        with pytest.raises(ValueError, match=f"Expected integers within int32, got {2**32 + 3}"):
            call(np.full((6, 1), 2**32 + 3))
    small = np.asarray(GOOD)
    for dtype in (np.int64, np.uint64, np.uint32, np.int8, np.uint8):
        assert np.array_equal(graph(small.astype(dtype)), graph(GOOD))
    # inside a trace they become the greatest, which is clipped, and not their low bits
    wide = jnp.full((6, 1), 2**32 - 1, jnp.uint32)
    assert np.array_equal(jax.jit(graph)(wide), graph(jnp.full((6, 1), LAST)))
    with jax.enable_x64(True):
        assert np.array_equal(jax.jit(graph)(jnp.full((6, 1), 2**32 + 3)), graph(jnp.full((6, 1), LAST)))
        with pytest.raises(ValueError, match="expected integers within int32"):
            graph(jnp.full((6, 1), 2**32 + 3))
