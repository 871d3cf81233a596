"""Divisions and square roots of integers against Python's unbounded integers."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qjax.numerics import integer_rsqrt, integer_sqrt
from qjax.numerics.division import fold_quotient, quotient, rounding_divide


def numbers(least: int) -> np.ndarray:
    """All small ones, squares and their neighbours, powers of two, random ones of every length."""
    rng = np.random.default_rng(0)
    roots = rng.integers(1, 2**31, 1500)
    squares = np.concatenate([roots**2 + step for step in (-1, 0, 1)])
    powers = np.concatenate([2 ** np.arange(62) + step for step in (-1, 0, 1)])
    every = rng.integers(0, 2**62, 8000) >> rng.integers(0, 61, 8000)
    ends = np.array([2**62 - 1, (2**31 - 1) ** 2, (2**31 - 1) ** 2 - 1, 0])
    found = np.unique(np.concatenate([np.arange(20000), squares, powers, every, ends]))
    return found[(found >= least) & (found < 2**62)]


def test_integer_sqrt_is_exact():
    x = numbers(0)
    want = np.array([math.isqrt(int(v)) for v in x])
    assert np.array_equal(integer_sqrt(x), want)
    with jax.enable_x64(True):
        assert np.array_equal(jax.jit(integer_sqrt)(jnp.asarray(x)), want)


def test_integer_rsqrt_is_what_it_says():
    x = numbers(1)
    r, h = integer_rsqrt(x)
    for v, got, half in zip(x.tolist(), r.tolist(), h.tolist(), strict=True):
        lifted = v << (2 * half)
        assert 2**60 <= lifted < 2**62
        assert got == round(Fraction(2**61, math.isqrt(lifted)))
        # (1 + e)^2 = r^2 x 4^(h - 61) within the bounds squared
        square = Fraction(got * got * lifted, 4**61)
        assert (1 - Fraction(1, 2**31)) ** 2 <= square <= (1 + Fraction(3, 2**31)) ** 2
    with jax.enable_x64(True):
        again = jax.jit(integer_rsqrt)(jnp.asarray(x))
        assert np.array_equal(again[0], r)
        assert np.array_equal(again[1], h)


@pytest.mark.parametrize("function", [integer_sqrt, integer_rsqrt])
def test_roots_refuse(function):
    with pytest.raises(TypeError, match="expected an array of int64"):
        function(np.arange(1, 3, dtype=np.int32))
    with pytest.raises(ValueError, match=r"expected numbers within \[[01], 2\^62\)"):
        function(np.array([2**62]))


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_rounding_divide(dtype):
    rng = np.random.default_rng(1)
    top = int(np.iinfo(dtype).max)
    a = np.concatenate([rng.integers(-top, top, 3000), np.tile(np.arange(-40, 41), 20), [top, -top, top, -top]])
    b = np.concatenate([rng.integers(1, top, 3000) >> rng.integers(0, 31, 3000), np.repeat(np.arange(1, 21), 81)])
    b = np.maximum(np.concatenate([b, [top, top, 1, 2]]), 1)
    a, b = a.astype(dtype), b.astype(dtype)
    want = [round(Fraction(int(p), int(q))) for p, q in zip(a, b, strict=True)]
    assert np.array_equal(rounding_divide(a, b), want)
    with jax.enable_x64(True):
        assert np.array_equal(jax.jit(rounding_divide)(jnp.asarray(a), jnp.asarray(b)), want)


def test_rounding_divide_refuses():
    with pytest.raises(TypeError, match="two arrays of int32, or two of int64"):
        rounding_divide(np.arange(3, dtype=np.int32), np.arange(3))
    with pytest.raises(ValueError, match="greater than 0"):
        rounding_divide(np.arange(3), np.zeros(3, np.int64))


@pytest.mark.parametrize("scales", [(0.5, 0.25, 2.0), (1e-3, 0.7, 0.011), (3e4, 1e-6, 1e-6), (1e-6, 3e4, 0.3)])
def test_quotient_is_one_rounding(scales):
    a, b = np.meshgrid(np.arange(-255, 256, 3), np.r_[np.arange(-40, 41), -65535, 65535, 255], indexing="ij")
    a, b = a.ravel().astype(np.int32), b.ravel().astype(np.int32)
    s0, s1, s_y = (np.float32(s) for s in scales)
    constants = fold_quotient(s0, s1, s_y)
    ratio = Fraction(float(s0)) / (Fraction(float(s1)) * Fraction(float(s_y)))
    factor = Fraction(int(constants["factor"])) / Fraction(2) ** int(constants["shift"])
    # saturated above 2^44, 30 bits below, 2^-45 at the least
    assert abs(factor - min(ratio, factor)) <= max(ratio / 2**29, Fraction(1, 2**45))

    def exact(p: int, q: int) -> int:
        if q == 0:
            return (p > 0) * 2**20 - (p < 0) * 2**20
        return max(-(2**20), min(2**20, round(p * factor / q)))

    want = np.array([exact(int(p), int(q)) for p, q in zip(a, b, strict=True)])
    assert np.array_equal(quotient(a, b, constants), want)
    traced = jax.jit(lambda a, b, s: quotient(a, b, fold_quotient(*s)))(a, b, (s0, s1, s_y))
    assert np.array_equal(traced, want)
