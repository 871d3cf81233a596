"""Quantize, dequantize and the choice of parameters: against fractions, and the same bits everywhere."""

import itertools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qjax.numerics.affine import (
    QParams,
    QSpec,
    broadcast_to_tensor,
    choose_qparams,
    dequantize,
    power_of_two_at_least,
    quantize,
    round_to_grid,
    split_groups,
)
from qjax.numerics.unfused import unfused
from tests.numerics import float32

MODES = {
    "symmetric": {},
    "full": {"narrow_range": False},
    "unsigned": {"signed": False},
    "asymmetric": {"symmetric": False},
    "asymmetric unsigned": {"symmetric": False, "signed": False},
    "asymmetric narrow": {"symmetric": False, "narrow_range": True},
    "asymmetric unsigned narrow": {"symmetric": False, "signed": False, "narrow_range": True},
}
RULE = {"symmetric": "symmetric", "full": "symmetric", "unsigned": "unsigned"}
TIES = 524_288


def fractions(x) -> list[Fraction]:
    return [Fraction(float(v)) for v in np.asarray(x).ravel()]


def ranges(signed: bool) -> tuple[np.ndarray, np.ndarray]:
    ends = [0.0, 1e-20, 1e-3, 0.1, 1.0, 2.5, 127.0, 127.5, 255.0, 3e5, 1e20]
    pairs = list(itertools.product(ends if signed else [0.0], ends))
    rng = np.random.default_rng(0)
    random = rng.lognormal(size=(64, 2)) * (1 if signed else (0, 1))
    both = np.concatenate([np.array(pairs), random]).astype(np.float32)
    shifted = np.array([[-3.0, -1.0], [2.0, 6.0]], np.float32) * (1 if signed else (0, 1))
    both = np.concatenate([both * np.array([-1, 1], np.float32), np.sort(np.abs(shifted), 1)])
    return both[:, 0], both[:, 1]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.sampled(5)
def test_parameters_are_the_fractions_and_zero_has_a_code(bits, mode):
    spec = QSpec(bits=bits, axis=0, **MODES[mode])
    lo, hi = ranges(signed=mode != "unsigned")
    qparams = choose_qparams(lo, hi, spec)
    rule = RULE.get(mode, "asymmetric")
    pairs = zip(fractions(lo), fractions(hi), strict=True)
    expected = [float32.choose(a, b, spec.qmin, spec.qmax, rule) for a, b in pairs]
    assert fractions(qparams.scale) == [scale for scale, _ in expected]
    assert np.asarray(qparams.zero_point).tolist() == [zero_point for _, zero_point in expected]
    traced = jax.jit(lambda lo, hi: choose_qparams(lo, hi, spec))(lo, hi)
    assert np.array_equal(np.asarray(traced.scale), np.asarray(qparams.scale))
    assert np.array_equal(np.asarray(traced.zero_point), np.asarray(qparams.zero_point))
    # 0.0 comes back as 0.0, exactly.
    codes = quantize(np.zeros((lo.size, 1), np.float32), qparams)
    assert np.array_equal(np.asarray(codes)[:, 0], np.asarray(qparams.zero_point).astype(spec.dtype))
    assert not np.asarray(dequantize(codes, qparams)).any()
    # Both ends of the range come back to within half a step and half a step of the zero point's nudge.
    for end in (lo, hi):
        real = np.asarray(dequantize(quantize(end[:, None], qparams), qparams))[:, 0].astype(np.float64)
        step = np.asarray(qparams.scale).astype(np.float64)
        assert (np.abs(real - end) <= step * (1 + 1e-6)).all()


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
def test_numpy_computes_the_same_parameters(symmetric, power_of_two):
    rng = np.random.default_rng(1)
    lo, hi = np.sort(rng.normal(size=(2, 100_000)) * rng.lognormal(size=100_000) * 3, 0).astype(np.float32)
    spec = QSpec(symmetric=symmetric, axis=0)
    got = jax.jit(lambda a, b: choose_qparams(a, b, spec, power_of_two=power_of_two))(lo, hi)
    low, high = np.minimum(lo, 0), np.maximum(hi, 0)
    span = np.maximum(-low, high) if symmetric else high - low
    scale = span * np.float32(1 / (127 if symmetric else 255))
    if power_of_two:
        mantissa, exponent = np.frexp(scale)
        scale = np.ldexp(np.float32(1), exponent - (mantissa == 0.5))
    zero_point = 0 * low if symmetric else np.clip(-128 - np.rint(low * (1 / scale)), -128, 127)
    assert np.array_equal(np.asarray(got.scale), scale)
    assert np.array_equal(np.asarray(got.zero_point), zero_point.astype(np.int32))


def test_every_power_of_two_and_its_neighbours():
    powers = np.ldexp(np.float32(1), np.arange(-126, 127)).astype(np.float32)
    for x, expected in (
        (powers, powers),
        (np.nextafter(powers, np.float32(np.inf)), powers * 2),
        (np.nextafter(powers[1:], np.float32(0)), powers[1:]),
    ):
        assert np.array_equal(np.asarray(power_of_two_at_least(jnp.asarray(x))), expected)
        assert np.array_equal(np.asarray(jax.jit(power_of_two_at_least)(x)), expected)


def test_degenerate_ranges():
    for symmetric in (True, False):
        spec = QSpec(symmetric=symmetric)
        for lo, hi in ((0.0, 0.0), (0.0, 1e-40), (-1e-36, 1e-36)):
            for qparams in (
                choose_qparams(lo, hi, spec),
                jax.jit(lambda a, b, spec=spec: choose_qparams(a, b, spec))(lo, hi),
            ):
                assert float(qparams.scale) == 1.0
                assert int(qparams.zero_point) == (0 if symmetric else -128)
        traced = jax.jit(lambda a, b, spec=spec: choose_qparams(a, b, spec))
        assert float(traced(np.float32(-np.inf), np.float32(np.inf)).scale) == 2.0**100
        assert float(traced(np.float32(np.nan), np.float32(1)).scale) == 1.0
        assert spec.qmin <= int(traced(np.float32(np.nan), np.float32(np.nan)).zero_point) <= spec.qmax


@pytest.mark.parametrize(
    ("lo", "hi", "spec", "words"),
    [
        (0.0, np.inf, QSpec(), "the range is not finite"),
        (np.nan, 1.0, QSpec(), "the range is not finite"),
        (0.0, 1e39, QSpec(), "a number beyond float32"),
        (1.0, -1.0, QSpec(), "lo must not exceed hi"),
        (-1.0, 1.0, QSpec(signed=False), "no negative codes"),
        (0.0, 1e31, QSpec(), "beyond 2\\^100"),
        (np.zeros(2), np.zeros(3), QSpec(axis=0), r"one shape\. Got \(2,\) and \(3,\)"),
    ],
)
def test_a_range_that_cannot_be_covered(lo, hi, spec, words):
    with pytest.raises(ValueError, match=words):
        choose_qparams(lo, hi, spec)


@given(
    st.lists(
        st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2**60), max_value=2**60),
        min_size=8,
        max_size=8,  # one shape, so that it compiles once
    ),
    st.floats(width=32, min_value=2**-60, max_value=2**60),
    st.integers(2, 16),
    st.sampled_from(list(MODES)),
    st.integers(0, 2**16 - 1),
)
@settings(max_examples=25)
def test_codes_are_the_fractions(values, scale, bits, mode, offset):
    spec = QSpec(bits=bits, **MODES[mode])
    zero_point = 0 if spec.symmetric else spec.qmin + offset % spec.levels
    x = np.array(values, np.float32)
    # XLA flushes subnormal numbers to zero, and so does the oracle.
    x = np.where(np.abs(x) < 2.0**-126, np.float32(0), x)
    codes = quantize(x, QParams(scale, zero_point, spec))
    expected = [float32.code(v, Fraction(scale), zero_point, spec.qmin, spec.qmax) for v in fractions(x)]
    assert codes.dtype == spec.dtype
    assert np.asarray(codes).tolist() == expected


@pytest.mark.parametrize("bits", [2, 4, 8, 12, 16])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.sampled(5)
def test_every_code_survives_a_round_trip(bits, mode):
    spec = QSpec(bits=bits, **MODES[mode])
    codes = np.arange(spec.qmin, spec.qmax + 1).astype(spec.dtype)
    for scale, zero_point in ((0.1, spec.qmin), (1e-7, 0), (3e8, spec.qmax)):
        qparams = QParams(scale, 0 if spec.symmetric else max(zero_point, spec.qmin), spec)
        real = dequantize(codes, qparams)
        some, offset, step = (
            codes[:: 1 + codes.size // 256],
            int(qparams.zero_point),
            Fraction(float(qparams.scale)),
        )
        exact = [float32.nearest((int(code) - offset) * step) for code in some]
        assert fractions(real[:: 1 + codes.size // 256]) == exact
        assert np.array_equal(np.asarray(quantize(real, qparams)), codes)


def tie_case(per_channel: bool, zero_point: int) -> tuple[np.ndarray, QParams]:
    rng = np.random.default_rng(2)
    if per_channel:
        scale = rng.uniform(0.001, 0.1, 64).astype(np.float32)
        spec = QSpec(bits=16, symmetric=False, axis=-1)
        return float32.exact_ties(scale, TIES), QParams(scale, np.full(64, zero_point), spec)
    scale = np.float32(0.0371)
    return float32.exact_ties(scale, TIES), QParams(scale, zero_point, QSpec(bits=16, symmetric=False))


@pytest.mark.parametrize("zero_point", [0, 3])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.sampled(2)
def test_ties_have_one_code_everywhere(per_channel, zero_point):
    x, qparams = tie_case(per_channel, zero_point)
    inverse = np.float32(1) / np.asarray(qparams.scale)
    steps = np.rint(x * inverse)
    expected = np.clip(steps, -(2**15) - zero_point, 2**15 - 1 - zero_point).astype(np.int32) + zero_point
    rows = x.shape[0]

    def one_row(row):
        return quantize(row[None], qparams)[0]

    def scanned(x):
        return jax.lax.scan(lambda carry, part: (carry, quantize(part, qparams)), 0, x.reshape(8, rows // 8, -1))[1]

    ways = {
        "eager": quantize(x, qparams),
        "jit": jax.jit(quantize)(x, qparams),
        "jit with constant parameters": jax.jit(lambda x: quantize(x, qparams))(x),
        "vmap": jax.jit(jax.vmap(one_row))(x),
        "scan": jax.jit(scanned)(x).reshape(x.shape),
        "checkpoint": jax.jit(jax.checkpoint(lambda x: quantize(x, qparams)))(x),
    }
    for way, codes in ways.items():
        assert np.array_equal(np.asarray(codes), expected), way
    # The ties do not depend on the parity of the zero point.
    base = np.asarray(quantize(x, qparams.replace(zero_point=qparams.zero_point * 0))).astype(np.int64)
    inside = np.abs(base) < 2**14
    assert np.array_equal(np.asarray(ways["eager"])[inside] - zero_point, base[inside])


def test_a_constant_upstream_is_not_merged_into_the_reciprocal():
    """x * c * (1/s) with constants c, s: XLA of jax 0.10 computes x * (c/s) unless the product is kept."""
    rng = np.random.default_rng(3)
    y = rng.integers(-(2**23), 2**23, 1 << 18).astype(np.float32)
    c, s = np.float32(0.00137), np.float32(0.00151)
    expected = np.rint((y * c) * (np.float32(1) / s))
    merged = np.rint(y * (c * (np.float32(1) / s)))
    assert (expected != merged).sum() > 1000
    got = jax.jit(lambda y: round_to_grid(y * c, jnp.asarray(s), "nearest_even"))(y)
    assert np.array_equal(np.asarray(got), expected)


def test_unfused_products_are_rounded_before_the_sum():
    rng = np.random.default_rng(4)
    a, b, c = rng.normal(size=(3, 1 << 18)).astype(np.float32)
    k = np.float32(0.0371)
    assert np.array_equal(np.asarray(jax.jit(lambda a, b, c: unfused(a * b) + c)(a, b, c)), a * b + c)
    assert np.array_equal(np.asarray(jax.jit(lambda a, c: unfused(a * k) + c)(a, c)), a * k + c)
    assert np.array_equal(np.asarray(jax.jit(lambda a: unfused(a * k) * k)(a)), (a * k) * k)
    summed = jax.jit(jax.vmap(lambda a, b, c: unfused(a * b) - c))(a, b, c)
    assert np.array_equal(np.asarray(summed), a * b - c)
    edges = np.array([np.nan, np.inf, -np.inf, 0.0, -1e38], np.float32)
    lowest = np.finfo(np.float32).min
    got = np.asarray(jax.jit(unfused)(edges))
    assert np.array_equal(got, np.array([np.nan, np.inf, lowest, 0.0, -1e38], np.float32), equal_nan=True)


def test_dequantized_values_add_as_numpy_adds():
    rng = np.random.default_rng(5)
    codes = rng.integers(-128, 128, (1 << 16)).astype(np.int8)
    y = rng.normal(size=codes.shape).astype(np.float32)
    qparams = QParams(0.0371, -5, QSpec(symmetric=False))
    expected = (codes.astype(np.int32) + 5).astype(np.float32) * np.float32(0.0371) + y
    assert np.array_equal(np.asarray(jax.jit(lambda c, y: dequantize(c, qparams) + y)(codes, y)), expected)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_16_bit_floats_are_computed_in_float32(dtype):
    every = np.arange(2**16, dtype=np.uint16).view(jnp.dtype(dtype))
    every = every[np.isfinite(every.astype(np.float32))]
    qparams = QParams(0.0371, 7, QSpec(symmetric=False))
    for run in (quantize, jax.jit(quantize)):
        assert np.array_equal(np.asarray(run(every, qparams)), np.asarray(run(every.astype(np.float32), qparams)))


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.sampled(2)
def test_infinities_and_huge_numbers_saturate_and_nan_is_zero(signed, bits):
    spec = QSpec(bits=bits, signed=signed, symmetric=False)
    zero_point = spec.qmin + 3
    qparams = QParams(2.0**-100, zero_point, spec)
    x = np.array([np.inf, 3e38, -np.inf, -3e38, np.nan], np.float32)
    for run in (quantize, jax.jit(quantize)):
        codes = np.asarray(run(x, qparams)).tolist()
        assert codes == [spec.qmax, spec.qmax, spec.qmin, spec.qmin, zero_point]
    wide = QParams(2.0**100, zero_point, spec)
    assert np.asarray(quantize(x[[0, 2]], wide)).tolist() == [spec.qmax, spec.qmin]


def test_the_clip_survives_a_fused_reduction():
    """XLA CPU may drop the saturation of a narrowing cast in a fused reduction; the clip must stay."""
    x = np.full((256, 64), 1000.0, np.float32)
    qparams = QParams(1.0, 0, QSpec())
    total = jax.jit(lambda x: quantize(x, qparams).astype(jnp.float32).sum(0))(x)
    assert np.array_equal(np.asarray(total), np.full(64, 127.0 * 256))


@pytest.mark.parametrize(
    "spec",
    [
        QSpec(bits=4, axis=(0, -1)),
        QSpec(bits=4, axis=-1, group_size=2, group_axis=2),
        QSpec(bits=5, symmetric=False, group_size=4, group_axis=-2),
    ],
)
def test_each_slice_is_quantized_by_its_own_parameters(spec):
    rng = np.random.default_rng(6)
    x = rng.normal(size=(3, 2, 8, 5)).astype(np.float32)
    view, axes = split_groups(x, spec)
    qparams = choose_qparams(view.min(axes), view.max(axes), spec)
    codes = np.asarray(quantize(x, qparams))
    parts, _ = split_groups(codes, spec)
    alone = spec.replace(axis=None, group_size=None, group_axis=0)
    kept = [axis for axis in range(view.ndim) if axis not in axes]
    for index in np.ndindex(*qparams.scale.shape):
        at = tuple(index[kept.index(axis)] if axis in kept else slice(None) for axis in range(view.ndim))
        single = QParams(np.asarray(qparams.scale)[index], np.asarray(qparams.zero_point)[index], alone)
        assert np.array_equal(np.asarray(quantize(view[at], single)), parts[at])
    full = np.broadcast_to(np.asarray(broadcast_to_tensor(qparams.scale, spec, x.shape)), x.shape)
    assert (np.abs(np.asarray(dequantize(codes, qparams)) - x) <= full * 0.5001 + full * (not spec.symmetric)).all()


@given(st.sampled_from(["nearest_away", "nearest_up", "toward_zero", "floor", "ceil"]))
def test_another_rounding_moves_the_ties(rounding):
    x = (np.arange(-20, 20) + np.float32(0.5)) * np.float32(0.25)
    codes = np.asarray(quantize(x, QParams(0.25, 0, QSpec()), rounding=rounding))
    half = Fraction(1, 2)
    k = range(-20, 20)
    expected = {
        "nearest_away": [i + 1 if i >= 0 else i for i in k],
        "nearest_up": [int(i + half + half) for i in k],
        "toward_zero": [i if i >= 0 else i + 1 for i in k],
        "floor": list(k),
        "ceil": [i + 1 for i in k],
    }[rounding]
    assert codes.tolist() == expected


def test_stochastic_codes_are_unbiased_and_keyed():
    x, qparams = np.full(100_000, 0.3, np.float32), QParams(1.0, 5, QSpec(symmetric=False))
    key = jax.random.key(0)
    codes = np.asarray(quantize(x, qparams, rounding="stochastic", key=key))
    assert set(codes.tolist()) == {5, 6}
    # Five standard deviations of a binomial.
    assert abs((codes - 5).mean() - 0.3) < 5 * np.sqrt(0.3 * 0.7 / x.size)
    assert np.array_equal(
        np.asarray(jax.jit(lambda x, k: quantize(x, qparams, rounding="stochastic", key=k))(x, key)), codes
    )
    with pytest.raises(ValueError, match="needs a random key"):
        quantize(x, qparams, rounding="stochastic")


def test_wrong_types_are_named():
    qparams = QParams(1.0, 0, QSpec())
    with pytest.raises(TypeError, match=r"Expected a float tensor to quantize\. Got int32"):
        quantize(np.arange(3, dtype=np.int32), qparams)
    with pytest.raises(TypeError, match=r"codes must be integers\. Got float32"):
        dequantize(np.zeros(3, np.float32), qparams)


def test_the_x64_flag_changes_nothing():
    x = np.random.default_rng(7).normal(size=1000)
    spec = QSpec(bits=16, symmetric=False)
    narrow = choose_qparams(x.min(), x.max(), spec)
    codes, real = quantize(x, narrow), dequantize(quantize(x, narrow), narrow)
    with jax.enable_x64(True):
        wide = choose_qparams(x.min(), x.max(), spec)
        assert wide.scale.dtype == jnp.float32
        assert np.array_equal(np.asarray(wide.scale), np.asarray(narrow.scale))
        assert np.array_equal(np.asarray(quantize(x, wide)), np.asarray(codes))
        assert np.array_equal(np.asarray(dequantize(quantize(x, wide), wide)), np.asarray(real))
