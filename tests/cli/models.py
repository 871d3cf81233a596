"""Small models made by hand: the same bits on every machine."""

import numpy as np

from qjax import targets
from qjax.assign import assign
from qjax.export.integer_graph import IntegerGraph
from qjax.graph.ir import Graph, Node, Tensor
from tests.export.graphs import constant, quantization
from tests.lower.lowered import DENSE, accumulator, assemble, dense_chain, kernel, real

_CONV = {
    "strides": [1, 1],
    "padding": [[1, 1], [1, 1]],
    "lhs_dilation": [1, 1],
    "rhs_dilation": [1, 1],
    "groups": 1,
    "lhs_layout": [0, 3, 1, 2],
    "rhs_layout": [3, 2, 0, 1],
    "out_layout": [0, 3, 1, 2],
    "weight": 1,
    "channels": [[3, 3]],
    "rank": 4,
    "permutation": None,
}
_POOL = {
    "window": [1, 2, 2, 1],
    "strides": [1, 2, 2, 1],
    "padding": [[0, 0]] * 4,
    "base_dilation": [1] * 4,
    "window_dilation": [1] * 4,
}


def finished(graph: Graph, target: str) -> IntegerGraph:
    return IntegerGraph(assign(graph, targets.get(target)))


def dense(target: str = "tflite_micro") -> IntegerGraph:
    """Five inputs, one layer, four outputs."""
    return finished(dense_chain(), target)


def network(target: str = "tflite_micro") -> IntegerGraph:
    """Images of 8x8 to ten scores: two convolutions, a residual sum, a maximum, a dense layer."""
    rng = np.random.default_rng(5)
    shape, small = (None, 8, 8, 4), (None, 4, 4, 4)
    h, r, s = quantization(scale=0.05, zero_point=-128), quantization(scale=0.1), quantization(scale=0.12)
    tensors = [
        Tensor("image", (None, 8, 8, 1), "int8", quantization(scale=2.0**-6, zero_point=-20)),
        kernel("w1", rng, (3, 3, 1, 4)),
        kernel("w2", rng, (3, 3, 4, 4)),
        kernel("w3", rng, (64, 10)),
        *(real(f"b{i}", rng.normal(size=n)) for i, n in ((1, 4), (2, 4), (3, 10))),
        *(accumulator(name, shape) for name in ("a1", "s1", "c1", "a2", "s2", "a3", "c3")),
        Tensor("conv1", shape, "int8", h),
        Tensor("conv2", shape, "int8", r),
        Tensor("add", shape, "int8", s),
        Tensor("pool", small, "int8", s),
        Tensor("flat", (None, 64), "int8", s),
        *(accumulator(name, (None, 10)) for name in ("a4", "s4")),
        Tensor("scores", (None, 10), "int8", quantization(scale=0.75, zero_point=3)),
    ]

    def quantize(source: str, name: str) -> Node:
        return Node(name, "quantize", (source,), name)

    def step(source: str, name: str, value: str) -> Node:
        return Node(name, "affine_step", (source,), name, {"value": value}, {"step": "add"})

    nodes = [
        Node("a1", "conv", ("image",), "a1", {"kernel": "w1"}, _CONV, "digits.py:12"),
        step("a1", "s1", "b1"),
        Node("c1", "clamp", ("s1",), "c1", {}, {"relu": True}),
        quantize("c1", "conv1"),
        Node("a2", "conv", ("conv1",), "a2", {"kernel": "w2"}, _CONV, "digits.py:13"),
        step("a2", "s2", "b2"),
        quantize("s2", "conv2"),
        Node("a3", "add", ("conv1", "conv2"), "a3", {}, {"subtract": False}, "digits.py:14"),
        Node("c3", "clamp", ("a3",), "c3", {}, {"relu": True}),
        quantize("c3", "add"),
        Node("pool", "max_pool", ("add",), "pool", {}, _POOL, "digits.py:15"),
        Node("flat", "reshape", ("pool",), "flat", {}, {"shape": [None, 64]}, "digits.py:16"),
        Node("a4", "dot", ("flat",), "a4", {"kernel": "w3"}, DENSE, "digits.py:16"),
        step("a4", "s4", "b3"),
        quantize("s4", "scores"),
    ]
    return finished(assemble(tensors, nodes, "scores", inputs=("image",)), target)


def pair(target: str = "nearest_even") -> IntegerGraph:
    """Two inputs, codes and indices of six rows, and two outputs."""
    rng = np.random.default_rng(6)
    grid = quantization(scale=0.1, zero_point=4)
    tensors = [
        Tensor("words", (None,), "int32"),
        Tensor("bias", (None, 3), "int8", grid),
        constant("table", rng.integers(-127, 128, (6, 3)), "int8", quantization(-127, scale=0.2)),
        Tensor("rows", (None, 3), "int8", quantization(-127, scale=0.2)),
        accumulator("acc", (None, 3)),
        Tensor("sum", (None, 3), "int8", quantization(scale=0.3, zero_point=-1)),
    ]
    nodes = [
        Node("rows", "embed", ("words",), "rows", {"kernel": "table"}),
        Node("acc", "add", ("rows", "bias"), "acc", {}, {"subtract": False}),
        Node("sum", "quantize", ("acc",), "sum"),
    ]
    return finished(assemble(tensors, nodes, "sum", "rows", inputs=("words", "bias")), target)
