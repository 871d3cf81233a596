"""What every operation must state: how great its accumulators become, and along which axes it works."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax
from qjax import QSpec, Recipe, ops, targets
from qjax.assign.overflow import bounds, check_accumulators
from qjax.graph.ir import Graph
from qjax.lower import ConversionError
from qjax.lower.batch import independent
from qjax.ops import Operand, Preparation, Role
from qjax.ops.base import Elementwise
from qjax.ops.epilogue import Affine
from qjax.reporting import counts
from qjax.run.interpreter import Interpreter
from tests.export.emit import nodes
from tests.layers.round_trip import data
from tests.ops.nodes import (
    INT8,
    INT8_HIGH,
    INT8_LOW,
    INT16,
    INT16_ODD,
    Grid,
    check,
    finish_sum,
    finish_weighted,
    graph_of,
    run,
    sum_constants,
    weighted_constants,
)

MOST = 2**31 - 1
SUM = {"rounding": "floor"}


# ---------------------------------------------------------------------------- the greatest codes at the greatest length


@dataclasses.dataclass(frozen=True)
class Extreme:
    """A node as a function of its length. reach: what one element adds at most; codes: those that add it."""

    reach: int
    build: Callable[[int], tuple[Graph, list[np.ndarray], np.ndarray]]


def ends(grid: Grid) -> int:
    """The code that is farthest from the zero point."""
    return grid.qmax if grid.qmax - grid.zero_point >= grid.zero_point - grid.qmin else grid.qmin


def summed(
    op: str, grids: list[Grid], shapes: Callable[[int], Any], attributes: Callable[[int], dict[str, Any]]
) -> Callable[[int], tuple[Graph, list[np.ndarray], np.ndarray]]:
    """A node whose accumulator is the sum of n products of the farthest codes, in all elements of the result."""

    def build(n: int) -> tuple[Graph, list[np.ndarray], np.ndarray]:
        *given, output = shapes(n)
        codes = [np.full(shape, ends(grid), grid.dtype) for shape, grid in zip(given, grids, strict=True)]
        one = int(np.prod([ends(grid) - grid.zero_point for grid in grids], dtype=object))
        acc = np.full(output, n * one, object)
        if op == "cumulative_sum":
            acc = (np.arange(1, n + 1, dtype=np.int64) * one).reshape(output).astype(object)
        constants = sum_constants(np.random.default_rng(0), [acc], (), INT16)
        inputs = list(zip(given, grids, strict=True))
        graph = graph_of(op, inputs, (output, INT16), constants, {**SUM, **attributes(n)})
        return graph, codes, finish_sum([acc], constants, INT16, "floor")

    return build


def weighted(op: str, shape: Callable[[int], Any], kernel: Callable[[int], Any], attributes: dict[str, Any]) -> Any:
    """The same for a kernel of 127 in one channel and -127 in the other."""

    def build(n: int) -> tuple[Graph, list[np.ndarray], np.ndarray]:
        x = np.full(shape(n), ends(INT8_LOW), "int8")
        w = np.stack([np.full(kernel(n), 127, np.int8), np.full(kernel(n), -127, np.int8)], -1)
        output = (1, *(1,) * (x.ndim - 2), 2)
        acc = np.array([n * 255 * 127, -n * 255 * 127], object).reshape(output)
        constants = {**weighted_constants(np.random.default_rng(0), acc, (2,), INT16), "bias": np.zeros(2, np.int32)}
        known = {**attributes, "rule": "double_round", "permutation": None}
        graph = graph_of(op, [(x.shape, INT8_LOW)], (output, INT16), {"kernel": w, **constants}, known)
        return graph, [x], finish_weighted(acc, constants, INT16, "double_round")

    return build


def grouped(n: int) -> tuple[Graph, list[np.ndarray], np.ndarray]:
    x = np.full((1, n), ends(INT8_LOW), "int8")
    acc = np.full((1, 1), -n * 255 * 127, object)
    constants = sum_constants(np.random.default_rng(0), [acc], (), INT16)
    known = {"weight": 1, "group_axis": 0, "summed": 1, "batch": [], "weight_batch": [], "rank": 2}
    known |= {"channels": [[1, 2]], "permutation": None, **SUM}
    weights = np.full((1, n, 1), -127, np.int8)
    graph = graph_of(
        "grouped_dot",
        [(x.shape, INT8_LOW)],
        ((1, 1), INT16),
        {**constants, "weights": weights},
        known,
    )
    return graph, [x], finish_sum([acc], constants, INT16, "floor")


DENSE = {"lhs_contracting": [1], "rhs_contracting": [0], "lhs_batch": [], "rhs_batch": []}
WINDOW = {"padding": [[0, 0], [0, 0]], "strides": [1, 1], "base_dilation": [1, 1], "window_dilation": [1, 1]}
CONV = {"strides": [1, 1], "padding": [[0, 0], [0, 0]], "lhs_dilation": [1, 1], "rhs_dilation": [1, 1], "groups": 1}
CONV |= {"lhs_layout": [0, 3, 1, 2], "rhs_layout": [3, 2, 0, 1], "out_layout": [0, 3, 1, 2], "channels": [[3, 3]]}


def of_row(op: str, grid: Grid, attributes: dict[str, Any]) -> Any:
    return summed(op, [grid], lambda n: ((1, n), (1,)), lambda n: attributes)


EXTREMES = {
    "sum": Extreme(65535, of_row("sum", INT16_ODD, {"axes": [1]})),
    "sum, 8 bits": Extreme(255, of_row("sum", INT8_HIGH, {"axes": [1]})),
    "window_sum": Extreme(
        32768, summed("window_sum", [INT16], lambda n: ((1, n), (1, 1)), lambda n: {**WINDOW, "window": [1, n]})
    ),
    "cumulative_sum": Extreme(
        32768, summed("cumulative_sum", [INT16], lambda n: ((1, n), (1, n)), lambda n: {"axis": 1, "reverse": False})
    ),
    "dot": Extreme(
        255 * 255,
        summed(
            "dot",
            [INT8_LOW, INT8_HIGH],
            lambda n: ((1, n), (n, 1), (1, 1)),
            lambda n: {**DENSE, "weight": None, "channels": [], "rank": 2, "permutation": None},
        ),
    ),
    "dot of a weight": Extreme(
        255 * 127,
        weighted("dot", lambda n: (1, n), lambda n: (n,), {**DENSE, "weight": 1, "channels": [[1, 1]], "rank": 2}),
    ),
    "conv": Extreme(
        255 * 127, weighted("conv", lambda n: (1, 1, 1, n), lambda n: (1, 1, n), {**CONV, "weight": 1, "rank": 4})
    ),
    "grouped_dot": Extreme(255 * 127, grouped),
}


@pytest.mark.parametrize("name", EXTREMES)
def test_the_greatest_codes_at_the_greatest_length(name: str) -> None:
    extreme = EXTREMES[name]
    length = MOST // extreme.reach
    graph, codes, expected = extreme.build(length)
    assert check_accumulators(graph) is graph
    assert max(abs(b) for b in bounds(graph, graph.nodes[0]) or ()) == length * extreme.reach
    check(graph, codes, expected, distinct=1)
    beyond, _, _ = extreme.build(length + 1)
    with pytest.raises(ConversionError, match=r"the accumulator of 'node' \(\w+\) may reach -?2147\d{6}, beyond int32"):
        check_accumulators(beyond)


def test_products_along_an_axis() -> None:
    """The farthest codes, as many as int32 holds; one more is refused."""
    (x, y), most = (INT8_LOW, INT16), 255**3
    for factors, codes in ((2, INT8_HIGH), (3, INT8_LOW)):
        acc = np.full((1,), (ends(codes) - codes.zero_point) ** factors, object)
        constants = sum_constants(np.random.default_rng(0), [acc], (), y)
        known = {"axes": [1], "factors": factors, **SUM}
        graph = graph_of("prod", [((1, factors), codes)], ((1,), y), constants, known)
        assert check_accumulators(graph) is graph
        check(
            graph,
            [np.full((1, factors), ends(codes), codes.dtype)],
            finish_sum([acc], constants, y, "floor"),
            distinct=1,
        )
    assert bounds(graph, graph.nodes[0]) == (-most, most)
    beyond = graph_of("prod", [((1, 4), x)], ((1,), y), None, {"axes": [1], "factors": 4})
    with pytest.raises(ConversionError, match=r"\(prod\) may reach 4228250625, beyond int32"):
        check_accumulators(beyond)


def test_products_of_two_tensors() -> None:
    check_accumulators(graph_of("multiply", [((2,), INT16), ((2,), INT16)], ((2,), INT8)))
    with pytest.raises(ConversionError, match="may reach 4294836225, beyond int32"):
        check_accumulators(graph_of("multiply", [((2,), INT16_ODD), ((2,), INT16_ODD)], ((2,), INT8)))


LONG = {
    # op: (attributes, codes, scale of the result, the result in its steps); a scale of 0.5 in
    "softmax": ({"axes": [1]}, np.full((1, 65536), 32767, np.int16), 2.0**-20, 16),
    "log_softmax": ({"axes": [1]}, np.full((1, 65536), 32767, np.int16), 2.0**-8, round(-np.log(65536) * 2**8)),
    "logsumexp": (
        {"axes": [1], "keep": True},
        np.full((1, 65536), 32767, np.int16),
        1.0,
        round(16383.5 + np.log(65536)),
    ),
    "normalize": (
        {
            "axes": [1],
            "center": True,
            "divisor": 0,
            "epsilon": 1e-9,
            "feature_axes": [],
            "groups": 1,
            "joined": "add",
        },
        np.tile(np.array([32767, -32768], np.int16), 8192)[None],
        2.0**-6,
        np.tile([64, -64], 8192)[None],
    ),
}
"""Sums in 64 bits."""


@pytest.mark.parametrize("op", LONG)
def test_long_rows_of_the_greatest_codes(op: str) -> None:
    attributes, codes, scale, expected = LONG[op]
    q = INT16.quantization()
    x = Operand(codes.shape, "int16", q.scale, q.zero_point, q.qmin, q.qmax)
    y = Operand(codes.shape, "int16", np.float32(scale), q.zero_point, q.qmin, q.qmax)
    given = Preparation(attributes, {}, (x,), y, Affine.identity(), targets.get("nearest_even"))
    prepared = ops.get(op).prepare(given)
    shape = (1, 1) if op == "logsumexp" else codes.shape
    known = {**attributes, **prepared.attributes}
    constants = {role: np.asarray(value) for role, value in prepared.constants.items()}
    graph = graph_of(op, [(codes.shape, INT16)], (shape, INT16), constants, known)
    check_accumulators(graph)
    assert np.array_equal(run(graph, codes), np.broadcast_to(expected, shape))


def test_every_producer_is_met_here() -> None:
    """A new operation with accumulators needs a case above."""
    producers = {name for name in ops.names() if ops.get(name).role is Role.PRODUCER}
    sums = {name for name in producers if not isinstance(ops.get(name), Elementwise)}
    # test_resize_bilinear, test_lstm and test_svdf have their own; a graph has dots in the place of a ragged_dot
    recurrent = {"lstm_cell", "lstm_hidden", "svdf_feature", "svdf_time"}
    assert sums - {"backend", "prod", "ragged_dot", "resize_bilinear"} - recurrent == {
        name.partition(" ")[0].rstrip(",") for name in EXTREMES
    } | set(LONG)


# ---------------------------------------------------------------------------- models


class Cumulative(nnx.Module):
    def __init__(self, axis: int) -> None:
        self.axis = axis

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.cumsum(x, axis=self.axis)


def refused(axis: int, x: jax.Array, bits: int, match: str) -> None:
    qmodel = qjax.quantize(Cumulative(axis), Recipe(activations=QSpec(bits=bits)), x)
    qmodel.eval()
    with pytest.raises(ConversionError, match=match):
        qjax.convert(qmodel, x)


def test_running_sums_that_may_overflow_are_refused() -> None:
    message = r"accumulator of '.*' \(cumulative_sum\) may reach 22\d{8}, beyond int32"
    with pytest.warns(UserWarning, match=message):
        refused(1, data(2, 70_000), 16, message)
    graph, _, _ = of_row("cumulative_sum", INT8_HIGH, {"axis": 1, "reverse": False})(1)
    wide = dataclasses.replace(graph.tensors["x0"], shape=(None, 9_000_000))
    with pytest.raises(ConversionError, match="may reach 2295000000, beyond int32"):
        check_accumulators(graph.replace(tensors={**graph.tensors, "x0": wide}))


def test_running_sums_over_the_batch_are_refused() -> None:
    refused(0, data(4, 6), 8, r"\(cumulative_sum\) sums over the batch, which has no fixed size")


# ---------------------------------------------------------------------------- axes

ROWS = {name: (graph, codes) for name, (graph, codes) in nodes.of_operations().items() if len(graph.inputs) == 1}


@pytest.mark.sampled(30)
@pytest.mark.parametrize("name", ROWS)
def test_other_axes_keep_their_places(name: str) -> None:
    """Turned around along an axis that it does not work along, the input gives the result turned around."""
    graph, (codes,) = ROWS[name]
    (node,) = graph.nodes
    ((x, y),) = [(graph.tensors[n].shape, graph.tensors[node.output].shape) for n in node.inputs]
    (along,) = ops.get(node.op).works_along(node.attributes, [x], y)
    assert all(0 <= axis < len(x) for axis in along)
    # constants differ by place along the others
    if 0 in along or codes.shape[0] == 1 or any(np.shape(c.value)[:1] == x[:1] for c in graph.constants()):
        return
    interpreter = Interpreter(graph)
    ((plain,), (turned,)) = interpreter(codes), interpreter(codes[::-1])
    if node.op == "fill":
        # its input only says how many examples there are
        np.testing.assert_array_equal(turned, plain)
        return
    kept = [axis for axis, size in enumerate(plain.shape) if size == codes.shape[0]]
    assert any(np.array_equal(turned, np.flip(plain, axis)) for axis in kept)


NORM = {"center": True, "divisor": None, "epsilon": 1e-6, "joined": "add", "groups": 1, "feature_axes": [1]}


@pytest.mark.parametrize(
    ("op", "attributes"),
    [
        ("cumulative_sum", {"axis": 0, "reverse": False}),
        ("cumulative_extremum", {"axis": 0, "reverse": False, "function": "max"}),
        ("log_softmax", {"axes": [0], "places": 10, "rounding": "nearest_even"}),
        ("normalize", {"axes": [0], **NORM, "rounding": "nearest_even", "span": 255}),
        ("softmax", {"axes": [0], "method": "exact"}),
        ("take_along", {"axis": 0, "operand": [1], "indices": [1], "places": [0]}),
        (
            "resize_bilinear",
            {"axes": [0], "size": [3], "align_corners": False, "half_pixel_centers": True, "method": "fixed"},
        ),
        ("reverse", {"axes": [0]}),
        ("sort", {"axis": 0}),
        ("argsort", {"axis": 0}),
    ],
)
def test_what_works_along_the_batch_is_not_independent(op: str, attributes: dict[str, Any]) -> None:
    inputs = [((3, 4), INT8), ((3, 4, 1), "int32")][: 2 if op == "take_along" else 1]
    graph = graph_of(op, inputs, ((3, 4), INT8), None, attributes)
    first, second = graph.tensors["x0"], graph.tensors["y"]
    free = {t.name: dataclasses.replace(t, shape=(None, *t.shape[1:])) for t in (first, second)}
    assert not independent(graph.replace(tensors={**graph.tensors, **free}))
    key = "axis" if "axis" in attributes else "axes"
    node = dataclasses.replace(graph.nodes[0], attributes={**attributes, key: 1 if key == "axis" else [1]})
    assert independent(graph.replace(nodes=(node,), tensors={**graph.tensors, **free}))


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_what_multiplies_counts_its_products(every):
    """Every kernel that is a matrix product or a convolution, as its jaxpr shows."""
    counted: set[str] = set()
    named = nodes.of_operations() if every else nodes.one_of_each(nodes.of_operations())
    for name, (graph, inputs) in named.items():
        text = str(Interpreter(graph).jaxpr(*inputs))
        if "dot_general" in text or "conv_general_dilated" in text:
            (node,) = graph.nodes
            assert counts.macs(graph, node) > 0, name
            counted.add(node.op)
    assert counted >= {"dot", "conv", "grouped_dot"}


def test_products_of_groups_are_those_of_the_whole():
    x = np.arange(24, dtype=np.float32).reshape(3, 8)
    spec = QSpec(bits=4, axis=-1, group_size=4, group_axis=0)
    qmodel = qjax.quantize(nnx.Linear(8, 5, rngs=nnx.Rngs(0)), Recipe(weights=spec), x)
    graph = qjax.convert(qmodel, x).ir
    (node,) = (node for node in graph.nodes if node.op == "grouped_dot")
    assert counts.macs(graph, node, 3) == 3 * 8 * 5
