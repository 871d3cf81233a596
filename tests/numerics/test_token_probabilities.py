"""Probabilities of tokens and drawn tokens: beside binary64 and fractions, in every program, and what is refused."""

import functools
import os
import re
import subprocess
import sys
import textwrap
from fractions import Fraction
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import qjax

ints = functools.partial(np.array, dtype=np.int32)
floats = functools.partial(np.array, dtype=np.float32)
N, SIZE = 48, 97
KEY = functools.cache(lambda: jax.random.key(11))


@functools.cache
def rows(n=N, size=SIZE, seed=0):
    """Logits with ties, of small and of large spread, and some that are minus infinity; and tokens."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(-128, 128, (n, size)).astype(np.float32)
    logits = codes * rng.choice(floats([0.003, 0.0461, 0.3]), (n, 1))
    logits[1::5, ::3] = -np.inf
    return logits, rng.integers(0, size, n).astype(np.int32)


def in_binary64(logits, temperature=1.0):
    distance = (logits.astype(np.float64) - logits.max(-1, keepdims=True).astype(np.float64)) / temperature
    return distance - np.log(np.sum(np.exp(distance), -1, keepdims=True))


def same_bits(a, b):
    a, b = np.asarray(a), np.asarray(b)
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(a.view(np.int32), b.view(np.int32))


@pytest.mark.parametrize("temperature", [1.0, 0.3, 2.5])
def test_log_probs_are_those_of_binary64(temperature):
    logits, tokens = rows()
    found = np.asarray(qjax.log_probs(logits, tokens, temperature))
    wanted = in_binary64(logits, np.float64(1 / np.float32(1 / temperature)))[np.arange(N), tokens]
    there = np.isfinite(wanted)
    assert 0 < there.sum() < N
    assert (found[~there] == -np.inf).all()
    # the bound of the module's docstring, and three roundings to float32
    bound = 2.0**-22 + SIZE * 2.0**-30 + 3 * np.spacing(np.abs(found[there]))
    assert (np.abs(found[there] - wanted[there]) <= bound).all()


def test_the_gradient_is_that_of_log_softmax():
    logits, tokens = rows()
    cotangent = np.linspace(-2, 3, N, dtype=np.float32)
    found = jax.grad(lambda x: jnp.sum(qjax.log_probs(x, tokens, 0.5) * cotangent))(jnp.asarray(logits))
    shares = np.exp(in_binary64(logits, 0.5))
    wanted = ((np.arange(SIZE) == tokens[:, None]) - shares) * 2 * cotangent[:, None]
    # a weight is off by one unit of 2^-30 at most, the rest is three roundings
    bound = np.abs(cotangent[:, None]) * (2.0**-28 + 8 * shares * 2.0**-23 + 4 * 2.0**-24)
    assert (np.abs(np.asarray(found) - wanted) <= bound).all()
    assert np.asarray(found).any()


def programs():
    """Functions of codes, a scale and tokens, which all compute the same: the product belongs to the program."""

    def plain(codes, scale, tokens):
        logits = codes * scale
        draw = functools.partial(qjax.sample, key=KEY(), temperature=0.7, top_k=40, top_p=0.9)
        gradient = jax.grad(lambda x: jnp.sum(qjax.log_probs(x, tokens)))(logits)
        return qjax.log_probs(logits, tokens), gradient, draw(logits), qjax.sample(logits, temperature=0)

    def one_by_one(codes, scale, tokens):
        def step(place, given):
            row, own, token = given
            logits = row * own
            gradient = jax.grad(qjax.log_probs)(logits, token)
            drawn = qjax.sample(logits, jax.random.fold_in(KEY(), place), 0.7, 40, 0.9)
            return place + 1, (qjax.log_probs(logits, token), gradient, drawn, qjax.sample(logits, temperature=0))

        return lax.scan(step, np.int32(0), (codes, scale, tokens))[1]

    def mapped(codes, scale, tokens):
        keys = jax.vmap(jax.random.fold_in, (None, 0))(KEY(), np.arange(len(tokens)))
        rowwise = jax.vmap(lambda x, k: qjax.sample(x, k, 0.7, 40, 0.9))(codes * scale, keys)
        scores, gradient = jax.vmap(jax.value_and_grad(qjax.log_probs))(codes * scale, tokens)
        return scores, gradient, rowwise, jax.vmap(lambda x: qjax.sample(x, temperature=0))(codes * scale)

    def in_halves(codes, scale, tokens):
        half = len(tokens) // 2
        first = plain(codes[:half], scale[:half], tokens[:half])
        return *first, *plain(codes, scale, tokens)

    return {"jit": plain, "remat": jax.checkpoint(plain), "scan": one_by_one, "vmap": mapped, "halves": in_halves}


@pytest.mark.compiled
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["scan", "remat", "halves", "vmap", "jit"])
def test_every_program_has_the_same_bits(name):
    rng = np.random.default_rng(3)
    codes = rng.integers(-128, 128, (N, SIZE)).astype(np.float32)
    scale = rng.uniform(0.001, 0.3, (N, 1)).astype(np.float32)
    tokens = rng.integers(0, SIZE, N).astype(np.int32)
    wanted = programs()["jit"](codes, scale, tokens)
    found = jax.jit(programs()[name])(codes, scale, tokens)
    assert len(found) == (8 if name == "halves" else 4)
    for place, part in enumerate(found):
        same_bits(part, wanted[place % 4][: len(part)])
    assert len(np.unique(wanted[2])) > 10
    assert (np.asarray(wanted[2]) != np.asarray(wanted[3])).any()


ON_DEVICES = textwrap.dedent("""
    import sys
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    import qjax

    def everything(logits, tokens):
        keys = jax.random.key(5)
        gradient = jax.grad(lambda x: jnp.sum(qjax.log_probs(x, tokens)))(logits)
        drawn = qjax.sample(logits, keys, 0.8, 30, 0.95)
        return qjax.log_probs(logits, tokens), gradient, drawn, qjax.sample(logits, keys)

    rng = np.random.default_rng(0)
    logits = rng.integers(-128, 128, (16, 64)).astype(np.float32) * np.float32(0.0531)
    tokens = rng.integers(0, 64, 16).astype(np.int32)
    wanted = [np.asarray(x) for x in jax.jit(everything)(logits, tokens)]
    count = 0
    for shape, kind in (((2, 1), AxisType.Auto), ((2, 4), AxisType.Explicit)):
        if kind.name != sys.argv[1]:
            continue
        devices = np.array(jax.devices()[: shape[0] * shape[1]]).reshape(shape)
        mesh = jax.sharding.Mesh(devices, ("data", "words"), axis_types=(kind, kind))
        with jax.set_mesh(mesh):
            given = (
                jax.device_put(logits, NamedSharding(mesh, P("data", "words"))),
                jax.device_put(tokens, NamedSharding(mesh, P("data"))),
            )
            for found, expected in zip(jax.jit(everything)(*given), wanted):
                found = np.asarray(found)
                assert found.dtype == expected.dtype
                count += int((found.view(np.int32) != expected.view(np.int32)).sum())
    print("differ:", count)
""")


@pytest.mark.compiled
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
def test_every_mesh_has_the_same_bits(kind):
    """Rows and the vocabulary split over 8 devices by explicit axes, and over 2 by automatic ones; beside one."""
    flags = " ".join((os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8"))
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", ON_DEVICES, kind],
        capture_output=True,
        text=True,
        env=env,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert done.stdout.strip() == "differ: 0", done.stderr[-3000:]


def drawn_by_fractions(logits, key, temperature=1.0, top_k=None, top_p=None):
    """The token of one row, from weights of `log_probs`' own grid but sorted, cut and drawn by Python's integers."""
    inverse = np.float32(1 / temperature)
    distance = (logits.max() - logits) * inverse
    weights = [round(2**30 * Fraction(float(np.exp(-np.float64(d))))) for d in distance]
    order = sorted(range(len(weights)), key=lambda i: (-logits[i], i))
    order = order[: top_k or len(order)]
    if top_p is not None:
        total, part, kept = sum(weights[i] for i in order), Fraction(round(top_p * 2**30), 2**30), []
        for i in order:
            if sum(weights[j] for j in kept) >= part * total:
                break
            kept.append(i)
        order = kept
    high, low = map(int, np.asarray(jax.random.key_data(jax.random.fold_in(key, 0x716A6178))))
    place = sum(weights[i] for i in order) * (high << 32 | low) >> 64
    for i in sorted(order):
        place -= weights[i]
        if place < 0:
            return i
    raise AssertionError


@pytest.mark.sampled(5)
@pytest.mark.parametrize("top_p", [None, 0.5, 0.95, 1])
@pytest.mark.parametrize("top_k", [None, 1, 5, 1000])
def test_draws_are_those_of_fractions(top_k, top_p):
    """A weight of the oracle may differ by one of 2^30, which moves no draw of these."""
    logits, _ = rows(24, 19, seed=4)
    keys = jax.random.split(jax.random.key(1), 24)
    found = qjax.sample(logits, keys, 0.8, top_k, top_p)
    wanted = [drawn_by_fractions(row, key, 0.8, top_k, top_p) for row, key in zip(logits, keys, strict=True)]
    np.testing.assert_array_equal(found, wanted)


def test_shares_of_draws_are_the_probabilities():
    logits = floats([1, 2, 3, 2, -np.inf, -60])
    count = 100_000
    drawn = np.asarray(qjax.sample(np.broadcast_to(logits, (count, 6)), jax.random.key(101)))
    seen, wanted = np.bincount(drawn, minlength=6), count * np.exp(in_binary64(logits))
    assert not seen[4:].any()
    # chi square of 3 degrees of freedom: above 16.3 once in a thousand keys, and this key is fixed
    assert np.sum((seen - wanted)[:4] ** 2 / wanted[:4]) < 16.3


def test_ties_go_to_the_lowest_tokens():
    logits = floats([[2, 3, 3, 1, 3, -np.inf]])
    assert qjax.sample(logits, temperature=0).tolist() == [1]
    assert qjax.sample(floats([[0.0, -0.0]]), temperature=0).tolist() == [0]
    many = np.broadcast_to(logits, (400, 6))
    drawn = functools.partial(qjax.sample, many, jax.random.key(2))
    assert set(np.asarray(drawn(top_k=1)).tolist()) == {1}
    assert set(np.asarray(drawn(top_k=2)).tolist()) == {1, 2}
    assert set(np.asarray(drawn(top_k=4)).tolist()) == {0, 1, 2, 4}
    assert set(np.asarray(drawn(top_p=0.5)).tolist()) == {1, 2}
    assert set(np.asarray(drawn(top_p=0.01)).tolist()) == {1}
    np.testing.assert_array_equal(drawn(top_p=1.0), drawn())
    np.testing.assert_array_equal(drawn(top_k=6), drawn())


def test_a_key_for_all_and_a_key_for_each_row():
    logits, _ = rows()
    keys = jax.vmap(jax.random.fold_in, (None, 0))(KEY(), jnp.arange(N))
    wanted = qjax.sample(logits, KEY())
    np.testing.assert_array_equal(qjax.sample(logits, keys), wanted)
    np.testing.assert_array_equal(qjax.sample(logits[:5], KEY()), wanted[:5])
    np.testing.assert_array_equal(qjax.sample(logits[7], keys[7]), wanted[7])
    order = np.random.default_rng(0).permutation(N)
    np.testing.assert_array_equal(qjax.sample(logits[order], keys[order]), wanted[order])
    shaped = qjax.sample(logits.reshape(6, 8, SIZE), KEY())
    np.testing.assert_array_equal(shaped.reshape(-1), wanted)
    old = jax.random.key_data(KEY())
    np.testing.assert_array_equal(qjax.sample(logits, old), wanted)


BROKEN = floats([[1, np.nan, 2], [1, np.inf, 2], [-np.inf] * 3, [-np.nan, 0, 0]])


def test_rows_without_probabilities():
    fine = floats([[0, 1, 2]])
    logits = np.concatenate([BROKEN, fine])
    tokens = np.zeros(5, np.int32)
    for log_probs in (qjax.log_probs, jax.jit(qjax.log_probs)):
        assert np.isnan(np.asarray(log_probs(logits, tokens))).tolist() == [True] * 4 + [False]
    gradient = jax.grad(lambda x: jnp.sum(qjax.log_probs(x, tokens)))(jnp.asarray(logits))
    assert np.isnan(gradient).all(axis=1).tolist() == [True] * 4 + [False]
    for temperature in (0, 1.0):
        with pytest.raises(ValueError, match=r"row \(0,\) of the logits has no probabilities"):
            qjax.sample(logits, KEY(), temperature)
        found = jax.jit(lambda x, t=temperature: qjax.sample(x, KEY(), t))(logits)
        assert found[:4].tolist() == [-1] * 4
        assert found[4] in (0, 1, 2)


def test_tokens_outside_of_the_vocabulary():
    logits = np.zeros((3, 4), np.float32)
    with pytest.raises(ValueError, match="expected tokens from 0 to 3, got -1 to 4"):
        qjax.log_probs(logits, ints([-1, 0, 4]))
    found = jax.jit(qjax.log_probs)(logits, ints([-1, 0, 4]))
    assert np.isnan(found).tolist() == [True, False, True]
    wide = jax.jit(qjax.log_probs)(logits, np.array([2**31 + 1, 3, 2**32 - 1], np.uint32))
    assert np.isnan(wide).tolist() == [True, False, True]
    assert np.isfinite(jax.jit(qjax.log_probs)(np.zeros((3, 400), np.float32), np.array([0, 9, 255], np.uint8))).all()


def test_large_logits_and_small_temperatures():
    logits = floats([[3e38, -3e38, 3e38], [1e-40, 0, -1e-40]])
    found = qjax.log_probs(logits, ints([1, 2]))
    assert found[0] == -np.inf
    np.testing.assert_allclose(found[1], -np.log(3), atol=2**-22)
    assert qjax.log_probs(logits[:1], ints([0]), 1e-30)[0] == np.float32(-np.log(2))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: qjax.log_probs(x, np.zeros(3, np.float32)), TypeError, "expected tokens as integers, got float32"),
        (lambda x: qjax.log_probs(x, np.zeros(2, np.int32)), ValueError, "tokens of shape (3,), got (2,)"),
        (lambda x: qjax.log_probs(x.astype(int), np.zeros(3, int)), TypeError, "expected logits in float32, float16"),
        (lambda x: qjax.log_probs(x[:, :0], np.zeros(3, int)), ValueError, "tokens of the vocabulary], got (3, 0)"),
        (lambda x: qjax.log_probs(x, np.zeros(3, np.int32), 0), ValueError, "temperature as a positive Python number"),
        (lambda x: qjax.sample(x, KEY(), -1.0), ValueError, "temperature as a positive Python number, got -1.0"),
        (lambda x: qjax.sample(x, KEY(), float("nan")), ValueError, "temperature as a positive Python number, got nan"),
        (lambda x: qjax.sample(x, KEY(), top_k=0), ValueError, "top_k as an integer from 1 or None, got 0"),
        (lambda x: qjax.sample(x, KEY(), top_p=1.5), ValueError, "top_p as a number above 0 and at most 1"),
        (lambda x: qjax.sample(x), TypeError, "expected a key, got None"),
        (lambda x: qjax.sample(x, 3), TypeError, "expected a key of jax.random.key or jax.random.PRNGKey, got int"),
        (lambda x: qjax.sample(x, jax.random.split(KEY(), 2)), ValueError, "keys of shape (3,), one for each row"),
        (lambda x: qjax.sample(x, jax.random.key(0, impl="rbg")), TypeError, "which has 2 words, got one of 4 words"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call(np.zeros((3, 4), np.float32))
