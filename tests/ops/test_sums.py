"""Additions, products, sums, pooling and rescaling against Python's integers."""

import numpy as np
import pytest

from qjax.numerics.softfloat import Real
from qjax.ops.epilogue import Affine, fold_sum
from tests.ops.nodes import (
    GRIDS,
    INT4,
    INT8,
    INT8_HIGH,
    INT8_LOW,
    INT16,
    INT16_ODD,
    NARROW,
    UINT8,
    UINT8_HIGH,
    UINT8_MIDDLE,
    UINT16,
    check,
    finish_sum,
    graph_of,
    run,
    sum_constants,
)


@pytest.mark.parametrize(("grid", "out"), list(zip(GRIDS, (*GRIDS[3:], *GRIDS[:3]), strict=True)))
def test_rescale(grid, out):
    # 64 channels of random constants: positive and negative factors, powers of two, offsets, every shift
    rng = np.random.default_rng(2**17 + grid.qmax + grid.zero_point)
    x = grid.codes(rng, (40, 64))
    acc = grid.centered(x)
    constants = sum_constants(rng, [acc], (64,), out)
    graph = graph_of("rescale", [(x.shape, grid)], (x.shape, out), constants, {"rounding": "nearest_even"})
    check(graph, [x], finish_sum([acc], constants, out, "nearest_even"))


@pytest.mark.parametrize("rounding", ["nearest_even", "nearest_up", "nearest_away"])
@pytest.mark.parametrize(
    ("first", "second", "out"),
    [(INT8_LOW, INT8_HIGH, INT8), (UINT8_MIDDLE, NARROW, UINT8), (INT16_ODD, INT8, UINT16), (INT4, UINT16, INT4)],
)
def test_add(first, second, out, rounding):
    rng = np.random.default_rng(first.qmax + out.qmax)
    x0, x1 = first.codes(rng, (30, 16)), second.codes(rng, (30, 16))
    acc = [first.centered(x0), second.centered(x1)]
    constants = sum_constants(rng, acc, (16,), out)
    attributes = {"subtract": False, "rounding": rounding}
    graph = graph_of("add", [(x0.shape, first), (x1.shape, second)], (x0.shape, out), constants, attributes)
    check(graph, [x0, x1], finish_sum(acc, constants, out, rounding))


def test_add_broadcasts_an_operand():
    rng = np.random.default_rng(3)
    x0, x1 = INT8.codes(rng, (7, 4, 5)), INT8_HIGH.codes(rng, (7, 1, 5))
    acc = [INT8.centered(x0), INT8_HIGH.centered(x1)]
    constants = sum_constants(rng, acc, (), INT8)
    attributes = {"subtract": False, "rounding": "nearest_even"}
    graph = graph_of("add", [(x0.shape, INT8), (x1.shape, INT8_HIGH)], (x0.shape, INT8), constants, attributes)
    check(graph, [x0, x1], finish_sum(acc, constants, INT8, "nearest_even"))


SCALES = [
    (0.02, 0.02, 0.02),
    (0.5, 2.0**-12, 0.5),
    (2.0**-13, 3.0, 3.1),
    (1e-9, 1e9, 1e9),
    (0.25, 0.25, 0.5),
    (0.125, 0.25, 1.0),
]


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("subtract", [False, True])
@pytest.mark.sampled(1)
def test_add_of_all_pairs_of_codes_is_the_rounded_sum_of_reals(scales, subtract):
    # within half a step and what 30 bits of factor leave; on a dyadic grid, where ties are exact, equal to rint
    s0, s1, s_y = (np.float32(s) for s in scales)
    sign = -1 if subtract else 1
    folded = fold_sum([Real.of(s0), Real.of(np.float32(sign) * s1)], s_y, Affine.identity())
    constants = {role: np.asarray(value) for role, value in folded.items()}
    codes = np.arange(-128, 128, dtype=np.int8)
    x0, x1 = (a.ravel() for a in np.meshgrid(codes, codes))
    attributes = {"subtract": subtract, "rounding": "nearest_even"}
    graph = graph_of("add", [(x0.shape, INT8), (x1.shape, INT8_LOW)], (x0.shape, INT8), constants, attributes)
    y = run(graph, x0, x1)
    assert np.array_equal(y, finish_sum([INT8.centered(x0), INT8_LOW.centered(x1)], constants, INT8, "nearest_even"))
    real = (float(s0) * (x0.astype(float) + 7) + sign * float(s1) * (x1.astype(float) + 128)) / float(s_y)
    exact = np.clip(np.rint(real) - 7, -128, 127)
    if all(float(np.log2(s)).is_integer() for s in scales):
        assert np.array_equal(y, exact)
        assert (real % 1 == 0.5).any() or scales[0] == scales[2]
    near_tie = np.abs(real % 1 - 0.5) < 1e-5
    assert np.array_equal(y[~near_tie], exact[~near_tie])


@pytest.mark.parametrize(
    ("first", "second", "out"),
    [(INT8, INT8_LOW, INT8_HIGH), (UINT8_HIGH, NARROW, UINT8), (INT16, INT16, INT16), (INT4, UINT8_MIDDLE, INT8)],
)
def test_multiply(first, second, out):
    rng = np.random.default_rng(first.qmax + second.qmax)
    x0, x1 = first.codes(rng, (30, 16)), second.codes(rng, (30, 16))
    acc = first.centered(x0) * second.centered(x1)
    constants = sum_constants(rng, [acc], (16,), out)
    graph = graph_of(
        "multiply", [(x0.shape, first), (x1.shape, second)], (x0.shape, out), constants, {"rounding": "nearest_up"}
    )
    check(graph, [x0, x1], finish_sum([acc], constants, out, "nearest_up"))


@pytest.mark.parametrize(
    ("axes", "grid", "out"),
    [([1, 2], UINT8_HIGH, INT8), ([3], INT16_ODD, INT16), ([1, 2, 3], INT8_LOW, UINT8), ([2], UINT16, INT8)],
)
def test_sum(axes, grid, out):
    rng = np.random.default_rng(sum(axes))
    x = grid.codes(rng, (6, 4, 5, 3))
    acc = np.sum(grid.centered(x), axis=tuple(axes))
    constants = sum_constants(rng, [acc], (), out)
    graph = graph_of("sum", [(x.shape, grid)], (acc.shape, out), constants, {"axes": axes, "rounding": "nearest_even"})
    check(graph, [x], finish_sum([acc], constants, out, "nearest_even"))


WINDOWS = {
    "pool": ([1, 2, 2, 1], [1, 2, 2, 1], [[0, 0]] * 4, [1] * 4, [1] * 4),
    "padded": ([1, 3, 2, 1], [1, 2, 1, 1], [[0, 0], [1, 2], [0, 1], [0, 0]], [1] * 4, [1] * 4),
    "dilated": ([1, 2, 2, 2], [1, 1, 1, 1], [[0, 0], [1, 0], [0, 0], [0, 0]], [1, 2, 1, 1], [1, 2, 2, 1]),
}


def windows(x: np.ndarray, name: str, fill: object, reduce) -> np.ndarray:
    """`reduce_window` from its definition, on an object array."""
    window, strides, padding, base, dilation = WINDOWS[name]
    spread = [(size - 1) * b + 1 for size, b in zip(x.shape, base, strict=True)]
    full = np.full([size + sum(pair) for size, pair in zip(spread, padding, strict=True)], fill, object)
    full[tuple(slice(low, low + size, b) for (low, _), size, b in zip(padding, spread, base, strict=True))] = x
    sizes = [(n - d * (w - 1) - 1) // s + 1 for n, w, s, d in zip(full.shape, window, strides, dilation, strict=True)]
    out = np.empty(sizes, object)
    for position in np.ndindex(*sizes):
        index = tuple(
            slice(p * s, p * s + d * (w - 1) + 1, d)
            for p, s, w, d in zip(position, strides, window, dilation, strict=True)
        )
        out[position] = reduce(full[index].ravel().tolist())
    return out


def window_attributes(name: str) -> dict:
    names = ("window", "strides", "padding", "base_dilation", "window_dilation")
    return dict(zip(names, WINDOWS[name], strict=True))


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize(("grid", "out"), [(INT8_HIGH, INT8), (UINT8_MIDDLE, INT16)])
def test_window_sum(name, grid, out):
    rng = np.random.default_rng(len(name))
    x = grid.codes(rng, (2, 5, 4, 3))
    acc = windows(grid.centered(x), name, 0, sum)
    constants = sum_constants(rng, [acc], (), out)
    attributes = {**window_attributes(name), "rounding": "nearest_even"}
    graph = graph_of("window_sum", [(x.shape, grid)], (acc.shape, out), constants, attributes)
    check(graph, [x], finish_sum([acc], constants, out, "nearest_even"))


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("grid", [INT8_HIGH, UINT8_MIDDLE, NARROW, INT16_ODD])
def test_max_pool(name, grid):
    x = grid.codes(np.random.default_rng(len(name)), (2, 5, 4, 3))
    expected = windows(x.astype(object), name, grid.qmin, max)
    graph = graph_of("max_pool", [(x.shape, grid)], (expected.shape, grid), {}, window_attributes(name))
    check(graph, [x], expected, distinct=2)
