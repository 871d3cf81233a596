"""Frees a graph from the batch size it was traced with, by comparing it with a second trace."""

import dataclasses
from typing import Any

from qjax.export.ir import Graph
from qjax.export.lower import ConversionError


def free_batch(graph: Graph, other: Graph, size: int, other_size: int) -> Graph:
    """Replace every size that follows the batch by None.

    Args:
      graph, other: the same model lowered with batches of `size` and `other_size`.

    Raises:
      ConversionError: the model's structure depends on the batch.
    """
    if [node.op for node in graph.nodes] != [node.op for node in other.nodes]:
        raise ConversionError(
            f"The model runs other operations on a batch of {size} than on one of {other_size}; "
            "a graph has one structure."
        )

    def merge(a: Any, b: Any, where: str) -> Any:
        if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
            return type(a)(merge(x, y, where) for x, y in zip(a, b, strict=True))
        if a == b:
            return a
        if isinstance(a, int) and isinstance(b, int) and a * other_size == b * size:
            return None
        raise ConversionError(
            f"{where}: {a} on a batch of {size} becomes {b} on one of {other_size}, "
            "which is not a multiple of the batch."
        )

    nodes = tuple(
        dataclasses.replace(
            node,
            attributes={
                key: merge(value, second.attributes[key], f"Node {node.name!r}, {key}")
                for key, value in node.attributes.items()
            },
        )
        for node, second in zip(graph.nodes, other.nodes, strict=True)
    )
    tensors = {
        name: tensor
        if tensor.value is not None
        else dataclasses.replace(tensor, shape=merge(tensor.shape, other.tensors[name].shape, f"Tensor {name!r}"))
        for name, tensor in graph.tensors.items()
    }
    return graph.replace(nodes=nodes, tensors=tensors)
