"""TFLite's optimised depthwise convolution: whole vectors of 8 channels one way, the rest another."""

from typing import Any

import jax
import numpy as np
import pytest

from qjax.numerics import Multiplier, requantize
from tests.numerics.exact import double_round, neon
from tests.numerics.exact_rules import records

RULE = "tflite_depthwise_neon"
INT32: dict[str, Any] = {"qmin": -(2**31), "qmax": 2**31 - 1}


def rows(channels: int, count: int = 400) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Accumulators (count, channels), and a multiplier and a shift for each channel; ties and their neighbours."""
    acc, multiplier, shift = (c[: channels * 62 * 8].astype(np.int32) for c in records(62 * 8 * 64))
    keep = shift < 0
    m, s = multiplier[keep][:channels], shift[keep][:channels]
    grid = np.resize(acc, (count, channels))
    # odd multiples of half a step, for multipliers that are powers of two
    m[::2] = 2**30
    half = np.minimum(-s, 28)
    odd = (2 * (np.arange(count) - count // 2) + 1)[:, None]
    return np.where(np.arange(count)[:, None] % 2 == 0, (odd << half).astype(np.int32), grid), m, s


@pytest.mark.parametrize("channels", [1, 3, 7, 8, 9, 12, 16, 23, 24])
def test_the_channel_chooses(channels):
    acc, multiplier, shift = rows(channels)
    whole = channels - channels % 8
    want = [
        [(neon if c < whole else double_round)(int(a), int(multiplier[c]), int(shift[c])) for c, a in enumerate(row)]
        for row in acc
    ]
    got = jax.jit(lambda a, m: requantize(a, m, rule=RULE, **INT32))(acc, Multiplier(multiplier, shift))
    assert np.array_equal(got, want)


def test_both_rules_are_told_apart():
    acc, multiplier, shift = rows(12)
    m = Multiplier(multiplier, shift)
    found = {rule: np.asarray(requantize(acc, m, rule=rule, **INT32)) for rule in (RULE, "neon", "double_round")}
    assert np.array_equal(found[RULE][:, :8], found["neon"][:, :8])
    assert np.array_equal(found[RULE][:, 8:], found["double_round"][:, 8:])
    assert (found["neon"] != found["double_round"])[:, :8].any()
    assert (found["neon"] != found["double_round"])[:, 8:].any()


def test_in_every_transform():
    acc, multiplier, shift = rows(12)
    images = acc.reshape(4, 10, 10, 12)
    m = Multiplier(multiplier, shift)

    def f(a):
        return requantize(a, m, rule=RULE, **INT32)

    want = np.asarray(f(acc))
    for found in (f(images), jax.vmap(f)(images), jax.lax.map(f, images), jax.checkpoint(f)(images), jax.vmap(f)(acc)):
        assert np.array_equal(np.asarray(found).reshape(want.shape), want)


def test_a_scalar_is_one_channel():
    tie = np.int32(-3)
    half = Multiplier(np.int32(2**30), np.int32(-1))
    assert int(requantize(np.int32(-6), half, rule=RULE)) == double_round(-6, 2**30, -1) == -2
    assert requantize(np.full(8, -6, np.int32), half, rule=RULE).tolist() == [neon(-6, 2**30, -1)] * 8 == [-1] * 8
    assert int(requantize(tie, half, rule=RULE)) == double_round(-3, 2**30, -1)
