"""Joins several nodes into one that a backend's kernel computes, and splits such nodes again.

Requires: a program. Ensures: the same tensors flow between the remaining nodes; the new node keeps every attribute and
constant of the nodes that were joined (see `ops.backend`), and tensors keep their names.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.core import Tracer

from qjax.graph.ir import Array, Graph, Node, Tensor
from qjax.graph.kernels import attributes
from qjax.graph.matching import Match
from qjax.graph.node_view import NodeView
from qjax.ops import backend

_FACTS = ("dtype", "input_dtypes", "qmin", "qmax")


def fuse_match(graph: Graph, found: Match, name: str | None, pattern: str, prepared: Mapping[str, Array]) -> Graph:
    """Replace a match by one node, which takes the name and position of the match's last node.

    Args:
      found: a match in this graph, or in an earlier one in which other matches have been replaced since.
      name: the backend's name; None: the members' own kernels.
      pattern: the name of the backend's kernel.
      prepared: further constants by role, int arrays.
    """
    views = [NodeView(graph, view.node) for view in found.nodes.values()]
    labels = dict(zip((view.name for view in views), found.nodes, strict=True))
    return _fuse_nodes(graph, views, labels, tuple(t.name for t in found.inputs), name, pattern, prepared)


def _fuse_nodes(
    graph: Graph,
    views: list[NodeView],
    labels: Mapping[str, str],
    inputs: tuple[str, ...],
    name: str | None,
    pattern: str,
    prepared: Mapping[str, Array],
) -> Graph:
    root = views[-1]
    producers = {view.output.name: labels[view.name] for view in views}
    places = {tensor: index for index, tensor in reversed(list(enumerate(inputs)))}
    tensors, constants, members = dict(graph.tensors), dict[str, str](), list[Any]()
    for view in views:
        label, output = labels[view.name], view.output
        constants |= {f"{label}/{role}": tensor for role, tensor in view.node.constants.items()}
        q = output.quantization
        members.append(
            [
                ["label", label],
                ["op", view.op],
                ["name", view.name],
                ["location", view.location],
                [
                    "inputs",
                    [producers[source] if source in producers else places[source] for source in view.node.inputs],
                ],
                [
                    "output",
                    [output.name, list(output.shape), output.dtype, *((None, None) if q is None else (q.qmin, q.qmax))],
                ],
                ["attributes", [[key, value] for key, value in view.node.attributes.items()]],
            ]
        )
        if view is not root:
            del tensors[output.name]
            if q is not None:
                code = f"{root.output.name}/{label}/{backend.ZERO}"
                tensors[code] = Tensor(code, (), output.dtype, q, q.zero_point.astype(output.dtype))
                constants[f"{label}/{backend.ZERO}"] = code
    for role, value in prepared.items():
        key = f"{root.output.name}/{name}:{pattern}/{role}"
        tensors[key] = Tensor(key, tuple(np.shape(value)), str(value.dtype), None, value)
        constants[role] = key
    known = {"backend": name, "pattern": pattern, "members": members}
    node = Node(root.name, backend.NAME, inputs, root.output.name, constants, known, root.location)
    gone = {view.name for view in views}
    nodes = tuple(node if n.name == root.name else n for n in graph.nodes if n.name == root.name or n.name not in gone)
    return graph.replace(nodes=nodes, tensors=tensors, quantized=graph.quantized)


def expand(graph: Graph) -> Graph:
    """Remove backends from the graph: every fused node is replaced by its original nodes.

    Args:
      graph: the program.

    Examples:
      ```python
      from qjax.export import Backend, Fusion, compose, expand, op

      device = Backend(
          "expanded_device", "tflite_micro", [Fusion("linear", op("dot"), compose)]
      )
      plain = expand(qjax.convert(qmodel, x, target=device).ir)
      ```
    """
    if not any(node.op == backend.NAME for node in graph.nodes):
        return graph
    tensors, nodes = dict(graph.tensors), list[Node]()
    for node in graph.nodes:
        if node.op == backend.NAME:
            nodes += _members(graph, tensors, node)
        else:
            nodes.append(node)
    return graph.replace(nodes=tuple(nodes), tensors=tensors, quantized=graph.quantized)


def _members(graph: Graph, tensors: dict[str, Tensor], node: Node) -> list[Node]:
    members = backend.members_of(attributes(graph, node))
    own: dict[str, dict[str, str]] = {label: {} for label in members}
    for role, name in node.constants.items():
        label, slash, rest = role.partition("/")
        if not slash or rest == backend.ZERO:
            del tensors[name]
        else:
            own[label][rest] = name
    found: list[Node] = []
    for label, member in members.items():
        if member.tensor != node.output:
            code = node.constants.get(f"{label}/{backend.ZERO}")
            grid = None if code is None else graph.tensors[code].quantization
            tensors[member.tensor] = Tensor(member.tensor, member.shape, member.dtype, grid)
        inputs = tuple(node.inputs[s] if isinstance(s, int) else members[s].tensor for s in member.inputs)
        plain = {key: value for key, value in member.attributes.items() if key not in _FACTS}
        found.append(Node(member.name, member.op, inputs, member.tensor, own[label], plain, member.location))
    return found


def group_like(graph: Graph, other: Graph) -> Graph:
    """Join those nodes of the graph that are one node of a backend in `other`; their arithmetic does not change.

    Two graphs of one model, one of them for a device, then have the same nodes. A group is left alone if the graph
    lacks one of its nodes, or has another form of it than `other`.
    """
    for node in other.nodes:
        if node.op != backend.NAME:
            continue
        members = backend.members_of(attributes(other, node))
        known = {own.name: own for own in graph.nodes}
        alike = all(
            m.name in known and known[m.name].op == m.op and known[m.name].output == m.tensor for m in members.values()
        )
        if not alike:
            continue
        views = [NodeView(graph, known[m.name]) for m in members.values()]
        hidden = {view.output.name for view in views[:-1]}
        readers = {n.name for n in graph.nodes if hidden & set(n.inputs)}
        if hidden & set(graph.outputs) or not readers <= {view.name for view in views}:
            continue
        labels = {m.name: label for label, m in members.items()}
        graph = _fuse_nodes(graph, views, labels, node.inputs, None, str(node.attributes["pattern"]), {})
    return graph


def device_of(graph: Graph) -> str:
    """The device of a graph: its backends, or its target if it has none."""
    names = {str(n.attributes["backend"]) for n in graph.nodes if n.op == backend.NAME and n.attributes["backend"]}
    return ", ".join(sorted(names)) or graph.target


def host(value: Any) -> Any:
    """An array on the host, unless it is traced."""
    return value if isinstance(value, Tracer) else np.asarray(value)
