"""Multipliers and gemmlowp's primitives against Python integers and C doubles, on the host and inside jit."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qjax.numerics import (
    Multiplier,
    Real,
    effective_scale,
    quantize_multiplier,
    rounding_divide_by_power_of_two,
    saturating_rounding_doubling_high_mul,
)
from tests.numerics.exact import gemmlowp_rdbpot, gemmlowp_srdhm, nearest_away

RNG = np.random.default_rng(0)
EDGES = sorted(
    {0, 2**31 - 1, 2**31 - 2, -(2**31), -(2**31) + 1}
    | {s * (2**k + d) for k in range(31) for d in (-1, 0, 1) for s in (1, -1)}
)
INTEGERS = np.array(EDGES + RNG.integers(-(2**31), 2**31, 400).tolist(), np.int32)


def tflite_multiplier(e: float) -> tuple[int, int]:
    """QuantizeMultiplier from its text: frexp, round half away, carry, flush."""
    if e == 0:
        return 0, 0
    q, shift = math.frexp(e)
    fixed = nearest_away(Fraction(q) * 2**31)
    if fixed == 2**31:
        fixed, shift = fixed // 2, shift + 1
    return (0, 0) if shift < -31 else (fixed, shift)


def scales(n: int) -> np.ndarray:
    x = np.ldexp(RNG.uniform(0.5, 1, n), RNG.integers(-34, 30, n))
    # mantissas on and beside the ties of the 31st bit, and those that carry
    ties = (RNG.integers(2**30, 2**31, n) + 0.5) / 2.0**31
    carries = 1 - np.ldexp(1.0, -RNG.integers(30, 53, n))
    return np.concatenate([x, ties, np.nextafter(ties, 1), np.nextafter(ties, 0), carries, carries * 2.0**-31, [0.0]])


def test_quantize_multiplier_is_tflites_on_doubles():
    e = scales(5000)
    m = quantize_multiplier(e)
    want = np.array([tflite_multiplier(float(v)) for v in e], np.int32)
    assert m.multiplier.dtype == m.shift.dtype == np.int32
    assert np.array_equal(m.multiplier, want[:, 0])
    assert np.array_equal(m.shift, want[:, 1])


def test_host_jit_and_vmap_agree_on_float32():
    e = scales(20_000).astype(np.float32)
    host = quantize_multiplier(e)
    for f in (jax.jit(quantize_multiplier), jax.jit(jax.vmap(quantize_multiplier))):
        m = f(e)
        assert isinstance(m, Multiplier)
        assert m.multiplier.dtype == m.shift.dtype == jnp.int32
        assert np.array_equal(np.asarray(m.multiplier), host.multiplier)
        assert np.array_equal(np.asarray(m.shift), host.shift)
    concrete = quantize_multiplier(jnp.asarray(e))
    assert isinstance(concrete.multiplier, np.ndarray)
    assert np.array_equal(concrete.multiplier, host.multiplier)


@given(st.floats(min_value=2.0**-32, max_value=2.0**29))
def test_the_multiplier_is_within_half_a_unit(e):
    m = quantize_multiplier(e)
    assert 2**30 <= m.multiplier < 2**31
    unit = Fraction(2) ** (int(m.shift) - 31)
    assert abs(int(m.multiplier) * unit - Fraction(e)) <= unit / 2


def test_boundaries_of_the_shift():
    assert quantize_multiplier(2.0**-32) == (2**30, -31)
    assert quantize_multiplier(np.nextafter(2.0**-32, 0)) == (2**30, -31)  # carries
    assert quantize_multiplier(2.0**-32 * 0.999) == (0, 0)
    assert quantize_multiplier(2.0**29) == (2**30, 30)
    assert quantize_multiplier(1.0) == (2**30, 1)


def test_errors_on_the_host_and_saturation_in_a_trace():
    with pytest.raises(ValueError, match=r"at least 0. Got -0.5"):
        quantize_multiplier(np.array([1.0, -0.5]))
    with pytest.raises(ValueError, match=r"below 2\^30. Got 2147483648.0"):
        quantize_multiplier(2.0**31)
    with pytest.raises(ValueError, match="finite"):
        quantize_multiplier(np.nan)
    m = jax.jit(quantize_multiplier)(np.array([-1.0, 2.0**31, 2.0**30], np.float32))
    assert m.multiplier.tolist() == [0, 2**31 - 1, 2**31 - 1]
    assert m.shift.tolist() == [0, 30, 30]


@pytest.mark.parametrize("form", ["f64", "f32"])
def test_effective_scale_is_that_of_c_doubles(form):
    n = 100_000
    s_x, s_w, s_y = (np.exp(RNG.normal(-4, 3, n)).astype(np.float32) for _ in range(3))
    wide = (s_x * s_w).astype(np.float64) if form == "f32" else s_x.astype(np.float64) * s_w.astype(np.float64)
    want = wide / s_y.astype(np.float64)
    assert np.array_equal(effective_scale(s_x, s_w, s_y, form=form).to_float64(), want)
    host = quantize_multiplier(effective_scale(s_x, s_w, s_y, form=form))
    traced = jax.jit(lambda *s: quantize_multiplier(effective_scale(*s, form=form)))(s_x, s_w, s_y)
    assert np.array_equal(np.asarray(traced.multiplier), host.multiplier)
    assert np.array_equal(np.asarray(traced.shift), host.shift)


def test_the_two_forms_of_the_scale_differ():
    s_x, s_w, s_y = np.float32(0.1), np.float32(0.3), np.float32(0.7)
    f64, f32 = (quantize_multiplier(effective_scale(s_x, s_w, s_y, form=f)) for f in ("f64", "f32"))
    assert f64.multiplier != f32.multiplier


def test_effective_scale_broadcasts_channels_and_reports_errors():
    e = effective_scale(np.float32(0.5), np.array([0.25, 3.0], np.float32), np.float32(2.0))
    assert isinstance(e, Real)
    assert e.to_float64().tolist() == [0.0625, 0.75]
    with pytest.raises(ZeroDivisionError):
        effective_scale(np.float32(1), np.float32(1), np.float32(0))
    with pytest.raises(ValueError, match=r"form must be 'f64' or 'f32'. Got 'f16'"):
        effective_scale(1.0, 1.0, 1.0, form="f16")  # pyright: ignore[reportArgumentType]


def test_high_mul_is_gemmlowps():
    a, b = INTEGERS[:, None], INTEGERS[None, :]
    want = np.array([[gemmlowp_srdhm(x, y) for y in INTEGERS.tolist()] for x in INTEGERS.tolist()], np.int32)
    f = saturating_rounding_doubling_high_mul
    assert np.array_equal(f(a, b), want)
    for y in (
        f(jnp.asarray(a), jnp.asarray(b)),
        jax.jit(f)(a, b),
        jax.vmap(f, (0, None))(INTEGERS, INTEGERS),
    ):
        assert y.dtype == jnp.int32
        assert np.array_equal(np.asarray(y), want)
    assert f(-(2**31), -(2**31)) == 2**31 - 1


def test_divide_by_power_of_two_is_gemmlowps():
    exponent = np.arange(32, dtype=np.int32)
    want = np.array([[gemmlowp_rdbpot(x, e) for e in range(32)] for x in INTEGERS.tolist()], np.int32)
    f = rounding_divide_by_power_of_two
    assert np.array_equal(f(INTEGERS[:, None], exponent), want)
    assert np.array_equal(np.asarray(jax.jit(f)(INTEGERS[:, None], exponent)), want)


def test_high_mul_refuses_other_types():
    with pytest.raises(TypeError, match=r"operands must be int32\. Got int64"):
        saturating_rounding_doubling_high_mul(np.int64(1), np.int32(1))
