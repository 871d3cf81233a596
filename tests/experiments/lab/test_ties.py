"""The study of ties: its counts and its formulas against fractions in unbounded integers."""

import math
from fractions import Fraction

import numpy as np
import pytest

from experiments.lab import ties
from qjax.contrib.lab.study import Settings

HALF = Fraction(1, 2)
EXACT = {
    "nearest_even": round,
    "nearest_up": lambda x: math.floor(x + HALF),
    "nearest_away": lambda x: math.floor(x + HALF) if x >= 0 else -math.floor(-x + HALF),
    "toward_zero": math.trunc,
    "floor": math.floor,
    "ceil": math.ceil,
}


@pytest.mark.parametrize("domain", ties.DOMAINS)
@pytest.mark.parametrize("shift", [1, 2, 5])
def test_the_formulas_of_the_bias_are_those_of_fractions(shift: int, domain: str) -> None:
    span = 2 ** (shift + 1)
    numbers = [Fraction(x, 2**shift) for x in range(0 if domain == "after relu" else -span, span)]
    for rounding, exact in EXACT.items():
        bias = sum((exact(x) - x for x in numbers), Fraction()) / len(numbers)
        assert float(bias) == ties.bias_of_shift(rounding, shift, domain), rounding


def test_the_kernels_meet_the_formulas_exactly() -> None:
    for domain in ties.DOMAINS:
        for rounding, biases in ties.shift_biases(domain).items():
            assert biases == [ties.bias_of_shift(rounding, shift, domain) for shift in ties.SHIFTS], rounding


@pytest.mark.parametrize(("multiplier", "shift"), [(1, 4), (3, 5), (5, 6), (1025, 14), (6, 5)])
def test_ties_are_counted_as_in_fractions(multiplier: int, shift: int) -> None:
    acc = np.arange(2**15)
    products = (Fraction(int(x) * multiplier, 2**shift) for x in acc)
    counted = sum(product.denominator == 2 for product in products)
    assert ties.tie_share(acc, multiplier, shift) == counted / acc.size


@pytest.mark.exhaustive
def test_a_real_valued_scale_has_its_ties_counted_in_unbounded_integers() -> None:
    # 3 * 2^29 / 2^34: the exact product of acc = 16 is 1.5, a tie by construction
    m = ties.quantize_multiplier(np.float64(3 / 32))
    t = 31 - int(m.shift)
    assert Fraction(16 * int(m.multiplier), 2**t) == Fraction(3, 2)
    biases, found, differing = ties.real_scales(Settings(seed=1))
    assert (found, differing) == (0, 0)
    assert set(biases) == {(rule, domain) for rule in ties.RULES for domain in ties.DOMAINS}


def test_every_prediction_has_a_name_of_its_own() -> None:
    names = [p.name for p in ties.predict(Settings())]
    assert len(names) == len(set(names))
    assert all(p.low <= p.high for p in ties.predict(Settings()))
