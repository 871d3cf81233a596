"""Chooses the target's formula for a node without weights.

The runtime's formula computes its bare operation. With other affine steps after it (a factor after an addition, for
instance) it is not an operation of any runtime, so the exact sum applies, as it does if the target names no formula.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.core import Tracer

from qjax import ops
from qjax.graph.ir import Graph, Node, Quantization, Tensor
from qjax.ops.facts import AverageFacts
from qjax.ops.formulas import Formula, Setting, average, count_of, get
from qjax.targets import Target


def formula_of(
    graph: Graph, tensors: Mapping[str, Tensor], node: Node, chain: Sequence[Node], output: Tensor, target: Target
) -> tuple[Formula, Setting] | None:
    """The formula and its setting, or None for the exact sum.

    The target's formulas have been checked (`formulas.check_target`).
    """
    steps = [step for step in chain if not ops.get(step.op).clamps]
    factor = _factor(graph, node, steps) if target.scaled_matmul else None
    if factor is not None:
        return formula_for(tensors, node, "matmul", 1, output, target, factor)
    found = _operation(graph, node, steps)
    if found is None:
        return None
    return formula_for(tensors, node, *found, output, target)


def formula_for(
    tensors: Mapping[str, Tensor],
    node: Node,
    op: str,
    count: Any,
    output: Tensor,
    target: Target,
    factor: float = 1.0,
) -> tuple[Formula, Setting] | None:
    """The same as `formula_of`, for a node that is known to be one of `formulas.OPS`.

    count: how many elements an average has per output, int or int32 array. factor: see `Target.scaled_matmul`.
    """
    inputs = [_quantization(tensors[tensor]) for tensor in node.inputs]
    y = _quantization(output)
    averages = ops.get(node.op)
    if isinstance(averages, AverageFacts):
        x = tensors[node.inputs[0]]
        formula = average(
            target,
            op,
            spatial=averages.is_spatial(node.attributes, x.shape),
            wide=x.dtype == "int16",
            same_grid=_same_grid(inputs[0], y),
            varying=bool(np.ndim(count)),
        )
    else:
        name = target.formula(op)
        formula = None if name is None else get(name)
        if formula is not None and formula.broadcast is not None and len({tensors[x].shape for x in node.inputs}) > 1:
            formula = get(formula.broadcast)
    if formula is None:
        return None
    widths = frozenset(np.dtype(tensor.dtype).itemsize for tensor in (*(tensors[name] for name in node.inputs), output))
    if formula.widths is not None and widths not in formula.widths:
        return None
    setting = Setting(
        op,
        tuple(q.scale for q in inputs),
        tuple(q.zero_point for q in inputs),
        y.scale,
        y.zero_point,
        output.dtype,
        count,
        factor,
    )
    return formula, setting


def _factor(graph: Graph, node: Node, steps: Sequence[Node]) -> float | None:
    """The factor after a product of activations, if it is one positive constant."""
    if ops.get(node.op).operation(node.attributes) != "matmul" or len(steps) != 1:
        return None
    (known,) = (step.attributes for step in steps)
    if known.get("step") not in ("mul", "div") or not known.get("literal"):
        return None
    value = float(np.asarray(graph.constant(steps[0], "value")).reshape(()))
    if not 2.0**-100 < value < 2.0**100:
        return None
    return value if known["step"] == "mul" else 1.0 / value


def _operation(graph: Graph, node: Node, affine: list[Node]) -> tuple[str, Any] | None:
    """The operation of a runtime that the node is together with these steps, and the count of an average."""
    op = ops.get(node.op)
    if isinstance(op, AverageFacts):
        count = _count(graph, affine)
        shape = graph.tensors[node.inputs[0]].shape
        return (op.average, count) if count is not None and op.is_average(node.attributes, shape, count) else None
    operation = None if affine else op.operation(node.attributes)
    return None if operation is None else (operation, 1)


def _count(graph: Graph, affine: list[Node]) -> Any:
    """n, if the steps are one division by whole numbers n (or a product with 1 / n)."""
    if len(affine) != 1 or affine[0].attributes.get("step") not in ("div", "mul"):
        return None
    return count_of(affine[0].attributes["step"], graph.constant(affine[0], "value"))


def _quantization(tensor: Tensor) -> Quantization:
    assert tensor.quantization is not None
    return tensor.quantization


def _same_grid(a: Quantization, b: Quantization) -> bool:
    """Whether both belong to one quantizer: the very same arrays, or equal numbers where those are known."""
    if a.scale is b.scale and a.zero_point is b.zero_point:
        return True
    values = (a.scale, b.scale, a.zero_point, b.zero_point)
    if any(isinstance(value, Tracer) for value in values):
        return False
    return np.array_equal(a.scale, b.scale) and np.array_equal(a.zero_point, b.zero_point)
