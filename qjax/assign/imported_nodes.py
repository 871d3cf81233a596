"""Derives the target's constants for nodes that a file states as a whole.

Such a node has no chain after it. It states its bias ("bias": integers in steps of the accumulator, or float numbers),
the number of elements of an average ("count"), its bounds as codes ("clamp_min", "clamp_max"). Without any of these it
is its bare operation: y = x0 + x1, not y = 2 (x0 + x1). A node may state the factors of the exact sum instead
(`STATED`), if another step was folded into them before; they are kept, and the target determines only the rounding. An
operation with constants of its own decides what a file may state (`Op.restated`).
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from qjax import ops, targets
from qjax.assign.bounds import operand
from qjax.assign.constants import BARE, Case, Step, derive, kernel_scale, scales_alone, step_of, weighted_of
from qjax.assign.formulas import formula_for
from qjax.graph.ir import Graph, Node, Quantization, Tensor
from qjax.graph.weighted_product import arithmetic_of, kind_of
from qjax.ops import Operand, Preparation, Prepared, Role
from qjax.ops.epilogue import Affine
from qjax.ops.facts import AverageFacts
from qjax.support.names import lengthened

STATED = "shift"
"""A constant that every node with stated factors has."""
_BOUNDS = ("clamp_min", "clamp_max")


def restate(graph: Graph, names: Collection[str], target: targets.Target, alike: Mapping[str, Any]) -> Graph:
    """Add the target's constants to the nodes with these names. alike: see `assign`."""
    made = _Made(graph, alike)
    derived = _Derived(graph, target)
    nodes = tuple(_restate_node(graph, made, node, derived) if node.name in names else node for node in graph.nodes)
    return graph.replace(nodes=nodes, tensors=made.tensors)


def stated_nodes(graph: Graph) -> set[str]:
    """The names of the nodes in a quantized graph whose result has codes, but that lack the target's constants."""
    found = [node for node in graph.nodes if ops.get(node.op).role is Role.PRODUCER]
    return {node.name for node in found if graph.tensors[node.output].quantization is not None}


class _Made:
    """The graph's tensors, and the constants that the target adds.

    Nodes share what the target adds if `alike` says so, or if they state the same constants.
    """

    def __init__(self, graph: Graph, alike: Mapping[str, Any]) -> None:
        self.tensors = dict(graph.tensors)
        self.alike = alike
        self._known: dict[tuple[Any, ...], str] = {}
        self._names: set[str] = set()

    def constant(self, node: Node, role: str, name: str, value: Any) -> str:
        """The name under which a node finds an array in a role; `name` itself if it is free."""
        array = np.asarray(value)
        like = self.alike.get(node.name, sorted(node.constants.items()))
        key = (*like, role, array.dtype.str, array.shape, array.tobytes())
        if key not in self._known:
            name = lengthened(name, self._names, "'")
            self._names.add(name)
            self._known[key] = name
            self.tensors[name] = Tensor(name, array.shape, str(array.dtype), None, array)
        return self._known[key]


Found = tuple[Mapping[str, Any], Mapping[str, Any]]
"""Constants by role, and attributes."""


class _Derived:
    """Derives the target's constants for the nodes of a graph, once for equal nodes such as the steps of a loop."""

    def __init__(self, graph: Graph, target: targets.Target) -> None:
        self.graph, self.target = graph, target
        self._known: dict[Any, Any] = {}

    def of(self, node: Node, derive: Callable[[Graph, Node, targets.Target], Any]) -> Any:
        """The result of `derive` for the node, or for an earlier equal one."""
        key = derive, *self._key(node)
        if key not in self._known:
            self._known[key] = derive(self.graph, node, self.target)
        return self._known[key]

    def _key(self, node: Node) -> tuple[Any, ...]:
        """All of a node except its own name, its place and the names of the tensors that it reads and writes.

        A name stands for one constant, so constants are equal if their names are.
        """
        tensors = [self.graph.tensors[name] for name in (*node.inputs, node.output)]
        grids = [(t.shape, t.dtype, None if t.value is None else t.name, _grid(t.quantization)) for t in tensors]
        # A tensor plus itself is another case than two tensors with the same grid.
        places = tuple(node.inputs.index(name) for name in node.inputs)
        constants = tuple(sorted(node.constants.items()))
        return node.op, repr(sorted(node.attributes.items())), constants, tuple(grids), places


def _grid(q: Quantization | None) -> Any:
    if q is None:
        return None
    arrays = ((np.shape(a), np.asarray(a).dtype.str, np.asarray(a).tobytes()) for a in (q.scale, q.zero_point))
    return (*arrays, q.qmin, q.qmax, q.axes)


def _restate_node(graph: Graph, made: _Made, node: Node, derived: _Derived) -> Node:
    target = derived.target
    if ops.get(node.op).prepares:
        return _prepare_node(graph, made, node, derived)
    if "kernel" in node.constants:
        found, attributes = derived.of(node, _derive_weighted)
        own = {"kernel": node.constants["kernel"]}
        names = {"bias": node.constants["bias"]}
    elif STATED in node.constants:
        return dataclasses.replace(node, attributes={**node.attributes, "rounding": target.rounding.value})
    else:
        found, attributes = derived.of(node, _derive_sum)
        own, names = dict[str, str](), dict[str, str]()
    for role, value in found.items():
        own[role] = made.constant(node, role, names.get(role, f"{node.output}/{role}"), value)
    own |= {role: node.constants[role] for role in _BOUNDS if role in node.constants}
    # If a formula takes the factor, the target's attributes contain it.
    kept = {key: value for key, value in node.attributes.items() if key != "factor"}
    return dataclasses.replace(node, constants=own, attributes={**kept, **attributes})


def _prepare_node(graph: Graph, made: _Made, node: Node, derived: _Derived) -> Node:
    """Finish a node of an operation that prepares its own constants."""
    op, prepared = ops.get(node.op), derived.of(node, _prepare_own)
    if prepared is None:
        return node
    roles = {
        role: made.constant(node, role, f"{node.output}/{role}", value)
        for role, value in prepared.constants.items()
        if role not in op.keeps
    }
    roles |= {role: name for role, name in node.constants.items() if role in op.keeps or role in _BOUNDS}
    return dataclasses.replace(node, constants=roles, attributes={**node.attributes, **prepared.attributes})


def _prepare_own(graph: Graph, node: Node, target: targets.Target) -> Prepared | None:
    held = {role: graph.constant(node, role) for role in node.constants if role not in _BOUNDS}
    inputs, output = (operand(graph.tensors[name]) for name in node.inputs), operand(graph.tensors[node.output])
    given = Preparation(node.attributes, held, tuple(inputs), output, Affine.identity(), target)
    return ops.get(node.op).restated(given)


def _derive_weighted(graph: Graph, node: Node, target: targets.Target) -> Found:
    kernel, x = graph.tensors[node.constants["kernel"]], graph.tensors[node.inputs[0]]
    output = graph.tensors[node.output]
    inputs = scales_alone(graph, node.inputs[:1])
    case = Case(BARE, (), inputs, Operand((), output.dtype, operand(output).scale), kernel_scale(graph, node))
    case = dataclasses.replace(case, kind=kind_of(node, kernel), wide=x.dtype == "int16")
    case = dataclasses.replace(case, bias=graph.constant(node, "bias"))
    rule = weighted_of(target, case).rule
    return derive(target, case).constants, arithmetic_of(node, kernel, x.shape, rule, target)


def _derive_sum(graph: Graph, node: Node, target: targets.Target) -> Found:
    op, output = ops.get(node.op), graph.tensors[node.output]
    count = np.asarray(graph.constant(node, "count")) if "count" in node.constants else None
    # A sum without a division is no averaging operation of any runtime.
    averaged = op.average if isinstance(op, AverageFacts) and count is not None else None
    operation = averaged or op.operation(node.attributes)
    found = None
    factor = node.attributes.get("factor", 1.0)
    if operation is not None and (factor == 1 or target.scaled_matmul):
        found = formula_for(graph.tensors, node, operation, 1 if count is None else count, output, target, factor)
    behind = () if factor == 1 else (Step("affine_step", {"step": "mul"}, {"value": np.float32(factor)}),)
    case = Case(step_of(graph, node, ()), behind, scales_alone(graph, node.inputs), operand(output), count=count)
    if found is not None:
        case = dataclasses.replace(case, formula=(found[0].name, found[1]))
    derived = derive(target, case)
    if averaged is None or found is None:
        return derived.constants, derived.attributes
    return {**derived.constants, "count": np.asarray(found[1].count, np.int32)}, derived.attributes
