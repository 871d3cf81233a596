"""Recomputes what the nodes of a program return and compares it with its tensors, for graphs that come from files.

A file's shapes, dtypes and ranges are claims. The emitters lay out memory by them and omit checks that they make
unnecessary, so a false claim would cause writes beyond an array. Here every kernel is traced without being run, at two
batch sizes, and its result is compared. This also finds whatever prevents a kernel from being traced (a constant or an
attribute that is missing or impossible).
"""

import contextlib
import math
import weakref
from collections.abc import Generator, Sequence

import jax
import numpy as np

from qjax import ops
from qjax.graph.batch_shapes import Sizes, input_shape, keeps_size, result_of
from qjax.graph.check import GraphError, check_integer
from qjax.graph.ir import Graph, Node, Quantization, Tensor

MAX_ELEMENTS = 2**31 - 1
"""The most elements of a tensor per example, because indices within one are int32 in every runtime."""
_BATCHES = ((2, 3), (20_160, 40_320))
"""Pairs of batch sizes. The second, for graphs that divide the batch, has all divisors up to 10, and 2^k up to 64."""


def check_computed(graph: Graph) -> Graph:
    """Check in addition to `check_integer` that shapes, dtypes and ranges are those that the nodes compute.

    Raises:
      GraphError: they are not; the message names the node or the tensor, what it states and what is computed.
    """
    check_integer(graph)
    for tensor in graph.tensors.values():
        if math.prod(size for size in tensor.shape if size) > MAX_ELEMENTS:
            raise GraphError(
                f"Tensor {tensor.name!r}: expected at most {MAX_ELEMENTS} elements, got the shape {tensor.shape}."
            )
        if tensor.value is None and tensor.quantization is not None and tensor.quantization.axes:
            raise GraphError(
                f"Tensor {tensor.name!r}: expected one scale, because only constants have scales of their channels."
            )
    # Tracing every kernel is expensive, and an emitter that passes a graph on would do it twice.
    stated = (*graph.tensors.values(), *graph.nodes)
    known = _traced.get(graph, ())
    if len(known) != len(stated) or any(a is not b for a, b in zip(known, stated, strict=True)):
        _check_kernels(graph)
        _traced[graph] = stated
    for node in graph.nodes:
        _check_range(graph, node)
    return graph


_traced: weakref.WeakKeyDictionary[Graph, tuple[Tensor | Node, ...]] = weakref.WeakKeyDictionary()
"""The tensors and nodes of each graph whose kernels were traced, because its mappings can be changed."""


def _check_kernels(graph: Graph) -> None:
    free = any(None in graph.tensors[name].shape for name in graph.inputs)
    for batches in _BATCHES:
        try:
            for batch in batches if free else (1,):
                _check_shapes(graph, batch)
        except _NoKernel as error:
            if not free or batches is _BATCHES[-1]:
                raise GraphError(str(error)) from error
        else:
            break


class _NoKernel(Exception):
    """A kernel cannot be traced, perhaps only at this batch size."""


@contextlib.contextmanager
def _name_errors(place: str) -> Generator[None]:
    """Names the node in errors: a kernel trusts its node, so bad fields, like a bad batch size, can fail anywhere."""
    try:
        yield
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise _NoKernel(f"{place}: its fields contradict each other or its inputs ({reason}).") from error


def _check_shapes(graph: Graph, batch: int) -> None:
    """Compare the shapes that the kernels return at one batch size."""
    places = {node.name: f"Node {node.name!r} ({node.op})" for node in graph.nodes}
    keeps = True
    for node in graph.nodes:
        with _name_errors(places[node.name]):
            keeps = keeps and keeps_size(graph, node)
    computed = {node.output for node in graph.nodes}
    found = {name: input_shape(t.shape, batch) for name, t in graph.tensors.items() if name not in computed}
    known: dict[object, jax.ShapeDtypeStruct] = {}
    for node in graph.nodes:
        place, stated, inputs = places[node.name], graph.tensors[node.output], [found[name] for name in node.inputs]
        with _name_errors(place), jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
            made = result_of(graph, node, inputs, known)
        shape = tuple(made.shape)
        if made.dtype != np.dtype(stated.dtype):
            raise GraphError(f"{place}: expected its output to be of {stated.dtype}, got {made.dtype} by its kernel.")
        if math.prod(shape) > MAX_ELEMENTS * batch:
            raise GraphError(f"{place}: expected at most {MAX_ELEMENTS} elements for each example, got {shape}.")
        if not _is(stated.shape, shape, batch if keeps else None):
            raise GraphError(
                f"{place}: expected its output to have the shape {stated.shape} that the file states, got {shape} from "
                f"its kernel with a batch of {batch}."
            )
        found[node.output] = shape


def _is(stated: Sequence[int | None], shape: Sizes, batch: int | None) -> bool:
    """Whether a shape is as stated. batch: the size of a free axis, None for any."""
    if len(stated) != len(shape):
        return False
    free = shape if batch is None else (batch,) * len(shape)
    return shape == tuple(any_ if size is None else size for size, any_ in zip(stated, free, strict=True))


def _check_range(graph: Graph, node: Node) -> None:
    """Compare the range of the result, by which later nodes omit checks, with the origin of its codes.

    Kernels of producers clip to the stated range, except for tables. Other operations only move codes.
    """
    op, output = ops.get(node.op), graph.tensors[node.output]
    q, place = output.quantization, f"Node {node.name!r} ({node.op})"
    if op.role is ops.Role.INTEGER and q is not None and not op.reals:
        raise GraphError(f"{place}: expected plain integers as its output, got a tensor with a scale, {output.name!r}.")
    if q is None:
        return
    constants = {role: graph.tensors[name] for role, name in node.constants.items()}
    moves = op.role is ops.Role.GRID
    if moves:
        inputs = [] if op.sizes_only else [graph.tensors[name] for name in node.inputs]
        for tensor in (*inputs, *constants.values()):
            # A tensor without a scale is an index, a mask, or a constant whose codes are checked below.
            plain = tensor.quantization is None and (op.chooses or tensor.dtype == "bool" or tensor.value is not None)
            own = tensor.quantization
            if not plain and (own is None or own.qmin < q.qmin or own.qmax > q.qmax):
                raise GraphError(f"{place}: expected {tensor.name!r} to have codes within the range of its output.")
    for role, tensor in constants.items():
        codes = np.asarray(tensor.value)
        tabulated = role == "table" and tensor.dtype == output.dtype
        if (moves or tabulated) and tensor.dtype != "bool" and codes.size:
            low, high = int(codes.min()), int(codes.max())
            if not q.qmin <= low <= high <= q.qmax:
                raise GraphError(
                    f"{place}: expected the constant {tensor.name!r} to hold codes within [{q.qmin}, {q.qmax}], got "
                    f"[{low}, {high}]."
                )


def same_quantization(a: Quantization | None, b: Quantization | None) -> bool:
    """Whether two tensors have equal scales, zero points and ranges, or neither has any."""
    if a is None or b is None:
        return a is b
    alike = np.array_equal(a.scale, b.scale) and np.array_equal(a.zero_point, b.zero_point)
    return alike and (a.qmin, a.qmax) == (b.qmin, b.qmax)


__all__ = ["check_computed", "same_quantization"]
