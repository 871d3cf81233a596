"""Products with weights in narrow registers and int16 pairs, through the interpreter, against Python's integers."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from qjax.graph.kernels import prepare, run_node
from qjax.numerics.accumulator import Accumulator
from qjax.run.interpreter import Interpreter
from tests.numerics.registers import register
from tests.ops.nodes import (
    INT8,
    INT8_HIGH,
    INT16,
    NARROW,
    UINT8,
    UINT8_HIGH,
    UINT8_MIDDLE,
    Grid,
    check,
    finish_weighted,
    graph_of,
    weighted_constants,
)
from tests.ops.test_conv import CASES, attributes_of, channels_last, codes_of
from tests.ops.test_dot import ARRANGEMENTS, vector_shape

PAIRS = Accumulator(pairs=True)


@dataclasses.dataclass(frozen=True)
class Products:
    """For every output of `shape`: codes, weights, whether the code is padding; (outputs, K), in the sum's order."""

    shape: tuple[int, ...]
    codes: np.ndarray
    weights: np.ndarray
    outside: np.ndarray
    tap: int

    def sums(self, accumulator: Accumulator, zero_point: int) -> np.ndarray:
        found = [
            register(accumulator, *values, zero_point, self.tap)
            for values in zip(self.codes, self.weights, self.outside, strict=True)
        ]
        return np.array(found, object).reshape(self.shape)


# ---------------------------------------------------------------------------- dot


def dot_products(x: np.ndarray, w: np.ndarray, contracting, batch, weight: int, permutation) -> Products:
    """By index, from the definition of `dot_general`; K runs over the activation's axes as they are stored."""
    of_x, of_w = (contracting[0], contracting[1]) if weight == 1 else (contracting[1], contracting[0])
    batch_x, batch_w = (batch[0], batch[1]) if weight == 1 else (batch[1], batch[0])
    free_x = [a for a in range(x.ndim) if a not in of_x and a not in batch_x]
    free_w = [a for a in range(w.ndim) if a not in of_w and a not in batch_w]
    order = sorted(range(len(of_x)), key=lambda i: of_x[i])
    sizes = [x.shape[of_x[i]] for i in order]
    parts = [x.shape[a] for a in batch_x], [x.shape[a] for a in free_x], [w.shape[a] for a in free_w]
    shape = tuple(n for part in (parts if weight == 1 else (parts[0], parts[2], parts[1])) for n in part)
    codes, weights = [], []
    for index in np.ndindex(*shape):
        b, rest = index[: len(batch_x)], index[len(batch_x) :]
        first = len(free_x) if weight == 1 else len(free_w)
        fx, fw = (rest[:first], rest[first:]) if weight == 1 else (rest[first:], rest[:first])
        at_x, at_w = [0] * x.ndim, [0] * w.ndim
        for axes, at, values in ((batch_x, at_x, b), (batch_w, at_w, b), (free_x, at_x, fx), (free_w, at_w, fw)):
            for axis, value in zip(axes, values, strict=True):
                at[axis] = value
        row_x, row_w = [], []
        for k in np.ndindex(*sizes):
            for i, value in zip(order, k, strict=True):
                at_x[of_x[i]] = at_w[of_w[i]] = value
            row_x.append(int(x[tuple(at_x)]))
            row_w.append(int(w[tuple(at_w)]))
        codes.append(row_x)
        weights.append(row_w)
    values = [np.array(v, object).reshape(*shape, -1) for v in (codes, weights)]
    if permutation is not None:
        values = [v.transpose(*permutation, len(shape)) for v in values]
    shape = values[0].shape[:-1]
    codes, weights = (v.reshape(-1, v.shape[-1]) for v in values)
    return Products(shape, codes, weights, np.zeros(codes.shape, bool), 1)


def dot_case(name: str, grid: Grid, accumulator: Accumulator, w_grid: Grid = NARROW, k: int = 0):
    rng = np.random.default_rng(len(name) + accumulator.bits)
    x_shape, w_shape, contracting, batch, weight, permutation, channels = ARRANGEMENTS[name]
    if k:  # a sum of that length
        x_shape, w_shape = (9, k), (k, 5)
    x, w = grid.codes(rng, x_shape), w_grid.codes(rng, w_shape)
    products = dot_products(x, w, contracting, batch, weight, permutation)
    acc, out = products.sums(accumulator, grid.zero_point), INT8
    constants = weighted_constants(rng, acc, vector_shape(acc.shape, channels), out)
    attributes = {
        "lhs_contracting": list(contracting[0]),
        "rhs_contracting": list(contracting[1]),
        "lhs_batch": list(batch[0]),
        "rhs_batch": list(batch[1]),
        "weight": weight,
        "channels": channels,
        "rank": acc.ndim,
        "permutation": permutation,
        "rule": "nearest_even",
        "accumulator": accumulator.to_json(),
    }
    graph = graph_of("dot", [(x_shape, grid)], (acc.shape, out), {"kernel": w, **constants}, attributes)
    changed = products.sums(Accumulator(), grid.zero_point) != acc
    return graph, x, finish_weighted(acc, constants, out, "nearest_even"), changed


@pytest.mark.parametrize("name", ARRANGEMENTS)
@pytest.mark.parametrize("accumulator", [Accumulator(13, "saturate"), Accumulator(11, "wrap"), PAIRS], ids=str)
def test_every_arrangement_of_axes(name, accumulator):
    graph, x, expected, changed = dot_case(name, UINT8_MIDDLE, accumulator)
    check(graph, [x], expected)
    assert changed.any() or name == "nothing contracted"


@pytest.mark.parametrize("bits", range(8, 33))
@pytest.mark.parametrize("overflow", ["saturate", "wrap"])
@pytest.mark.sampled(14)
def test_every_width(bits, overflow):
    operands = "codes" if bits % 3 == 0 else "centered"
    grid = (UINT8_HIGH, INT8_HIGH, UINT8_MIDDLE)[bits % 3]
    graph, x, expected, changed = dot_case("dense", grid, Accumulator(bits, overflow, operands=operands), k=17)
    check(graph, [x], expected, distinct=2)
    assert changed.any() == (bits < 19)


@pytest.mark.sampled(23)
@pytest.mark.parametrize("grid", [UINT8, UINT8_MIDDLE, UINT8_HIGH, INT8, INT8_HIGH, INT16], ids=str)
@pytest.mark.parametrize("operands", ["centered", "codes"])
@pytest.mark.parametrize("overflow", ["saturate", "wrap"])
def test_every_kind_of_codes(grid, operands, overflow):
    graph, x, expected, changed = dot_case("dense", grid, Accumulator(14, overflow, operands=operands), k=12)
    check(graph, [x], expected)
    assert changed.any()


@pytest.mark.parametrize("k", [1, 2, 3, 16, 17, 33])
@pytest.mark.parametrize("grid", [UINT8, UINT8_MIDDLE, UINT8_HIGH], ids=str)
def test_pairs_of_odd_and_even_sums(k, grid):
    graph, x, expected, changed = dot_case("dense", grid, PAIRS, Grid("int8", -128, 127, 0), k=k)
    check(graph, [x], expected, distinct=2)
    assert changed.any() if k > 3 else k > 1 or not changed.any()


@pytest.mark.parametrize(
    ("grid", "w_grid"), [(INT8, NARROW), (UINT8_MIDDLE, Grid("int16", -255, 255, 0)), (INT16, NARROW)]
)
def test_pairs_leave_other_operands_exact(grid, w_grid):
    graph, x, _, _ = dot_case("dense", grid, PAIRS, w_grid, k=16)
    node = graph.nodes[0]
    attributes = {key: value for key, value in node.attributes.items() if key != "accumulator"}
    exact = graph.replace(nodes=(dataclasses.replace(node, attributes=attributes),))
    assert np.array_equal(Interpreter(graph)(x)[0], Interpreter(exact)(x)[0])


# ---------------------------------------------------------------------------- conv


@functools.cache
def conv_products(name: str, order: str) -> tuple[Products, np.random.Generator, np.ndarray, np.ndarray]:
    case = CASES[name]
    rng, x, w = codes_of(case)
    _, window, _, strides, padding, lhs_dilation, rhs_dilation, groups, grid, _ = case
    rank, per_group, features = len(window), w.shape[-2], w.shape[-1]
    spread = [(size - 1) * d + 1 for size, d in zip(x.shape[1:-1], lhs_dilation, strict=True)]
    sizes = [
        (spread[d] + sum(padding[d]) - rhs_dilation[d] * (window[d] - 1) - 1) // strides[d] + 1 for d in range(rank)
    ]
    taps = list(np.ndindex(*window))
    steps = [(tap, c) for tap in taps for c in range(per_group)]
    if order == "chw":
        steps = [(tap, c) for c in range(per_group) for tap in taps]
    shape = (x.shape[0], *sizes, features)
    codes, weights, outside = [], [], []
    for n, *position, feature in np.ndindex(*shape):
        group = feature // (features // groups)
        for tap, c in steps:
            at = [position[d] * strides[d] + tap[d] * rhs_dilation[d] - padding[d][0] for d in range(rank)]
            met = all(0 <= a < s and a % d == 0 for a, s, d in zip(at, spread, lhs_dilation, strict=True))
            place = tuple(a // d for a, d in zip(at, lhs_dilation, strict=True))
            codes.append(int(x[(n, *place, group * per_group + c)]) if met else grid.zero_point)
            weights.append(int(w[(*tap, c, feature)]))
            outside.append(not met)
    arrays = [np.array(v, object).reshape(-1, len(steps)) for v in (codes, weights, outside)]
    return Products(shape, *arrays, tap=per_group), rng, x, w


def conv_case(name: str, accumulator: Accumulator):
    case, out = CASES[name], INT8
    products, _, x, w = conv_products(name, accumulator.order)
    acc = products.sums(accumulator, case[8].zero_point)
    constants = weighted_constants(np.random.default_rng(3), acc, (acc.shape[-1],), out)
    attributes = {
        **attributes_of(case, channels_last(x.ndim - 2)),
        "rule": "nearest_even",
        "accumulator": accumulator.to_json(),
    }
    graph = graph_of("conv", [(x.shape, case[8])], (acc.shape, out), {"kernel": w, **constants}, attributes)
    changed = products.sums(Accumulator(), case[8].zero_point) != acc
    return graph, x, finish_weighted(acc, constants, out, "nearest_even"), changed


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name][8].dtype.endswith("8") and name != "4 bits"])
@pytest.mark.parametrize("accumulator", [Accumulator(14, "saturate"), Accumulator(13, "wrap")], ids=str)
@pytest.mark.sampled(12)
def test_convolutions(name, accumulator):
    graph, x, expected, changed = conv_case(name, accumulator)
    check(graph, [x], expected)
    assert changed.any()


@pytest.mark.parametrize("name", ["16 bits", "depthwise, 16 bits"])
@pytest.mark.parametrize("accumulator", [Accumulator(22, "saturate"), Accumulator(21, "wrap")], ids=str)
def test_convolutions_of_wide_codes(name, accumulator):
    graph, x, expected, changed = conv_case(name, accumulator)
    check(graph, [x], expected)
    assert changed.any()


UNSIGNED = [name for name in CASES if CASES[name][8].dtype == "uint8"]


@pytest.mark.parametrize("name", UNSIGNED)
@pytest.mark.parametrize(
    "accumulator",
    [
        PAIRS,
        Accumulator(pairs=True, order="chw"),
        Accumulator(pairs=True, unit="tap", padding="skip"),
    ],
    ids=str,
)
@pytest.mark.sampled(7)
def test_pairs_of_convolutions(name, accumulator):
    graph, x, expected, changed = conv_case(name, accumulator)
    check(graph, [x], expected)
    # one channel per group leaves a tap's product alone beside a zero
    assert changed.any() or (accumulator.unit == "tap" and name == "depthwise, twice")


@pytest.mark.parametrize("name", ["few channels", "groups", "dilated"])
@pytest.mark.parametrize("order", ["hwc", "chw"])
def test_saturation_follows_the_order_and_the_operands(name, order):
    accumulator = Accumulator(15, "saturate", operands="codes", order=order)
    graph, x, expected, changed = conv_case(name, accumulator)
    check(graph, [x], expected)
    assert changed.any()


def test_orders_and_units_differ():
    products = {order: conv_products("few channels", order)[0] for order in ("hwc", "chw")}
    for variants in (
        [Accumulator(14, "saturate", order=order) for order in ("hwc", "chw")],
        [PAIRS, Accumulator(pairs=True, order="chw"), Accumulator(pairs=True, unit="tap")],
        [PAIRS, Accumulator(pairs=True, padding="skip")],
    ):
        results = [tuple(products[a.order].sums(a, 255).ravel()) for a in variants]
        assert len(set(results)) == len(results)


def test_layouts_of_torch_and_onnx():
    accumulator = Accumulator(pairs=True, unit="tap", padding="skip")
    products, _, x, w = conv_products("few channels", "hwc")
    acc, out = np.moveaxis(products.sums(accumulator, 255), -1, 1), UINT8
    constants = weighted_constants(np.random.default_rng(3), acc, (acc.shape[1], 1, 1), out)
    layout = [0, 1, 2, 3]
    attributes = {
        **attributes_of(CASES["few channels"], (layout, layout, layout)),
        "rule": "nearest_even",
        "accumulator": accumulator.to_json(),
    }
    kernel = np.ascontiguousarray(w.transpose(3, 2, 0, 1))
    codes = np.ascontiguousarray(np.moveaxis(x, -1, 1))
    graph = graph_of("conv", [(codes.shape, UINT8_HIGH)], (acc.shape, out), {"kernel": kernel, **constants}, attributes)
    check(graph, [codes], finish_weighted(acc, constants, out, "nearest_even"))


# ---------------------------------------------------------------------------- transformations


@pytest.mark.parametrize("accumulator", [Accumulator(14, "saturate"), Accumulator(13, "wrap"), PAIRS], ids=str)
@pytest.mark.parametrize("name", ["few channels", "groups"])
@pytest.mark.sampled(2)
def test_vmap_and_constants_in_a_trace(name, accumulator):
    graph, x, expected, _ = conv_case(name, accumulator)
    constants, node = prepare(graph)["node"], graph.nodes[0]
    several = np.stack([x, x[::-1], np.roll(x, 1, axis=1)])
    batched = jax.jit(jax.vmap(lambda x: run_node(graph, node, constants, [x])))(several)
    assert np.array_equal(np.asarray(batched[0]).astype(object), expected)
    assert np.array_equal(batched, [Interpreter(graph)(a)[0] for a in several])

    @jax.jit
    def traced(kernel, bias, x):
        tensors = dict(graph.tensors)
        for role, value in (("kernel", kernel), ("bias", bias)):
            tensors[role] = dataclasses.replace(tensors[role], value=value)
        own = graph.replace(tensors=tensors)
        return run_node(own, node, prepare(own)["node"], [x])

    again = traced(graph.tensors["kernel"].value, graph.tensors["bias"].value, x)
    assert np.array_equal(np.asarray(again).astype(object), expected)
