"""One product whose rows get codes at run time, as a graph, and rows at which formulas part."""

import numpy as np

from qjax import targets
from qjax.assign import assign
from qjax.graph.ir import Graph, Node, Quantization, Tensor

F32 = np.float32
KINDS = ("normal", "ties", "far", "positive", "sparse")


def product(
    target: str, n: int, depth: int, *, symmetric: bool = False, bits: int = 8, group: int | None = None, seed: int = 0
) -> Graph:
    """A `dynamic_dot` with random weights under a target."""
    rng = np.random.default_rng(seed)
    most = 2 ** (bits - 1) - 1
    shape, scales = (n, depth), (n,)
    if group is not None:
        shape, scales = (n, depth // group, group), (n, depth // group)
    codes = rng.integers(-most, most + 1, shape).astype(np.int8)
    scale = (rng.random(scales) * 0.02 + 0.001).astype(F32)
    if group is not None:
        scale = (scale.view(np.uint32) & np.uint32(0xFFFF0000)).view(F32)
    grid = Quantization(scale, np.zeros((), np.int32), -most, most, tuple(range(len(scales))))
    tensors = {
        "x": Tensor("x", (None, depth), "float32"),
        "kernel": Tensor("kernel", shape, "int8", grid, codes),
        "y": Tensor("y", (None, n), "float32"),
    }
    attributes = {"symmetric": symmetric, "summed": 1, "features": [n]}
    node = Node("y", "dynamic_dot", ("x",), "y", {"kernel": "kernel"}, attributes)
    return assign(Graph(tensors, (node,), ("x",), ("y",), ""), targets.get(target))


def rows(kind: str, count: int, depth: int, seed: int = 0) -> np.ndarray:
    """Rows of very different size; the first one is zero."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, depth)) * np.exp(3 * rng.normal(size=(count, 1)))
    if kind == "ties":
        x = rng.integers(-255, 256, (count, depth)) * 0.5
        x[:, 0], x[:, -1] = 127.5, -127.5
        x[count // 2 :] = rng.integers(-127, 128, (count - count // 2, depth)) * 0.25
        x[count // 2 :, 0] = 63.5
    elif kind == "far":
        x += 100
    elif kind == "positive":
        x = np.abs(x) * rng.choice([-1, 1], (count, 1))
    elif kind == "sparse":
        x = np.where(rng.random((count, depth)) < 0.9, 0, x)
    x[0] = 0
    return x.astype(F32)
