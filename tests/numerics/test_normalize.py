"""The integer normalisation against exact fractions of the codes."""

# what models and grids are made of has no static type here
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportReturnType=false

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qjax.numerics.normalize import Setup, factor, normalized, prepare

BITS = 200


def root(x: Fraction) -> Fraction:
    """The square root, off by less than 2^-100 of itself for the numbers here."""
    return Fraction(math.isqrt((x.numerator << (2 * BITS)) // x.denominator), 2**BITS)


def reals(row: list[int], scale: float, center: bool, divisor: int, epsilon: float, joined: str) -> list[Fraction]:
    """The real function of one row of codes."""
    x = [Fraction(c) * Fraction(float(np.float32(scale))) for c in row]
    mean = sum(x) / len(x) if center else Fraction(0)
    power = sum((v - mean) ** 2 for v in x) / divisor
    small = Fraction(epsilon)
    below = max(root(power), small) if joined == "max" else root(power + small)
    return [Fraction(0) if below == 0 else (v - mean) / below for v in x]


def rows(rng: np.random.Generator, length: int, span: int) -> np.ndarray:
    """Random codes, equal ones, one that differs by one step, one far from the others, both ends."""
    low = -(span // 3)
    found = rng.integers(low, low + span + 1, (8, length))
    found[0] = found[1] = found[2] = 7
    found[1, 0], found[2, 0] = 8, low
    found[3] = np.where(np.arange(length) % 2, low, low + span)
    found[4] = 0
    found[5] = np.clip(np.round(rng.normal(size=length) * span / 20), low, low + span)
    return found.astype(np.int32)


CASES = [
    # length, span, scale, center, divisor (0: length), epsilon, joined
    (8, 255, 0.03, True, 0, 1e-6, "add"),
    (768, 255, 0.03, True, 0, 1e-5, "add"),
    (100, 255, 1e-5, True, 0, 1e-3, "add"),
    (5, 255, 1e-25, True, 0, 1e-3, "add"),
    (64, 255, 0.1, False, 0, 1e-6, "add"),
    (9, 255, 0.02, True, 8, 0.0, "add"),
    (16, 255, 0.02, False, 1, 1e-12, "max"),
    (16, 255, 0.002, False, 1, 0.5, "max"),
    (2, 65535, 1e-4, True, 0, 1e-5, "add"),
    (3000, 65535, 1e-4, True, 0, 1e-5, "add"),
    (1, 255, 0.1, True, 0, 1e-6, "add"),
]
TRACED = (CASES[1], CASES[3], CASES[7], CASES[8])


@pytest.mark.parametrize("case", CASES)
def test_within_its_error(case):
    """|2^p y / F - t| <= 1/2 + |t| 2^-29, and the same bits in a trace."""
    length, span, scale, center, divisor, epsilon, joined = case
    codes = rows(np.random.default_rng(length), length, span)
    setup = Setup.of(length, span, centered=center)
    divisor = divisor or length

    def run(codes, scale):
        return normalized(codes, (1,), setup, prepare(setup, divisor, epsilon, scale, joined), joined)

    got = run(codes, np.float32(scale))
    assert got.dtype == np.int32
    if case in TRACED:
        assert np.array_equal(jax.jit(run)(jnp.asarray(codes), jnp.float32(scale)), got)
    parts = factor(setup, divisor)
    unit = Fraction(int(parts.mantissa)) * Fraction(2) ** int(parts.exponent)
    for row, found in zip(codes.tolist(), got.tolist(), strict=True):
        for y, t in zip(reals(row, scale, center, divisor, epsilon, joined)[:40], found, strict=False):
            want = y / unit * 2**setup.places
            assert abs(want - t) <= Fraction(1, 2) + abs(want) / 2**29
            assert abs(t) <= 2**30


def test_equal_codes_without_epsilon_give_zero():
    setup = Setup.of(6, 255, centered=True)
    constants = prepare(setup, 6, 0.0, np.float32(0.1))
    assert not normalized(np.full((2, 6), 9, np.int32), (1,), setup, constants).any()


def test_refuses_what_64_bits_do_not_hold():
    Setup.of(2**14, 65535, centered=True)
    for length, centered in ((2**14 + 1, True), (2**31, False)):
        with pytest.raises(ValueError, match="fewer bits for this tensor"):
            Setup.of(length, 65535, centered=centered)


def test_the_greatest_energy_fits_and_no_bit_is_wasted():
    """W <= n^2 span^2 / 4 about the mean and n span^2 about zero, of which half of the codes at each end come near."""
    for count in (*range(1, 40), 255, 256, 768, 1023, 4096):
        for span in (1, 3, 15, 127, 181, 255, 256, 65535):
            for centered in (True, False):
                gain = Setup.of(count, span, centered=centered).gain
                greatest = (count * span) ** 2 // 4 if centered else count * span**2
                assert greatest << gain < 2**61
                assert gain % 2 == 0
                assert gain == 30 or greatest + 1 >= 2 ** (61 - gain - 2)
