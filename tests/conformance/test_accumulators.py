"""The records: fixed for ever, in range, and able to tell the rules apart."""

import itertools
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from conformance import accumulators
from qjax.numerics import Multiplier, requantize


def test_splitmix64_is_the_published_sequence():
    # The first outputs for seed 0 in the reference implementation's test vector.
    want = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert accumulators.splitmix64(3, 0).tolist() == want


def test_every_record_is_a_valid_one():
    acc, multiplier, shift = records = accumulators.all_records()
    assert len(acc) == 395436
    assert {a.dtype for a in records} == {np.dtype(np.int32)}
    assert multiplier.min() == 2**30
    assert set(shift.tolist()) == set(range(-31, 31))
    assert (acc.min(), acc.max()) == (-(2**31), 2**31 - 1)


def test_near_ties_are_near_ties():
    for acc, m, s in zip(*accumulators.near_ties(20), strict=True):
        step = Fraction(int(m), 2 ** (31 - int(s)))
        assert abs((int(acc) * step) % 1 - Fraction(1, 2)) <= Fraction(3, 2) * step
    with pytest.raises(ValueError, match=r"negative shifts, -31 to -1. Got -2 to 0"):
        accumulators.near_ties(1, shifts=(-2, 0))


def test_any_two_rules_differ_somewhere():
    acc, multiplier, shift = accumulators.all_records()
    constants = Multiplier(multiplier, shift)
    limits: dict[str, Any] = {"qmin": -(2**31), "qmax": 2**31 - 1}
    rules = ("nearest_even", "nearest_away", "single_round", "double_round", "neon", "ruy", "tvm")
    answers = {rule: np.asarray(requantize(acc, constants, rule=rule, **limits)) for rule in rules}
    small = shift < 0  # nothing wraps; ruy shifts left for s = 0 already
    for a, b in itertools.combinations(rules, 2):
        count = np.count_nonzero((answers[a] != answers[b])[small])
        assert (count == 0) == ({a, b} == {"single_round", "ruy"}), (a, b, count)
