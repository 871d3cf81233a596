"""Codes of gradients: the exact expectation of stochastic rounding, the hash behind it, scales, NaN, refusals."""

from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import qjax
from qjax.numerics import gradient_codes
from qjax.numerics.gradient_codes import FRACTION, Gradients, encode, fold, hashed, key_words, random_bits

WORDS = np.array([0x12345678, 0x9ABCDEF0], np.uint32)
NEAREST = Gradients(rounding="nearest")


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_over_all_random_values_the_mean_code_is_the_number_itself(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers on the grid of 2^-16 of a step have exactly their own value as the mean; Python adds the codes up."""
    how, rng = Gradients(bits=bits), np.random.default_rng(bits)
    exact = rng.integers(-how.top * 2**FRACTION, how.top * 2**FRACTION, 6)
    exact[:3] = -1, 1, 2**FRACTION // 2
    # float32 has 24 bits
    exact = np.where(np.abs(exact) >= 2**24, exact // 256 * 256, exact)
    exact[-1] = how.top * 2**FRACTION
    x = np.ldexp(exact.astype(np.float64), -FRACTION).astype(np.float32)
    every = jnp.arange(2**FRACTION, dtype=jnp.uint32)[:, None]
    monkeypatch.setattr(gradient_codes, "random_bits", lambda words, shape: jnp.broadcast_to(every, shape))
    many = jnp.broadcast_to(x, (2**FRACTION, x.size))
    codes = np.asarray(jax.jit(gradient_codes.round_codes, static_argnums=2)(many, jnp.float32(1), how.top, WORDS))
    assert np.abs(codes).max() <= how.top
    for column, number in zip(codes.T, x, strict=True):
        assert Fraction(int(column.astype(np.int64).sum()), 2**FRACTION) == Fraction(float(number))


def test_every_step_of_the_hash_can_be_undone_so_all_random_values_are_equally_frequent() -> None:
    """The inverse in Python's integers: for each index first -> hash is a bijection of 32 bits, as is index -> hash."""

    def unshift(h: int, by: int) -> int:
        found = h
        for _ in range(32 // by):
            found = h ^ (found >> by)
        return found

    def undone(h: int, second: int) -> int:
        """index * golden + first"""
        h = unshift(h, 16) * pow(0x846CA68B, -1, 2**32) % 2**32
        h = (unshift(h, 15) - second) * pow(0x7FEB352D, -1, 2**32) % 2**32
        return unshift(h, 16)

    rng = np.random.default_rng(0)
    index, first, second = rng.integers(0, 2**32, (3, 200), dtype=np.uint32)
    found = np.asarray(hashed(jnp.asarray(index), jnp.asarray(first), jnp.asarray(second)))
    for h, i, a, b in zip(found.tolist(), index.tolist(), first.tolist(), second.tolist(), strict=True):
        assert (undone(h, b) - i * 0x9E3779B9) % 2**32 == a
        assert (undone(h, b) - a) * pow(0x9E3779B9, -1, 2**32) % 2**32 == i


def test_random_bits_depend_on_the_words_and_on_the_row_major_index_only() -> None:
    flat = np.asarray(random_bits(jnp.asarray(WORDS), (24,)))
    assert np.array_equal(np.asarray(random_bits(jnp.asarray(WORDS), (2, 3, 4))).ravel(), flat)
    assert flat.max() < 2**FRACTION
    streams = fold(jnp.asarray(WORDS), jnp.arange(4, dtype=jnp.uint32))
    assert np.array_equal(streams[2], fold(jnp.asarray(WORDS), 2))
    assert len({tuple(words) for words in np.asarray(streams).tolist()}) == 4
    assert key_words(jax.random.key(0)).shape == (2,)


@pytest.mark.parametrize("how", [NEAREST, Gradients(), Gradients(bits=16), Gradients(bits=5, rounding="nearest")])
def test_loss_scaling_changes_the_scale_and_no_code(how: Gradients) -> None:
    x, words = draw(4, 7), jnp.asarray(WORDS) if how.stochastic else None
    plain, scaled = (encode(jnp.asarray(v), (0, 1), how, words) for v in (x, np.ldexp(x, 12)))
    assert all(np.array_equal(a, b) for a, b in zip(plain.digits, scaled.digits, strict=True))
    assert np.array_equal(scaled.scale, np.ldexp(np.asarray(plain.scale), 12))


def test_16_bits_are_two_bytes_of_one_code() -> None:
    how, x = Gradients(bits=16, rounding="nearest"), draw(40)
    x[:2] = np.abs(x).max() * np.array([1, -1], np.float32)
    coded = encode(jnp.asarray(x), (0,), how, None)
    high, low = (np.asarray(d).astype(np.int32) for d in coded.digits)
    assert np.array_equal(high * 256 + low, np.round(x * (np.float32(how.top) / np.abs(x).max())))
    assert (high * 256 + low)[:2].tolist() == [how.top, -how.top] == [32639, -32639]


def test_scales_are_those_of_the_shared_axes_and_tiny_or_zero_tensors_have_finite_ones() -> None:
    x = draw(3, 5)
    coded = encode(jnp.asarray(x), (1,), NEAREST, None)
    assert np.array_equal(coded.scale, np.abs(x).max(1, keepdims=True) * np.float32(1 / 127))
    for tiny in (0.0, 1e-40, 1e-33):
        found = encode(jnp.full((4,), tiny, jnp.float32), (0,), NEAREST, None)
        assert np.isfinite(np.asarray(found.scale)).all()
        assert not np.asarray(found.digits[0]).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_with_nan_or_infinity_has_the_scale_nan(bad: float) -> None:
    x = draw(3, 4)
    x[1, 2] = bad
    assert np.isnan(np.asarray(encode(jnp.asarray(x), (1,), NEAREST, None).scale)).ravel().tolist() == [0, 1, 0]
    assert np.isnan(encode(jnp.asarray(x), (0, 1), NEAREST, None).scale)
    assert np.isnan(encode(jnp.asarray(draw(3)), (0,), NEAREST, None, jnp.array(True)).scale)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bits": 3}, "bits: expected 4 to 8 or 16, got 3"),
        ({"bits": 12}, "bits: expected 4 to 8 or 16, got 12"),
        ({"bits": 8.0}, "bits: expected 4 to 8 or 16, got 8.0"),
        ({"rounding": "up"}, "rounding: expected one of 'stochastic', 'nearest', got 'up'"),
        ({"per": "rows"}, "per: expected one of .*, got 'rows'. Did you mean 'row'"),
        ({"per": "block"}, "block: expected a positive number .*, got None. Use block=1024"),
        ({"per": "block", "block": 0}, "block: expected a positive number .*, got 0"),
        ({"block": 64}, "block=64 is for per='block', got per='tensor'. Leave it out"),
    ],
)
def test_a_setting_that_is_no_setting_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"Gradients: {message}"):
        Gradients(**fields)


def test_other_names_and_other_types_are_refused() -> None:
    unchecked: Any = Gradients
    with pytest.raises(TypeError, match=r"expected fields among bits, rounding, per, block, got axis=0\. Use per"):
        unchecked(axis=0)
    wrong: Any = 8
    with pytest.raises(TypeError, match=r"Recipe: gradients: expected a qjax\.Gradients or None, got 8"):
        qjax.Recipe(gradients=wrong)
