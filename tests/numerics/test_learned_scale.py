"""Scales that an optimizer moves: portable bits, never destroyed, with the gradients of the papers."""

import decimal
import math
import zlib
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qjax.numerics.learned_scale import _EXP2_SERIES, learned_scale, log2_scale_of, pact_scale, power_of_two_scale

MAKERS = {
    "learned": learned_scale,
    "power_of_two": lambda raw: power_of_two_scale(raw, 127),
    "pact": lambda raw: pact_scale(raw, 255),
}
GOLDEN = 3737824837
RAW = np.random.default_rng(0).uniform(-64, 64, 200_000).astype(np.float32)


def exact_exp2(r: float) -> decimal.Decimal:
    with decimal.localcontext() as context:
        context.prec = 50
        return decimal.Decimal(2) ** decimal.Decimal(r)


def test_the_series_is_that_of_a_power_of_two():
    with decimal.localcontext() as context:
        context.prec = 60
        terms = [decimal.Decimal(2).ln() ** k / math.factorial(k) * 2**31 for k in range(12)]
    assert [int(term.to_integral_value()) for term in terms] == list(_EXP2_SERIES)


def test_within_one_unit_in_the_last_place():
    rng = np.random.default_rng(1)
    near_whole = np.nextafter(np.arange(-63, 64, dtype=np.float32), np.array([[-100], [100]], np.float32)).ravel()
    r = np.concatenate([rng.uniform(-64, 64, 3000), rng.normal(size=2000), near_whole]).astype(np.float32)
    for raw, scale in zip(r, np.asarray(learned_scale(r)), strict=True):
        error = abs(Fraction(exact_exp2(float(raw))) - Fraction(float(scale)))
        assert error <= Fraction(float(np.spacing(scale))), raw


def test_exact_at_whole_numbers():
    k = np.arange(-64, 65)
    assert np.array_equal(np.asarray(learned_scale(k.astype(np.float32))), np.ldexp(np.float32(1), k))


def test_the_bits_are_the_same_everywhere():
    eager = np.asarray(learned_scale(RAW))
    assert np.array_equal(np.asarray(jax.jit(learned_scale)(RAW)), eager)
    assert np.array_equal(np.asarray(jax.jit(lambda: learned_scale(RAW))()), eager)
    assert np.array_equal(np.asarray(jax.vmap(learned_scale)(RAW)), eager)
    assert np.array_equal(
        np.asarray(jax.jit(jax.value_and_grad(lambda r: learned_scale(r).sum()))(RAW)[1]),
        eager * np.float32(np.log(2)),
    )
    with jax.enable_x64(True):
        wide = learned_scale(RAW.astype(np.float64))
        assert wide.dtype == jnp.float32
        assert np.array_equal(np.asarray(wide), eager)
    # Every version of JAX and every machine: a change of these bits is a change of every trained model.
    assert zlib.crc32(eager.tobytes()) == GOLDEN


def test_never_decreasing():
    for start in (0.0, -7.0, 3.999, -0.5):
        first = np.float32(start).view(np.int32)
        r = np.sort((first + np.arange(200_000, dtype=np.int32)).view(np.float32))
        assert (np.diff(np.asarray(learned_scale(r)).astype(np.float64)) >= 0).all()


@given(st.lists(st.floats(width=32), min_size=16, max_size=16), st.sampled_from(list(MAKERS)))
@settings(max_examples=25)
def test_a_scale_is_positive_and_finite_whatever_the_raw_value(raw, name):
    scale = np.asarray(MAKERS[name](np.array(raw, np.float32)))
    assert np.isfinite(scale).all()
    assert (scale >= 2.0**-100).all()
    assert (scale <= 2.0**100).all()


@given(st.floats(width=32), st.floats(width=32), st.sampled_from(list(MAKERS)))
@settings(max_examples=25)
def test_a_gradient_is_finite_whatever_comes_in(raw, cotangent, name):
    _, vjp = jax.vjp(MAKERS[name], jnp.float32(raw))
    (gradient,) = vjp(jnp.float32(cotangent))
    assert np.isfinite(gradient)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.sampled(3)
def test_no_learning_rate_destroys_a_scale(optimizer, name):
    """Losses that explode, at learning rates up to the end of float32."""
    for rate in (1.0, 1e10, 1e38):
        tx = getattr(optax, optimizer)(rate)
        raw = jnp.float32(0.5)
        state = tx.init(raw)

        @jax.jit
        def step(raw, state, x, tx=tx):
            gradient = jax.grad(lambda raw: (MAKERS[name](raw) * x) ** 2)(raw)
            with jax.numpy_dtype_promotion("standard"):  # optax's own arithmetic needs it
                updates, state = tx.update(gradient, state, raw)
            return optax.apply_updates(raw, updates), state

        for x in (1.0, -1e30, np.inf, np.nan, 3.0, -3.0):
            raw, state = step(raw, state, jnp.float32(x))
            scale = float(MAKERS[name](raw))
            assert np.isfinite(scale)
            assert 2.0**-100 <= scale <= 2.0**100


def test_nan_and_beyond_the_limits():
    raw = np.array([np.nan, np.inf, -np.inf, 65.0, -64.5], np.float32)
    assert np.asarray(learned_scale(raw)).tolist() == [1.0, 2.0**64, 2.0**-64, 2.0**64, 2.0**-64]
    assert np.asarray(power_of_two_scale(raw, 127)).tolist() == [
        2.0**-7,
        2.0**57,
        2.0**-71,
        2.0**57,
        2.0**-71,
    ]
    raw = np.array([np.nan, np.inf, -np.inf, 0.0, -3.0], np.float32)
    assert np.asarray(pact_scale(raw, 1)).tolist() == [1.0, 2.0**64, 2.0**-64, 2.0**-64, 2.0**-64]
    # The gradient goes on beyond the limits, so that a raw value can come back.
    assert float(jax.grad(learned_scale)(jnp.float32(-70.0))) == float(np.float32(2.0**-64) * np.float32(np.log(2)))


@pytest.mark.parametrize("qmax", [1, 7, 127, 255, 32767, 65535])
def test_power_of_two_scales_are_the_paper_s(qmax):
    """Jain et al. 2020: 2^ceil(log2 t) / 2^(bits-1) signed, / 2^bits unsigned; the gradient is s ln 2."""
    raw = np.array([-3.0, -2.999, -0.1, 0.0, 1e-7, 0.5, 1.0, 10.2], np.float32)
    whole = np.array([-3, -2, 0, 0, 1, 1, 1, 11])
    expected = np.ldexp(np.float32(1), whole - (qmax + 1).bit_length() + 1)
    run = lambda raw: power_of_two_scale(raw, qmax)  # noqa: E731
    assert np.array_equal(np.asarray(run(raw)), expected)
    assert np.array_equal(np.asarray(jax.jit(run)(raw)), expected)
    gradient = jax.grad(lambda raw: run(raw).sum())(jnp.asarray(raw))
    assert np.array_equal(np.asarray(gradient), expected * np.float32(np.log(2)))


def test_pact_scales():
    alpha = np.array([6.0, 1.0, 0.1], np.float32)
    expected = alpha * np.float32(1 / 15)
    assert np.array_equal(np.asarray(pact_scale(alpha, 15)), expected)
    gradient = jax.grad(lambda a: pact_scale(a, 15).sum())(jnp.asarray(alpha))
    assert np.array_equal(np.asarray(gradient), np.full(3, np.float32(1 / 15)))


def test_a_scale_comes_back_from_its_logarithm():
    powers = np.ldexp(1.0, np.arange(-64, 65))
    assert np.array_equal(np.asarray(learned_scale(log2_scale_of(powers))), powers.astype(np.float32))
    scale = np.random.default_rng(2).uniform(2.0**-8, 2.0**-4, 10_000)
    back = np.asarray(learned_scale(log2_scale_of(scale))).astype(np.float64)
    assert (np.abs(back - scale) <= scale * 2.0**-21.5).all()
    for bad in (0.0, -1.0, np.nan, np.inf, 2.0**65):
        with pytest.raises(ValueError, match="must lie in"):
            log2_scale_of(bad)


def test_wrong_arguments_are_named():
    with pytest.raises(TypeError, match=r"the raw parameter must be a float\. Got int32"):
        learned_scale(np.int32(1))
    with pytest.raises(ValueError, match=r"must be a power of two .* Got qmax = 100"):
        power_of_two_scale(1.0, 100)
    with pytest.raises(ValueError, match="qmax must be at least 1"):
        pact_scale(1.0, 0)
