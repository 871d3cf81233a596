"""Registers: their fields, their bounds, and their sums against Python's integers."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qjax.numerics.accumulator import EXACT, Accumulator, bits_for, wrap
from qjax.numerics.narrow_sums import (
    pair_sum,
    pair_sum_events,
    running_sums,
    saturating_sum,
    saturating_sum_events,
)
from tests.numerics.registers import columns, paired, saturated, wrapped

SOME = (
    EXACT,
    Accumulator(8, "wrap"),
    Accumulator(16, "saturate"),
    Accumulator(20, "saturate", operands="codes", order="chw"),
    Accumulator(pairs=True),
    Accumulator(pairs=True, unit="tap", padding="skip"),
)


@pytest.mark.parametrize("accumulator", SOME, ids=str)
def test_json_returns_what_went_in(accumulator):
    text = json.dumps(accumulator.to_json())
    assert Accumulator.of_json(json.loads(text)) == accumulator
    assert hash(Accumulator.of_json(json.loads(text))) == hash(accumulator)
    assert Accumulator.of_json(None) == EXACT
    assert len({str(a) for a in SOME}) == len(SOME)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bits": 33, "overflow": "wrap"}, r"bits must be an integer in 2..32. Got 33"),
        ({"bits": 1, "overflow": "wrap"}, r"bits must be an integer in 2..32. Got 1"),
        ({"bits": 8.0, "overflow": "wrap"}, r"bits must be an integer in 2..32. Got 8.0"),
        ({"bits": 16}, r"overflow='exact' needs 32 bits. Got bits=16: choose what happens"),
        ({"overflow": "clip"}, r"overflow must be one of 'exact', 'wrap', 'saturate'. Got 'clip'"),
        ({"operands": "raw"}, r"operands must be one of 'centered', 'codes'"),
        ({"pairs": True, "overflow": "saturate", "bits": 16}, r"int16 pairs are summed in exact 32 bits"),
        ({"operands": "codes"}, r"operands only apply to overflow='wrap' and 'saturate'"),
        ({"overflow": "wrap", "order": "chw"}, r"does not depend on the order; drop order='chw'"),
        ({"overflow": "saturate", "unit": "tap"}, r"unit and padding only apply to pairs=True"),
        ({"pairs": True, "unit": "tap", "order": "chw"}, r"unit='tap' pairs the channels of one tap"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Accumulator(**arguments)


def test_what_is_no_accumulator_is_refused():
    with pytest.raises(TypeError, match=r"pairs must be True or False. Got 1"):
        Accumulator(pairs=1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"expected a list of .*, got dict"):
        Accumulator.of_json({})
    good = EXACT.to_json()
    for bad in ([], good[1:], [*good, good[0]], [*good[1:], ["width", 3]], [*good[1:], "bits"], [*good[1:], [[], 3]]):
        with pytest.raises((ValueError, TypeError)):
            Accumulator.of_json(bad)
    with pytest.raises(ValueError, match=r"expected \[field, value\] for bits, overflow, .*; got \[\['bits', 8\]\]"):
        Accumulator.of_json([["bits", 8]])


def test_pairs_are_for_unsigned_codes_and_signed_weights():
    pairs = Accumulator(pairs=True)
    assert pairs.on("uint8", "int8") == pairs
    for codes, weights in (("int8", "int8"), ("uint16", "int8"), ("uint8", "int16"), ("int16", "int8")):
        assert pairs.on(codes, weights) == EXACT
    narrow = Accumulator(12, "wrap")
    assert narrow.on("int16", "int8") == narrow


def test_bits_for_every_small_range():
    for low in range(-70, 1):
        for high in range(71):
            bits = bits_for(low, high)
            assert -(2 ** (bits - 1)) <= low
            assert high < 2 ** (bits - 1)
            assert bits == 1 or not (-(2 ** (bits - 2)) <= low and high < 2 ** (bits - 2))
    assert bits_for(-(2**31), 2**31 - 1) == 32
    assert bits_for(0, 2**31) == 33


@pytest.mark.parametrize("bits", range(2, 33))
def test_wrap(bits):
    rng = np.random.default_rng(bits)
    edges = [e + d for p in (0, bits - 1, bits, 31) for e in (2**p, -(2**p)) for d in (-1, 0, 1)]
    values = np.array([wrapped(v, 32) for v in edges] + list(rng.integers(-(2**31), 2**31, 500)), np.int32)
    expected = [wrapped(int(v), bits) for v in values]
    assert np.array_equal(np.asarray(wrap(jnp.asarray(values), bits)).astype(object), expected)


def rows(rng, k: int, x_dtype: str = "uint8", w_dtype: str = "int8", batch: int = 2, m: int = 3, n: int = 4):
    """Random rows, half of them at an edge."""

    def codes(dtype, size):
        info = np.iinfo(dtype)
        inner, edges = rng.integers(info.min, info.max + 1, size), rng.choice([info.min, info.max], size)
        return np.where(rng.random(size) < 0.5, inner, edges).astype(dtype)

    return codes(x_dtype, (k, batch, m)), codes(w_dtype, (k, batch, n))


def centered(x, zero_point):
    return x.astype(object) - zero_point


@pytest.mark.parametrize(
    ("bits", "x_dtype", "w_dtype"),
    [(bits, "int8", "int8") for bits in range(8, 33)] + [(bits, "uint16", "int16") for bits in (8, 30, 31, 32)],
)
@pytest.mark.sampled(4)
def test_saturating_sums_of_every_width(bits, x_dtype, w_dtype):
    rng = np.random.default_rng(bits)
    x, w = rows(rng, 29, x_dtype, w_dtype)
    z = int(rng.choice(x.ravel()))
    expected = columns(lambda p: saturated(p, bits), centered(x, z), w)
    acc, events = jax.jit(lambda x, w, z: saturating_sum_events(x, w, z, bits))(x, w, np.int32(z))
    for index in np.ndindex(*expected.shape):
        assert (int(acc[index]), int(events[index])) == expected[index]
    # the sums do reach the register's ends
    assert bits > 16 + 8 * (x.itemsize - 1) or np.any(np.asarray(events))


@pytest.mark.parametrize("k", [0, 1, 2, 3, 7, 8, 9, 15, 16, 17])
@pytest.mark.sampled(2)
def test_sums_of_every_length(k):
    rng = np.random.default_rng(k)
    for m, n in ((5, 2), (2, 5)):  # the loop keeps the longer axis last
        x, w = rows(rng, k, m=m, n=n)
        acc, events = pair_sum_events(jnp.asarray(x), jnp.asarray(w))
        expected = columns(paired, x, w)
        total, low, high = running_sums(jnp.asarray(x), jnp.asarray(w), 100)
        partial = columns(lambda p: [0, *itertools.accumulate(p)], centered(x, 100), w)
        for index in np.ndindex(2, m, n):
            assert (int(acc[index]), int(events[index])) == expected[index]
            sums = partial[index]
            assert (int(total[index]), int(low[index]), int(high[index])) == (sums[-1], min(sums), max(sums))


codes_and_weights = st.lists(st.tuples(st.integers(0, 255), st.integers(-128, 127)), max_size=40)


@given(codes_and_weights, st.integers(2, 32), st.integers(0, 255))
@settings(max_examples=25)
def test_one_output(products, bits, zero_point):
    padded = products + [(0, 0)] * (40 - len(products))
    x, w = (np.array([p[i] for p in padded]).reshape(40, 1, 1) for i in (0, 1))
    x, w = x.astype(np.uint8), w.astype(np.int8)
    acc = _one(x, w, np.int32(zero_point), bits)
    assert int(acc) == saturated([(a - zero_point) * b for a, b in products], bits)[0]
    assert int(_one_pair(x, w)) == paired([a * b for a, b in products])[0]


# the width is data here: one compiled function for all examples
_sums = {bits: jax.jit(lambda x, w, z, bits=bits: saturating_sum(x, w, z, bits)[0, 0, 0]) for bits in range(2, 33)}
_one_pair = jax.jit(lambda x, w: pair_sum(x, w)[0, 0, 0])


def _one(x, w, zero_point, bits):
    return _sums[bits](x, w, zero_point)


def test_pairs_of_extremes_and_edges():
    # every pair of products out of the values where a sum of two meets an int16 bound, and the extremes
    codes, weights = [0, 1, 2, 127, 128, 129, 254, 255], [-128, -127, -65, -64, -1, 0, 1, 63, 64, 65, 126, 127]
    quads = np.array(list(itertools.product(codes, weights, codes, weights)))
    x, w = quads[:, [0, 2]].T.astype(np.uint8), quads[:, [1, 3]].T.astype(np.int8)
    got, events = pair_sum_events(jnp.asarray(x)[:, :, None], jnp.asarray(w)[:, :, None])
    exact = [int(a) * int(b) + int(c) * int(d) for a, b, c, d in quads]
    assert np.array_equal(np.ravel(got).astype(object), [max(-32768, min(32767, v)) for v in exact])
    assert np.array_equal(np.ravel(events), [not -32768 <= v <= 32767 for v in exact])


def test_every_product_beside_every_other():
    # all 65,536 products against 256 of their kind, so that every sum near a bound occurs
    rng = np.random.default_rng(0)
    a, b = (v.ravel() for v in np.meshgrid(np.arange(256), np.arange(-128, 128), indexing="ij"))
    order = rng.permutation(a.size)[:256]
    x = np.stack([np.repeat(a[None], 256, 0), np.repeat(a[order][:, None], a.size, 1)]).astype(np.uint8)
    w = np.stack([np.repeat(b[None], 256, 0), np.repeat(b[order][:, None], a.size, 1)]).astype(np.int8)
    got = pair_sum(jnp.asarray(x.reshape(2, -1, 1)), jnp.asarray(w.reshape(2, -1, 1)))
    exact = x.astype(np.int32) * w.astype(np.int32)
    assert np.array_equal(np.ravel(got), np.clip(exact.sum(0).ravel(), -32768, 32767))


def test_how_often_pairs_saturate():
    # counted over all 2^32 pairs of products: their histogram against itself
    def share(codes, weights):
        values, counts = np.unique(np.outer(codes, np.arange(-128, 128)), return_inverse=True)
        mass = np.bincount(counts.ravel(), np.tile(weights, len(codes)) / len(codes))
        above = np.concatenate([[0.0], np.cumsum(mass[::-1])])[::-1]
        below = np.concatenate([[0.0], np.cumsum(mass)])
        over = above[np.searchsorted(values, 32767 - values, side="right")]
        under = below[np.searchsorted(values, -32768 - values, side="left")]
        return float((mass * (over + under)).sum())

    uniform, normal = np.full(256, 1 / 256), np.exp(-0.5 * (np.arange(-128, 128) / 32) ** 2)
    assert round(share(np.arange(256), uniform), 3) == 0.036
    assert 1.0e-4 < share(np.arange(256), normal / normal.sum()) < 1.4e-4
    assert share(np.arange(128), uniform) == 0
    # and the kernel counts the same on a sample
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (2, 100_000, 1)).astype(np.uint8)
    w = rng.integers(-128, 128, (2, 100_000, 1)).astype(np.int8)
    events = np.asarray(pair_sum_events(jnp.asarray(x), jnp.asarray(w))[1])
    assert abs(events.mean() - share(np.arange(256), uniform)) < 3e-3


def test_signed_codes_are_shifted_into_unsigned_ones():
    rng = np.random.default_rng(0)
    x, w = rows(rng, 9, "int8")
    unsigned = (x.astype(np.int32) + 128).astype(np.uint8)
    shifted = pair_sum_events(jnp.asarray(x), jnp.asarray(w), -128)
    for a, b in zip(shifted, pair_sum_events(jnp.asarray(unsigned), jnp.asarray(w)), strict=True):
        assert np.array_equal(a, b)


def test_partial_sums_beyond_32_bits():
    x, w = np.full((70, 1, 1), 65535, np.uint16), np.full((70, 1, 1), -32768, np.int16)
    with jax.enable_x64(True):
        total, low, high = (int(v[0, 0, 0]) for v in running_sums(jnp.asarray(x), jnp.asarray(w), 0, jnp.int64))
    assert (total, low, high) == (-70 * 65535 * 32768,) * 2 + (0,)


@pytest.mark.parametrize("function", [lambda x, w: saturating_sum(x, w, 7, 14), pair_sum])
def test_jit_vmap_and_scan(function):
    rng = np.random.default_rng(0)
    x, w = (np.stack(a) for a in zip(*(rows(rng, 19) for _ in range(3)), strict=True))
    jitted = jax.jit(function)
    one_by_one = [np.asarray(jitted(a, b)) for a, b in zip(x, w, strict=True)]
    assert np.array_equal(jax.jit(jax.vmap(function))(x, w), one_by_one)
    assert np.array_equal(jax.jit(lambda x, w: jax.lax.map(lambda v: function(*v), (x, w)))(x, w), one_by_one)
    shared = jax.jit(jax.vmap(function, (0, None)))(x, w[0])
    assert np.array_equal(shared, [jitted(a, w[0]) for a in x])
