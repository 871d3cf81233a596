"""Matrix products: every arrangement of axes, every kind of codes, against Python's integers."""

import numpy as np
import pytest

from tests.numerics.exact import RULES
from tests.ops.nodes import (
    GRIDS,
    INT4,
    INT8,
    INT8_HIGH,
    INT8_LOW,
    INT16,
    INT16_ODD,
    NARROW,
    UINT4,
    UINT8,
    UINT8_HIGH,
    UINT8_MIDDLE,
    UINT16,
    Grid,
    check,
    dot,
    finish_sum,
    finish_weighted,
    graph_of,
    sum_constants,
    weighted_constants,
)

ARRANGEMENTS = {
    # name: (x, w, contracting, batch, operand that is the weight, permutation, [result axis, weight axis])
    "dense": ((9, 6), (6, 5), ((1,), (0,)), ((), ()), 1, None, [[1, 1]]),
    "dense transposed": ((9, 6), (5, 6), ((1,), (1,)), ((), ()), 1, None, [[1, 0]]),
    "weight on the left": ((9, 6), (5, 6), ((1,), (1,)), ((), ()), 0, None, [[0, 0]]),
    "left, permuted": ((9, 6), (5, 6), ((1,), (1,)), ((), ()), 0, [1, 0], [[1, 0]]),
    "two contracting": ((9, 3, 4), (4, 5, 3), ((1, 2), (2, 0)), ((), ()), 1, None, [[1, 1]]),
    "three axes of features": ((4, 6), (2, 6, 3), ((1,), (1,)), ((), ()), 1, None, [[1, 0], [2, 2]]),
    "heads as a batch": ((3, 2, 3, 4), (2, 4, 5), ((3,), (1,)), ((1,), (0,)), 1, None, [[0, 0], [3, 2]]),
    "heads, permuted": ((3, 2, 3, 4), (2, 4, 5), ((3,), (1,)), ((1,), (0,)), 1, [1, 2, 0, 3], [[2, 0], [3, 2]]),
    "nothing contracted": ((9, 2), (3,), ((), ()), ((), ()), 1, None, [[2, 0]]),
}


def vector_shape(result: tuple[int, ...], channels: list[list[int]]) -> tuple[int, ...]:
    kept = [axis for axis, _ in channels]
    shape = [size if axis in kept else 1 for axis, size in enumerate(result)]
    return tuple(shape[min(kept) :])


def weighted_case(name: str, x_grid: Grid, out: Grid, rule: str, w_grid: Grid = NARROW, bounds=None):
    rng = np.random.default_rng(len(name) + x_grid.zero_point + 2**16)
    x_shape, w_shape, contracting, batch, weight, permutation, channels = ARRANGEMENTS[name]
    x, kernel = x_grid.codes(rng, x_shape), w_grid.codes(rng, w_shape)
    left, right = x_grid.centered(x), kernel.astype(object)
    if weight == 0:
        left, right = right, left
    acc = dot(left, right, contracting, batch)
    acc = acc if permutation is None else acc.transpose(permutation)
    constants = weighted_constants(rng, acc, vector_shape(acc.shape, channels), out)
    expected = finish_weighted(acc, constants, out, rule, bounds)
    attributes = {
        "lhs_contracting": list(contracting[0]),
        "rhs_contracting": list(contracting[1]),
        "lhs_batch": list(batch[0]),
        "rhs_batch": list(batch[1]),
        "weight": weight,
        "channels": channels,
        "rank": acc.ndim,
        "permutation": permutation,
        "rule": rule,
    }
    if bounds is not None:
        constants |= {"clamp_min": np.asarray(bounds[0], np.int32), "clamp_max": np.asarray(bounds[1], np.int32)}
    graph = graph_of("dot", [(x_shape, x_grid)], (acc.shape, out), {"kernel": kernel, **constants}, attributes)
    return graph, x, expected


@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_every_arrangement_of_axes(name):
    graph, x, expected = weighted_case(name, UINT8_MIDDLE, INT8, "nearest_even")
    check(graph, [x], expected)


@pytest.mark.parametrize(("x_grid", "out"), list(zip(GRIDS, (*GRIDS[5:], *GRIDS[:5]), strict=True)))
def test_every_kind_of_codes(x_grid, out):
    graph, x, expected = weighted_case("dense", x_grid, out, "nearest_even")
    check(graph, [x], expected)


@pytest.mark.parametrize("w_grid", [INT4, Grid("int8", -2, 1, 0), Grid("int16", -255, 255, 0), INT16])
def test_every_kind_of_weights(w_grid):
    graph, x, expected = weighted_case("dense", INT8_LOW, INT8_HIGH, "single_round", w_grid)
    check(graph, [x], expected)


@pytest.mark.parametrize("rule", RULES)
def test_every_fixed_point_rule(rule):
    graph, x, expected = weighted_case("two contracting", INT8_HIGH, UINT8_HIGH, rule)
    check(graph, [x], expected)


def test_fused_bounds():
    graph, x, expected = weighted_case("dense", INT8, INT8, "nearest_even", bounds=(-7, 90))
    check(graph, [x], expected)
    assert expected.min() == -7
    assert expected.max() == 90


ACTIVATIONS = {
    "scores": ((2, 3, 4, 5), (2, 3, 6, 5), ((3,), (3,)), ((0, 1), (0, 1)), None),
    "values": ((2, 4, 5), (2, 5, 3), ((2,), (1,)), ((0,), (0,)), None),
    "permuted": ((2, 4, 5, 3), (5, 2, 6), ((), ()), ((0, 2), (1, 0)), [0, 2, 3, 4, 1]),
    "two contracting": ((9, 3, 5), (5, 3, 6), ((1, 2), (1, 0)), ((), ()), [1, 0]),
}


@pytest.mark.parametrize(
    ("name", "x_grid", "w_grid", "out", "rounding"),
    [
        ("scores", INT8, INT8_LOW, INT8, "nearest_even"),
        ("scores", UINT8_MIDDLE, INT8_HIGH, INT16, "nearest_up"),
        ("values", UINT8, UINT8_HIGH, UINT8_MIDDLE, "nearest_away"),
        ("permuted", INT4, UINT4, UINT16, "nearest_even"),
        ("two contracting", INT16, INT8, INT8_LOW, "nearest_even"),
        ("two contracting", NARROW, INT16_ODD, INT8, "nearest_up"),
    ],
)
def test_products_of_activations(name, x_grid, w_grid, out, rounding):
    rng = np.random.default_rng(len(name) + x_grid.qmax)
    x_shape, w_shape, contracting, batch, permutation = ACTIVATIONS[name]
    x, w = x_grid.codes(rng, x_shape), w_grid.codes(rng, w_shape)
    acc = dot(x_grid.centered(x), w_grid.centered(w), contracting, batch)
    acc = acc if permutation is None else acc.transpose(permutation)
    constants = sum_constants(rng, [acc], (), out)
    attributes = {
        "lhs_contracting": list(contracting[0]),
        "rhs_contracting": list(contracting[1]),
        "lhs_batch": list(batch[0]),
        "rhs_batch": list(batch[1]),
        "weight": None,
        "channels": [],
        "rank": acc.ndim,
        "permutation": permutation,
        "rounding": rounding,
    }
    graph = graph_of("dot", [(x_shape, x_grid), (w_shape, w_grid)], (acc.shape, out), constants, attributes)
    check(graph, [x, w], finish_sum([acc], constants, out, rounding))


def test_the_largest_accumulator_of_int8():
    # 2^31 - 1 is 133143 products of -128 - 127 and 127, give or take: the sum of the codes wraps on the way there
    count = (2**31 - 1) // (255 * 127)
    kernel = np.full((count, 1), 127, np.int8)
    constants = {
        "kernel": kernel,
        "bias": np.zeros(1, np.int32),
        "multiplier": np.asarray([2**30], np.int32),
        "shift": np.asarray([-24], np.int32),
    }
    attributes = {
        "lhs_contracting": [1],
        "rhs_contracting": [0],
        "lhs_batch": [],
        "rhs_batch": [],
        "weight": 1,
        "channels": [[1, 1]],
        "rank": 2,
        "permutation": None,
        "rule": "nearest_even",
    }
    graph = graph_of("dot", [((1, count), INT8_HIGH)], ((1, 1), INT8), constants, attributes)
    x = np.full((1, count), -128, np.int8)
    acc = np.array([[-255 * 127 * count]], object)
    assert -acc[0, 0] > 2**31 - 2**16
    check(graph, [x], finish_weighted(acc, constants, INT8, "nearest_even"), distinct=1)
