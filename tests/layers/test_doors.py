"""The ways in: variables in their forms, and arguments that take keywords only, flags and keys."""

import flax.linen as nn
import jax
import numpy as np
import pytest
from flax import nnx

import qjax

X = jax.random.normal(jax.random.key(0), (3, 4))
KEY = jax.random.key(1)


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(x)


class Named(nn.Module):
    """Keywords only, as flax's nlp_seq."""

    @nn.compact
    def __call__(self, *, x, scale, train, double=False):
        y = nn.Dense(2)(x) + scale
        return y * 2 if double else nn.Dropout(0.5, deterministic=not train)(y)


class Draws(nn.Module):
    """Adds noise, which is the same for every example."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(x) + jax.random.normal(self.make_rng("noise"), (1, 2))


class NamedNnx(nnx.Module):
    def __init__(self):
        self.dense = nnx.Linear(4, 2, rngs=nnx.Rngs(0))

    def __call__(self, x, *, deterministic):
        return self.dense(x) if deterministic else -self.dense(x)


def exact_graph(model, sample):
    model.eval()
    qmodel = qjax.quantize(model, qjax.Recipe(), sample)
    qmodel.eval()
    graph = qjax.convert(qmodel, sample)
    args = sample if isinstance(sample, tuple) else (sample,)
    assert np.array_equal(graph(*args), qmodel(*args))
    return graph


def test_parameters_alone():
    variables = Dense().init(KEY, X)
    whole, bare = (qjax.from_linen(Dense(), v) for v in (variables, variables["params"]))
    assert jax.tree.structure(nnx.state(whole)) == jax.tree.structure(nnx.state(bare))
    assert np.array_equal(bare(X), whole(X))
    leaf = qjax.from_linen(nn.Dense(2), variables["params"]["Dense_0"])
    assert np.array_equal(leaf(X), whole(X))
    with pytest.raises(TypeError, match="or the parameters alone, got a list"):
        qjax.from_linen(Dense(), [variables])


def test_keyword_only_arguments_follow_the_positional_ones():
    variables = Named().init(KEY, x=X, scale=X[:, :2], train=False)
    model = qjax.from_linen(Named(), variables, evaluation={"train": False}, training={"train": True})
    exact_graph(model, (X, X[:, :2]))
    with pytest.raises(TypeError, match=r"Named: missing a required .*'scale'.*for each mode: from_linen\("):
        model(X)
    with pytest.raises(TypeError, match="too many positional arguments"):
        qjax.from_linen(Named(), variables)(X, X[:, :2], False, True)
    with pytest.raises(TypeError, match=r"missing a required .*'train'"):
        qjax.from_linen(Named(), variables)(X, X[:, :2])


class Positions(nnx.Module):
    """As the decoders of flax's examples, which training calls by keywords and with a source of random numbers."""

    def __init__(self):
        self.dense = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    def __call__(self, x, positions, cache=None, mask=None, rngs=None):
        y = self.dense(x) * jax.numpy.sin(positions.astype(np.float32) / 3)[:, None]
        return y if mask is None else jax.numpy.where(mask[:, None], y, np.float32(0))


def test_a_call_is_the_same_with_and_without_keywords():
    positions, mask = np.arange(3, dtype=np.int32), np.array([True, False, True])
    qmodel = qjax.quantize(Positions(), qjax.Recipe(), (X, positions, None, mask))
    qmodel.eval()
    by_position = qmodel(X, positions, None, mask)
    assert np.array_equal(qmodel(X, mask=mask, positions=positions), by_position)
    assert np.array_equal(qmodel(X, positions, cache=None, mask=mask, rngs=nnx.Rngs(0)), by_position)
    graph = qjax.convert(qmodel, (X, positions, None, mask))
    assert np.array_equal(graph(X, positions, None, mask), by_position)
    with pytest.raises(TypeError, match="unexpected keyword argument 'masks'"):
        qmodel(X, positions, masks=mask)


def test_flags_and_random_numbers_do_not_change_the_names_of_inputs():
    class Pair(nnx.Module):
        def __init__(self):
            self.dense = nnx.Linear(4, 2, rngs=nnx.Rngs(0))

        def __call__(self, pair, double=False, rngs=None):
            return self.dense(pair["a"] + pair["b"]) * (2 if double else 1)

    qmodel = qjax.quantize(Pair(), qjax.Recipe(), {"a": X, "b": X})
    qmodel.eval()
    assert {"input/a", "input/b"} <= set(qmodel.plan.by_name)
    assert np.array_equal(qmodel({"a": X, "b": X}, False, nnx.Rngs(0)), qmodel({"a": X, "b": X}))


@pytest.mark.exhaustive
def test_a_flag_of_nnx_by_keyword():
    graphs = [exact_graph(NamedNnx(), (X, flag)) for flag in (True, False)]
    assert not np.array_equal(graphs[0](X, True), graphs[1](X, False))
    with pytest.raises(TypeError, match="expected True, with which the model was converted, got False"):
        graphs[0](X, False)
    with pytest.raises(TypeError, match=r"missing a required .*'deterministic'.* including flags and None"):
        qjax.quantize(NamedNnx(), qjax.Recipe(), X)


def test_numbers_drawn_in_evaluation():
    variables = Draws().init({"params": KEY, "noise": KEY}, X)
    with pytest.raises(ValueError, match=r"In evaluation mode the module draws .*\"noise\".* from_linen\(..., rngs="):
        exact_graph(qjax.from_linen(Draws(), variables), X)
    model = qjax.from_linen(Draws(), variables, rngs={"noise": KEY})
    exact_graph(model, X)
    assert np.array_equal(model(X), model(X))
    model.train()
    assert not np.array_equal(model(X), model(X))


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:quantize. the model trains, but convert will refuse it")
def test_a_key_among_the_arguments():
    class Keyed(nnx.Module):
        def __init__(self):
            self.dense = nnx.Linear(4, 2, rngs=nnx.Rngs(0))

        def __call__(self, x, key):
            y = self.dense(x)
            return y if key is None else y + jax.random.normal(key, (1, 2))

    exact_graph(Keyed(), (X, None))
    qmodel = qjax.quantize(Keyed(), qjax.Recipe(), (X, KEY))
    with pytest.raises(qjax.ConversionError, match="draw the numbers outside and pass them in"):
        qjax.convert(qmodel, (X, KEY))


@pytest.mark.filterwarnings("ignore:quantize. the model trains, but convert will refuse it")
def test_a_cache_among_the_variables():
    attention = nn.MultiHeadDotProductAttention(2, qkv_features=4, decode=True)
    x = X[:, None]
    variables = attention.init(KEY, x)
    assert "cache" in variables
    plain = nn.MultiHeadDotProductAttention(2, qkv_features=4)
    assert np.array_equal(qjax.from_linen(plain, variables)(x), qjax.from_linen(plain, variables["params"])(x))
    qmodel = qjax.quantize(qjax.from_linen(attention, variables), qjax.Recipe(), x)
    with pytest.raises(
        qjax.ConversionError, match=r"writes the variable 'cached_.*' from its arguments, but a graph keeps"
    ):
        qjax.convert(qmodel, x)
