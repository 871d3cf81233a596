"""The same graph under another target: its rules, formulas and constants, made anew from the graph's own scales.

A finished graph holds what a model says of itself (codes of weights, integer biases, scales, zero points, clamps,
counts of averages) beside what a target made of it (rules, formulas, multipliers, shifts). Here the second part is
replaced. A graph that was read from a file has only the first; this finishes it.

What comes out is what a conversion for the other target gives, but for two things that a conversion decides earlier:
biases are integers already (a target whose rule adds a float bias gets their exact value), and averages keep the grids
that they have.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from qjax import ops, targets
from qjax.export.check import check, check_integer
from qjax.export.ir import Graph, Node, Quantization, Tensor
from qjax.export.passes import check_accumulators, remove_dead
from qjax.export.passes.formulas import formula_for
from qjax.export.passes.fuse import operand
from qjax.export.passes.partition import expand
from qjax.export.passes.weighted import arithmetic_of, kind_of, scale_in_rank
from qjax.numerics.rules import get_rule
from qjax.numerics.softfloat import Real
from qjax.ops import Preparation, Role
from qjax.ops.channels import weight_to_result
from qjax.ops.epilogue import Affine, fold_sum, requantization
from qjax.ops.facts import AverageFacts
from qjax.ops.formulas import check_target

_KEPT = ("kernel", "bias", "count", "clamp_min", "clamp_max")
"""Constants that belong to the model; all others belong to the target."""


def retarget(graph: Graph, target: str | targets.Target) -> Graph:
    """The graph under a target.

    Args:
      graph: a finished graph, or one whose nodes have no rule and no formula yet. A product with weights needs the
        constants kernel (with its scale) and bias (int32, at the scale of input times kernel), an average `count`.
        Without constants of a target, a node stands for its bare operation: y = x0 + x1, not y = 2 (x0 + x1).
      target: the target or its name.

    Raises:
      ValueError: an unknown target; an output whose scale is far too small for its input.
      ConversionError: an accumulator that may overflow under the target.
    """
    target = targets.get(target)
    check_target(target)
    graph = expand(graph)
    if graph.target == target.name and all(_is_finished(node) for node in graph.nodes):
        return graph
    made = _Made(graph)
    nodes = tuple(_retargeted(graph, made, node, target) for node in check(graph).nodes)
    # No node reads the former target's constants any more, so they go with the dead tensors.
    changed = graph.replace(
        nodes=nodes,
        tensors=made.tensors,
        target=target.name,
        quantization=target.quantize,
        dequantization=target.dequantize,
    )
    return check_accumulators(check_integer(remove_dead(changed)))


def made_by_target(graph: Graph) -> set[str]:
    """The names of the nodes whose rule, formula and constants are what the graph's target makes of the scales.

    An emitter whose files carry scales but no constants asks this: their runtime will derive the constants alike.
    """
    # Under another name, so that `retarget` takes no node for finished.
    again = retarget(graph.replace(target=""), graph.target)
    fresh = {node.name: node for node in again.nodes}

    def same(node: Node, other: Node) -> bool:
        if dict(node.attributes) != dict(other.attributes) or node.constants.keys() != other.constants.keys():
            return False
        return all(np.array_equal(graph.constant(node, role), again.constant(other, role)) for role in node.constants)

    return {node.name for node in graph.nodes if node.name in fresh and same(node, fresh[node.name])}


class _Made:
    """The graph's tensors, and the constants that the target adds.

    Nodes that held the former constants together, as the steps of a loop do, hold the new ones together.
    """

    def __init__(self, graph: Graph) -> None:
        self.tensors = dict(graph.tensors)
        self._known: dict[tuple[Any, ...], str] = {}
        self._names: set[str] = set()

    def constant(self, node: Node, role: str, name: str, value: Any) -> str:
        """The name under which a node finds an array in a role; `name` where that is free."""
        array = np.asarray(value)
        key = (*sorted(node.constants.items()), role, array.dtype.str, array.shape, array.tobytes())
        if key not in self._known:
            while name in self._names:
                name += "'"
            self._names.add(name)
            self._known[key] = name
            self.tensors[name] = Tensor(name, array.shape, str(array.dtype), None, array)
        return self._known[key]


def _is_finished(node: Node) -> bool:
    op = ops.get(node.op)
    if op.role is not Role.PRODUCER:
        return True
    if op.prepares:
        return any(not role.startswith("clamp_") for role in node.constants)
    return bool({"rule", "formula", "rounding"} & set(node.attributes))


def _retargeted(graph: Graph, made: _Made, node: Node, target: targets.Target) -> Node:
    if ops.get(node.op).role is not Role.PRODUCER:
        return node
    output = graph.tensors[node.output]
    if ops.get(node.op).prepares:
        return _prepared(graph, made, node, target)
    own = {key: value for key, value in node.attributes.items() if key not in ("rule", "formula", "accumulator")}
    own.pop("rounding", None)
    if "kernel" in node.constants:
        constants, attributes = _weighted(graph, node, target)
    else:
        constants, attributes = _summed(graph, node, output, target)
    kept = {role: node.constants[role] for role in _KEPT if role in node.constants and role != "count"}
    roles = {role: name for role, name in kept.items() if not role.startswith("clamp_")}
    for role, value in constants.items():
        roles[role] = made.constant(node, role, roles.get(role, f"{node.output}/{role}"), value)
    ordered = {**roles, **{role: name for role, name in kept.items() if role not in roles}}
    return dataclasses.replace(node, constants=ordered, attributes={**own, **attributes})


def _prepared(graph: Graph, made: _Made, node: Node, target: targets.Target) -> Node:
    """An operation that makes its own constants."""
    held = {role: graph.constant(node, role) for role in node.constants if not role.startswith("clamp_")}
    inputs, output = (operand(graph.tensors[name]) for name in node.inputs), operand(graph.tensors[node.output])
    given = Preparation(node.attributes, held, tuple(inputs), output, Affine.identity(), target)
    prepared = ops.get(node.op).retarget(given)
    if prepared is None:
        return node
    kept = ops.get(node.op).keeps
    roles = {
        role: made.constant(node, role, f"{node.output}/{role}", value)
        for role, value in prepared.constants.items()
        if role not in kept
    }
    roles |= {role: name for role, name in node.constants.items() if role in kept or role.startswith("clamp_")}
    return dataclasses.replace(node, constants=roles, attributes={**node.attributes, **prepared.attributes})


# ---------------------------------------------------------------------------- products with weights


def _weighted(graph: Graph, node: Node, target: targets.Target) -> tuple[dict[str, Any], dict[str, Any]]:
    kernel = graph.tensors[node.constants["kernel"]]
    s_x = _quantization(graph, node.inputs[0]).scale
    s_y = _quantization(graph, node.output).scale
    s_w = weight_to_result(scale_in_rank(kernel), node.attributes["channels"], node.attributes["rank"])
    per_channel = np.size(s_w) > 1
    wide = graph.tensors[node.inputs[0]].dtype == "int16"
    weighted = target.weighted(kind_of(node, kernel), per_channel=per_channel, wide=wide)
    if graph.tensors[node.output].dtype == "int32":
        # The output is the accumulator itself: nothing is rounded.
        weighted = targets.Weighted("nearest_even")
    step = Real.of(s_x) * Real.of(s_w)
    bias, real = _bias(graph, node, step)
    bias, constants = requantization(s_x, s_w, s_y, real, bias, weighted, per_channel)
    shape = tuple(np.shape(s_w))
    constants = {
        role: np.broadcast_to(value, np.broadcast_shapes(shape, np.shape(value))) for role, value in constants.items()
    }
    x = graph.tensors[node.inputs[0]].shape
    return {"bias": bias, **constants}, arithmetic_of(node, kernel, x, weighted.rule, target)


def _bias(graph: Graph, node: Node, step: Real) -> tuple[Any, Real]:
    """The bias in steps of the accumulator, int32, and as a real number."""
    held = np.asarray(graph.constant(node, "bias"))
    rule = get_rule(node.attributes["rule"]) if "rule" in node.attributes else None
    if rule is None or rule.real_bias is None:
        return held, Real.of(held) * step
    real = rule.real_bias(rule.constants(**{role: graph.constant(node, role) for role in rule.fields}), step)
    return (real / step).to_int32(), real


# ---------------------------------------------------------------------------- sums of scaled integers


def _summed(graph: Graph, node: Node, output: Tensor, target: targets.Target) -> tuple[dict[str, Any], dict[str, Any]]:
    rounding = {"rounding": target.rounding.value}
    factors = {role: graph.constant(node, role) for role in node.constants if role not in _KEPT}
    count = _count(graph, node)
    bare = _exact(graph, node, output, count)
    if "rounding" in node.attributes and not _equal(factors, bare):
        # Another affine step was folded into these factors. They are all that is left of it, so they stay.
        return factors, rounding
    op = ops.get(node.op)
    # A sum that is not divided is no operation of any runtime.
    averaged = op.average if isinstance(op, AverageFacts) and count is not None else None
    operation = averaged or op.operation(node.attributes)
    found = None
    if operation is not None:
        found = formula_for(graph.tensors, node, operation, 1 if count is None else count, output, target)
    if found is None:
        return bare, rounding
    formula, setting = found
    constants: dict[str, Any] = dict(formula.prepare(setting))
    if averaged is not None:
        constants["count"] = np.asarray(setting.count, np.int32)
    return constants, {"formula": formula.name}


def _exact(graph: Graph, node: Node, output: Tensor, count: Any) -> dict[str, Any]:
    assert output.quantization is not None
    # Integers that are no codes (masks, indices) have no scale.
    known = [graph.tensors[name].quantization for name in node.inputs]
    scales = [Real.of(quantization.scale) for quantization in known if quantization is not None]
    accumulators = ops.get(node.op).scales(node.attributes, scales)
    return fold_sum(accumulators, output.quantization.scale, _average(count))


def _average(count: Any) -> Affine:
    affine = Affine.identity()
    return affine if count is None else Affine(affine.g / Real.of(np.asarray(count, np.float32)), affine.b)


def _count(graph: Graph, node: Node) -> Any:
    """How many elements an average has, or None for a node that is none."""
    op = ops.get(node.op)
    if not isinstance(op, AverageFacts):
        return None
    if "count" in node.constants:
        return np.asarray(graph.constant(node, "count"))
    if "rounding" not in node.attributes:
        return None
    # A target that computes averages exactly stores no count: find the number that gives the factors of this node.
    output = graph.tensors[node.output]
    held = {role: graph.constant(node, role) for role in node.constants if role not in _KEPT}
    factor = np.asarray(held["factor0"], np.float64) * 2.0 ** -np.asarray(held["shift"], np.float64)
    steps = float(np.asarray(_quantization(graph, node.inputs[0]).scale)) / float(
        np.asarray(_quantization(graph, node.output).scale)
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        guess = np.rint(steps / factor)
    if not np.all((guess >= 1) & (guess < 2**31)):
        return None
    count = guess.astype(np.int32)
    if not op.is_average(node.attributes, graph.tensors[node.inputs[0]].shape, count):
        return None
    return count if _equal(held, _exact(graph, node, output, count)) else None


def _equal(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[role], b[role]) for role in a)


def _quantization(graph: Graph, name: str) -> Quantization:
    quantization = graph.tensors[name].quantization
    if quantization is None:
        raise ValueError(f"retarget: the tensor {name!r} has no scale, and a target makes its constants from scales.")
    return quantization
