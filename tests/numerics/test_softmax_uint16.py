"""Softmax with exponentials of 16 bits, the AArch64 kernel: against Python's integers, and what LiteRT answered."""

from fractions import Fraction

import jax
import numpy as np
import pytest

from qjax.numerics import softmax
from tests.numerics.exact import double_round, neon
from tests.numerics.float32 import nearest


def row(codes: list[int], table: list[int]) -> list[int]:
    powers = [table[max(codes) - q] for q in codes]
    inverse = nearest(1 / nearest(nearest(Fraction(sum(powers))) / 256))
    shift = inverse.numerator.bit_length() - inverse.denominator.bit_length()
    shift += 1 if Fraction(2) ** shift <= inverse else 0
    multiplier = int(inverse / Fraction(2) ** (shift - 31))
    assert 2**30 <= multiplier < 2**31
    whole = len(codes) - len(codes) % 16
    found = [(neon if i < whole else double_round)(p, multiplier, shift) for i, p in enumerate(powers)]
    return [max(-128, min(127, y - 128)) for y in found]


@pytest.mark.parametrize(
    ("length", "scale"), [(1, 0.1), (3, 0.0112), (16, 0.1), (33, 0.02), (300, 2.0**-9), (50, 20.0)]
)
@pytest.mark.sampled(2)
def test_against_integers(length, scale):
    rng = np.random.default_rng(length)
    x = np.clip(np.rint(rng.normal(rng.integers(-60, 60, (60, 1)), 40, (60, length))), -128, 127).astype(np.int8)
    constants = softmax.prepare("uint16", scale)
    want = [row(codes, constants[0].tolist()) for codes in x.tolist()]
    assert np.array_equal(softmax.softmax(x, constants), want)
    assert np.array_equal(jax.jit(softmax.softmax)(x, constants), want)


def test_the_table_holds_16_bits():
    powers = softmax.prepare("uint16", np.float32(0.1))[0]
    assert powers.dtype == np.int32
    exact = 65535 * np.exp(-np.float64(np.float32(0.1)) * np.arange(256))
    # expf and the product are float32: half a step of rounding and a few units of 2^-24
    assert np.max(np.abs(powers - exact)) < 0.51
    assert powers[0] == 65535


# answers of ai-edge-litert 2.3.0 for AArch64, and what it answers on x86
@pytest.mark.parametrize(
    ("scale", "codes", "arm", "x86"),
    [
        (0.023942148312926292, [-125, 96, 120], [-128, -36, 36], [-128, -36, 35]),
        (0.012080388143658638, [3, -107, 71], [-56, -109, 37], [-56, -109, 36]),
        (0.006863968446850777, [-35, 56, 118], [-83, -44, 0], [-83, -45, 0]),
    ],
)
def test_where_arm_and_x86_differ(scale, codes, arm, x86):
    x = np.array(codes, np.int8)
    assert softmax.softmax(x, softmax.prepare("uint16", scale)).tolist() == arm
    assert softmax.softmax(x, softmax.prepare("float32", scale)).tolist() == x86
