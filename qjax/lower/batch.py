"""Frees a graph from the batch size with which it was traced, by comparing it with a second trace.

A reshape to (4, 784) on a batch of 4 and to (8, 784) on a batch of 8, for example, becomes one to (None, 784).
"""

import dataclasses
from itertools import zip_longest
from typing import Any

import numpy as np
from jax.core import Tracer

from qjax import ops
from qjax.graph import float_parts
from qjax.graph.ir import Graph, Node, Tensor
from qjax.graph.unsupported import ConversionError
from qjax.ops import island
from qjax.ops.fill import Fill

Part = tuple[str, str | None]
"""What an error names: a part of the graph, and the user's line."""


def free_batch(graph: Graph, other: Graph, size: int, other_size: int) -> Graph:
    """Replace every size that follows the batch by None.

    Cases of a number that differs between the two:
    1. a size in the shape of a tensor, or the `shape` of a reshape or broadcast: None where it is a multiple of the
       batch;
    2. the `limit` of a slice: None where it is the end of the axis;
    3. the `shape` of a fill, and its data, which must be the same for every example: one row of it is kept. A constant
       that a node reads as one of its inputs becomes such a fill. So does one that is added, multiplied or compared;
    4. anything else (an offset, the length of a padding, the data of a constant) is an error, because the model then
       depends on an example's position in the batch or on the number of its neighbours.

    Args:
      graph, other: the same model lowered with batches of `size` and `other_size`.

    Raises:
      ConversionError: the model's structure depends on the batch.
    """
    graph, other = _fill_constants(graph, other), _fill_constants(other, graph)
    if [node.op for node in graph.nodes] != [node.op for node in other.nodes]:
        pairs = zip_longest(graph.nodes, other.nodes)
        here, there = next((a, b) for a, b in pairs if a is None or b is None or a.op != b.op)
        place = next(node for node in (here, there) if node is not None)
        kinds = " and ".join(f"{node.op!r}" if node else "nothing" for node in (here, there))
        raise ConversionError(
            f"the model runs other operations on a batch of {size} than on one of {other_size} "
            f"({kinds}, from {place.name!r} on), as a scan or a loop over the examples does",
            "A graph has one structure for every batch: treat all examples at once, and scan or loop over another "
            "axis.",
            where=place.location,
        )

    def refuse(part: Part, a: Any, b: Any) -> ConversionError:
        what, where = part
        return ConversionError(
            f"{what}: {a} on a batch of {size} becomes {b} on one of {other_size}",
            "A graph accepts any batch, so no operation may depend on an example's position in the batch or on the "
            'batch size. Or take the sample\'s batch only: convert(..., batch="fixed").',
            where=where,
        )

    def free_shape(a: Any, b: Any, part: Part) -> tuple[int | None, ...]:
        if len(a) != len(b):
            raise refuse(part, a, b)
        follows = [x != y for x, y in zip(a, b, strict=True)]
        if any(f and (x % size or x * other_size != y * size) for f, x, y in zip(follows, a, b, strict=True)):
            raise refuse(part, a, b)
        return tuple(None if f else x for f, x in zip(follows, a, strict=True))

    def attribute(node: Node, key: str, a: Any, b: Any) -> Any:
        if a == b:
            return a
        part = f"{key} of {node.name!r} ({node.op})", node.location
        follows = ops.get(node.op).free.get(key)
        if follows == "sizes":
            return list(free_shape(a, b, part))
        if follows == "ends":
            ends = (graph.tensors[node.inputs[0]].shape, other.tensors[node.inputs[0]].shape)
            if all(x == y or (x, y) == axis for x, y, axis in zip(a, b, zip(*ends, strict=True), strict=True)):
                return [x if x == y else None for x, y in zip(a, b, strict=True)]
        raise refuse(part, a, b)

    places = {name: node.location for node in graph.nodes for name in (*node.constants.values(), node.output)}

    roles = [(node, ops.get(node.op).per_example) for node in graph.nodes]
    rows = {node.constants[role] for node, role in roles if role is not None and role in node.constants}
    # Constants that other roles read as well keep their shape.
    rows -= {name for node, role in roles for own, name in node.constants.items() if own != role}
    rows -= {name for node, _ in roles for name in node.inputs}

    def tensor(first: Tensor) -> Tensor:
        second = other.tensors.get(first.name)
        part = f"tensor {first.name!r}", places.get(first.name, "input")
        if second is None:
            raise refuse(part, first.shape, None)
        if first.name in rows:
            first, second = (_one_row(t, free_shape(first.shape, second.shape, part), part) for t in (first, second))
        if first.value is None:
            return dataclasses.replace(first, shape=free_shape(first.shape, second.shape, part))
        if first.shape != second.shape:
            raise refuse(part, first.shape, second.shape)
        known = (
            second.value is not None and not isinstance(first.value, Tracer) and not isinstance(second.value, Tracer)
        )
        values = (np.asarray(first.value), np.asarray(second.value)) if known else ()
        if values and not np.array_equal(*values, equal_nan=values[0].dtype.kind == "f"):
            raise refuse(part, first.value, second.value)
        return first

    def attributes(node: Node, second: Node) -> dict[str, Any]:
        if node.op == island.NAME:
            shapes = [(graph.tensors[name].shape, other.tensors[name].shape) for name in node.inputs]
            try:
                return float_parts.free_attributes(node, second, shapes, size, other_size)
            except ValueError as error:
                raise ConversionError(f"in the float island {node.name!r}, {error}.", where=node.location) from None
        return {key: attribute(node, key, a, second.attributes[key]) for key, a in node.attributes.items()}

    nodes = tuple(
        dataclasses.replace(
            node,
            attributes=attributes(node, second),
        )
        for node, second in zip(graph.nodes, other.nodes, strict=True)
    )
    nodes = tuple(_at_batch(node, graph.tensors[node.output].shape, size) for node in nodes)
    for a, b in zip(_constants(graph), _constants(other), strict=True):
        if np.shape(a) != np.shape(b):
            raise ConversionError(
                f"the model returns a constant, which depends on no input and has a row for each example: "
                f"{np.shape(a)} on a batch of {size}",
                "Return one row of it, or leave it out and repeat it outside of the graph. Or take the sample's batch "
                'only: convert(..., batch="fixed").',
                where="output",
            )
    free = graph.replace(nodes=nodes, tensors={name: tensor(t) for name, t in graph.tensors.items()})
    for node in free.nodes:
        _check_batch(free, node)
        _check_rows(free, node, graph)
    return free


def _fill_constants(graph: Graph, other: Graph) -> Graph:
    """The graph with a fill for every constant input of a node whose shape differs in the other graph."""
    computed = {*graph.inputs, *(node.output for node in graph.nodes)}
    fills: dict[str, Node] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        inputs = list(node.inputs)
        for place, name in enumerate(inputs):
            second = other.tensors.get(name)
            if name in computed or second is None or second.shape == graph.tensors[name].shape:
                continue
            if name not in fills:
                label, shape = f"{name}/repeated", list(graph.tensors[name].shape)
                fills[name] = Node(
                    label,
                    Fill.name,
                    (graph.inputs[0],),
                    label,
                    {"value": name},
                    {"shape": shape, "times": 1},
                    node.location,
                )
                nodes.append(fills[name])
            inputs[place] = fills[name].output
        nodes.append(dataclasses.replace(node, inputs=tuple(inputs)))
    if not fills:
        return graph
    repeated = {
        fill.output: dataclasses.replace(graph.tensors[name], name=fill.output, value=None)
        for name, fill in fills.items()
    }
    return graph.replace(nodes=tuple(nodes), tensors={**graph.tensors, **repeated})


def _constants(graph: Graph) -> list[Any]:
    """The results of the model that depend on no input."""
    return [x for x in graph.call.leaves if not isinstance(x, int)] if graph.call is not None else []


def _one_row(tensor: Tensor, shape: tuple[int | None, ...], part: Part) -> Tensor:
    """The data of a fill reduced to size 1 along the batch, where it is repeated for any size."""
    kept = tuple(1 if n is None else n for n in shape)
    if tensor.value is None or kept == tensor.shape:
        return dataclasses.replace(tensor, shape=kept)
    row = tensor.value[tuple(slice(0, 1) if n is None else slice(None) for n in shape)]
    if not isinstance(tensor.value, Tracer) and not (np.asarray(tensor.value) == np.asarray(row)).all():
        raise ConversionError(
            f"{part[0]}: a constant that differs from example to example of the batch, whose size is free",
            "Use the same values for every example, or pass them as an argument of the call.",
            where=part[1],
        )
    return dataclasses.replace(tensor, shape=kept, value=row)


def _at_batch(node: Node, shape: tuple[int | None, ...], size: int) -> Node:
    """The node with the facts about the traced batch that its operation needs."""
    try:
        return dataclasses.replace(node, attributes=ops.get(node.op).at_batch(node.attributes, shape, size))
    except ValueError as error:
        raise ConversionError(f"{node.name!r} {error}.", where=node.location) from None


def _check_batch(graph: Graph, node: Node) -> None:
    """Raise unless a free size of the result is that of an input."""
    shapes = [graph.tensors[name].shape for name in node.inputs]
    try:
        kept = ops.get(node.op).keeps_batch(node.attributes, shapes)
    except ValueError as error:
        raise ConversionError(f"{node.name!r} {error}.", where=node.location) from None
    if not kept:
        raise _repeats(node, shapes[0])


def _repeats(node: Node, shape: tuple[int | None, ...]) -> ConversionError:
    return ConversionError(
        f"{node.name!r} repeats a tensor of shape {shape} for every example of the batch, whose size is free",
        "Let the operations after it broadcast instead.",
        where=node.location,
    )


def _check_rows(graph: Graph, node: Node, traced: Graph) -> None:
    """Raise if only a constant, now reduced to one row, determined the number of examples: the data must do so."""
    role = ops.get(node.op).per_example
    if role is None or role not in node.constants or not node.inputs:
        return
    name, data, output = node.constants[role], graph.tensors[node.inputs[0]].shape, graph.tensors[node.output].shape
    cut = graph.tensors[name].shape != traced.tensors[name].shape
    if cut and output.count(None) > data.count(None):
        raise _repeats(node, data)


def independent(graph: Graph) -> bool:
    """Whether a graph treats the examples of a batch independently, so that it is correct for any number of them.

    The free axis of every tensor is the batch, and no operation works along it.

    Requires: every free size follows the batch (`free_batch`).
    """
    computed = [*graph.inputs, *(node.output for node in graph.nodes)]
    if any(graph.tensors[name].shape.count(None) > 1 for name in computed):
        return False
    return all(_apart(graph, node) for node in graph.nodes)


def _apart(graph: Graph, node: Node) -> bool:
    shapes = [graph.tensors[name].shape for name in node.inputs]
    output = graph.tensors[node.output].shape
    if not any(None in shape for shape in shapes):
        return None not in output
    # A result without a free axis mixes the examples.
    if None not in output:
        return False
    along = ops.get(node.op).works_along(node.attributes, shapes, output)
    return all(shape.index(None) not in axes for shape, axes in zip(shapes, along, strict=True) if None in shape)
