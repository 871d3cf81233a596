"""The structural rules that every graph obeys, checked between passes and after loading."""

import numpy as np
from jax.core import Tracer

from qjax import ops
from qjax.export.ir import INTEGER_DTYPES, Graph, Tensor


class GraphError(ValueError):
    """A graph that breaks a rule of the format; the message names the culprit."""


def check(graph: Graph) -> Graph:
    """Verify names, order and references; returns the graph, so that it can stand in a chain of passes."""
    known: set[str] = set()
    for name, tensor in graph.tensors.items():
        if name != tensor.name:
            raise GraphError(f"Tensor {tensor.name!r} is stored under the name {name!r}.")
        if tensor.value is not None:
            known.add(name)
            if tuple(np.shape(tensor.value)) != tensor.shape:
                raise GraphError(
                    f"Constant {name!r}: expected data of shape {tensor.shape}, got {np.shape(tensor.value)}."
                )
    for name in graph.inputs:
        _require(graph, name, "The graph's inputs")
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


def check_integer(graph: Graph) -> Graph:
    """Verify in addition that the graph is finished: known operations and integers only."""
    check(graph)
    for node in graph.nodes:
        if node.op not in ops.names():
            raise GraphError(f"Node {node.name!r}: unknown operation {node.op!r}. Known: {', '.join(ops.names())}.")
    for tensor in graph.tensors.values():
        if tensor.dtype not in INTEGER_DTYPES:
            raise GraphError(f"Tensor {tensor.name!r}: expected an integer dtype, got {tensor.dtype}.")
        _check_tensor(tensor)
    for name in (*graph.inputs, *graph.outputs):
        if graph.tensors[name].dtype == "int64":
            raise GraphError(f"Tensor {name!r}: int64 is for constants, not for inputs or outputs.")
    return graph


def _check_tensor(tensor: Tensor) -> None:
    value, quantization = tensor.value, tensor.quantization
    if value is not None and np.dtype(value.dtype).name != tensor.dtype:
        raise GraphError(f"Constant {tensor.name!r}: declared {tensor.dtype}, its data is {value.dtype}.")
    if quantization is None:
        return
    info = np.iinfo(tensor.dtype)
    if not info.min <= quantization.qmin < quantization.qmax <= info.max:
        raise GraphError(
            f"Tensor {tensor.name!r}: the range [{quantization.qmin}, {quantization.qmax}] does not fit {tensor.dtype}."
        )
    expected = tuple(tensor.shape[axis] for axis in quantization.axes)
    if tuple(np.shape(quantization.scale)) != expected:
        raise GraphError(
            f"Tensor {tensor.name!r}: expected scales of shape {expected}, got {np.shape(quantization.scale)}."
        )
    if isinstance(quantization.scale, Tracer):
        return
    scale = np.asarray(quantization.scale)
    if not (np.isfinite(scale).all() and (scale > 0).all()):
        raise GraphError(f"Tensor {tensor.name!r}: a scale must be finite and positive, got {scale}.")


def _require(graph: Graph, name: str, place: str) -> None:
    if name not in graph.tensors:
        raise GraphError(f"{place}: there is no tensor {name!r}.")
