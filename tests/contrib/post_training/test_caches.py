"""Scales that move between a key-value cache and the weights around it: float bits stay, few bits cost less."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import qjax
from qjax.contrib.post_training import caches
from qjax.contrib.post_training.labels import Union, reshaped
from qjax.contrib.post_training.noise import noise_of
from qjax.contrib.post_training.symmetries import Symmetries, find_symmetries
from qjax.training.weights import weights_of

N, PLACES, WIDTH, HEADS, SIZE, TOKENS = 2, 7, 16, 2, 4, 12
GROUPS = 2
LOUD = np.asarray([30.0, 0.3], np.float32)
"""How much greater the keys of a head are, and its values."""

FORMS = ("plain", "rotary", "interleaved", "repeated", "fused", "turned", "set")
FACTORS = {"rotary": HEADS * SIZE // 2, "interleaved": HEADS * SIZE // 2}
"""How many factors the keys of a form have, where not one for each channel."""


class Decoder(nnx.Module):
    """One layer of grouped-query attention: each head of the cache serves two query heads."""

    def __init__(self, form="rotary", between=None):
        rngs = nnx.Rngs(0)
        self.form, self.between = form, between
        linear = functools.partial(nnx.Linear, rngs=rngs, bias_init=nnx.initializers.normal(0.1))
        self.embed, self.norm = nnx.Embed(TOKENS, WIDTH, rngs=rngs), nnx.RMSNorm(WIDTH, rngs=rngs)
        inner = HEADS * SIZE
        if form == "fused":
            self.qkv = linear(WIDTH, (GROUPS + 2) * inner)
        else:
            self.query, self.key, self.value = linear(WIDTH, GROUPS * inner), linear(WIDTH, inner), linear(WIDTH, inner)
        self.out = linear(GROUPS * inner, WIDTH)
        self.gate = nnx.Param(jnp.linspace(-0.1, 0.1, SIZE))
        self.key_norm, self.query_norm = nnx.RMSNorm(SIZE, rngs=rngs), nnx.RMSNorm(SIZE, rngs=rngs)

    def rotated(self, x, positions):
        angles = positions[..., None, None].astype(jnp.float32) / jnp.asarray([1.0, 10.0])[None, None, None]
        sin, cos = jnp.sin(angles), jnp.cos(angles)
        if self.form == "interleaved":
            a, b = x[..., ::2], x[..., 1::2]
            return jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape)
        if self.form == "rotary":
            a, b = jnp.split(x, 2, axis=-1)
            return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
        return x

    def heads(self, x):
        if self.form != "fused":
            return self.query(x), self.key(x), self.value(x)
        inner = HEADS * SIZE
        return jnp.split(self.qkv(x), [GROUPS * inner, (GROUPS + 1) * inner], axis=-1)

    def written(self, cache, new, start):
        if self.form == "set":
            return cache.at[:, start].set(new[:, 0]) if new.shape[1] == 1 else self.slice(cache, new, start)
        return self.slice(cache, new, start)

    def slice(self, cache, new, start):
        if self.form == "turned":
            return lax.dynamic_update_slice(cache, new.transpose(0, 2, 1, 3), (0, 0, start, 0))
        return lax.dynamic_update_slice(cache, new, (0, start, 0, 0))

    def __call__(self, tokens, positions, cache):
        x = self.embed(tokens)
        n, t, _ = x.shape
        q, k, v = self.heads(self.norm(x))
        q = q.reshape(n, t, HEADS * GROUPS, SIZE)
        k, v = (y.reshape(n, t, HEADS, SIZE) for y in (k, v))
        if self.between == "norm":
            q, k = self.query_norm(q), self.key_norm(k)
        if self.between == "tanh":
            k = jnp.tanh(k)
        if self.between == "one":
            k = k * (self.gate[...] + 1.0)[None, None, None]
        q, k = self.rotated(q, positions), self.rotated(k, positions)
        start = positions[0, 0]
        keys, values = self.written(cache["keys"], k, start), self.written(cache["values"], v, start)
        ks, vs = (y.transpose(0, 2, 1, 3) if self.form == "turned" else y for y in (keys, values))
        seen = jnp.arange(PLACES)[None, None] <= positions[..., None]
        if self.form == "repeated":
            ks, vs = (jnp.repeat(y, GROUPS, axis=2) for y in (ks, vs))
            scores = jnp.einsum("nthd,nshd->nhts", q, ks) / np.float32(SIZE**0.5)
            weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -1e30), axis=-1)
            y = jnp.einsum("nhts,nshd->nthd", weights, vs)
        else:
            q = q.reshape(n, t, HEADS, GROUPS, SIZE)
            scores = jnp.einsum("nthgd,nshd->nhgts", q, ks) / np.float32(SIZE**0.5)
            weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -1e30), axis=-1)
            y = jnp.einsum("nhgts,nshd->nthgd", weights, vs)
        x = x + self.out(y.reshape(n, t, HEADS * GROUPS * SIZE))
        cache = {"keys": keys, "values": values}
        if self.between == "returned":
            return self.embed.attend(x), cache, k
        return self.embed.attend(x), cache


def loud(model):
    """The same float function with heads of unlike ranges."""
    each, grouped = np.repeat(LOUD, SIZE), np.repeat(LOUD, GROUPS * SIZE)
    for layer, factors in ((model.key, each), (model.value, each), (model.query, 1 / grouped)):
        layer.kernel[...], layer.bias[...] = layer.kernel[...] * factors[None], layer.bias[...] * factors
    model.out.kernel[...] = model.out.kernel[...] / grouped[:, None]
    return model


def empty(n=N, form="rotary"):
    shape = (n, HEADS, PLACES, SIZE) if form == "turned" else (n, PLACES, HEADS, SIZE)
    return {name: jnp.zeros(shape) for name in ("keys", "values")}


def call(n=N, length=PLACES - 1, seed=0, start=0, form="rotary"):
    tokens = jax.random.randint(jax.random.key(seed), (n, length), 0, TOKENS, jnp.int32)
    positions = jnp.broadcast_to(start + jnp.arange(length, dtype=jnp.int32), (n, length))
    return tokens, positions, empty(n, form)


RECIPE = qjax.Recipe(
    overrides={"input/2/.*": qjax.Override(activations=qjax.QSpec(bits=4, symmetric=False))},
    integers=[qjax.integers("positions", 0, PLACES)],
)
BATCHES = [call(8, seed=seed) for seed in range(4)]


def quantized(model, sample=None):
    qmodel = qjax.quantize(model, RECIPE, call() if sample is None else sample)
    qmodel.eval()
    return qmodel


def symmetries(qmodel, args, state: Any = "cache") -> tuple[caches.Units, list, Symmetries]:
    where, leaves, traced = caches.locate_state(qmodel, state, args)
    paths = ["/".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(qmodel.model, nnx.Param))]
    names = weights_of(qmodel, args).names
    found = find_symmetries(traced, [leaf for leaf in leaves if leaf is not None], paths, names, ())
    return caches.Units(where, (None,) * len(leaves)), leaves, found


def floats(qmodel, args):
    return qmodel.trace(*args).evaluate(quantize=None).output


@pytest.mark.parametrize(
    ("old", "new"),
    [((2, 12), (2, 3, 4)), ((2, 3, 4), (6, 4)), ((6, 4), (3, 8)), ((4,), (1, 4, 1)), ((1, 6, 1), (2, 3)), ((), (1, 1))],
)
def test_labels_are_reshaped_as_the_tensor_is(old, new):
    """Beside numpy, for labels along every subset of the axes."""
    for kept in np.ndindex((2,) * len(old)):
        shape = [size if keep else 1 for size, keep in zip(old, kept, strict=True)]
        labels = np.arange(1, 1 + int(np.prod(shape))).reshape(shape)
        found = reshaped(labels, old, new)
        assert found.ndim == len(new)
        np.testing.assert_array_equal(np.broadcast_to(found, new), np.broadcast_to(labels, old).reshape(new))


def test_a_label_that_would_equal_its_inverse_has_no_factor():
    union = Union()
    a, b = union.fresh((3,)), union.fresh((3,))
    union.join(a, -b)
    assert union.free(a).tolist() == (-union.free(b)).tolist() != [0, 0, 0]
    union.join(a[:1], b[:1])
    union.none(b[1:2], "a reason")
    assert (union.free(a) == 0).tolist() == (union.free(b) == 0).tolist() == [True, True, False]
    assert union.why(a[:1]) == "it would be multiplied and divided by the same factor"
    assert union.why(a[1:]) == "a reason"
    assert union.why(a[2:]) is None


@pytest.mark.parametrize("length", [PLACES - 1, 1])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.sampled(1)
def test_with_powers_of_two_the_float_model_keeps_its_bits(form, length):
    """Every factor at once, by powers of two, which round nothing; the cache is filled with any numbers."""
    args = call(length=length, start=2 if length == 1 else 0, form=form)
    cache = {name: jax.random.normal(jax.random.key(i), x.shape) for i, (name, x) in enumerate(args[2].items())}
    args = (*args[:2], cache)
    before = quantized(Decoder(form), args)
    units, leaves, found = symmetries(before, args)
    assert found.left == {}
    groups = list(caches.groups_of(leaves, found))
    assert [len(group.labels) for group in groups] == [FACTORS.get(form, HEADS * SIZE), HEADS * SIZE]
    after, rng = nnx.clone(before), np.random.default_rng(0)
    for group in groups:
        factors = 2.0 ** rng.integers(-4, 5, len(group.labels))
        caches.scale_parameters(after, group, factors)
        units = units.moved(group, factors)
    moved = floats(after, units.arguments(args))
    expected = floats(before, args)
    jax.tree.map(np.testing.assert_array_equal, units.outputs(moved), expected)
    assert not np.array_equal(moved[1]["keys"], expected[1]["keys"])
    assert not np.array_equal(moved[1]["values"], expected[1]["values"])


@pytest.mark.parametrize(
    ("between", "why"),
    [
        ("tanh", "'table' reads or makes it|'tanh' reads or makes it"),
        ("one", "a constant is added to it"),
        ("returned", "the model returns a result computed from it"),
    ],
)
@pytest.mark.sampled(1)
def test_what_is_not_understood_moves_nothing(between, why):
    qmodel = quantized(Decoder(between=between))
    _, _, found = symmetries(qmodel, call(), ("cache", 1))
    assert [leaf.name for leaf in found.states] == ["input/2/values"]
    assert list(found.left) == ["input/2/keys"]
    assert any(text in found.left["input/2/keys"] for text in why.split("|"))
    assert not any("key" in path or "query" in path for path in found.parameters)


@pytest.mark.exhaustive
def test_heads_behind_a_norm_share_the_factors_of_its_scale():
    qmodel = quantized(Decoder(between="norm"))
    _, leaves, found = symmetries(qmodel, call())
    keys, values = caches.groups_of(leaves, found)
    assert len(keys.labels) == SIZE // 2
    assert set(keys.parameters) == {"key_norm/scale", "query_norm/scale"}
    assert len(values.labels) == HEADS * SIZE
    assert list(found.left) == ["input/2/keys, its heads"]


def test_only_what_is_a_state_may_change_its_units():
    """Keys are written into one argument and read with another."""

    class Two(nnx.Module):
        def __init__(self):
            self.key = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

        def __call__(self, x, other, state):
            new = lax.dynamic_update_slice(state, self.key(x), (0, 1, 0))
            return jnp.einsum("ntd,nsd->nts", other, new), new

    x = jax.random.normal(jax.random.key(0), (2, 2, 4))
    args = x, x + 1.0, jnp.zeros((2, 5, 4))
    qmodel = qjax.quantize(Two(), qjax.Recipe(), args)
    _, _, found = symmetries(qmodel, args, "state")
    assert found.left == {"input/2": "it is combined with an argument that is not a state"}
    with pytest.raises(ValueError, match="equalize: state: expected an argument of the call"):
        qjax.training.equalize(qmodel, [args], state="cache")
    # Without the word nothing moves through the argument.
    with pytest.raises(ValueError, match="equalize: expected layers between which a scale can move"):
        qjax.training.equalize(qmodel, [args])


@pytest.fixture(scope="module")
def equalized():
    before = quantized(loud(Decoder()))
    qjax.calibrate(before, BATCHES)
    after = nnx.clone(before)
    return before, after, qjax.training.equalize(after, BATCHES, state="cache")


def noise(qmodel, truth, bring=lambda args: args):
    batches = [call(8, seed=seed) for seed in range(10, 14)]
    given = [floats(truth, args)[0] for args in batches]
    return noise_of(given, [qmodel(*bring(args))[0] for args in batches])


@pytest.mark.exhaustive
def test_heads_of_unlike_ranges_gain(equalized):
    before, after, found = equalized
    assert [m.made[0] for m in found.moved] == ["input/2/keys", "input/2/values"]
    assert all(m.spread > 10 for m in found.moved)
    assert "input/2/values" in str(found)
    assert noise(after, before) < 0.25 * noise(before, before)


@pytest.mark.exhaustive
def test_a_filled_cache_comes_along(equalized):
    """A cache of the float model as it was, brought into the moved units; one call goes on from it."""
    before, after, found = equalized
    _, cache = floats(before, call(3, 4, seed=5))
    one = call(3, 1, seed=6, start=4)
    y, new = floats(before, (*one[:2], cache))
    y_moved, moved = floats(after, (*one[:2], found.state(cache)))
    np.testing.assert_allclose(y_moved, y, rtol=0, atol=1e-5 * np.max(np.abs(y)))
    assert not np.allclose(moved["keys"], new["keys"])
    for name, x in found.state(new).items():
        np.testing.assert_allclose(moved[name], x, rtol=0, atol=1e-5 * np.max(np.abs(x)))
    with pytest.raises(ValueError, match="expected a result of equalize"):
        qjax.training.Migration((), 0, {}).state(cache)


@pytest.mark.exhaustive
def test_filled_caches_calibrate_as_empty_ones_do(equalized):
    """Batches are given in the units of the float model as it was."""
    before, _, _ = equalized
    batches = []
    for seed in range(4):
        _, cache = floats(before, call(8, 4, seed=seed))
        batches.append((*call(8, 1, seed=seed, start=4)[:2], cache))
    after = nnx.clone(before)
    found = qjax.training.equalize(after, batches, state="cache")
    assert found.moved
    filled = [(*args[:2], found.state(args[2])) for args in batches]
    truth = [floats(before, args)[0] for args in batches]
    assert noise_of(truth, [after(*args)[0] for args in filled]) < noise_of(truth, [before(*a)[0] for a in batches])


@pytest.mark.slow
@pytest.mark.exhaustive
def test_codes_are_exact_and_a_prefill_is_its_single_steps(equalized):
    _, after, _ = equalized
    sample = call()
    whole = qjax.convert(after, sample, state="cache")
    one = qjax.convert(after, call(length=1, start=2), state="cache")
    tokens, positions, cache = call(5, seed=7)
    logits, last = whole(tokens, positions, cache)
    theirs, its = nnx.jit(qjax.exact(after, sample))(after, tokens, positions, cache)
    np.testing.assert_array_equal(logits, theirs)
    jax.tree.map(np.testing.assert_array_equal, last, its)
    state = empty(5)
    for place in range(PLACES - 1):
        found, state = one(tokens[:, place : place + 1], positions[:, place : place + 1], state)
        np.testing.assert_array_equal(found[:, 0], logits[:, place])
    jax.tree.map(np.testing.assert_array_equal, state, last)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_post_training_moves_them_where_it_is_told_of_the_cache():
    model = loud(Decoder())
    before = quantized(model)
    plain, told = (
        qjax.post_training(model, RECIPE, BATCHES, steps=["equalize", "bias"], state=state) for state in (None, "cache")
    )
    assert plain.post_training_report["equalize"].kept is None
    row = told.post_training_report["equalize"]
    assert row.kept
    assert "scales moved in 2 of 2 pairs" in row.said
    assert noise(told, before) < 0.25 * noise(plain, before)
    assert told.post_training_report.final.noise < 0.25 * told.post_training_report["calibrated"].score.noise
