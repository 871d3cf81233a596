"""XNNPACK's formulas on ARM against Python's integers and fractions."""

from fractions import Fraction

import numpy as np
import pytest

from conformance import cases
from tests.numerics.exact import nearest_even, nearest_up
from tests.numerics.float32 import nearest
from tests.ops.formulas import tflite
from tests.ops.formulas.onnx import Grids, clamp, evaluate, f32
from tests.ops.formulas.test_tflite import expected, grids, operands


def multiply(a: int, b: int, g: Grids) -> int:
    scale = nearest(nearest(exact(g.scales[0]) * exact(g.scales[1])) / exact(g.y_scale))
    return nearest_up(a * b * scale) + g.y_zero_point


def exact(x: np.float32) -> Fraction:
    return Fraction(float(x))


@pytest.mark.parametrize("seed", range(8))
def test_multiply(seed):
    g = grids("int8", seed, spread=2)
    codes = operands(g, 1003, seed)

    def one(a, b):
        return multiply(a, b, g)

    np.testing.assert_array_equal(evaluate("xnnpack_multiply_arm", "multiply", codes, g), expected(g, codes, one, one))


def test_multiply_takes_ties_up_where_x86_takes_them_to_even():
    g = Grids((f32(0.25), f32(0.5)), (0, 0), f32(1), 3, "int8")
    codes = [np.array([-12, -4, 4, 12, 20], np.int32), np.ones(5, np.int32)]
    assert evaluate("xnnpack_multiply_arm", "multiply", codes, g).tolist() == [2, 3, 4, 5, 6]
    assert evaluate("xnnpack_multiply", "multiply", codes, g).tolist() == [1, 3, 3, 5, 5]


@pytest.mark.parametrize("y_scale", [2.0**-8, 2.0**16.1])
def test_far_scales_and_other_codes_are_litert_s_own(y_scale):
    far = Grids((f32(1), f32(1)), (3, -100), f32(y_scale), 5, "int8")
    for g in (far, grids("int16", 1)):
        codes = operands(g, 200, 1)
        np.testing.assert_array_equal(
            evaluate("xnnpack_multiply_arm", "multiply", codes, g),
            evaluate("tflite_multiply_neon", "multiply", codes, g),
        )


def mean(total: int, count: int, g: Grids) -> int:
    """The total is of the codes as they are."""
    scale = nearest(nearest(exact(g.scales[0]) / exact(g.y_scale)) * nearest(Fraction(1, count)))
    offset = nearest(g.y_zero_point - nearest(Fraction(count * g.zero_points[0])) * scale)
    return nearest_even(nearest(nearest(Fraction(total)) * scale + offset))


@pytest.mark.parametrize("count", [1, 3, 16, 49, 12544])
@pytest.mark.sampled(2)
def test_mean(count):
    g = grids("int8", count, inputs=1, spread=2)
    (zero,) = g.zero_points
    low, high = g.limits
    rng = np.random.default_rng(count)
    totals = np.concatenate([rng.integers(low * count, high * count + 1, 400), rng.integers(-900, 901, 400)])
    want = clamp(np.array([mean(int(t), count, g) for t in totals]), g)
    centred = [(totals - count * zero).astype(np.int32)]
    np.testing.assert_array_equal(evaluate("xnnpack_mean_arm", "mean", centred, g, count), want)


def test_mean_where_fused_steps_show():
    differ = 0
    means = [case for case in cases.mean_fused() if case.inputs[0].shape[1:3] in ((2, 2), (5, 5), (12, 12))]
    for case in means[:12]:
        (x,), y = case.grids, case.output
        g = Grids((f32(x.scale),), (x.zero_point,), f32(y.scale), y.zero_point, "int8")
        count = int(np.prod(case.inputs[0].shape[1:3]))
        # one length, so that cases of one count share a program
        totals = np.resize(case.inputs[0].astype(np.int64).sum((1, 2, 3)), 192)
        want = clamp(np.array([mean(int(t), count, g) for t in totals]), g)
        apart = clamp(np.array([tflite.xnnpack_mean(int(t), count, g) for t in totals]), g)
        centred = [(totals - count * x.zero_point).astype(np.int32)]
        np.testing.assert_array_equal(evaluate("xnnpack_mean_arm", "mean", centred, g, count), want)
        np.testing.assert_array_equal(evaluate("xnnpack_mean", "mean", centred, g, count), apart)
        differ += int(np.count_nonzero((want != apart)[: len(case.inputs[0])]))
    assert differ > 100
