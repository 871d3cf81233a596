"""ONNX Runtime's averages: of integers where it pools globally, of float32 numbers one by one elsewhere."""

import numpy as np
import pytest

from qjax.ops.formulas import get
from tests.ops.formulas.onnx import Grids, clamp, evaluate, f32, grids

COUNT = 20_000


def setting(dtype: str, seed: int, n: int) -> tuple[Grids, np.ndarray]:
    """Grids, and n centred codes for each of COUNT averages; every fourth average lies near a tie."""
    g = grids(dtype, seed, inputs=1)
    rng = np.random.default_rng(seed)
    if seed % 2:
        g = Grids(g.scales, g.zero_points, f32(g.scales[0] / f32(rng.integers(1, n + 1))), g.y_zero_point, dtype)
    low, high = g.limits
    return g, rng.integers(low, high + 1, (n, COUNT)).astype(np.int32) - np.int32(g.zero_points[0])


def global_oracle(q: np.ndarray, g: Grids) -> np.ndarray:
    share = f32(g.scales[0] / f32(g.y_scale * f32(len(q))))
    return np.rint((q.sum(0).astype(f32) * share).astype(np.float64)) + g.y_zero_point


def float_oracle(q: np.ndarray, g: Grids, count) -> np.ndarray:
    """float32 of the average divided by the output's scale."""
    total = np.zeros(q.shape[1:], f32)
    for row in q:
        total = total + row.astype(f32) * g.scales[0]
    quotient = total / np.asarray(count).astype(f32) / g.y_scale
    assert quotient.dtype == np.float32
    return quotient


def inside(quotient: np.ndarray, g: Grids) -> np.ndarray:
    y = np.rint((quotient + f32(g.y_zero_point)).astype(np.float64))
    return np.where(np.abs(y) >= 2.0**31, -(2.0**31), y)


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("n", [1, 3, 49])
def test_global_average_sums_integers(dtype, seed, n):
    g, q = setting(dtype, seed, n)
    got = evaluate("onnx_global_average", "mean", (q.sum(0),), g, count=n)
    np.testing.assert_array_equal(got, clamp(global_oracle(q, g), g))


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("n", [2, 9])
@pytest.mark.sampled(2)
def test_average_pool_adds_floats_in_order(dtype, seed, n):
    g, q = setting(dtype, seed, n)
    want = clamp(inside(float_oracle(q, g, n), g), g)
    np.testing.assert_array_equal(evaluate("onnx_average_pool", "average_pool", (q,), g, count=n), want)
    want = clamp(np.rint(float_oracle(q, g, n).astype(np.float64)) + g.y_zero_point, g)
    np.testing.assert_array_equal(evaluate("onnx_float_average_pool", "average_pool", (q,), g, count=n), want)


def test_padding_is_left_out_of_the_count():
    g, q = setting("uint8", 3, 6)
    count = np.random.default_rng(0).integers(1, 7, COUNT).astype(np.int32)
    q = np.where(np.arange(6)[:, None] < count, q, np.int32(0))
    want = clamp(inside(float_oracle(q, g, count), g), g)
    np.testing.assert_array_equal(evaluate("onnx_average_pool", "average_pool", (q,), g, count=count), want)


def test_a_window_of_the_whole_image_is_a_global_average():
    g, q = setting("int8", 1, 12)
    whole = get("onnx_average_pool").whole
    assert whole is not None
    got = evaluate(whole, "average_pool", (q.sum(0),), g, count=12)
    np.testing.assert_array_equal(got, clamp(global_oracle(q, g), g))
    assert np.any(got != evaluate("onnx_average_pool", "average_pool", (q,), g, count=12))


def test_the_order_of_the_summands_shows():
    g, q = setting("int8", 1, 12)
    pooled = [evaluate("onnx_average_pool", "average_pool", (x,), g, count=12) for x in (q, q[::-1].copy())]
    assert np.any(pooled[0] != pooled[1])
