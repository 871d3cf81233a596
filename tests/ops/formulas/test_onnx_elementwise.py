"""ONNX Runtime's additions, products and changes of the grid, for all pairs of codes."""

from fractions import Fraction

import numpy as np
import pytest

from tests.ops.formulas.onnx import Grids, all_pairs, clamp, evaluate, f32, grids

DTYPES = ("int8", "uint8")
SEEDS = range(8)
UNIT = 240
"""The oracle of the multiply-adds counts in units of 2^-240."""


def units(x: np.floating) -> int:
    value = Fraction(float(x)) * 2**UNIT
    assert value.denominator == 1
    return int(value)


def half_even(n: int, bits: int) -> int:
    """n / 2^bits to the nearest integer, ties to even."""
    half = 1 << (bits - 1)
    return (n + half - 1 + (n >> bits & 1)) >> bits


def nearest24(n: int) -> int:
    """The nearest integer with 24 significant bits, ties to even."""
    surplus = n.bit_length() - 24
    return half_even(n, surplus) << surplus if surplus > 0 else n


def converted(x: int) -> int:
    """x86's conversion of a float to int32."""
    return x if -(2**31) <= x < 2**31 else -(2**31)


def exact_add(g: Grids) -> np.ndarray:
    (za, zb), zy = g.zero_points, g.y_zero_point << UNIT
    ra, rb = (units(f32(s / g.y_scale)) for s in g.scales)
    fixed = nearest24(zy - nearest24(ra * za + nearest24(rb * zb)))
    low, high = g.limits
    rows = []
    for b in range(low, high + 1):
        second = nearest24(b * rb + fixed)
        rows.append([converted(half_even(nearest24(a * ra + second), UNIT)) for a in range(low, high + 1)])
    return np.array(rows).T


def converted_array(x: np.ndarray) -> np.ndarray:
    y = np.rint(x.astype(np.float64))
    return np.where((y < -(2.0**31)) | (y >= 2.0**31), -(2.0**31), y)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.sampled(6)
def test_add_is_two_fused_multiply_adds(dtype, seed):
    g = grids(dtype, seed)
    np.testing.assert_array_equal(evaluate("onnx_add", "add", all_pairs(g), g), clamp(exact_add(g), g))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", SEEDS)
def test_multiply_has_the_zero_point_inside(dtype, seed):
    g = grids(dtype, seed)
    a, b = all_pairs(g)
    ratio = f32(f32(g.scales[0] * g.scales[1]) / g.y_scale)
    inside = (a * b).astype(f32) * ratio + f32(g.y_zero_point)
    assert inside.dtype == np.float32
    np.testing.assert_array_equal(evaluate("onnx_multiply", "multiply", (a, b), g), clamp(converted_array(inside), g))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["rescale", "add", "subtract", "multiply"])
@pytest.mark.sampled(3)
def test_float_steps_between_dequantize_and_quantize(name, dtype, seed):
    g = grids(dtype, seed)
    a, b = all_pairs(g)
    x, y = a.astype(f32) * g.scales[0], b.astype(f32) * g.scales[1]
    real = {"rescale": x, "add": x + y, "subtract": x - y, "multiply": x * y}[name] / g.y_scale
    assert real.dtype == np.float32
    formula = {"rescale": "onnx_rescale", "multiply": "onnx_float_multiply"}.get(name, "onnx_float_add")
    if name == "rescale":
        g = Grids(g.scales[:1], g.zero_points[:1], g.y_scale, g.y_zero_point, dtype)
    operands = (a,) if name == "rescale" else (a, b)
    want = clamp(np.rint(real.astype(np.float64)) + g.y_zero_point, g)
    np.testing.assert_array_equal(evaluate(formula, name, operands, g), want)


def test_the_formulas_differ_where_they_should():
    """Fused or not, zero point inside or outside: the settings above tell them apart."""
    g = grids("int8", 0)
    pairs = all_pairs(g)
    assert np.any(evaluate("onnx_add", "add", pairs, g) != evaluate("onnx_float_add", "add", pairs, g))
    g = Grids((f32(0.25), f32(0.5)), (0, 0), f32(1), 3, "int8")
    products = [evaluate(name, "multiply", pairs, g) for name in ("onnx_multiply", "float32/f32")]
    assert np.any(products[0] != products[1])
