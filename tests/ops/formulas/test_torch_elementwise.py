"""PyTorch's additions, products and changes of the grid, for all pairs of codes: in blocks, and behind them."""

from fractions import Fraction

import numpy as np
import pytest

from qjax.ops.formulas import Setting, get
from tests.numerics.float32 import nearest
from tests.ops.formulas.onnx import Grids, all_pairs, clamp, f32, grids
from tests.ops.formulas.torch import run

DTYPES = ("int8", "uint8")
SEEDS = range(8)
ONE = f32(1)


def fused(a: np.ndarray, b: np.floating, c: np.floating) -> np.ndarray:
    """fma(a, b, c) in fractions."""
    b_, c_ = Fraction(float(b)), Fraction(float(c))
    return np.array([float(nearest(Fraction(float(x)) * b_ + c_)) for x in a], f32)


def wrapped(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.int64) + 2**31) % 2**32 - 2**31


def rint(x: np.ndarray) -> np.ndarray:
    return np.clip(np.rint(x.astype(np.float64)), -(2.0**31), 2.0**31 - 1).astype(np.int64)


def stored(g: Grids, i: int) -> np.ndarray:
    low, high = g.limits
    return np.arange(low, high + 1)


def add_in_blocks(g: Grids) -> np.ndarray:
    a, b = (
        fused(stored(g, i), scale, f32(scale * f32(-zero_point)))
        for i, (scale, zero_point) in enumerate(zip(g.scales, g.zero_points, strict=True))
    )
    share = ONE / g.y_scale
    steps = np.minimum((a[None, :] + b[:, None]) * share, f32(2147483520))
    assert steps.dtype == np.float32
    return clamp(wrapped(rint(steps) + g.y_zero_point), g)


def add_left_over(g: Grids) -> np.ndarray:
    a, b = all_pairs(g)
    steps = (a.astype(f32) * g.scales[0] + b.astype(f32) * g.scales[1]) * (ONE / g.y_scale) + f32(g.y_zero_point)
    assert steps.dtype == np.float32
    return clamp(rint(steps), g)


def far_apart(dtype: str) -> Grids:
    """Sums beyond int32 with a great zero point."""
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    return Grids((f32(0.0625), f32(0.09)), (low + 7, low + 9), f32(2.0**-30), high - 2, dtype)


def settings(dtype: str) -> list[Grids]:
    return [*(grids(dtype, seed) for seed in SEEDS), far_apart(dtype)]


def left_over(name: str, op: str, operands: tuple[np.ndarray, ...], g: Grids) -> np.ndarray:
    """Every element as one of 63, so that no element is in a block."""
    rows = [np.resize(x.reshape(-1), (1041, 63)) for x in operands]
    found = run(name, op, rows, g, rows=True)
    return found.reshape(-1)[: operands[0].size].reshape(operands[0].shape)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_in_blocks(dtype):
    for g in settings(dtype):
        a, b = all_pairs(g)
        want = add_in_blocks(g).T
        np.testing.assert_array_equal(run("torch_add", "add", (a, b), g), want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_left_over(dtype):
    for g in settings(dtype):
        np.testing.assert_array_equal(left_over("torch_add", "add", all_pairs(g), g), add_left_over(g))


def test_a_tensor_has_blocks_first():
    g = grids("uint8", 0)
    a, b = (x.reshape(-1)[:1000] for x in all_pairs(g))
    blocks, rest = add_in_blocks(g).T.reshape(-1)[:1000], add_left_over(g).reshape(-1)[:1000]
    want = np.where(np.arange(1000) < 960, blocks, rest)
    np.testing.assert_array_equal(run("torch_add", "add", (a.reshape(10, 100), b.reshape(10, 100)), g).ravel(), want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sum_wraps_in_blocks_and_saturates_behind_them(dtype):
    g = far_apart(dtype)
    a = np.full(65, 200, np.int32)
    y = run("torch_add", "add", (a, a), g)
    low, high = g.limits
    assert y[0] == (low if g.y_zero_point > 127 else high)
    assert y[64] == high


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("behind", [False, True])
def test_multiply(dtype, behind):
    for g in settings(dtype):
        a, b = all_pairs(g)
        steps = (a * b).astype(f32) * (f32(g.scales[0] * g.scales[1]) * (ONE / g.y_scale))
        assert steps.dtype == np.float32
        whole = np.rint(steps.astype(np.float64))
        outside = (whole < -(2.0**31)) | (whole >= 2.0**31)
        whole = np.clip(whole, -(2.0**31), 2.0**31 - 1)
        want = clamp(np.where(outside & (not behind), -(2.0**31), whole) + g.y_zero_point, g)
        found = left_over if behind else run
        np.testing.assert_array_equal(found("torch_multiply", "multiply", (a, b), g), want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rescale(dtype):
    for two in settings(dtype):
        g = Grids(two.scales[:1], two.zero_points[:1], two.y_scale, two.y_zero_point, dtype)
        codes = stored(g, 0) - g.zero_points[0]
        real = codes.astype(f32) * g.scales[0]
        want = clamp(rint(fused(real, ONE / g.y_scale, f32(g.y_zero_point))), g)
        np.testing.assert_array_equal(run("torch_rescale", "rescale", (codes,), g), want)


def floor_log2(q: Fraction) -> int:
    e = q.numerator.bit_length() - q.denominator.bit_length()
    return e if q >= Fraction(2) ** e else e - 1


@pytest.mark.parametrize("seed", range(12))
def test_qnnpack_add(seed):
    g = grids("uint8", seed if seed % 8 < 6 else 100 + seed)
    if seed == 9:
        g = Grids((f32(0.5), f32(2.0**-12)), g.zero_points, f32(256), 3, "uint8")
    if seed == 10:
        g = Grids((f32(200), f32(0.001)), g.zero_points, f32(1), 130, "uint8")
    a, b = all_pairs(g)
    ratios = [Fraction(float(f32(scale / g.y_scale))) for scale in g.scales]
    shift = 21 - floor_log2(max(ratios))
    ma, mb = (round(r * Fraction(2) ** shift) for r in ratios)
    assert 2**21 <= max(ma, mb) <= 2**22
    total = a.astype(np.int64) * ma + b.astype(np.int64) * mb
    away = np.sign(total) * ((np.abs(total) + (1 << (shift - 1))) >> shift)
    np.testing.assert_array_equal(run("torch_qnnpack_add", "add", (a, b), g), clamp(away + g.y_zero_point, g))


@pytest.mark.parametrize("scale", [2.0**-11, 2.0**8])
def test_qnnpack_add_refuses_what_qnnpack_refuses(scale):
    with pytest.raises(ValueError, match=r"must be in \[2\^-10, 2\^8\)"):
        get("torch_qnnpack_add").prepare(
            Setting("add", (f32(scale), f32(2.0**-12)), (np.int32(0), np.int32(0)), f32(1), np.int32(0), "uint8")
        )


def test_the_formulas_differ():
    g = grids("uint8", 0)
    pairs = all_pairs(g)
    found = [run(name, "add", pairs, g) for name in ("torch_add", "torch_qnnpack_add", "onnx_add", "onnx_float_add")]
    assert all(np.any(found[0] != other) for other in found[1:])
