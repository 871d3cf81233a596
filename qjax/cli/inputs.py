"""Provides the inputs of a graph: arrays from files, never cast, or random codes that begin with the edges."""

from collections.abc import Sequence

import numpy as np

from qjax import ops
from qjax.cli import arrays
from qjax.cli.errors import Refused, refusing
from qjax.graph.ir import Graph, Tensor
from qjax.run.interpreter import check_shapes
from qjax.runtimes.batches import batch_axis


def read(graph: Graph, paths: Sequence[str], *, codes: bool) -> list[np.ndarray]:
    """The graph's inputs from .npy or .npz files.

    Args:
      codes: whether the files hold codes in the dtypes of the graph's inputs instead of float32. An input without a
        scale (indices) is an integer either way.

    Raises:
      Refused: other arrays, dtypes or shapes are in the files, or codes are out of range.
    """
    with refusing():
        found = arrays.read(paths, graph.inputs)
    for name, array in zip(graph.inputs, found, strict=True):
        _check(graph.tensors[name], array, codes)
    with refusing("the files"):
        check_shapes(graph, [array.shape for array in found])
    if any(array.size == 0 for array in found):
        raise Refused("the files hold no example: expected a batch of at least 1.")
    return found


def _check(tensor: Tensor, array: np.ndarray, codes: bool) -> None:
    q, place = tensor.quantization, f"input {tensor.name!r}"
    if q is None or codes:
        if array.dtype.name != tensor.dtype:
            what = "indices" if q is None else "codes"
            cure = f"array.astype(np.{tensor.dtype}) if they fit"
            if codes and array.dtype.kind == "f":
                cure = "leave --codes out to give floats"
            raise Refused(f"{place}: expected {what} of dtype {tensor.dtype}, got {array.dtype}: {cure}.")
    elif array.dtype != np.float32:
        cure = "array.astype(np.float32)"
        if array.dtype.name == tensor.dtype:
            cure = "add --codes if the file holds codes"
        raise Refused(f"{place}: expected floats of dtype float32, got {array.dtype}: {cure}.")
    if codes and q is not None and array.size and (array.min() < q.qmin or array.max() > q.qmax):
        raise Refused(f"{place}: expected codes within [{q.qmin}, {q.qmax}], got [{array.min()}, {array.max()}].")


def random_codes(graph: Graph, examples: int, seed: int) -> list[np.ndarray]:
    """Codes for every input; the same seed produces the same codes.

    The first examples are the edges, in all inputs at once: the least, the greatest, zero, alternating, all codes in
    turn. The others are uniform. An input without a batch axis gets one array of random codes.
    """
    rng = np.random.default_rng(seed)
    return [_random(graph, graph.tensors[name], examples, rng) for name in graph.inputs]


def _random(graph: Graph, tensor: Tensor, examples: int, rng: np.random.Generator) -> np.ndarray:
    low, high, zero = _range(graph, tensor)
    shape = [examples if size is None else size for size in tensor.shape]
    values = rng.integers(low, high + 1, shape, dtype=np.int64)
    axis = batch_axis(tensor)
    if axis is not None:
        rows = np.moveaxis(values, axis, 0)
        size = rows[0].size
        ramp = low + np.arange(size) % (high - low + 1)
        turns = np.where(np.arange(size) % 2 == 0, low, high)
        for index, row in enumerate((low, high, zero, turns, ramp)[:examples]):
            rows[index] = row if np.ndim(row) == 0 else np.asarray(row).reshape(rows[index].shape)
    return values.astype(tensor.dtype)


def _range(graph: Graph, tensor: Tensor) -> tuple[int, int, int]:
    """The least and the greatest code, and the code that represents 0."""
    q = tensor.quantization
    if q is not None:
        return q.qmin, q.qmax, int(np.asarray(q.zero_point))
    chosen = [(node, ops.get(node.op).indexed) for node in graph.consumers(tensor.name)]
    rows = [graph.tensors[node.constants[role]].shape[0] or 1 for node, role in chosen if role is not None]
    return 0, min(rows, default=128) - 1, 0


def joined(tensor: Tensor, parts: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate the batches of one output."""
    axis = batch_axis(tensor)
    if axis is not None:
        return np.concatenate(parts, axis)
    if len(parts) > 1:
        raise Refused(f"output {tensor.name!r} has no batch axis: leave out --batch-size.")
    return parts[0]
