"""Moves a product of all steps of a loop back into the steps, so that RAM holds only one step's result.

    p = dot(xs, w); loop: use(p[i])    ->    loop: use(dot(xs[i], w))

Conversion puts the product of a recurrent layer's inputs in front of the loop (`qjax.lower.products`), where a runtime
with large caches computes it faster. A microcontroller has no room for it: a layer of 128 GRU units over 49 frames
needs 19 KB more. A row of the product depends on its own frame alone, so each step can compute its own row.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from qjax import ops
from qjax.graph.dead_code import remove_dead, remove_identities
from qjax.graph.ir import Graph, Node, Tensor
from qjax.numerics import get_rule
from qjax.ops.base import Attributes
from qjax.ops.dot import Dot
from qjax.ops.reshape import Reshape
from qjax.ops.slice import Slice, Split


def products_in_steps(graph: Graph) -> Graph:
    """The graph with a product for each step, if every step reads its own row of a product of all steps."""
    readers: dict[str, list[Node]] = {}
    for node in graph.nodes:
        for name in dict.fromkeys(node.inputs):
            readers.setdefault(name, []).append(node)
    found = [stacked for node in graph.nodes if (stacked := _Stacked.of(graph, node, readers)) is not None]
    if not found:
        return graph
    tensors = dict(graph.tensors)
    # by name: the node that takes a row, and the one that then drops its first axis
    slices = {row.name: (stacked, row) for stacked in found for _, row, _ in stacked.rows}
    drops = {drop.name: (stacked, source, row) for stacked in found for source, row, drop in stacked.rows}
    made: dict[tuple[str, int], str] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.name in slices:
            stacked, row = slices[node.name]
            key = stacked.product.name, _step(row)
            if key not in made:
                made[key] = stacked.one(tensors, nodes, _step(row))
        elif node.name in drops:
            stacked, source, row = drops[node.name]
            nodes.append(stacked.row(source, node, made[stacked.product.name, _step(row)]))
        else:
            nodes.append(node)
    return remove_identities(remove_dead(graph.replace(nodes=tuple(nodes), tensors=tensors)))


@dataclasses.dataclass(frozen=True)
class _Stacked:
    """A product whose rows are read one by one, as a whole or in parts.

    rows: per reader, what it reads (the product or a part of it), the node that takes the row, and the one that drops
    its first axis.
    """

    product: Node
    rows: tuple[tuple[Node, Node, Node], ...]

    @classmethod
    def of(cls, graph: Graph, node: Node, readers: Mapping[str, Sequence[Node]]) -> "_Stacked | None":
        op, attributes = ops.get(node.op), node.attributes
        if not isinstance(op, Dot) or attributes["weight"] != 1 or attributes["lhs_batch"]:
            return None
        rule = attributes.get("rule")
        # if the rule depends on the position of a number, a separate row may have other codes
        if rule is None or not get_rule(rule).monotone or attributes["permutation"] is not None:
            return None
        shape, rank = graph.tensors[node.output].shape, attributes["rank"]
        if 0 in attributes["lhs_contracting"] or rank < 2 or not isinstance(shape[0], int):
            return None
        if any(len(graph.tensors[name].shape) >= rank for role, name in node.constants.items() if role != "kernel"):
            return None
        behind = readers.get(node.output, ())
        sources = behind if behind and all(_splits(reader) for reader in behind) else (node,)
        if {node.output, *(source.output for source in sources)} & set(graph.outputs):
            return None
        rows: list[tuple[Node, Node, Node]] = []
        for source in sources:
            for row in readers.get(source.output, ()):
                after = readers.get(row.output, ())
                if not _is_row(graph, row) or len(after) != 1 or not _drops_axis(graph, after[0]):
                    return None
                rows.append((source, row, after[0]))
        return cls(node, tuple(rows)) if rows else None

    def one(self, tensors: dict[str, Tensor], nodes: list[Node], step: int) -> str:
        """Add one step's product; returns the name of its result."""
        before, after = (tensors[name] for name in (self.product.inputs[0], self.product.output))
        name = self.product.name
        rest, rank = list(before.shape[1:]), len(before.shape)
        bounds: dict[str, object] = {
            "start": [step] + [0] * (rank - 1),
            "limit": [step + 1, *rest],
            "strides": [1] * rank,
        }
        chain: Sequence[tuple[str, str, Tensor, dict[str, object], dict[str, str]]] = (
            (Slice.name, f"{name}/slice[{step}]", dataclasses.replace(before, shape=(1, *rest)), bounds, {}),
            (Reshape.name, f"{name}/row[{step}]", dataclasses.replace(before, shape=tuple(rest)), {"shape": rest}, {}),
            (
                Dot.name,
                f"{name}[{step}]",
                dataclasses.replace(after, shape=after.shape[1:]),
                _without_first_axis(self.product.attributes),
                dict(self.product.constants),
            ),
        )
        source = before.name
        for op, made, like, attributes, constants in chain:
            if made in tensors:
                raise ValueError(f"C: the graph already has a tensor called {made!r}. Rename the module.")
            tensors[made] = dataclasses.replace(like, name=made)
            nodes.append(Node(made, op, (source,), made, constants, attributes, self.product.location))
            source = made
        return source

    def row(self, source: Node, node: Node, product: str) -> Node:
        """The node that computes a step's row: its part of the product, or the product itself under the row's name."""
        if source is self.product:
            return dataclasses.replace(node, inputs=(product,))
        attributes = {**source.attributes, "axis": source.attributes["axis"] - 1}
        return dataclasses.replace(source, name=node.name, inputs=(product,), output=node.output, attributes=attributes)


def _without_first_axis(attributes: Attributes) -> dict[str, object]:
    return {
        **attributes,
        "lhs_contracting": [axis - 1 for axis in attributes["lhs_contracting"]],
        "channels": [[out - 1, axis] for out, axis in attributes["channels"]],
        "rank": attributes["rank"] - 1,
    }


def _step(row: Node) -> int:
    return row.attributes["start"][0]


def _splits(node: Node) -> bool:
    return isinstance(ops.get(node.op), Split) and node.attributes["axis"] > 0


def _is_row(graph: Graph, node: Node) -> bool:
    if not isinstance(ops.get(node.op), Slice) or node.output in graph.outputs:
        return False
    attributes, shape = node.attributes, graph.tensors[node.inputs[0]].shape
    whole = [0] * (len(shape) - 1), list(shape[1:]), [1] * len(shape)
    first, *rest = attributes["start"]
    return (rest, attributes["limit"][1:], attributes["strides"]) == whole and attributes["limit"][0] == first + 1


def _drops_axis(graph: Graph, node: Node) -> bool:
    before, after = (graph.tensors[name].shape for name in (node.inputs[0], node.output))
    return (
        isinstance(ops.get(node.op), Reshape)
        and before[0] == 1
        and before[1:] == after
        and node.output not in graph.outputs
    )
