"""PyTorch's averages: all sums near ties, channels in blocks and left over, counts per output."""

from fractions import Fraction

import numpy as np
import pytest

from tests.numerics.float32 import nearest
from tests.ops.formulas.onnx import Grids, clamp, f32
from tests.ops.formulas.torch import run

ONE = f32(1)
COUNTS = (1, 2, 3, 4, 6, 7, 9, 10, 12, 14, 25, 48, 49, 98, 196, 225, 841)


def grid(dtype: str, seed: int) -> Grids:
    rng = np.random.default_rng(seed)
    info = np.iinfo(dtype)
    scale, zero_point = f32(np.exp2(rng.uniform(-8, 2))), int(rng.integers(info.min, info.max + 1))
    return Grids((scale,), (zero_point,), scale, zero_point, dtype)


def sums(g: Grids, count: int, seed: int, channels: int = 16) -> np.ndarray:
    """(32, channels) sums of centred codes that lie at and next to ties of the mean of stored codes, and any others."""
    rng = np.random.default_rng(seed)
    low, high = g.limits
    stored = rng.integers(low, high, (32, channels)) * count + count // 2 + rng.integers(-1, 2, (32, channels))
    stored[0] = rng.integers(low * count, high * count + 1, channels)
    return np.clip(stored, low * count, high * count) - count * g.zero_points[0]


def rint(x: np.ndarray) -> np.ndarray:
    assert x.dtype == np.float32
    return np.rint(x.astype(np.float64)).astype(np.int64)


def fused(acc: np.ndarray, factor: np.floating, zero_point: int) -> np.ndarray:
    found = {
        int(s): float(nearest(nearest(Fraction(int(s))) * Fraction(float(factor)) + zero_point)) for s in np.unique(acc)
    }
    return np.vectorize(found.__getitem__, otypes=[f32])(acc)


def every_count(g: Grids, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Sums of shape (counts, 32, 16), and the counts to broadcast against them."""
    acc = np.stack([sums(g, count, seed + count) for count in COUNTS])
    return acc, np.array(COUNTS, np.int32).reshape(-1, 1, 1)


def expected(name: str, acc: np.ndarray, n: np.ndarray, g: Grids) -> np.ndarray:
    z, scale, x = g.y_zero_point, g.scales[0], acc.astype(f32)
    m = ONE / n.astype(f32)
    if name == "torch_average_pool":
        return rint(x * m) + z
    if name == "torch_average_pool_contiguous":
        return rint(x * m + f32(z))
    if name == "torch_adaptive_mean":
        return rint(np.stack([fused(a, factor, z) for a, factor in zip(acc, (ONE / (ONE / m)).ravel(), strict=True)]))
    if name == "torch_mean":
        return rint((acc + n * z).astype(f32) / n.astype(f32))
    assert name == "torch_qnnpack_average"
    return rint(x * (scale / (scale * n.astype(f32)))) + z


NAMES = (
    "torch_average_pool",
    "torch_average_pool_contiguous",
    "torch_adaptive_mean",
    "torch_mean",
    "torch_qnnpack_average",
)


def op_of(name: str) -> str:
    return "mean" if "mean" in name else "average_pool"


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sampled(5)
def test_in_blocks_of_channels(name, dtype):
    for seed in range(5):
        g = grid(dtype, seed)
        acc, n = every_count(g, seed)
        np.testing.assert_array_equal(run(name, op_of(name), (acc,), g, n), clamp(expected(name, acc, n, g), g))


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("name", ["torch_average_pool", "torch_adaptive_mean"])
@pytest.mark.sampled(2)
def test_left_over_channels(name, dtype):
    for seed in range(3):
        g = grid(dtype, seed)
        acc, n = every_count(g, seed)
        factor = ONE / (ONE / (ONE / n.astype(f32)))
        rest = clamp(rint(acc.astype(f32) * factor + f32(g.y_zero_point)), g)
        blocks = clamp(expected(name, acc, n, g), g)
        assert np.any(rest != blocks)
        few, some = acc[:, :, :7], acc[:, :, :13]
        np.testing.assert_array_equal(run(name, op_of(name), (few,), g, n), rest[:, :, :7])
        want = np.concatenate([blocks[:, :, :8], rest[:, :, 8:13]], axis=2)
        np.testing.assert_array_equal(run(name, op_of(name), (some,), g, n), want)


@pytest.mark.parametrize("name", NAMES)
def test_one_count_for_all(name):
    g = grid("uint8", 6)
    for count in (9, 49):
        acc, n = sums(g, count, count)[None], np.array(count, np.int32).reshape(1, 1, 1)
        got = run(name, op_of(name), (acc,), g, count)
        np.testing.assert_array_equal(got, clamp(expected(name, acc, n, g), g))


def test_a_scalar_is_left_over():
    g = grid("uint8", 2)
    acc = np.asarray(2 * 37 + 1 - 2 * g.zero_points[0])
    want = clamp(np.asarray(round(Fraction(2 * 37 + 1, 2))), g)
    np.testing.assert_array_equal(run("torch_adaptive_mean", "mean", (acc,), g, 2), want)


def test_the_layout_decides():
    """An odd zero point turns ties the other way."""
    g = Grids((f32(0.1),), (3,), f32(0.1), 3, "uint8")
    acc = np.arange(-5, 11).reshape(2, 8)
    last = run("torch_average_pool", "average_pool", (acc,), g, 2)
    first = run("torch_average_pool_contiguous", "average_pool", (acc,), g, 2)
    # a sum of 1 is half a step: 0 and 4 are even
    assert last.reshape(-1)[6] == 3
    assert first.reshape(-1)[6] == 4
