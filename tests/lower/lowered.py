"""A graph as the lowering leaves it, made by hand: accumulators, real constants, quantizers."""

import numpy as np
from numpy.typing import ArrayLike

from qjax.graph.ir import Graph, Node, Quantization, Tensor
from tests.export.graphs import quantization


def real(name: str, values) -> Tensor:
    data = np.asarray(values, np.float32)
    return Tensor(name, data.shape, "float32", None, data)


def accumulator(name: str, shape: tuple[int | None, ...]) -> Tensor:
    return Tensor(name, shape, "int32")


def assemble(tensors: list[Tensor], nodes: list[Node], *outputs: str, inputs: tuple[str, ...] = ("x",)) -> Graph:
    return Graph({t.name: t for t in tensors}, tuple(nodes), inputs, outputs, "")


def kernel(name: str, rng: np.random.Generator, shape: tuple[int, ...]) -> Tensor:
    """Narrow int8 codes with a scale per index of the last axis."""
    scales = (2.0 ** rng.uniform(-8, -5, shape[-1])).astype(np.float32)
    codes = rng.integers(-127, 128, shape).astype(np.int8)
    zeros = np.zeros(shape[-1], np.int32)
    return Tensor(name, shape, "int8", Quantization(scales, zeros, -127, 127, (len(shape) - 1,)), codes)


DENSE = {
    "lhs_contracting": [1],
    "rhs_contracting": [0],
    "lhs_batch": [],
    "rhs_batch": [],
    "weight": 1,
    "channels": [[1, 1]],
    "rank": 2,
    "permutation": None,
}


def dense_chain(seed: int = 0, gamma: ArrayLike = (1.5, -0.75, 1e-20, 2.0)) -> Graph:
    """x -> dot -> * gamma -> + beta -> relu -> quantize, five inputs and four features."""
    rng = np.random.default_rng(seed)
    tensors = [
        Tensor("x", (None, 5), "int8", quantization(scale=0.05, zero_point=11)),
        kernel("w", rng, (5, 4)),
        real("gamma", gamma),
        real("beta", [0.5, -0.25, 1.0, 0.0]),
        *(accumulator(name, (None, 4)) for name in ("acc", "scaled", "shifted", "clamped")),
        Tensor("y", (None, 4), "int8", quantization(scale=0.02, zero_point=-128)),
    ]
    nodes = [
        Node("acc", "dot", ("x",), "acc", {"kernel": "w"}, DENSE, "user.py:1"),
        Node("scaled", "affine_step", ("acc",), "scaled", {"value": "gamma"}, {"step": "mul"}, "user.py:2"),
        Node("shifted", "affine_step", ("scaled",), "shifted", {"value": "beta"}, {"step": "add"}, "user.py:2"),
        Node("clamped", "clamp", ("shifted",), "clamped", {}, {"relu": True}, "user.py:3"),
        Node("y", "quantize", ("clamped",), "y", {}, {}, "user.py:3"),
    ]
    return assemble(tensors, nodes, "y")


def residual_network(seed: int = 0, zero_point: int = 0, *, wide: bool = True) -> Graph:
    """A small network with every kind of chain: convolution, batch norm, residual sum, pooling, clip, dense.

    The residual sum halves: half of its results are exact ties. zero_point: of the output, which has 16 bits where it
    is wide, else 8.
    """
    rng = np.random.default_rng(seed)
    shape, small = (None, 6, 6, 4), (None, 3, 3, 4)
    conv = {
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
    pool = {
        "window": [1, 2, 2, 1],
        "strides": [1, 2, 2, 1],
        "padding": [[0, 0]] * 4,
        "base_dilation": [1] * 4,
        "window_dilation": [1] * 4,
    }
    norm = {"epsilon": 1e-5, "trailing": 0, "use_running_average": True}
    tensors = [
        Tensor("x", shape, "int8", quantization(scale=2.0**-5, zero_point=-5)),
        kernel("w1", rng, (3, 3, 4, 4)),
        real("mean", rng.normal(size=4)),
        real("var", rng.uniform(0.1, 4, 4)),
        real("scale", rng.normal(size=4)),
        real("bias", rng.normal(size=4)),
        *(accumulator(name, shape) for name in ("conv", "normed", "relued", "sum")),
        Tensor("h", shape, "uint8", quantization(0, 255, scale=2.0**-5, zero_point=0)),
        Tensor("r", shape, "int8", quantization(scale=2.0**-4, zero_point=-20)),
        Tensor("clipped", shape, "int8", quantization(scale=2.0**-4, zero_point=-20)),
        real("low", -1.0),
        real("high", 3.5),
        accumulator("window", small),
        accumulator("mean_of_four", small),
        real("four", 4.0),
        Tensor("p", small, "int8", quantization(scale=0.02, zero_point=3)),
        Tensor("flat", (None, 36), "int8", quantization(scale=0.02, zero_point=3)),
        kernel("w2", rng, (36, 7)),
        accumulator("logits", (None, 7)),
        Tensor("y", (None, 7), "int16", quantization(-32768, 32767, scale=0.001, zero_point=zero_point))
        if wide
        else Tensor("y", (None, 7), "int8", quantization(scale=0.2, zero_point=zero_point)),
    ]
    statistics = {name: name for name in ("mean", "var", "scale", "bias")}
    nodes = [
        Node("conv", "conv", ("x",), "conv", {"kernel": "w1"}, conv),
        Node("normed", "batch_norm", ("conv",), "normed", statistics, norm),
        Node("relued", "clamp", ("normed",), "relued", {}, {"relu": True}),
        Node("h", "quantize", ("relued",), "h"),
        Node("sum", "add", ("x", "h"), "sum", {}, {"subtract": False}),
        Node("r", "quantize", ("sum",), "r"),
        Node("clipped", "clamp", ("r",), "clipped", {"low": "low", "high": "high"}),
        Node("window", "window_sum", ("clipped",), "window", {}, pool),
        Node("mean_of_four", "affine_step", ("window",), "mean_of_four", {"value": "four"}, {"step": "div"}),
        Node("p", "quantize", ("mean_of_four",), "p"),
        Node("flat", "reshape", ("p",), "flat", {}, {"shape": [None, 36]}),
        Node("logits", "dot", ("flat",), "logits", {"kernel": "w2"}, DENSE),
        Node("y", "quantize", ("logits",), "y"),
    ]
    return assemble(tensors, nodes, "y")
