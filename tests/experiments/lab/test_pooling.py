"""The study of pooling: exact results against fractions, graphs against them, and every formula known."""

import math
from fractions import Fraction

import jax
import numpy as np
import pytest

import qjax
from experiments.lab import pooling
from experiments.lab import pooling_cases as cases
from qjax.contrib.lab.study import Settings

BY_NAME = {case.name: case for case in cases.CASES}


def _rounded(value: Fraction, ties: str) -> int:
    below = math.floor(value)
    if value - below != Fraction(1, 2) or ties == "even":
        return round(value)
    return below if ties == "away" and value < 0 else below + 1


@pytest.mark.parametrize("ties", ["even", "up", "away"])
def test_rounding_is_that_of_fractions(ties: str) -> None:
    numerators = np.arange(-40, 40)
    found = cases.rounded(cases.CASES[0], numerators, 8, ties)
    assert list(found) == [_rounded(Fraction(int(n), 8), ties) for n in numerators]


def test_ties_away_from_code_0_see_the_stored_codes() -> None:
    dark = BY_NAME["pool 2x2, dark half behind a relu"]
    # three codes -128 and one -126: centred sum 2, stored sum -510
    assert cases.rounded(dark, np.array([2]), 4, "away")[0] == 1
    assert cases.rounded(dark, np.array([2]), 4, "away from code 0")[0] == 0


@pytest.mark.parametrize("name", ["pool 2x2", "pool 3x3", "add, scales 1 : 1/4 : 2"])
def test_exact_results_and_their_share_of_ties(name: str) -> None:
    case = BY_NAME[name]
    inputs = cases.codes(case, 0, 2**13)
    numerator, denominator = cases.exact(case, inputs)
    ties = np.mean((2 * numerator + denominator) % (2 * denominator) == 0)
    assert ties == pooling._SHARES[name]
    if case.op == "pool":
        x, k = inputs[0].astype(int), case.size
        assert numerator[3, 0, 1, 7] == x[3, :, k : 2 * k, 7].sum()
    else:
        assert numerator[5, 9] == 4 * int(inputs[0][5, 9]) + int(inputs[1][5, 9])


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("pool 2x2, dark half behind a relu", "tflite_micro"),
        ("pool 2x2", "tosa"),
        ("add, equal scales, behind a relu", "tflite_xnnpack"),
    ],
)
def test_a_graph_gives_the_exact_codes_with_its_ties(name: str, target: str) -> None:
    case = BY_NAME[name]
    inputs = cases.codes(case, 0, 2**13)
    numerator, denominator = cases.exact(case, inputs)
    expected = cases.rounded(case, numerator, denominator, cases.ties_of(case.op, target))
    # flax divides by a numpy integer
    with jax.numpy_dtype_promotion("standard"):
        graph = cases.graph(case, target)
    out = np.asarray(graph.run(*inputs)).astype(np.int64) - case.zero_point
    assert np.array_equal(out, expected)


def test_every_target_has_a_known_way_with_ties() -> None:
    for op in ("pool", "add"):
        assert {cases.ties_of(op, name) for name in qjax.targets.names()} <= {*pooling.KINDS[op]}
        assert set(cases.chosen_targets(op, True)) == set(qjax.targets.names())
        assert "tflite_micro" in cases.chosen_targets(op, False)


def test_every_prediction_has_a_name_of_its_own() -> None:
    names = [p.name for p in pooling.predict(Settings())]
    assert len(names) == len(set(names))
