"""The interval arithmetic behind tables of functions: "exact" is said only of what is; else the truth lies within."""

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from qjax.numerics.elementary import exact, functions
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


POINTS = np.concatenate(
    [RNG.normal(size=60) * 3, RNG.normal(size=20) * 0.01, [-1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 27.0, -8.0]]
)
ONE = ("acos", "acosh", "asin", "asinh", "atan", "atanh", "cbrt", "cos", "cosh", "erf", "erfc", "exp", "exp2", "expm1")
ONE += ("log", "log1p", "logistic", "sin", "sinh", "sqrt", "tan", "tanh")


@pytest.mark.parametrize("function", ONE)
@pytest.mark.parametrize("width", [0.0, 2.0**-12])
def test_the_value_of_a_function_is_within(function, width):
    """Of a point, and of the least, the greatest and the middle of a short interval, against 28 digits."""
    steps = Steps(POINTS.shape)
    with np.errstate(all="ignore"):
        low, high = steps._step(function, (0,), [(POINTS, POINTS + width)])
    checked = 0
    for index in np.flatnonzero(~steps.unsure & ~np.isnan(low) & ~np.isnan(high)):
        for part in (0.0, 0.5, 1.0):
            value = getattr(functions, function)(Fraction(float(POINTS[index] + part * width)))
            if not math.isfinite(value):
                continue  # at an edge of the domain
            checked += 1
            # Python compares a fraction with a float exactly
            assert float(low[index]) <= Fraction(value) <= float(high[index])
    # those of a restricted domain keep the points inside of it
    assert checked >= 3 * 8
    tight = (high - low)[~steps.unsure & np.isfinite(low) & np.isfinite(high)]
    assert np.median(tight) <= 1e-3 + 16 * width


@pytest.mark.parametrize(("value", "nearest"), [("0.5", 0), ("1.5", 2), ("2.5", 2), ("-3.5", -4), ("7.25", 7)])
def test_numbers_with_digits_round_to_even(value, nearest):
    assert exact.round_even(Decimal(value)) == nearest
    assert exact.round_even(Fraction(value)) == nearest


def test_a_choice_between_intervals_takes_both_ends_of_one():
    steps = Steps((2,))
    a, b = (np.array([1.0, 2.0]), np.array([1.5, 2.5])), (np.array([3.0, 4.0]), np.array([3.5, 4.5]))
    low, high = steps._select(np.array([False, True]), a, b)
    assert np.array_equal(low, [1.0, 4.0])
    assert np.array_equal(high, [1.5, 4.5])
    assert not steps.unsure.any()


def test_a_jump_within_an_interval_is_unsure():
    """Half a number rounds away from zero; the ends of an interval around it round to different integers."""
    steps = Steps((3,))
    low, _ = steps._round_away((np.array([0.4, 0.6, 2.0]), np.array([0.6, 0.7, 2.0])))
    assert np.array_equal(steps.unsure, [True, False, False])
    assert np.array_equal(low[1:], [1.0, 2.0])
