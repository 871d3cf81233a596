"""Additions whose steps float32 holds exactly: all pairs of codes, in Python's integers and in any order of floats."""

from fractions import Fraction
from itertools import product

import numpy as np
import pytest

from qjax.ops.formulas import Setting, get
from tests.ops.formulas.onnx import Grids, all_pairs, clamp, evaluate, grids

F32 = np.float32
SEEDS = (0, 1, 2, 3, 4, 5, 7)
"""Setting 6 has scales that are refused, see the last test."""


def factors(g: Grids) -> tuple[list[int], int]:
    """The factors and the shift, from fractions."""
    ratios = [Fraction(float(s)) / Fraction(float(g.y_scale)) for s in g.scales]
    shift = 0
    while shift < 40 and max(ratios) * 2 ** (shift + 1) < 2**14:
        shift += 1
    # Python rounds half to even, too.
    return [round(ratio * 2**shift) for ratio in ratios], shift


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("op", "sign"), [("add", 1), ("subtract", -1)])
def test_one_sum_and_one_rounding(op, sign, seed):
    g = grids("uint8", seed)
    (m, n), shift = factors(g)
    a, b = (x.astype(np.int64) for x in all_pairs(g))
    total = a * m + sign * b * n
    # float64 holds total / 2^shift exactly
    want = np.rint(total / 2.0**shift) + g.y_zero_point
    np.testing.assert_array_equal(evaluate("openvino_add", op, all_pairs(g), g), clamp(want, g))


@pytest.mark.parametrize("seed", SEEDS)
def test_float32_holds_every_step(seed):
    """So a fused step, or the other order, is the same number."""
    g = grids("uint8", seed)
    ms, shift = factors(g)
    a, b = (x.astype(F32) for x in all_pairs(g))
    exact = (a.astype(np.float64) * ms[0] + b.astype(np.float64) * ms[1]) / 2.0**shift
    share = F32(2.0**-shift)
    for early, swapped in product((False, True), repeat=2):
        m, n = (F32(x) * share if early else F32(x) for x in ms)
        terms = [a * m, b * n][:: -1 if swapped else 1]
        total = terms[0] + terms[1]
        np.testing.assert_array_equal(total if early else total * share, exact)


def test_codes_of_16_bits_do_not_wrap():
    g = Grids((F32(1), F32(1)), (0, 0), F32(1), 0, "int16")
    ends = np.array([[-(2**15), 2**15 - 1]], np.int16)
    assert evaluate("openvino_add", "add", [ends, ends], g).tolist() == [[-(2**15), 2**15 - 1]]


def test_an_output_scale_far_too_small_is_refused():
    setting = Setting("add", (F32(2.0**14), F32(1)), (np.int32(0),) * 2, F32(1), np.int32(0), "uint8")
    with pytest.raises(ValueError, match=r"expected ratios of scales .* below 2\^14.* calibrate the output on the sum"):
        get("openvino_add").prepare(setting)
