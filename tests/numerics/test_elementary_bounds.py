"""The interval arithmetic behind tables of functions: "exact" is said only of what is; else the truth lies within."""

from fractions import Fraction

import numpy as np
import pytest

from qjax.numerics.elementary.bounds import exact_product, unless_exact, widened
from qjax.numerics.elementary.intervals import Steps

RNG = np.random.default_rng(9)
WIDE = RNG.normal(size=400) * 2.0 ** RNG.integers(-60, 60, 400)
SHORT = np.round(RNG.normal(size=400) * 64) / 8
NUMBERS = np.concatenate([WIDE, SHORT, [0.0, 1.0, -1.0, 2.0**-600]])
OTHERS = RNG.permutation(NUMBERS)


def fractions(values):
    return [Fraction(float(value)) for value in np.broadcast_to(values, NUMBERS.shape)]


@pytest.mark.parametrize("function", ["add", "sub", "mul"])
def test_the_truth_is_within_and_exact_means_exact(function):
    steps = Steps(NUMBERS.shape)
    low, high = getattr(steps, f"_{function}")((NUMBERS, NUMBERS), (OTHERS, OTHERS))
    operation = {"add": Fraction.__add__, "sub": Fraction.__sub__, "mul": Fraction.__mul__}[function]
    truth = [operation(a, b) for a, b in zip(fractions(NUMBERS), fractions(OTHERS), strict=True)]
    exact = [a == b == c for a, b, c in zip(fractions(low), fractions(high), truth, strict=True)]
    assert all(a <= c <= b for a, b, c in zip(fractions(low), fractions(high), truth, strict=True))
    assert all(a != b or c for a, b, c in zip(low, high, exact, strict=True))
    # short numbers lose nothing, beside short ones
    short = np.isin(NUMBERS, SHORT) & np.isin(OTHERS, SHORT)
    assert all(c for c, both in zip(exact, short, strict=True) if both)
    assert 200 < np.sum(low == high) < NUMBERS.size


def test_a_product_is_called_exact_where_it_is():
    product, exact = exact_product(NUMBERS, OTHERS)
    for a, b, c, says in zip(fractions(NUMBERS), fractions(OTHERS), fractions(product), exact, strict=True):
        assert not says or a * b == c
    assert np.sum(exact) > 100
    assert not exact_product(np.float64(2.0**-600), np.float64(2.0**-500))[1]


def test_what_is_not_exact_is_widened():
    value = np.asarray([1.0, 3.0])
    low, high = unless_exact(value, np.asarray([True, False]))
    assert (low[0], high[0]) == (1.0, 1.0)
    assert low[1] < 3.0 < high[1]
    with np.errstate(invalid="ignore"):
        ends = widened(np.asarray([1.0, np.inf]), np.asarray([2.0, np.inf]), 2.0**-40)
    assert ends[0][0] < 1.0
    assert ends[1][0] > 2.0
    assert ends[0][1] == np.finfo(np.float64).max
    assert ends[1][1] == np.inf
