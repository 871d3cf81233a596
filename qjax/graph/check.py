"""Checks the structural rules of every graph, between passes and after loading."""

import math

import numpy as np
from jax.core import Tracer

from qjax import ops
from qjax.graph.ir import INTEGER_DTYPES, REAL_DTYPE, REAL_DTYPES, Graph, Node, Quantization, Tensor
from qjax.ops import backend
from qjax.ops.fields import OF_TARGETS, OfTarget, problem
from qjax.support.names import MAX_NAME


class GraphError(ValueError):
    """The graph breaks a rule of the format; the message names the offending part."""


def check(graph: Graph) -> Graph:
    """Check names, order and references; returns the graph, for use in a chain of passes."""
    known: set[str] = set()
    for name, tensor in graph.tensors.items():
        if len(name) > MAX_NAME:
            raise GraphError(
                f"Tensor {name[:40]!r}...: expected a name of at most {MAX_NAME} characters, as a file holds it, got "
                f"{len(name)}. Rename the attribute, the argument or the key of the model that has it."
            )
        if name != tensor.name:
            raise GraphError(f"Tensor {tensor.name!r}: expected it under its own name, got {name!r}.")
        if tensor.value is not None:
            known.add(name)
            if tuple(np.shape(tensor.value)) != tensor.shape:
                raise GraphError(
                    f"Constant {name!r}: expected data of shape {tensor.shape}, got {np.shape(tensor.value)}."
                )
    for name in graph.inputs:
        _require(graph, name, "The graph's inputs")
        if graph.tensors[name].value is not None:
            raise GraphError(f"Input {name!r}: expected no data, because a tensor is either an input or a constant.")
        if name in known:
            raise GraphError(f"Input {name!r} is listed twice.")
        known.add(name)
    names: set[str] = set()
    for node in graph.nodes:
        place = f"Node {node.name!r} ({node.op})"
        if node.name in names:
            raise GraphError(f"{place}: a second node has this name.")
        names.add(node.name)
        for name in (*node.inputs, *node.constants.values()):
            _require(graph, name, place)
            if name not in known:
                raise GraphError(f"{place} reads {name!r} before it is computed.")
        for role, name in node.constants.items():
            if graph.tensors[name].value is None:
                raise GraphError(f"{place}: its constant {role} = {name!r} carries no data.")
        _require(graph, node.output, place)
        if node.output in known:
            raise GraphError(f"{place} computes {node.output!r}, which exists already.")
        known.add(node.output)
    for name in graph.outputs:
        _require(graph, name, "The graph's outputs")
        if name not in known:
            raise GraphError(f"Output {name!r} is never computed.")
    return graph


def check_quantized(graph: Graph) -> Graph:
    """Check in addition the rules of a quantized graph: known operations, valid parameters, nothing of a target."""
    if graph.target or graph.quantized is not None:
        raise GraphError(f"Expected a quantized graph, got a program for {graph.target!r}: take its `quantized`.")
    check(graph)
    for node in graph.nodes:
        if node.op not in ops.names() or node.op == backend.NAME:
            raise GraphError(f"Node {node.name!r}: expected an operation of a quantized graph, got {node.op!r}.")
        given = [key for key in OF_TARGETS if key in node.attributes]
        if given:
            raise GraphError(f"Node {node.name!r}: {', '.join(given)} belong to a program for a target, not here.")
        # A node from a file keeps the attributes that came with its constants.
        _check_attributes(node, ops.get(node.op).fields, possible=(ops.get(node.op).prepared,))
    for tensor in graph.tensors.values():
        if tensor.dtype not in (*INTEGER_DTYPES, *REAL_DTYPES):
            raise GraphError(f"Tensor {tensor.name!r}: expected integers or floats, got {tensor.dtype}.")
        _check_tensor(tensor)
    return graph


def check_integer(graph: Graph) -> Graph:
    """Check in addition that the graph is a program: known operations and integers only."""
    check(graph)
    for node in graph.nodes:
        if node.op not in ops.names():
            raise GraphError(f"Node {node.name!r}: unknown operation {node.op!r}. Known: {', '.join(ops.names())}.")
        op = ops.get(node.op)
        if type(op).kernel is ops.Op.kernel:
            raise GraphError(f"Node {node.name!r}: {node.op!r} has no kernel. Only a quantized graph may hold it.")
        _check_attributes(node, op.fields, op.prepared, *((OfTarget,) if op.role is ops.Role.PRODUCER else ()))
        if node.op == backend.NAME:
            try:
                dtypes = [graph.tensors[name].dtype for name in node.inputs]
                backend.members_of({**node.attributes, "input_dtypes": dtypes})
                backend.kernel_of(node.attributes)
            except ValueError as error:
                raise GraphError(f"Node {node.name!r}: {error}") from None
    reals = _of_islands(graph)
    for tensor in graph.tensors.values():
        if tensor.dtype not in INTEGER_DTYPES and not (tensor.dtype == REAL_DTYPE and tensor.name in reals):
            raise GraphError(f"Tensor {tensor.name!r}: expected an integer dtype, got {tensor.dtype}.")
        _check_tensor(tensor)
    for name in (*graph.inputs, *graph.outputs):
        if graph.tensors[name].dtype == "int64":
            raise GraphError(f"Tensor {name!r}: int64 is for constants, not for inputs or outputs.")
    return graph


def _check_attributes(node: Node, *stated: type, possible: tuple[type, ...] = ()) -> None:
    wrong = problem(stated, node.attributes, possible)
    if wrong is not None:
        raise GraphError(f"Node {node.name!r}: {node.op!r} {wrong}")


def _of_islands(graph: Graph) -> set[str]:
    """The tensors that may hold floats, because only float parts read and compute them."""
    found: set[str] = set()
    others: set[str] = set()
    for node in graph.nodes:
        (found if ops.get(node.op).reals else others).update((*node.inputs, node.output, *node.constants.values()))
    return found - others


def _check_tensor(tensor: Tensor) -> None:
    place, value = f"Tensor {tensor.name!r}", tensor.value
    if value is not None and np.dtype(value.dtype).name != tensor.dtype:
        raise GraphError(f"Constant {tensor.name!r}: declared {tensor.dtype}, its data is {value.dtype}.")
    if value is not None and tensor.dtype == REAL_DTYPE and not isinstance(value, Tracer):
        nans = int(np.isnan(np.asarray(value)).sum())
        if nans:
            raise GraphError(
                f"Constant {tensor.name!r}: expected numbers, got {nans} NaN of {value.size}. Integers have no NaN: "
                "drop the check for missing values that jnp.median and jnp.quantile make: sort, and take the middle."
            )
    if tensor.quantization is None:
        return
    _check_quantization(tensor.quantization, tensor, place)
    if value is None or isinstance(value, Tracer) or not math.prod(value.shape):
        return
    # Codes beyond the range would lose bits in packing, and invalidate the proofs that no accumulator overflows.
    low, high = int(np.min(np.asarray(value))), int(np.max(np.asarray(value)))
    qmin, qmax = tensor.quantization.qmin, tensor.quantization.qmax
    if low < qmin or high > qmax:
        raise GraphError(f"{place}: expected codes within [{qmin}, {qmax}], got [{low}, {high}].")


def _check_quantization(q: Quantization, tensor: Tensor, place: str) -> None:
    info, rank = np.iinfo(tensor.dtype), len(tensor.shape)
    if not info.min <= q.qmin < q.qmax <= info.max:
        raise GraphError(f"{place}: the range [{q.qmin}, {q.qmax}] does not fit {tensor.dtype}.")
    if any(not 0 <= axis < rank for axis in q.axes):
        raise GraphError(f"{place}: expected axes within [0, {rank - 1}], got {list(q.axes)}.")
    if len(set(q.axes)) != len(q.axes):
        raise GraphError(f"{place}: expected every axis once, got {list(q.axes)}.")
    scale_dtype, zero_dtype = np.dtype(q.scale.dtype).name, np.dtype(q.zero_point.dtype).name
    if (scale_dtype, zero_dtype) != ("float32", "int32"):
        raise GraphError(
            f"{place}: expected a scale of float32 and a zero point of int32, got {scale_dtype} and {zero_dtype}."
        )
    expected = tuple(tensor.shape[axis] for axis in q.axes)
    if tuple(q.scale.shape) != expected:
        raise GraphError(f"{place}: expected scales of shape {expected}, got {tuple(q.scale.shape)}.")
    if tuple(q.zero_point.shape) not in ((), expected):
        raise GraphError(f"{place}: expected a zero point of shape () or {expected}, got {tuple(q.zero_point.shape)}.")
    if not isinstance(q.scale, Tracer):
        scale = np.asarray(q.scale)
        if not (np.isfinite(scale).all() and (scale > 0).all()):
            raise GraphError(f"{place}: expected finite and positive scales, got {scale}.")
    if not isinstance(q.zero_point, Tracer):
        zero_point = np.asarray(q.zero_point)
        if ((zero_point < q.qmin) | (zero_point > q.qmax)).any():
            raise GraphError(f"{place}: expected a zero point within [{q.qmin}, {q.qmax}], got {zero_point}.")


def _require(graph: Graph, name: str, place: str) -> None:
    if name not in graph.tensors:
        raise GraphError(f"{place}: there is no tensor {name!r}.")
