"""Finds the subgraphs that patterns describe.

A match has one output: the results of its other nodes are read only within the match and are not outputs of the graph,
so that one node can replace the match. If several matches overlap, this order decides:

1. patterns in the given order; a node that belongs to one match cannot belong to another;
2. for each pattern, candidates for the match's output from the last node to the first, so that a longer chain is found
   before its own beginning;
3. for each such node, the inputs in their order first, then swapped (unless both are the same pattern, where that is
   the same match); the alternatives of `any_of` in their order.

The cost is one visit per node and pattern, times the nodes in a pattern, times 2 for each commutative node whose first
order fails.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from qjax import ops
from qjax.graph.ir import Graph, Node, Tensor
from qjax.graph.node_view import NodeView
from qjax.graph.pattern import Pattern, check_root
from qjax.support.names import Names


@dataclasses.dataclass(frozen=True, eq=False)
class Match:
    """A subgraph that matches a pattern.

    Attributes:
      graph: the graph in which it was found.
      pattern: the pattern that matched.
      nodes: by label, in execution order; the label is the pattern's name, or otherwise the operation's (with "#2" for
        a second one).
      inputs: the tensors from outside, one per place in the pattern (a named tensor once), in the order of the pattern.
      output: the tensor of the last node.
      tensors: named tensors.

    Examples:
      ```python
      from qjax.export import match, op

      found = match(graph, op("dot", name="product"))[0]
      print(found["product"].attributes, found.output.name)
      ```
    """

    graph: Graph
    pattern: Pattern
    nodes: Mapping[str, NodeView]
    inputs: tuple[Tensor, ...]
    output: Tensor
    tensors: Mapping[str, Tensor]

    @property
    def root(self) -> NodeView:
        """The node that computes the output."""
        return list(self.nodes.values())[-1]

    @property
    def constants(self) -> Mapping[str, Tensor]:
        """Every constant of every node, by `label/role`."""
        return {
            f"{label}/{role}": tensor
            for label, view in self.nodes.items()
            for role, tensor in view.constant_tensors.items()
        }

    def __getitem__(self, name: str) -> Any:
        """The node or tensor with that name."""
        if name in self.nodes:
            return self.nodes[name]
        if name in self.tensors:
            return self.tensors[name]
        raise KeyError(f"Nothing named {name!r} in this match. Names: {', '.join([*self.nodes, *self.tensors])}.")

    def __contains__(self, name: str) -> bool:
        return name in self.nodes or name in self.tensors

    def __repr__(self) -> str:
        parts = ", ".join(f"{label}={view.name!r}" for label, view in self.nodes.items())
        return f"<Match {parts}: {', '.join(t.name for t in self.inputs)} -> {self.output.name}>"


def match(graph: Any, *patterns: Pattern, overlapping: bool = False) -> list[Match]:
    """Find the subgraphs that the patterns describe, in execution order of their outputs.

    Args:
      graph: an `IntegerGraph` or its `ir`.
      patterns: in the order of their priority, see the module's docstring.
      overlapping: return every matching subgraph, even if they share nodes; two ways to match one set of nodes (an
        addition's inputs swapped) count separately.

    Raises:
      TypeError, ValueError: these are not a graph and patterns; or a predicate asks for values inside jit.

    Examples:
      ```python
      from qjax.export import match, op, tensor

      for found in match(graph, op("dot", tensor("x"), name="product")):
          print(found)
      ```
    """
    ir = getattr(graph, "ir", graph)
    if not isinstance(ir, Graph):
        raise TypeError(f"match: expected a graph from qjax.convert, got {type(graph).__name__}.")
    if not patterns:
        raise ValueError("match: expected at least one pattern, got none.")
    for pattern in patterns:
        check_root(pattern, "match: a pattern")
    found = find(ir, patterns, overlapping=overlapping)
    order = {node.name: index for index, node in enumerate(ir.nodes)}
    return sorted((m for _, m in found), key=lambda m: order[m.root.name])


def find(graph: Graph, patterns: Sequence[Pattern], *, overlapping: bool = False) -> list[tuple[int, Match]]:
    """(index of the pattern, match) for every match, in the order in which they were found."""
    index, claimed = _Index(graph), set[str]()
    found: list[tuple[int, Match]] = []
    for number, pattern in enumerate(patterns):
        for root in reversed(graph.nodes):
            if root.name in claimed:
                continue
            seen: set[object] = set()
            for state in index.tensor(pattern, root.output, _State(), claimed):
                if root.name not in {node.name for _, node in state.nodes} or not index.closed(state, root):
                    continue
                key = (tuple((label, node.name) for label, node in state.nodes), state.inputs)
                if key in seen:
                    continue
                seen.add(key)
                found.append((number, index.result(pattern, state)))
                if not overlapping:
                    claimed |= {node.name for _, node in state.nodes}
                    break
    return found


@dataclasses.dataclass(frozen=True)
class _State:
    """The bindings so far: nodes with the names of their patterns, named tensors, tensors from outside."""

    nodes: tuple[tuple[str | None, Node], ...] = ()
    tensors: tuple[tuple[str, str], ...] = ()
    inputs: tuple[str, ...] = ()


class _Index:
    """A graph whose producers and readers are indexed once."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.producers = {node.output: node for node in graph.nodes}
        self.readers = Counter(name for node in graph.nodes for name in node.inputs)
        self.order = {node.name: position for position, node in enumerate(graph.nodes)}

    def tensor(self, pattern: Pattern, name: str, state: _State, claimed: set[str]) -> Iterator[_State]:
        """Every way in which the pattern matches the tensor."""
        if pattern.kind == "any_of":
            for alternative in pattern.inputs or ():
                yield from self.tensor(alternative, name, state, claimed)
        elif pattern.kind == "op":
            node = self.producers.get(name)
            if node is not None:
                yield from self.node(pattern, node, state, claimed)
        else:
            yield from self.outside(pattern, name, state)

    def outside(self, pattern: Pattern, name: str, state: _State) -> Iterator[_State]:
        """Match a tensor that comes from outside."""
        tensor = self.graph.tensors[name]
        if pattern.name is not None:
            bound = dict(state.tensors).get(pattern.name)
            if bound is not None:
                if bound == name:
                    yield state
                return
        if pattern.kind == "constant" and tensor.value is None:
            return
        if pattern.where is not None and not _ask_predicate(pattern, tensor, name):
            return
        named = () if pattern.name is None else ((pattern.name, name),)
        yield _State(state.nodes, state.tensors + named, (*state.inputs, name))

    def node(self, pattern: Pattern, node: Node, state: _State, claimed: set[str]) -> Iterator[_State]:
        """Match a node."""
        if pattern.name is not None:
            bound = next((known for label, known in state.nodes if label == pattern.name), None)
            if bound is not None:
                if bound is node:
                    yield state
                return
        if node.name in claimed or any(known is node for _, known in state.nodes):
            return
        if not self.fits(pattern, node):
            return
        state = dataclasses.replace(state, nodes=(*state.nodes, (pattern.name, node)))
        if pattern.inputs is None:
            yield dataclasses.replace(state, inputs=(*state.inputs, *node.inputs))
            return
        if len(pattern.inputs) != len(node.inputs):
            return
        yield from self.sequence(pattern.inputs, node.inputs, state, claimed)
        swaps = pattern.commutative
        if swaps is None:
            swaps = ops.get(node.op).commutes(node.attributes)
        if swaps and len(node.inputs) == 2:
            yield from self.sequence(pattern.inputs, node.inputs[::-1], state, claimed)

    def sequence(
        self, patterns: Sequence[Pattern], names: Sequence[str], state: _State, claimed: set[str]
    ) -> Iterator[_State]:
        """Every way in which patterns match tensors, one by one."""
        if not patterns:
            yield state
            return
        for bound in self.tensor(patterns[0], names[0], state, claimed):
            yield from self.sequence(patterns[1:], names[1:], bound, claimed)

    def fits(self, pattern: Pattern, node: Node) -> bool:
        """Whether the node by itself satisfies the pattern."""
        if pattern.ops and node.op not in pattern.ops:
            return False
        view = NodeView(self.graph, node)
        if pattern.attributes:
            known = view.attributes
            if any(
                key not in known or _tuples_to_lists(known[key]) != _tuples_to_lists(value)
                for key, value in pattern.attributes
            ):
                return False
        if pattern.relu is not None and view.relu is not pattern.relu:
            return False
        return pattern.where is None or _ask_predicate(pattern, view, node.name)

    def closed(self, state: _State, root: Node) -> bool:
        """Whether one node can replace the match, because its inner results are only read inside."""
        members = [node for _, node in state.nodes]
        within = Counter(name for node in members for name in node.inputs)
        inside = {node.output for node in members}
        if inside & set(state.inputs):
            return False
        hidden = inside - {root.output}
        return all(self.readers[name] == within[name] and name not in self.graph.outputs for name in hidden)

    def result(self, pattern: Pattern, state: _State) -> Match:
        """The match with its labels."""
        nodes: dict[str, NodeView] = {}
        names = Names((label for label, _ in state.nodes if label is not None), between="#")
        for name, node in sorted(state.nodes, key=lambda item: self.order[item[1].name]):
            nodes[name or names.fresh(node.op)] = NodeView(self.graph, node)
        tensors = self.graph.tensors
        named = {name: tensors[bound] for name, bound in state.tensors}
        inputs = tuple(tensors[name] for name in state.inputs)
        return Match(self.graph, pattern, nodes, inputs, nodes[next(reversed(nodes))].output, named)


def _ask_predicate(pattern: Pattern, subject: Any, name: str) -> bool:
    assert pattern.where is not None
    try:
        return bool(pattern.where(subject))
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
        raise ValueError(
            f"The predicate `where` of a pattern asks for the value of an array of {name!r}, which is not known inside "
            "jit: qjax.exact matches there. Ask for structure: attributes, dtypes, shapes, which constants there are."
        ) from error


def _tuples_to_lists(value: Any) -> Any:
    """Tuples as lists, because JSON has no tuples."""
    return [_tuples_to_lists(item) for item in value] if isinstance(value, (list, tuple)) else value
