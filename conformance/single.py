"""qjax's own answer to a case: the operation converted for a target and run by the interpreter."""

import functools
import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from conformance.case import Case, Grid, float_bias, output_shape, padding, strides, window
from qjax import ops
from qjax.assign import assign
from qjax.graph.ir import Graph, Node, Quantization, Tensor
from qjax.graph.kernels import attributes, prepare
from qjax.numerics import softmax
from qjax.numerics.affine import QParams, QSpec, quantize
from qjax.numerics.lookup import FUNCTIONS
from qjax.numerics.rules import get_rule
from qjax.numerics.tables import function_table
from qjax.ops.quantize import Quantize
from qjax.ops.windows import convolution, pool, with_kernel
from qjax.targets import Target


def run(case: Case, target: Target) -> np.ndarray:
    """The output's codes under a target, in the dtype of the case's output grid."""
    if case.op == "quantize":
        return _quantize(case, target)
    if case.op in FUNCTIONS:
        return _table(case, target)
    if case.op == "softmax":
        return _softmax(case, target)
    graph = graph_of(case, target)
    (node,) = graph.nodes
    constants = prepare(graph)[node.name]
    known = json.dumps(attributes(graph, node), sort_keys=True)
    return np.asarray(_kernel(node.op, known)(constants, list(case.inputs)))


def rule(case: Case, target: Target) -> str:
    """What decides the case's bits under a target: a rule of requantization, a formula, a table."""
    if case.op == "quantize":
        return target.quantize
    if case.op in FUNCTIONS:
        return f"table: {target.tables}"
    if case.op == "softmax":
        return f"softmax: {target.softmax}"
    known = graph_of(case, target).nodes[0].attributes
    return known.get("formula") or known.get("rule") or f"exact sum, {known['rounding']}"


def graph_of(case: Case, target: Target) -> Graph:
    """The case as a finished graph of one node."""
    tensors: dict[str, Tensor] = {}
    names: list[str] = []
    for index, (codes, grid) in enumerate(zip(case.inputs, case.grids, strict=True)):
        names.append(f"x{index}")
        tensors[names[-1]] = Tensor(names[-1], codes.shape, grid.dtype, _quantization(grid))
    op, known, constants = _operation(case)
    if case.kernel is not None:
        assert case.kernel_grid is not None
        axes = (case.kernel.ndim - 1,) if np.ndim(case.kernel_grid.scale) else ()
        codes, grid = case.kernel, case.kernel_grid
        if grid.zero_point:
            # This is how the conversion stores asymmetric weights.
            codes, grid = (codes.astype(np.int32) - grid.zero_point).astype(np.int16), Grid(grid.scale, 0, "int16")
        tensors["kernel"] = Tensor("kernel", codes.shape, grid.dtype, _quantization(grid, axes), codes)
        constants["kernel"] = "kernel"
    shape = output_shape(case)
    tensors["y"] = Tensor("y", shape, case.output.dtype, _quantization(case.output))
    if case.bias is not None and case.kernel is not None:
        # As in files: codes in steps of the accumulator, or the real numbers that a runtime adds itself.
        bias = float_bias(case) if _adds_floats(case, target) else case.bias
        tensors["bias"] = Tensor("bias", bias.shape, str(bias.dtype), None, bias)
        nodes = (Node("y", op, tuple(names), "y", {**constants, "bias": "bias"}, known),)
        return assign(Graph(tensors, nodes, tuple(names), ("y",), ""), target)
    tensors["acc"] = Tensor("acc", shape, "int32")
    chain: list[Node] = []
    last = "acc"
    for index, (step, value) in enumerate(_steps(case)):
        tensors[f"value{index}"] = Tensor(f"value{index}", np.shape(value), "float32", None, value)
        tensors[f"step{index}"] = Tensor(f"step{index}", shape, "int32")
        chain.append(
            Node(f"step{index}", "affine_step", (last,), f"step{index}", {"value": f"value{index}"}, {"step": step})
        )
        last = f"step{index}"
    nodes = (Node("node", op, tuple(names), "acc", constants, known), *chain, Node("y", Quantize.name, (last,), "y"))
    return assign(Graph(tensors, nodes, tuple(names), ("y",), ""), target)


def _operation(case: Case) -> tuple[str, dict[str, Any], dict[str, str]]:
    """Name, attributes and constants of the node."""
    if case.op == "fully_connected":
        rank = case.inputs[0].ndim
        return (
            "dot",
            {
                "lhs_contracting": [rank - 1],
                "rhs_contracting": [0],
                "lhs_batch": [],
                "rhs_batch": [],
                "weight": 1,
                "channels": [[rank - 1, 1]],
                "rank": rank,
                "permutation": None,
            },
            {},
        )
    if case.op == "softmax":
        return "softmax", {"axes": [case.inputs[0].ndim - 1]}, {}
    if case.op in ("conv2d", "depthwise_conv2d"):
        assert case.kernel is not None
        groups = case.inputs[0].shape[3] // case.kernel.shape[2]
        return (
            "conv",
            with_kernel(convolution(strides(case), padding(case), groups=groups)),
            {},
        )
    if case.op == "average_pool":
        return (
            "window_sum",
            pool([1, *window(case), 1], [1, *strides(case), 1], [[0, 0], *padding(case), [0, 0]]),
            {},
        )
    if case.op == "matmul":
        numbers = {"lhs_contracting": [2], "rhs_contracting": [1], "lhs_batch": [0], "rhs_batch": [0]}
        return "dot", {**numbers, "weight": None, "channels": [], "rank": 3, "permutation": None}, {}
    if case.op == "mean":
        return "sum", {"axes": list(case.attributes["axes"])}, {}
    if case.op in ("add", "subtract"):
        return "add", {"subtract": case.op == "subtract"}, {}
    return case.op, {}, {}


def _steps(case: Case) -> list[tuple[str, np.ndarray]]:
    """The affine steps behind the accumulator: the division of an average."""
    if case.op == "mean":
        count = np.prod([case.inputs[0].shape[axis] for axis in case.attributes["axes"]])
        return [("div", np.asarray(count, np.float32))]
    return [("div", valid_counts(case))] if case.op == "average_pool" else []


def _adds_floats(case: Case, target: Target) -> bool:
    """Whether the target's rule for a product takes the bias as a real number."""
    kind = {"fully_connected": "dot", "conv2d": "conv"}.get(case.op, "depthwise")
    assert case.kernel_grid is not None
    wide = case.grids[0].dtype == "int16"
    rule = target.weighted(kind, per_channel=np.ndim(case.kernel_grid.scale) > 0, wide=wide).rule  # pyright: ignore[reportArgumentType]
    return get_rule(rule).takes_bias


def valid_counts(case: Case) -> np.ndarray:
    """How many elements that are no padding each window of an average pool covers; a scalar without padding."""
    if case.attributes.get("padding", "VALID") == "VALID":
        return np.asarray(np.prod(window(case)), np.float32)
    ones = np.ones((1, *case.inputs[0].shape[1:3], 1), np.float32)
    around = [(0, 0), *((low, high) for low, high in padding(case)), (0, 0)]
    return np.asarray(
        jax.lax.reduce_window(ones, np.float32(0), jax.lax.add, (1, *window(case), 1), (1, *strides(case), 1), around)
    )


def _quantization(grid: Grid, axes: tuple[int, ...] = ()) -> Quantization:
    scale = np.asarray(grid.scale, np.float32)
    zero_point = np.full(scale.shape if axes else (), grid.zero_point, np.int32)
    return Quantization(scale, zero_point, grid.qmin, grid.qmax, axes)


def _quantize(case: Case, target: Target) -> np.ndarray:
    grid = case.output
    spec = QSpec(8 if grid.dtype.endswith("int8") else 16, signed=grid.qmin < 0, symmetric=False, narrow_range=False)
    params = QParams(np.asarray(grid.scale, np.float32), np.int32(grid.zero_point), spec)
    return np.asarray(quantize(jnp.asarray(case.inputs[0]), params, quantization=target.quantize))


def _table(case: Case, target: Target) -> np.ndarray:
    (x,), y = case.grids, case.output
    table = function_table(
        target.tables,
        case.op,
        float(x.scale),
        x.zero_point,
        float(y.scale),
        y.zero_point,
        x_range=(x.qmin, x.qmax),
        y_range=(y.qmin, y.qmax),
    )
    return table[case.inputs[0].astype(np.int64) - x.qmin].astype(y.dtype)


def _softmax(case: Case, target: Target) -> np.ndarray:
    if target.softmax is None:
        raise ValueError(f"target {target.name!r} does not say how it computes softmax; set Target.softmax.")
    constants = softmax.prepare(
        target.softmax,
        float(case.grids[0].scale),
        length=case.inputs[0].shape[-1],
        y_scale=float(case.output.scale),
        y_zero_point=int(case.output.zero_point),
    )
    return np.asarray(jax.jit(softmax.softmax)(case.inputs[0], constants))


@functools.lru_cache(maxsize=64)
def _kernel(op: str, known: str) -> Any:
    """The kernel under jit; cases that differ in their numbers only share its program."""
    facts: Mapping[str, Any] = json.loads(known)

    def kernel(constants: Mapping[str, Any], inputs: list[jax.Array]) -> jax.Array:
        return ops.get(op).kernel(facts, constants, inputs)

    return jax.jit(kernel)
