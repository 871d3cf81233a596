"""One shift with the roundings and overflows of ap_fixed: every 12-bit accumulator under every pair of modes."""

from fractions import Fraction

import jax
import numpy as np
import pytest

from qjax.numerics import Real, get_rule, requantize
from qjax.numerics.rules import PowerOfTwo, power_of_two
from tests.numerics.exact_rules import AP_ROUNDINGS, ap_overflow

OVERFLOWS = ("SAT", "SAT_ZERO", "SAT_SYM", "WRAP")
CODES = [
    (0, -128, 127),
    (3, -128, 127),
    (-128, -128, 127),
    (5, 0, 255),
    (0, -127, 127),
    (1, -2, 1),
    (0, 0, 1),
    (0, -(2**31), 2**31 - 1),
]


def oracle(rounding: str, overflow: str, acc: int, shift: int, codes: tuple[int, int, int]) -> int:
    rounded = AP_ROUNDINGS[rounding](Fraction(acc) * Fraction(2) ** -shift)
    return ap_overflow(overflow, rounded + codes[0], *codes)


@pytest.mark.parametrize("rounding", AP_ROUNDINGS)
@pytest.mark.sampled(2)
def test_every_12_bit_accumulator(rounding):
    acc = np.arange(-(2**11), 2**11, dtype=np.int32)
    first = list(AP_ROUNDINGS).index(rounding)
    for shift in (-34, -31, -20, -3, 0, 1, 2, 5, 11, 12, 31, 40, 63):
        rounded = [AP_ROUNDINGS[rounding](Fraction(a) * Fraction(2) ** -shift) for a in acc.tolist()]
        for j, overflow in enumerate(OVERFLOWS):
            zero_point, qmin, qmax = CODES[(first + j) % len(CODES)]
            want = [ap_overflow(overflow, r + zero_point, zero_point, qmin, qmax) for r in rounded]
            got = requantize(
                acc,
                PowerOfTwo(np.int32(shift)),
                rule=f"power_of_two:{rounding}:{overflow}",
                zero_point=zero_point,
                qmin=qmin,
                qmax=qmax,
            )
            assert np.asarray(got).tolist() == want, (shift, overflow, qmin, qmax)


@pytest.mark.parametrize("overflow", OVERFLOWS)
@pytest.mark.parametrize("rounding", AP_ROUNDINGS)
@pytest.mark.sampled(4)
def test_any_accumulator(rounding, overflow):
    """About a million records over the 28 pairs: ties, ends of int32, every shift."""
    rng = np.random.default_rng(3)
    n = 36_000
    shift = rng.integers(-40, 70, n)
    acc = rng.integers(-(2**31), 2**31, n) >> rng.integers(0, 31, n)
    tie = (2 * rng.integers(-(2**20), 2**20, n) + 1) << np.clip(shift - 1, 0, 31)
    acc = np.where(np.arange(n) % 3 == 0, np.clip(tie, -(2**31), 2**31 - 1), acc)
    acc[:3] = [2**31 - 1, -(2**31), 0]
    codes = CODES[(len(rounding) + len(overflow)) % len(CODES)]
    f = jax.jit(
        lambda a, c: requantize(
            a, c, rule=f"power_of_two:{rounding}:{overflow}", zero_point=codes[0], qmin=codes[1], qmax=codes[2]
        )
    )
    got = np.asarray(f(acc.astype(np.int32), PowerOfTwo(shift.astype(np.int32))))
    want = [oracle(rounding, overflow, a, s, codes) for a, s in zip(acc.tolist(), shift.tolist(), strict=True)]
    assert np.array_equal(got, want)


def test_the_table_of_ties():
    """The table in the module's docstring."""
    acc = np.array([1, -1, 3, -3], np.int32)
    ties = {r: requantize(acc, 0.5, rule=f"power_of_two:{r}:SAT").tolist() for r in AP_ROUNDINGS}
    assert ties == {
        "TRN": [0, -1, 1, -2],
        "TRN_ZERO": [0, 0, 1, -1],
        "RND": [1, 0, 2, -1],
        "RND_CONV": [0, 0, 2, -2],
        "RND_ZERO": [0, 0, 1, -1],
        "RND_INF": [1, -1, 2, -2],
        "RND_MIN_INF": [0, -1, 1, -2],
    }
    for rounding, values in ties.items():
        (row,) = [r for r in (power_of_two.__doc__ or "").splitlines() if r.startswith(f"| {rounding} |")]
        assert row.endswith(f"| {', '.join(str(v) for v in values)} |")


def test_overflows_of_an_unsigned_and_a_narrow_range():
    acc = np.array([300, -3, 256, 200], np.int32)
    unsigned = {
        o: requantize(acc, 1.0, rule=f"power_of_two:TRN:{o}", zero_point=2, qmin=0, qmax=255).tolist()
        for o in OVERFLOWS
    }
    assert unsigned == {
        "SAT": [255, 0, 255, 202],
        "SAT_ZERO": [2, 2, 2, 202],
        "SAT_SYM": [255, 0, 255, 202],
        "WRAP": [46, 255, 2, 202],
    }
    acc = np.array([128, -128, -129], np.int32)
    assert requantize(acc, 1.0, rule="power_of_two:TRN:SAT_SYM").tolist() == [127, -127, -127]
    assert requantize(acc, 1.0, rule="power_of_two:TRN:WRAP", qmin=-127).tolist() == [-127, -127, 127]


def test_scales():
    rule = get_rule("power_of_two")
    e = np.array([1.0, 0.25, 8.0, 2.0**-50], np.float32)
    assert rule.prepare(e).shift.tolist() == [0, 2, -3, 50]
    assert jax.jit(rule.prepare)(e).shift.tolist() == [0, 2, -3, 50]
    assert rule.prepare(Real.of(2.0**-7)).shift == 7
    for bad in (0.3, 0.0, -0.5, np.array([0.5, 0.75])):
        with pytest.raises(ValueError, match=r"power_of_two needs effective scales.*powers of two. Got .*tqt"):
            rule.prepare(bad)
    with pytest.raises(ValueError, match=r"a shift must lie in"):
        requantize(np.zeros(1, np.int32), PowerOfTwo(np.int32(2**30)), rule="power_of_two")


def test_names():
    assert get_rule("power_of_two:TRN:WRAP") is get_rule("power_of_two:TRN:WRAP")
    assert get_rule("power_of_two:TRN:WRAP").name == "power_of_two:TRN:WRAP"
    acc = np.arange(-1000, 1000, dtype=np.int32)
    default, named = (requantize(acc, 0.125, rule=r) for r in ("power_of_two", "power_of_two:RND_CONV:SAT"))
    assert np.array_equal(default, named)
    assert np.array_equal(default, requantize(acc, 0.125, rule="nearest_even"))
    for name in ("power_of_two:UP:SAT", "power_of_two:TRN:CLIP", "power_of_two:TRN", "power_of_two:TRN:SAT:1"):
        with pytest.raises(ValueError, match=rf"rounding among TRN, .*overflow among SAT, .*WRAP. Got '{name}'"):
            get_rule(name)
    with pytest.raises(ValueError, match=r"rule must be one of .*nemo:D, power_of_two:ROUNDING:OVERFLOW. Got 'half:1'"):
        get_rule("half:1")
