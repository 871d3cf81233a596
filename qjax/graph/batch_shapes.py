"""Computes the shapes of a graph's tensors for one batch size.

A free size, None, is the batch size or a multiple of it, as when frames of a video are folded into the batch, or the
two halves of a pair are concatenated. The multiple is not in the tensor's shape; it follows from the operations.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from qjax import ops
from qjax.graph import kernels
from qjax.graph.ir import Graph, Node

Shape = tuple[int | None, ...]
Sizes = tuple[int, ...]


def input_shape(shape: Shape, batch: int) -> Sizes:
    """The shape of an input, whose free size is the batch size."""
    return tuple(batch if size is None else size for size in shape)


def batch_of(graph: Graph, inputs: Sequence[Any]) -> int:
    """The batch size of some inputs; 1 if no input has a batch axis."""
    shapes = [graph.tensors[name].shape for name in graph.inputs]
    found = (np.shape(x)[shape.index(None)] for x, shape in zip(inputs, shapes, strict=True) if None in shape)
    return int(next(found, 1))


def shapes_at(graph: Graph, batch: int) -> dict[str, Sizes]:
    """The shape of every tensor by name, including constants.

    Raises:
      ValueError: an operation cannot run at that batch size.
    """
    if all(keeps_size(graph, node) for node in graph.nodes):
        return {name: input_shape(tensor.shape, batch) for name, tensor in graph.tensors.items()}
    computed = {node.output for node in graph.nodes}
    found = {name: input_shape(t.shape, batch) for name, t in graph.tensors.items() if name not in computed}
    known: dict[object, jax.ShapeDtypeStruct] = {}
    for node in graph.nodes:
        inputs = [found[name] for name in node.inputs]
        try:
            found[node.output] = result_of(graph, node, inputs, known).shape
        except (TypeError, ValueError) as error:
            shapes = " and ".join(map(str, inputs))
            raise ValueError(
                f"Node {node.name!r} ({node.op}) cannot compute operands of shape {shapes}: {error}. Choose another "
                "batch."
            ) from None
    return {name: found[name] for name in graph.tensors}


def bytes_at(graph: Graph, batch: int) -> dict[str, int]:
    """The bytes of every tensor by name, for the shapes of `shapes_at`."""
    shapes = shapes_at(graph, batch)
    return {name: math.prod(shapes[name]) * np.dtype(tensor.dtype).itemsize for name, tensor in graph.tensors.items()}


def keeps_size(graph: Graph, node: Node) -> bool:
    """Whether the free size of the result is certainly that of the operands."""
    inputs = [graph.tensors[name].shape for name in node.inputs]
    output, op = graph.tensors[node.output].shape, ops.get(node.op)
    if None not in output:
        return True
    if any(shape.count(None) > 1 for shape in (*inputs, output)) or not any(None in shape for shape in inputs):
        return False
    if "sizes" in op.free.values():
        # Moving codes does not change their number.
        return len(inputs) == 1 and _known_elements(inputs[0]) == _known_elements(output)
    along = op.works_along(node.attributes, inputs, output)
    pairs = zip(inputs, along, strict=True)
    return all(None not in shape or shape.index(None) not in axes for shape, axes in pairs)


def _known_elements(shape: Shape) -> int:
    return math.prod(size for size in shape if size is not None)


def result_of(
    graph: Graph, node: Node, inputs: Sequence[Sizes], known: dict[object, jax.ShapeDtypeStruct]
) -> jax.ShapeDtypeStruct:
    """The shape and dtype that the node's kernel returns for operands of these shapes; it is traced but not run.

    known: the results so far of equal nodes. Exceptions of the kernel are passed on.
    """
    attributes, constants = kernels.attributes(graph, node), kernels.constants_of(graph, node)
    sizes = sorted((role, np.shape(value), str(value.dtype)) for role, value in constants.items())
    key = (node.op, repr(sorted(attributes.items())), repr(sizes), tuple(inputs))
    if key not in known:
        dtypes = [np.dtype(graph.tensors[name].dtype) for name in node.inputs]
        given = [jax.ShapeDtypeStruct(*facts) for facts in zip(inputs, dtypes, strict=True)]
        op = ops.get(node.op)

        def kernel(*arrays: Any) -> Any:
            return op.kernel(attributes, op.runtime(attributes, constants), list(arrays))

        known[key] = jax.eval_shape(kernel, *given)
    return known[key]


__all__ = ["batch_of", "bytes_at", "input_shape", "keeps_size", "result_of", "shapes_at"]
