"""Makes the program of a model under another target, by `assign` on the program's quantized graph.

Programs from files of other formats, and those made by hand, have no quantized graph, so `from_program` reconstructs
one. A program holds both the model's own numbers (codes of weights, biases, scales, zero points, clamps) and what a
target made of them (rules, formulas, multipliers, shifts). `from_program` removes the second part. Where a target
folded a value that cannot be recovered, the node keeps its constants in a form that every target accepts
(`assign.imported_nodes`), or there is an error. It only returns a graph whose program under the same target has the
given constants.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qjax import ops, targets
from qjax.assign import assign
from qjax.assign.constants import kernel_scale
from qjax.assign.imported_nodes import STATED
from qjax.assign.partition import expand
from qjax.graph.dead_code import remove_dead
from qjax.graph.ir import Graph, Node, Tensor
from qjax.graph.unsupported import ConversionError
from qjax.numerics.rules import get_rule
from qjax.numerics.softfloat import Real
from qjax.ops import Role
from qjax.ops.epilogue import Affine, fold_sum
from qjax.ops.facts import AverageFacts
from qjax.ops.fields import OF_TARGETS
from qjax.support.names import lengthened


def retarget(graph: Graph, target: str | targets.Target) -> Graph:
    """The program under another target: the same as that of a conversion for that target.

    Args:
      graph: a program. If it has no quantized graph (see `Graph.quantized`), `from_program` reconstructs one, in which
        biases are already integers and folded factors remain.
      target: the target or its name.

    Raises:
      ValueError: the target is unknown; an output's scale is far too small for its input.
      ConversionError: an accumulator may overflow under the target; a quantized graph cannot be reconstructed.
    """
    target = targets.get(target)
    if graph.target == target.name:
        return expand(graph)
    if graph.quantized is not None:
        return assign(graph.quantized.replace(metadata=graph.metadata, call=graph.call), target)
    whole = expand(graph)
    return assign(from_program(whole), target, alike(whole))


_BOUNDS = ("clamp_min", "clamp_max")


def from_program(graph: Graph) -> Graph:
    """Reconstruct the quantized graph of a program.

    Raises:
      ValueError: the program's target is unknown here.
      ConversionError: the constants of some nodes are not those that the target derives from the scales, so the
        original numbers are unknown.
    """
    graph = expand(graph)
    bare = stated(graph)
    made = _same_constants(graph, bare)
    other = [node for node in graph.nodes if node.name not in made]
    if other:
        listed = ", ".join(f"{node.name!r} ({node.op})" for node in other[:5])
        raise ConversionError(
            f"{len(other)} nodes have constants that the target {graph.target!r} does not derive from "
            f"their scales: {listed}. The constants of another target would have to be guessed",
            "Convert the model again: graphs from qjax.convert, and files that they are saved to, keep what every "
            "target needs.",
            where=other[0].location,
        )
    return bare


def alike(graph: Graph) -> dict[str, Sequence[Any]]:
    """By node, the constants that it shares with others, see `assign`."""
    return {node.name: sorted(node.constants.items()) for node in graph.nodes}


def made_by_target(graph: Graph) -> set[str]:
    """The names of the nodes whose rule, formula and constants are those that the target derives from the scales.

    Emitters whose files carry scales but no constants need this, because their runtime derives the constants itself.
    """
    return _same_constants(graph, stated(graph))


def _same_constants(graph: Graph, bare: Graph) -> set[str]:
    again = assign(bare, targets.get(graph.target), alike(graph))
    fresh = {node.name: node for node in again.nodes}

    def same(node: Node, other: Node) -> bool:
        if dict(node.attributes) != dict(other.attributes) or node.constants.keys() != other.constants.keys():
            return False
        return all(np.array_equal(graph.constant(node, role), again.constant(other, role)) for role in node.constants)

    return {node.name for node in graph.nodes if node.name in fresh and same(node, fresh[node.name])}


def stated(graph: Graph) -> Graph:
    """The graph without its target's constants, as far as the nodes allow.

    Products with weights keep their kernels and biases, averages their counts. A sum keeps its factors if they do not
    follow from its scales alone, because another step was folded into them. Operations that prepare their own constants
    keep those.
    """
    tensors = dict(graph.tensors)
    nodes = tuple(_remove_derived(graph, tensors, node) for node in graph.nodes)
    return remove_dead(graph.replace(nodes=nodes, tensors=tensors, target=""))


def _remove_derived(graph: Graph, tensors: dict[str, Tensor], node: Node) -> Node:
    op = ops.get(node.op)
    if op.role is not Role.PRODUCER:
        own = {key: value for key, value in node.attributes.items() if key not in OF_TARGETS}
        return dataclasses.replace(node, attributes=own) if op.reals else node
    _quantization(graph, node.output)
    own = {key: value for key, value in node.attributes.items() if key not in OF_TARGETS}
    if op.prepares:
        return dataclasses.replace(node, attributes=own)
    bounds = {role: node.constants[role] for role in _BOUNDS if role in node.constants}
    if "kernel" in node.constants:
        constants = {"kernel": node.constants["kernel"], "bias": _bias(graph, tensors, node)}
        return dataclasses.replace(node, attributes=own, constants={**constants, **bounds})
    held = {role: graph.constant(node, role) for role in node.constants if role not in (*_BOUNDS, "count")}
    count = _count(graph, node, held)
    constants: dict[str, str] = {}
    if count is not None:
        constants["count"] = node.constants.get("count") or _add(tensors, f"{node.output}/count", count)
    if STATED in held and "rounding" in node.attributes and not _equal(held, _exact(graph, node, count)):
        constants = {role: node.constants[role] for role in held}
    return dataclasses.replace(node, attributes=own, constants={**constants, **bounds})


def _add(tensors: dict[str, Tensor], name: str, value: Any) -> str:
    name = lengthened(name, tensors, "'")
    tensors[name] = Tensor(name, tuple(np.shape(value)), str(value.dtype), None, value)
    return name


def _bias(graph: Graph, tensors: dict[str, Tensor], node: Node) -> str:
    """The bias in steps of the accumulator, or as the float numbers that a rule adds itself."""
    rule = get_rule(node.attributes["rule"]) if "rule" in node.attributes else None
    if rule is None or rule.real_bias is None:
        return node.constants["bias"]
    scale = _quantization(graph, node.inputs[0]).scale
    step = Real.of(scale) * Real.of(kernel_scale(graph, node))
    real = rule.real_bias(rule.constants(**{role: graph.constant(node, role) for role in rule.fields}), step)
    name, numbers = node.constants["bias"], np.asarray(real.to_float64())
    tensors[name] = Tensor(name, numbers.shape, "float64", None, numbers)
    return name


def _count(graph: Graph, node: Node, held: Mapping[str, Any]) -> Any:
    """The number of elements of an average, int32; None for any other node."""
    op = ops.get(node.op)
    if not isinstance(op, AverageFacts):
        return None
    if "count" in node.constants:
        return np.asarray(graph.constant(node, "count"))
    if "rounding" not in node.attributes or STATED not in held:
        return None
    # A target that computes averages exactly stores no count. Find the count that leads to this node's factors, bit
    # for bit.
    factor = np.asarray(held["factor0"], np.float64) * 2.0 ** -np.asarray(held["shift"], np.float64)
    steps = float(np.asarray(_quantization(graph, node.inputs[0]).scale)) / float(
        np.asarray(_quantization(graph, node.output).scale)
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        nearest = np.rint(steps / factor)
    if not np.all((nearest >= 1) & (nearest < 2**31)):
        return None
    count = nearest.astype(np.int32)
    if not op.is_average(node.attributes, graph.tensors[node.inputs[0]].shape, count):
        return None
    return count if _equal(held, _exact(graph, node, count)) else None


def _exact(graph: Graph, node: Node, count: Any) -> dict[str, Any]:
    """The factors of a node with nothing folded into it except the division of an average."""
    # Integers that are not codes (masks, indices) have no scale.
    known = [graph.tensors[name].quantization for name in node.inputs]
    scales = [Real.of(quantization.scale) for quantization in known if quantization is not None]
    affine = Affine.identity()
    if count is not None:
        affine = Affine(affine.g / Real.of(np.asarray(count, np.float32)), affine.b)
    accumulators = ops.get(node.op).scales(node.attributes, scales)
    return fold_sum(accumulators, _quantization(graph, node.output).scale, affine)


def _equal(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[role], b[role]) for role in a)


def _quantization(graph: Graph, name: str) -> Any:
    quantization = graph.tensors[name].quantization
    if quantization is None:
        raise ValueError(f"retarget: expected a scale for the tensor {name!r}, because constants follow from it.")
    return quantization
