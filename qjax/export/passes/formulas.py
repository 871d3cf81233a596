"""Which formula of the target computes a node without weights.

The runtime's formula stands for its bare operation. A chain of other affine steps behind it (a factor behind an
addition, say) is no operation of any runtime; the exact sum serves there, as it does where the target names no formula.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.core import Tracer

from qjax.export.ir import Graph, Node, Quantization, Tensor
from qjax.ops.formulas import Formula, Setting, average, count_of, get
from qjax.targets import Target

_AFFINE = ("affine_step", "batch_norm")


def formula_of(
    graph: Graph, tensors: Mapping[str, Tensor], node: Node, chain: Sequence[Node], output: Tensor, target: Target
) -> tuple[Formula, Setting] | None:
    """The formula and what it may know, or None for the exact sum.

    The target's formulas have been checked (`formulas.check_target`).
    """
    found = _operation(graph, node, [step for step in chain if step.op in _AFFINE])
    if found is None:
        return None
    return formula_for(tensors, node, *found, output, target)


def formula_for(
    tensors: Mapping[str, Tensor], node: Node, op: str, count: Any, output: Tensor, target: Target
) -> tuple[Formula, Setting] | None:
    """The same for a node that is known to be one of `formulas.OPS`.

    count: how many elements one output of an average has, int or int32 array.
    """
    inputs = [_quantization(tensors[tensor]) for tensor in node.inputs]
    y = _quantization(output)
    if op in ("mean", "average_pool"):
        x = tensors[node.inputs[0]]
        formula = average(
            target,
            op,
            spatial=op == "mean" and len(x.shape) == 4 and sorted(node.attributes["axes"]) == [1, 2],
            wide=x.dtype == "int16",
            same_grid=_same_grid(inputs[0], y),
            varying=bool(np.ndim(count)),
        )
    else:
        name = target.formula(op)
        formula = None if name is None else get(name)
    if formula is None:
        return None
    setting = Setting(
        op,
        tuple(q.scale for q in inputs),
        tuple(q.zero_point for q in inputs),
        y.scale,
        y.zero_point,
        output.dtype,
        count,
    )
    return formula, setting


def _operation(graph: Graph, node: Node, affine: list[Node]) -> tuple[str, Any] | None:
    """What a runtime calls the node with these steps behind it, and the count of an average."""
    if node.op in ("sum", "window_sum"):
        count = _count(graph, affine)
        full = elements(graph, node)
        if count is None or (node.op == "sum" and not np.array_equal(count, full)):
            return None
        return "mean" if node.op == "sum" else "average_pool", count
    if affine:
        return None
    if node.op == "add":
        return "subtract" if node.attributes["subtract"] else "add", 1
    return ({"dot": "matmul"}.get(node.op, node.op), 1) if node.op in ("multiply", "rescale", "dot") else None


def _count(graph: Graph, affine: list[Node]) -> Any:
    """n, where the steps are one division by whole numbers n (or a product with 1 / n)."""
    if len(affine) != 1 or affine[0].attributes.get("step") not in ("div", "mul"):
        return None
    return count_of(affine[0].attributes["step"], graph.constant(affine[0], "value"))


def elements(graph: Graph, node: Node) -> int | None:
    """How many elements of its input one output of a sum reads; None where the batch is among them."""
    if node.op != "sum":
        return math.prod(node.attributes["window"])
    sizes = [graph.tensors[node.inputs[0]].shape[axis] for axis in node.attributes["axes"]]
    return None if None in sizes else math.prod(size for size in sizes if size is not None)


def _quantization(tensor: Tensor) -> Quantization:
    assert tensor.quantization is not None
    return tensor.quantization


def _same_grid(a: Quantization, b: Quantization) -> bool:
    """Whether the two are one quantizer's: the very same arrays, or equal numbers where those are known."""
    if a.scale is b.scale and a.zero_point is b.zero_point:
        return True
    values = (a.scale, b.scale, a.zero_point, b.zero_point)
    if any(isinstance(value, Tracer) for value in values):
        return False
    return np.array_equal(a.scale, b.scale) and np.array_equal(a.zero_point, b.zero_point)
