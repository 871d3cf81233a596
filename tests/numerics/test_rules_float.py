"""The rules in floating point against numpy's IEEE operations, and against Python integers for the fused one."""

from fractions import Fraction
from typing import Any

import jax
import numpy as np
import pytest

from qjax.numerics import Real, effective_scale, float32, get_rule, requantize
from qjax.numerics.float32 import Float32
from qjax.numerics.rules import Float32WithBias, Float64
from tests.numerics.float32 import nearest

COUNT = 10**6
RULES = ("float32", "float32_x86", "float32_zero_point_inside", "float32_zero_point_fma")
F32 = np.float32
INT32: dict[str, Any] = {"qmin": -(2**31), "qmax": 2**31 - 1}


def accumulators(count: int, rng: np.random.Generator) -> np.ndarray:
    acc = (rng.integers(-(2**31), 2**31, count) >> rng.integers(0, 31, count)).astype(np.int32)
    ends = np.array([2**31 - 1, -(2**31), 0, 1, -1, 2**24 + 1, -(2**24) - 1, 2**31 - 64, 2**25 + 2], np.int32)
    return np.where(rng.integers(0, 16, count) == 0, ends[rng.integers(0, ends.size, count)], acc)


def scales(acc: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """float32 scales: of every size, powers of two, quotients (k + 1/2) / acc that make ties, and tiny ones."""
    n = acc.size
    scale = np.exp2(rng.uniform(-40, 10, n))
    scale = np.where(rng.integers(0, 4, n) == 0, np.exp2(rng.integers(-31, 4, n)), scale)
    magnitude = np.maximum(np.abs(acc.astype(np.float64)), 1)
    tie = (rng.integers(0, 200, n) + 0.5) / magnitude
    scale = np.where(rng.integers(0, 3, n) == 0, tie, scale)
    scale = np.where(rng.integers(0, 64, n) == 0, np.exp2(rng.uniform(-149, 60, n)), scale)
    return np.where(rng.integers(0, 200, n) == 0, 0.0, scale).astype(F32)


def to_int32(y: np.ndarray, *, indefinite: bool = False) -> np.ndarray:
    """rint and the conversion to int32 of float32 or float64 numbers; int64."""
    rounded = np.rint(y)
    high, low = rounded >= 2.0**31, rounded < -(2.0**31)
    plain = np.where(high | low, 0, rounded).astype(np.int64)
    plain = np.where(high, -(2**31) if indefinite else 2**31 - 1, plain)
    return np.where(low, -(2**31), plain)


def run(rule: str, acc, constants, *, zero_point: Any = 0, **codes) -> np.ndarray:
    f = jax.jit(lambda a, c: requantize(a, c, rule=rule, zero_point=zero_point, **codes))
    return np.asarray(f(acc, constants))


def count_wrong(got: np.ndarray, want: np.ndarray) -> int:
    assert got.shape == want.shape
    return int((got != want).sum())


@pytest.mark.parametrize("rule", ["float32", "float32_x86"])
def test_float32(rule):
    rng = np.random.default_rng(1)
    acc = accumulators(COUNT, rng)
    e = scales(acc, rng)
    rounded = to_int32(acc.astype(F32) * e, indefinite=rule == "float32_x86")
    assert count_wrong(run(rule, acc, float32.of(e), **INT32), rounded) == 0
    for zero_point, qmin, qmax in ((3, -128, 127), (255, 0, 255), (-128, -128, 127), (7, -8, 7)):
        want = np.clip(rounded + zero_point, qmin, qmax)
        assert count_wrong(run(rule, acc, float32.of(e), zero_point=zero_point, qmin=qmin, qmax=qmax), want) == 0


def test_the_overflow_of_x86_gives_the_least_code():
    acc = np.array([2**31 - 1, -(2**31), 2**30], np.int32)
    assert requantize(acc, 2.0, rule="float32").tolist() == [127, -128, 127]
    assert requantize(acc, 2.0, rule="float32_x86").tolist() == [-128, -128, -128]
    assert requantize(acc, 1.0, rule="float32_x86").tolist() == [-128, -128, 127]
    assert requantize(acc, 2.0, rule="float32_x86", zero_point=128, qmin=0, qmax=255).tolist() == [0, 0, 0]


def test_zero_point_inside():
    rng = np.random.default_rng(2)
    acc = accumulators(COUNT, rng)
    e = scales(acc, rng)
    for qmin, qmax in ((-128, 127), (0, 255), (-(2**29), 2**29)):
        zero_point = rng.integers(qmin, qmax + 1, COUNT).astype(np.int32)
        y = acc.astype(F32) * e + zero_point.astype(F32)
        want = np.clip(to_int32(y), qmin, qmax)
        got = run("float32_zero_point_inside", acc, float32.of(e), zero_point=zero_point, qmin=qmin, qmax=qmax)
        assert count_wrong(got, want) == 0


def test_the_direction_of_a_tie_depends_on_where_the_zero_point_is():
    acc = np.array([-3, -1, 1, 3], np.int32)
    assert requantize(acc, 0.5, rule="float32", zero_point=1).tolist() == [-1, 1, 1, 3]
    assert requantize(acc, 0.5, rule="float32_zero_point_inside", zero_point=1).tolist() == [0, 0, 2, 2]


def test_a_fused_multiply_add_differs():
    """7 * 13.071428 is 91.499996; the product alone rounds to 91.5, a tie that the zero point sends down."""
    y = {r: int(requantize(np.int32(7), F32(13.071428), rule=r, zero_point=-106)) for r in RULES[2:]}
    assert y == {"float32_zero_point_inside": -14, "float32_zero_point_fma": -15}


@pytest.mark.parametrize("count", [40_000, pytest.param(COUNT, marks=[pytest.mark.slow, pytest.mark.exhaustive])])
def test_zero_point_in_a_fused_multiply_add(count):
    rng = np.random.default_rng(3)
    acc = accumulators(count, rng)
    e = scales(acc, rng)
    zero_point = rng.integers(-128, 128, count).astype(np.int32)
    got = run("float32_zero_point_fma", acc, float32.of(e), zero_point=zero_point)
    mantissa, exponent = np.frexp(e.astype(np.float64))
    rows = zip(
        acc.astype(F32).astype(np.int64).tolist(),
        (mantissa * 2.0**24).astype(np.int64).tolist(),
        (exponent - 24).tolist(),
        zero_point.tolist(),
        strict=True,
    )

    def exact(a: int, m: int, k: int, z: int) -> int:
        # (total, k) is a * e + z; rounded to 24 bits, then to an integer, both to even
        total = (a * m << max(k, 0)) + (z << max(-k, 0))
        k = min(k, 0)
        for places in (max(abs(total).bit_length() - 24, 0), None):
            drop = -k if places is None else places
            if drop > 0:
                q, rest = total >> drop, total & ((1 << drop) - 1)
                total = q + (2 * rest > 1 << drop or (2 * rest == 1 << drop and q & 1))
                k += drop
        return max(-128, min(127, total << k))

    want = np.array([exact(*row) for row in rows])
    assert count_wrong(got, want) == 0


def test_bias_in_float32():
    rng = np.random.default_rng(4)
    acc = accumulators(COUNT, rng)
    e = scales(acc, rng)
    bias = (rng.normal(0, 1, COUNT) * np.exp2(rng.uniform(-10, 31, COUNT))).astype(F32)
    # a third of the biases nearly cancels
    bias = np.where(np.arange(COUNT) % 3 == 0, -acc.astype(F32) * F32(1 + 2.0**-20), bias)
    rule = get_rule("float32_bias")
    constants = rule.prepare(e, bias)
    assert rule.takes_bias
    assert rule.fields == ("mantissa", "exponent", "bias_mantissa", "bias_exponent")
    want = to_int32((acc.astype(F32) + bias) * e, indefinite=True)
    assert count_wrong(run("float32_bias", acc, constants, **INT32), want) == 0
    traced = jax.jit(rule.prepare)(e, bias)
    assert all(np.array_equal(t, c) for t, c in zip(traced, constants, strict=True))
    assert count_wrong(run("float32_bias", acc, e, **INT32), to_int32(acc.astype(F32) * e, indefinite=True)) == 0
    # PyTorch's b / (s_x s_w), in float32 steps
    b, s_x, s_w = F32(0.37), F32(0.1), F32(0.003)
    steps = float32.divide(float32.of(b), float32.multiply(float32.of(s_x), float32.of(s_w)))
    assert rule.prepare(0.5, steps) == rule.prepare(0.5, b / (s_x * s_w))


def float64_scales(acc: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    n = acc.size
    scale = np.exp2(rng.uniform(-40, 10, n))
    # products next to a tie: whether the 84 bits are rounded to a double first shows there
    tie = (rng.integers(0, 2**20, n) + 0.5) / np.maximum(np.abs(acc.astype(np.float64)), 1)
    tie *= 1 + rng.integers(-2, 3, n) * 2.0**-53
    scale = np.where(rng.integers(0, 2, n) == 0, tie, scale)
    scale = np.where(rng.integers(0, 64, n) == 0, np.exp2(rng.uniform(-300, 60, n)), scale)
    return np.where(rng.integers(0, 200, n) == 0, 0.0, scale)


def test_float64_away():
    rng = np.random.default_rng(5)
    acc = accumulators(COUNT, rng)
    e = float64_scales(acc, rng)
    product = acc.astype(np.float64) * e
    # C's round: the fraction is exact
    whole = np.trunc(product)
    rounded = whole + np.where(np.abs(product - whole) >= 0.5, np.copysign(1.0, product), 0.0)
    constants = get_rule("float64_away").prepare(e)
    assert isinstance(constants, Float64)
    assert all(np.asarray(c).dtype == np.int32 for c in constants)
    assert count_wrong(run("float64_away", acc, constants, **INT32), to_int32(rounded)) == 0
    # the rounding to a double is part of the rule: the exact product rounds otherwise
    some = np.flatnonzero(np.abs(product) < 2.0**31)[:40_000]
    exact = [_away(Fraction(int(acc[i])) * Fraction(float(e[i]))) for i in some]
    assert 0 < count_wrong(rounded[some], np.array(exact)) < 20_000


def _away(q: Fraction) -> int:
    magnitude = int(abs(q) + Fraction(1, 2))
    return magnitude if q >= 0 else -magnitude


@pytest.mark.parametrize("rule", RULES)
def test_scales_are_rounded_to_float32_on_the_host_as_in_a_trace(rule):
    rng = np.random.default_rng(6)
    s = [np.exp(rng.normal(-4, 3, 10_000)).astype(F32) for _ in range(3)]
    prepare = get_rule(rule).prepare
    e = effective_scale(*s)
    host = prepare(e)
    assert isinstance(host, Float32)
    assert np.array_equal(float32.to_array(host), e.to_float64().astype(F32))
    traced = jax.jit(lambda *v: prepare(effective_scale(*v)))(*s)
    assert all(np.array_equal(t, h) for t, h in zip(traced, host, strict=True))
    assert prepare(1 / 3) == float32.of(F32(1 / 3))
    exact = nearest(Fraction(1, 3))
    assert Fraction(int(prepare(1 / 3).mantissa)) * Fraction(2) ** int(prepare(1 / 3).exponent) == exact


def test_constants_of_a_double_on_the_host_as_in_a_trace():
    s = [np.exp(np.random.default_rng(7).normal(-4, 3, 10_000)).astype(F32) for _ in range(3)]
    prepare = get_rule("float64_away").prepare
    host, e = prepare(effective_scale(*s)), effective_scale(*s)
    traced = jax.jit(lambda *v: prepare(effective_scale(*v)))(*s)
    assert all(np.array_equal(t, h) for t, h in zip(traced, host, strict=True))
    value = np.ldexp(host.mantissa_high * 2.0**31 + host.mantissa_low, host.exponent)
    assert np.array_equal(value, e.to_float64())


def test_the_scale_of_float32_runtimes_is_the_f32_form():
    rng = np.random.default_rng(8)
    s_x, s_w, s_y = (np.exp(rng.normal(-4, 5, COUNT)).astype(F32) for _ in range(3))
    want = (s_x * s_w) / s_y
    assert want.dtype == F32
    assert np.array_equal(effective_scale(s_x, s_w, s_y, form="f32").to_float32(), want)
    assert not np.array_equal(effective_scale(s_x, s_w, s_y, form="f64").to_float32(), want)


@pytest.mark.parametrize(
    ("rule", "constants", "message"),
    [
        ("float32", -0.5, "at least 0. Got -0.5"),
        ("float32", 2.0**200, "finite"),
        ("float64_away", np.array([1.0, -2.0]), "at least 0. Got -2.0"),
        ("float32", Float32(np.int32(-5), np.int32(0)), r"mantissa in \[0, 2\^24\].*from -5 to -5.*use float32.of"),
        ("float32", Float32(np.int32(5), np.int32(-150)), r"exponent in \[-149, 104\]"),
        ("float32_bias", Float32WithBias(*(np.int32(v) for v in (1, 0, 2**25, 0))), "a float32 bias must have"),
        ("float64_away", Float64(np.int32(1), np.int32(0), np.int32(0)), r"mantissa_high in \[2\^21, 2\^22\)"),
    ],
)
def test_errors(rule, constants, message):
    with pytest.raises(ValueError, match=message):
        requantize(np.zeros(2, np.int32), constants, rule=rule)


def test_constants_of_another_type():
    with pytest.raises(TypeError, match=r"'float32' takes a scale or constants of type Float32. Got Float64"):
        requantize(np.zeros(2, np.int32), get_rule("float64_away").prepare(0.5), rule="float32")
    with pytest.raises(TypeError, match=r"exponent must be int32. Got int64"):
        requantize(np.zeros(2, np.int32), Float32(np.int32(1), np.int64(0)), rule="float32")


def test_negative_scales_of_a_trace_count_as_zero():
    for rule in ("float32", "float64_away"):
        c = jax.jit(get_rule(rule).prepare)(F32(-3))
        assert [int(v) for v in c] == [0] * len(c)
    assert Real.of(F32(0)).is_zero
