"""Rounding by name against fractions, exhaustively for 16-bit floats; the same bits in every transform."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qjax.numerics import Rounding, round_float, rounding_right_shift
from qjax.numerics._namespace import wide
from qjax.numerics.rounding import right_shift_with_headroom
from tests.numerics.exact import ROUNDINGS

DETERMINISTIC = sorted(ROUNDINGS)


def expected_floats(x: np.ndarray, rounding: str) -> np.ndarray:
    exact = [float(ROUNDINGS[rounding](Fraction(float(v)))) for v in x.ravel()]
    return np.array(exact, np.float64).reshape(x.shape)


def every_16_bit_float(dtype) -> np.ndarray:
    x = np.arange(2**16, dtype=np.uint16).view(jnp.dtype(dtype))
    return x[np.isfinite(x.astype(np.float32))]


@pytest.mark.parametrize("rounding", DETERMINISTIC)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.sampled(6)
def test_every_finite_16_bit_float(dtype, rounding):
    x = every_16_bit_float(dtype)
    y = round_float(x, rounding)
    assert y.dtype == dtype
    assert np.array_equal(np.asarray(y).astype(np.float64), expected_floats(x, rounding))


def hard_float32() -> np.ndarray:
    """Numbers whose sum with 1/2 rounds, ties and their neighbours, subnormals, the ends of the format."""
    ties = np.arange(-64, 64, dtype=np.float32) + np.float32(0.5)
    powers = np.float32(2.0) ** np.arange(-149, 128).astype(np.float32)
    odd = np.array([2**22 + 0.5, 2**22 + 1.5, 2**23 - 0.5, 2**23 + 1, 2**24 - 1, 2**31, 3.4028235e38], np.float32)
    x = np.concatenate([ties, powers, odd, np.float32(0.5) * powers])
    with np.errstate(over="ignore"):
        x = np.concatenate([x, np.nextafter(x, np.float32(np.inf)), np.nextafter(x, np.float32(-np.inf))])
    x = np.concatenate([x, -x, np.array([0.0, -0.0, 1e-45, -1e-45, 0.49999997, -0.49999997], np.float32)])
    return x[np.isfinite(x)]


@pytest.mark.parametrize("rounding", DETERMINISTIC)
def test_hard_float32_numbers_in_every_transform(rounding):
    x = hard_float32()
    want = expected_floats(x, rounding)
    for f in (round_float, jax.jit(round_float, static_argnums=1)):
        assert np.array_equal(np.asarray(f(x, rounding)).astype(np.float64), want)
    mapped = jax.jit(jax.vmap(lambda v: round_float(v, rounding)))(x)
    assert np.array_equal(np.asarray(mapped).astype(np.float64), want)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=32, max_size=32))
@settings(max_examples=25)
def test_any_float32(values):
    x = np.array(values, np.float32)
    for rounding in DETERMINISTIC:
        assert np.array_equal(np.asarray(round_float(x, rounding)).astype(np.float64), expected_floats(x, rounding))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_nan_and_infinity_pass_through(dtype):
    x = np.array([np.nan, np.inf, -np.inf], np.float32).astype(dtype)
    for rounding in Rounding:
        key = jax.random.key(0) if rounding is Rounding.STOCHASTIC else None
        y = np.asarray(round_float(x, rounding, key=key)).astype(np.float32)
        assert np.array_equal(y, x.astype(np.float32), equal_nan=True)


def test_stochastic_keeps_integers_and_reproduces():
    key = jax.random.key(7)
    integers = np.arange(-1000, 1000, dtype=np.float32)
    assert np.array_equal(np.asarray(round_float(integers, "stochastic", key=key)), integers)
    x = np.linspace(-3, 3, 5000, dtype=np.float32)
    y = np.asarray(round_float(x, "stochastic", key=key))
    assert set(np.unique(y - np.floor(x))) == {0.0, 1.0}
    assert np.array_equal(y, np.asarray(jax.jit(lambda v: round_float(v, "stochastic", key=key))(x)))
    assert not np.array_equal(y, np.asarray(round_float(x, "stochastic", key=jax.random.key(8))))


@pytest.mark.parametrize(("value", "up"), [(0.25, 0.25), (-0.25, 0.75), (5.5, 0.5), (-7.875, 0.125)])
def test_stochastic_rounds_up_as_often_as_the_fraction_says(value, up):
    n = 2**18
    y = np.asarray(round_float(np.full(n, value, np.float32), "stochastic", key=jax.random.key(3)))
    count = int((y > value).sum())
    # five standard deviations of the binomial count, for one fixed key
    assert (count - n * up) ** 2 < 25 * n * up * (1 - up)


def test_float_errors():
    with pytest.raises(ValueError, match=r"nearest_even, nearest_away, nearest_up.*Got 'half'"):
        round_float(np.float32(1), "half")
    with pytest.raises(ValueError, match="needs a random key"):
        round_float(np.float32(1), "stochastic")
    with pytest.raises(ValueError, match="takes no key"):
        round_float(np.float32(1), "floor", key=jax.random.key(0))
    for bad, name in ((np.float64(1), "float64"), (np.int32(1), "int32"), (1, "int")):
        with pytest.raises(TypeError, match=f"Got {name}"):
            round_float(bad)
    assert round_float(0.5).dtype == jnp.float32


# ------------------------------------------------------------------------------------------- integer shifts


def edges(bits: int) -> np.ndarray:
    """Around every power of two, every tie of every shift, and both ends of the type."""
    top = 2 ** (bits - 1)
    values = {0, top - 1, top - 2, -top, -top + 1}
    for k in range(bits - 1):
        values |= {s * (m * 2**k + d) for s in (1, -1) for m in (1, 3) for d in (-1, 0, 1)}
    return np.array(sorted(v for v in values if -top <= v < top), f"int{bits}")


@pytest.mark.parametrize("rounding", DETERMINISTIC)
@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.sampled(6)
def test_shift_on_edges_for_every_shift(bits, rounding):
    x = edges(bits)[:, None]
    shift = np.arange(bits, dtype=np.int32)[None, :]
    want = [[ROUNDINGS[rounding](Fraction(int(v), 2 ** int(s))) for s in shift[0]] for v in x[:, 0]]
    want = np.array(want, x.dtype)
    assert np.array_equal(rounding_right_shift(x, shift, rounding), want)
    with jax.enable_x64(bits == 64):
        traced = jax.jit(lambda a, s: rounding_right_shift(a, s, rounding))(x, shift)
        mapped = jax.vmap(lambda a: rounding_right_shift(a, shift[0], rounding))(jnp.asarray(x[:, 0]))
        eager = rounding_right_shift(jnp.asarray(x), shift, rounding)
    for y in (traced, mapped, eager):
        assert y.dtype == x.dtype
        assert np.array_equal(np.asarray(y), want)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=16, max_size=16), st.integers(0, 31))
def test_shift_of_any_int32(values, shift):
    x = np.array(values, np.int32)
    for rounding, exact in ROUNDINGS.items():
        want = np.array([exact(Fraction(v, 2**shift)) for v in values], np.int32)
        assert np.array_equal(rounding_right_shift(x, shift, rounding), want)


@pytest.mark.parametrize("rounding", DETERMINISTIC)
def test_headroom_form_is_the_same_function(rounding):
    x = edges(64)
    x = x[np.abs(x.astype(object)) <= 2**62][:, None]
    shift = np.arange(63, dtype=np.int64)[None, :]
    want = rounding_right_shift(x, shift, rounding)
    assert np.array_equal(right_shift_with_headroom(np, x, shift, Rounding(rounding)), want)
    with wide(jnp):
        y = jax.jit(lambda a, s: right_shift_with_headroom(jnp, a, s, Rounding(rounding)))(x, shift)
    assert np.array_equal(np.asarray(y), want)


def test_stochastic_shift_is_unbiased_and_keyed():
    key, n, shift = jax.random.key(11), 2**18, 5
    for value in (-47, -32, 1, 16, 31, 2**31 - 1, -(2**31)):
        y = np.asarray(rounding_right_shift(np.full(n, value, np.int32), shift, "stochastic", key=key))
        up = (value % 32) / 32
        count = int((y == value // 32 + 1).sum())
        assert count + int((y == value // 32).sum()) == n
        assert (count - n * up) ** 2 <= 25 * n * up * (1 - up)


@pytest.mark.parametrize("shift", [33, 50])
def test_stochastic_shift_of_64_bits_uses_all_of_them(shift):
    with jax.enable_x64(True):
        x = jnp.full(2**16, (3 << shift) + (1 << (shift - 1)), jnp.int64)
        y = np.asarray(rounding_right_shift(x, shift, "stochastic", key=jax.random.key(2)))
    count = int((y == 4).sum())
    assert count + int((y == 3).sum()) == 2**16
    assert (count - 2**15) ** 2 < 25 * 2**14


def test_shift_errors():
    with pytest.raises(ValueError, match=r"shift must lie in \[0, 31\] for int32. Got values from 1 to 32"):
        rounding_right_shift(np.int32(1), np.array([1, 32]), "floor")
    with pytest.raises(ValueError, match=r"Got values from -1 to -1"):
        rounding_right_shift(np.int32(1), -1, "floor")
    with pytest.raises(TypeError, match=r"int32 or int64 array\. Got int8"):
        rounding_right_shift(np.int8(1), 1, "floor")
    with pytest.raises(TypeError, match=r"shift must be an integer.*float64"):
        rounding_right_shift(np.int32(1), 1.0, "floor")
    with pytest.raises(TypeError, match="64-bit types are disabled"):
        rounding_right_shift(np.int64(1), jnp.int32(1), "floor")
    with pytest.raises(ValueError, match="needs a random key"):
        rounding_right_shift(np.int32(1), 1, "stochastic")
