"""Fixed-point rules on a million adversarial records and on every small one, against Python integers."""

from typing import Any

import jax
import numpy as np
import pytest

from qjax.numerics import Multiplier, Real, apply_scale_16, get_rule, quantize_multiplier, requantize
from qjax.numerics.rules import ScaledInteger, TosaScale
from tests.numerics import exact_rules
from tests.numerics.exact import saturate32
from tests.numerics.exact_rules import PUBLISHED, evaluate, records, small_records

INT32: dict[str, Any] = {"qmin": -(2**31), "qmax": 2**31 - 1}


def run(rule: str, acc: np.ndarray, constants) -> np.ndarray:
    return np.asarray(jax.jit(lambda a, c: requantize(a, c, rule=rule, **INT32))(acc, constants))


def rule_of(name: str, shifts: np.ndarray):
    """The type of the rule's constants, its oracle, the shift in its form, and which shifts it takes."""
    if name.startswith("tosa"):
        return TosaScale, getattr(exact_rules, name), 31 - shifts, shifts <= 29
    if name == "int16x8":
        return Multiplier, exact_rules.int16x8, shifts, shifts <= 7
    if name == "nvdla":
        return Multiplier, exact_rules.nvdla, shifts, shifts <= 15
    return Multiplier, PUBLISHED[name], shifts, shifts <= 30


NAMES = [*sorted(PUBLISHED), "int16x8", "nvdla", "tosa_single", "tosa_double"]


def compare(name: str, acc: np.ndarray, multiplier: np.ndarray, shift: np.ndarray) -> None:
    constants, oracle, shift, valid = rule_of(name, shift)
    acc, multiplier, shift = acc[valid], multiplier[valid], shift[valid]
    got = run(name, acc, constants(multiplier, shift))
    want = evaluate(oracle, acc, multiplier, shift)
    wrong = got != want
    assert not wrong.any(), (int(wrong.sum()), acc[wrong][:3], multiplier[wrong][:3], shift[wrong][:3])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sampled(1)
def test_a_million_adversarial_records(name):
    compare(name, *records())


@pytest.mark.parametrize("name", NAMES)
def test_adversarial_records(name):
    compare(name, *(c[:: 62 * 4 + 1] for c in records()))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sampled(2)
def test_every_8_bit_accumulator_and_6_bit_multiplier(name):
    compare(name, *small_records())


def test_the_records_hold_ties_of_every_shift():
    acc, multiplier, shift = (c.astype(np.int64) for c in records(62 * 800))
    t = 31 - shift
    tie = ((acc * multiplier) & ((1 << t) - 1)) == (1 << (t - 1))
    assert set(shift[tie & (acc < 0)].tolist()) == set(range(-31, 31))
    assert set(shift[tie & (acc > 0)].tolist()) == set(range(-30, 31))


# ------------------------------------------------------------------------------------ what the rules claim


def test_nvdla_has_a_scale_of_15_bits_and_no_large_ones():
    scale = np.array([0.7, 0.99999, 1.0, 2.0**14, 3.0e-9, 0.0])
    m = get_rule("nvdla").prepare(scale)
    stated = (np.asarray(m.multiplier) >> 16).astype(np.float64) * np.exp2(m.shift.astype(np.float64) - 15)
    assert not np.any(m.multiplier % 2**16)
    assert np.max(m.multiplier >> 16) == 2**15 - 1
    assert np.all(np.abs(stated - scale) <= scale * 2.0**-15)
    traced = jax.jit(get_rule("nvdla").prepare)(scale.astype(np.float32))
    for host, inside in zip(get_rule("nvdla").prepare(scale.astype(np.float32)), traced, strict=True):
        assert np.array_equal(host, np.asarray(inside))
    with pytest.raises(ValueError, match=r"nvdla takes effective scales below 2\^15\. Got one of 2\^15 or more"):
        get_rule("nvdla").prepare(2.0**15)
    acc = np.array([-3, -1, 1, 3], np.int32)
    assert requantize(acc, 0.5, rule="nvdla", **INT32).tolist() == [-2, -1, 1, 2]


def test_tvm_tonearest_is_nearest_away():
    acc, multiplier, shift = records()
    m = Multiplier(multiplier, shift)
    assert np.array_equal(run("tvm_tonearest", acc, m), run("nearest_away", acc, m))


def test_tvm_wraps_where_its_multiplier_is_a_half():
    acc = np.array([2**31 - 1, 2**31 - 2, -(2**31), 5], np.int32)
    half = Multiplier(np.int32(2**30), np.int32(0))
    assert requantize(acc, half, rule="tvm", **INT32).tolist() == [-(2**30), 2**30 - 1, -(2**30), 3]
    assert requantize(acc, half, rule="single_round", **INT32).tolist() == [2**30, 2**30 - 1, -(2**30), 3]
    doubled = Multiplier(np.int32(2**30), np.int32(2))
    assert requantize(acc, doubled, rule="tvm", **INT32).tolist() == [-2, -4, 0, 10]


def test_tvm_is_single_round_elsewhere():
    acc, multiplier, shift = records()
    keep = (shift < 0) & (multiplier != 2**30)
    m = Multiplier(multiplier[keep], shift[keep])
    assert np.array_equal(run("tvm", acc[keep], m), run("single_round", acc[keep], m))


def test_rndnu_is_xnnpacks_scalar_form_on_float32_bits():
    """(acc * multiplier + rounding) >> shift with the 24 bits of the float32 and 150 less its exponent field."""
    rng = np.random.default_rng(3)
    n = 200_000
    scale = np.exp2(rng.uniform(-32, 8, n)).astype(np.float32)
    bits = scale.view(np.int32)
    multiplier, shift = bits & 0x7FFFFF | 0x800000, 150 - (bits >> 23)
    # small enough that the shift in front does not saturate
    acc = (rng.integers(-(2**31), 2**31, n) >> np.clip(40 - shift, 0, 31)).astype(np.int32)
    want = [
        (a * m + (1 << (s - 1))) >> s for a, m, s in zip(*(c.tolist() for c in (acc, multiplier, shift)), strict=True)
    ]
    assert np.array_equal(np.asarray(requantize(acc, scale, rule="xnnpack_rndnu", **INT32)), want)
    m = get_rule("xnnpack_rndnu").prepare(np.float64(0.1))
    assert m.multiplier & 127 == 0
    assert m == quantize_multiplier(np.float32(0.1))


def test_rndnu_saturates_before_the_product():
    acc = np.array([2**31 - 1, -(2**31)], np.int32)
    assert requantize(acc, 1.5, rule="xnnpack_rndnu", **INT32).tolist() == [805306368, -805306368]
    assert requantize(acc, 1.5, rule="ruy", **INT32).tolist() == [-1, 0]


def test_int16x8_takes_48_bits():
    rng = np.random.default_rng(4)
    acc, multiplier, shift = (c[: 62 * 2000] for c in records())
    acc = np.concatenate(
        [
            rng.integers(-(2**47), 2**47, acc.size - 4) >> rng.integers(0, 47, acc.size - 4),
            [2**47, -(2**47), 2**47 - 1, 0],
        ]
    )
    keep = shift <= 7
    acc, m = acc[keep], Multiplier(multiplier[keep], shift[keep])
    want = evaluate(exact_rules.int16x8, acc, *m)
    got = requantize(acc, m, rule="int16x8", **INT32)
    assert got.dtype == np.int32
    assert np.array_equal(np.asarray(got), want)
    with jax.enable_x64(True):
        assert np.array_equal(run("int16x8", acc, m), want)
    beyond = np.array([2**60, -(2**60)], np.int64)
    assert requantize(beyond, 2.0**-20, rule="int16x8", **INT32).tolist() == [2**27, -(2**27)]
    with pytest.raises(ValueError, match=r"int16x8 takes effective scales below 2\^7. Got one of 2\^7"):
        requantize(acc, 128.0, rule="int16x8")
    with pytest.raises(TypeError, match=r"acc must be an int32 or int64 array. Got int16"):
        requantize(np.zeros(2, np.int16), 0.5, rule="int16x8")


def test_tosa_scales():
    c = get_rule("tosa_single").prepare(np.array([0.75, 2.0**28, 2.0**-33, 0.0]))
    assert c.multiplier.tolist() == [3 * 2**29, 2**30, 0, 0]
    assert c.shift.tolist() == [31, 2, 31, 31]
    traced = jax.jit(get_rule("tosa_single").prepare)(np.array([0.75, 2.0**28, 2.0**-33, 2.0**29], np.float32))
    assert traced.multiplier.tolist() == [3 * 2**29, 2**30, 0, 2**31 - 1]
    assert traced.shift.tolist() == [31, 2, 31, 2]
    with pytest.raises(ValueError, match=r"below 2\^29"):
        get_rule("tosa_double").prepare(2.0**29)
    with pytest.raises(ValueError, match=r"shift in \[2, 62\]. Got multipliers from 5 to 5 and shifts from 1 to 1"):
        requantize(np.zeros(1, np.int32), TosaScale(np.int32(5), np.int32(1)), rule="tosa_single")


def test_tosa_double_differs_from_both():
    acc = np.array([-6, -2, 2, 6, 3], np.int32)
    quarter = TosaScale(np.int32(2**30), np.int32(32))
    assert requantize(acc, quarter, rule="tosa_double").tolist() == [-2, -1, 1, 2, 1]
    assert requantize(acc, quarter, rule="tosa_single").tolist() == [-1, 0, 1, 2, 1]


def test_tosa_with_any_multiplier():
    rng = np.random.default_rng(5)
    n = 100_000
    acc = (rng.integers(-(2**31), 2**31, n) >> rng.integers(0, 31, n)).astype(np.int32)
    multiplier = (rng.integers(0, 2**31, n) >> rng.integers(0, 31, n)).astype(np.int32)
    c = TosaScale(multiplier, rng.integers(2, 63, n).astype(np.int32))
    for name in ("tosa_single", "tosa_double"):
        assert np.array_equal(run(name, acc, c), evaluate(getattr(exact_rules, name), acc, *c))


def test_apply_scale_16():
    rng = np.random.default_rng(6)
    n = 100_000
    value = rng.integers(-(2**47), 2**47, n) >> rng.integers(0, 47, n)
    value[:4] = [2**47, -(2**47), 0, 1]
    multiplier, shift = rng.integers(0, 2**15, n).astype(np.int32), rng.integers(2, 63, n).astype(np.int32)
    multiplier[:2] = 2**15 - 1
    want = evaluate(lambda v, m, s: saturate32((v * m + (1 << (s - 1))) >> s), value, multiplier, shift)
    got = apply_scale_16(value, multiplier, shift)
    assert isinstance(got, np.ndarray)
    assert got.dtype == np.int32
    assert np.array_equal(got, want)
    with jax.enable_x64(True):
        assert np.array_equal(np.asarray(jax.jit(apply_scale_16)(value, multiplier, shift)), want)
    with pytest.raises(TypeError, match=r"value must be an int64 array. Got int32"):
        apply_scale_16(np.int32(1), 1, 2)
    for name, operands in (("value", (2**48, 1, 2)), ("multiplier", (1, 2**15, 2)), ("shift", (1, 1, 63))):
        with pytest.raises(ValueError, match=rf"{name} must lie in \["):
            apply_scale_16(np.int64(operands[0]), *operands[1:])


def test_nemo():
    acc = (np.arange(-(2**12), 2**12) * 262139).astype(np.int32)
    for d in (1, 256, 2**16, 2**30):
        for e in (0.0, 0.3, 1.0, 1.9, 0.001):
            rule = f"nemo:{d}"
            c = get_rule(rule).prepare(e)
            assert (int(c.multiplier), 2 ** int(c.shift)) == (round(Real.of(e).to_float64() * d), d)
            want = evaluate(exact_rules.nemo, acc, np.full(acc.shape, c.multiplier), np.full(acc.shape, c.shift))
            assert np.array_equal(np.asarray(requantize(acc, e, rule=rule, **INT32)), want)
            traced = jax.jit(get_rule(rule).prepare)(np.float32(e))
            assert traced == get_rule(rule).prepare(np.float32(e))
    assert get_rule("nemo:256") is get_rule("nemo:256")
    for name in ("nemo:3", "nemo:x", "nemo:2:2"):
        with pytest.raises(ValueError, match=rf"needs one D out of 1, 2, 4, .*1073741824. Got '{name}'"):
            get_rule(name)
    with pytest.raises(ValueError, match=r"'nemo:1024' needs effective scales below .*choose a smaller D"):
        requantize(acc, 2.0**22, rule="nemo:1024")
    with pytest.raises(ValueError, match=r"at least 0. Got -1"):
        get_rule("nemo:4").prepare(-1.0)
    with pytest.raises(ValueError, match=r"its shift in \[0, 30\]"):
        requantize(acc, ScaledInteger(np.int32(1), np.int32(31)), rule="nemo:1024")


def test_tosas_double_round_is_gemmlowps_for_right_shifts() -> None:
    acc, multiplier, shift = records()
    right = (shift <= -1) & (multiplier >= 2**30)
    acc, multiplier, shift = acc[right], multiplier[right], shift[right]
    assert acc.size > 100_000
    assert set(range(1, 31)) <= set((-shift).tolist())
    gemmlowp = run("double_round", acc, Multiplier(multiplier, shift))
    tosa = run("tosa_double", acc, TosaScale(multiplier, (31 - shift).astype(np.int32)))
    np.testing.assert_array_equal(tosa, gemmlowp)
