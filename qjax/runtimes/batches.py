"""The batches that a runtime is called with: slices of the inputs, all of one size."""

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np

from qjax.graph.ir import Graph, Tensor


def shape_of(tensor: Tensor, batch: int) -> tuple[int, ...]:
    """The tensor's shape for a batch of that size."""
    return tuple(batch if size is None else size for size in tensor.shape)


def tensor_bytes(tensor: Tensor, batch: int) -> int:
    """The bytes of a tensor's codes in memory."""
    return math.prod(shape_of(tensor, batch)) * np.dtype(tensor.dtype).itemsize


def batch_axis(tensor: Tensor) -> int | None:
    """The axis of the batch, or None where the shape is fixed."""
    return tensor.shape.index(None) if None in tensor.shape else None


@dataclasses.dataclass(frozen=True)
class Batch:
    """One batch: as many examples as asked for, of which the first `count` are asked about."""

    arrays: list[np.ndarray]
    count: int | None


def batches(graph: Graph, values: Sequence[np.ndarray], size: int, *, whole: bool = False) -> Iterator[Batch]:
    """Slices of the inputs along the batch.

    Args:
      size: how many examples in each.
      whole: the last one has that many too, its last example being repeated; else it is shorter.
    """
    axes = [batch_axis(graph.tensors[name]) for name in graph.inputs]
    if all(axis is None for axis in axes):
        yield Batch(list(values), None)
        return
    total = next(value.shape[axis] for value, axis in zip(values, axes, strict=True) if axis is not None)
    for start in range(0, total, size):
        count = min(size, total - start)
        index = np.minimum(np.arange(start, start + (size if whole else count)), total - 1)
        taken = [
            value if axis is None else np.take(value, index, axis) for value, axis in zip(values, axes, strict=True)
        ]
        yield Batch(taken, count)


def examples_of(tensor: Tensor, value: np.ndarray, count: int | None) -> np.ndarray:
    """The first `count` examples of an output; all of it where there is no batch."""
    axis = batch_axis(tensor)
    return value if axis is None or count is None else np.take(value, np.arange(count), axis)
