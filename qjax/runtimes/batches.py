"""Splits inputs into the batches with which a runtime is called, all of one size."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from qjax.graph.ir import Graph, Tensor


def batch_axis(tensor: Tensor) -> int | None:
    """The axis of the batch, or None if the shape is fixed."""
    return tensor.shape.index(None) if None in tensor.shape else None


@dataclasses.dataclass(frozen=True)
class Batch:
    """One batch: `size` examples, of which the first `count` are compared; None if there is no batch axis."""

    arrays: list[np.ndarray]
    count: int | None
    size: int | None = None

    def examples_of(self, tensor: Tensor, value: np.ndarray) -> np.ndarray:
        """The rows of an output that belong to the compared examples; all rows if an example has none or several."""
        axis = batch_axis(tensor)
        if axis is None or self.count is None or value.shape[axis] != self.size:
            return value
        return np.take(value, np.arange(self.count), axis)


def batches(graph: Graph, values: Sequence[np.ndarray], size: int, *, whole: bool = False) -> Iterator[Batch]:
    """Slice the inputs along the batch.

    Args:
      size: the number of examples in each batch.
      whole: whether the last batch is padded to this size by repeating its last example, instead of being shorter.
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
        yield Batch(taken, count, len(index))
