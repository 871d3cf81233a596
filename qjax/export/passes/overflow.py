"""Proves that no int32 accumulator can overflow, from the weights themselves."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from numpy.typing import NDArray

from qjax.export.ir import Graph, Node, Tensor
from qjax.export.lower import ConversionError
from qjax.numerics.accumulator import EXACT, Accumulator
from qjax.ops.channels import weight_to_result
from qjax.ops.epilogue import BIAS_BITS

_LOWEST, _HIGHEST = -(2**31), 2**31 - 1


def check_accumulators(graph: Graph) -> Graph:
    """Verify the worst case of every accumulator; the graph is returned as it is.

    An accumulator that wraps or saturates is meant to; what must fit int32 is its register with the bias added.
    Constants that are being traced cannot be looked at; their bound was verified when the graph was first converted.
    """
    for node in graph.nodes:
        if any(size is None for size in _summed_sizes(graph, node)):
            raise ConversionError(
                f"{node.location}: {node.name!r} ({node.op}) sums over the batch, whose size is free: no bound of its "
                "accumulator exists. Sum behind the graph's output."
            )
        reached = bounds(graph, node)
        if reached is not None and not (reached[0] >= _LOWEST and reached[1] <= _HIGHEST):
            bound = reached[1] if reached[1] > _HIGHEST else reached[0]
            raise ConversionError(
                f"{node.location}: the accumulator of {node.name!r} ({node.op}) may reach {bound}, beyond int32. "
                "Use fewer bits for its activations or its weights."
            )
    return graph


def _summed_sizes(graph: Graph, node: Node) -> list[int | None]:
    """The sizes of the activation's axes that a node sums over."""
    axes: list[int] = []
    if node.op == "sum":
        axes = node.attributes["axes"]
    elif node.op == "dot":
        axes = node.attributes["rhs_contracting" if node.attributes["weight"] == 0 else "lhs_contracting"]
    return [graph.tensors[node.inputs[0]].shape[axis] for axis in axes]


def worst_case(graph: Graph, node: Node) -> int | None:
    """The largest |accumulator| that any input codes can give, or None where it has none (or is unknown)."""
    reached = bounds(graph, node)
    return None if reached is None else max(reached[1], -reached[0])


def bounds(graph: Graph, node: Node) -> tuple[int, int] | None:
    """The least and the greatest accumulator that any input codes can give, its bias included."""
    tensors = [graph.tensors[name] for name in node.inputs]
    if node.op in ("dot", "conv") and "kernel" in node.constants:
        accumulator = Accumulator.of_json(node.attributes.get("accumulator"))
        accumulator = accumulator.on(tensors[0].dtype, graph.tensors[node.constants["kernel"]].dtype)
        stored = accumulator.pairs or accumulator.operands == "codes"
        products = product_bounds(graph, node, stored=stored)
        bias = graph.constant(node, "bias")
        if products is None or isinstance(bias, Tracer):
            return None
        low, high = products
        if accumulator.overflow == "wrap" and (low.min() < accumulator.low or high.max() > accumulator.high):
            low, high = np.full_like(low, accumulator.low), np.full_like(high, accumulator.high)
        elif accumulator.overflow == "saturate":
            low, high = (np.clip(b, accumulator.low, accumulator.high) for b in products)
        offset = np.asarray(bias).astype(np.int64)
        if stored:
            z = _zero_point(tensors[0])
            if z is None:
                return None
            offset = offset - z * _per_channel(graph, node, lambda kernel: kernel)
        return int((low + offset).min(initial=0)), int((high + offset).max(initial=0))
    if node.op == "dot":
        reach = _count(graph, node) * _reach(tensors[0]) * _reach(tensors[1])
    elif node.op == "multiply":
        reach = _reach(tensors[0]) * _reach(tensors[1])
    elif node.op == "sum":
        reach = _count(graph, node) * _reach(tensors[0])
    elif node.op == "window_sum":
        reach = math.prod(node.attributes["window"]) * _reach(tensors[0])
    else:
        return None
    return -reach, reach


def may_wrap(graph: Graph) -> Any:
    """Whether traced weights let an int32 accumulator wrap, a boolean tracer; None where no weights of their bits can.

    Inside a trace nothing can be raised. The numbers that the graph computes there must not be used where this holds.
    """
    found: list[Any] = []
    for node in graph.nodes:
        given, x = node.attributes, graph.tensors[node.inputs[0]].quantization if node.inputs else None
        if x is None or not {"kernel", "bias"} <= set(node.constants) or "channels" not in given:
            continue
        kernel, bias = graph.constant(node, "kernel"), graph.constant(node, "bias")
        q = graph.tensors[node.constants["kernel"]].quantization
        if q is None or not isinstance(kernel, Tracer) or Accumulator.of_json(given.get("accumulator")) != EXACT:
            continue
        kept = [w for _, w in given["channels"]]
        summed = math.prod(n for axis, n in enumerate(kernel.shape) if axis not in kept)
        if summed * max(q.qmax, -q.qmin) * (x.qmax - x.qmin) + 2**BIAS_BITS <= _HIGHEST:
            continue
        with jax.enable_x64(True):
            z = _wide(x.zero_point)
            low, high = (b + _wide(bias) for b in _reached(graph, node, x.qmin - z, x.qmax - z))
            found.append(jnp.any((low < _LOWEST) | (high > _HIGHEST)))
    return functools.reduce(jnp.logical_or, found) if found else None


def _wide(value: Any) -> jax.Array:
    return jnp.asarray(value).astype(jnp.int64)


def product_bounds(graph: Graph, node: Node, *, stored: bool = False) -> tuple[NDArray[Any], NDArray[Any]] | None:
    """The least and the greatest sum of products with a kernel, per channel; None while the kernel is traced.

    Both are reached: every weight meets the code that is worst for it. They bound all partial sums as well, in any
    order, because a product may be zero.

    Args:
      stored: of codes as they are stored, instead of codes minus the zero point.

    Returns:
      int64 vectors in the shape that broadcasts against the result's trailing axes.
    """
    if isinstance(graph.constant(node, "kernel"), Tracer):
        return None
    low, high = _span(graph.tensors[node.inputs[0]], stored)
    return _reached(graph, node, low, high)


def _reached(graph: Graph, node: Node, low: Any, high: Any) -> tuple[Any, Any]:
    """The least and the greatest sum of products with factors in [low, high], per channel."""
    # low <= 0 <= high: a positive weight is least with the least code
    positive = _per_channel(graph, node, lambda kernel: kernel.clip(min=0))
    negative = _per_channel(graph, node, lambda kernel: kernel.clip(max=0))
    return positive * low + negative * high, positive * high + negative * low


def _per_channel(graph: Graph, node: Node, function: Any) -> Any:
    """The sum of `function(kernel)` over what the accumulator sums, int64."""
    kernel = graph.constant(node, "kernel")
    kernel = (kernel if isinstance(kernel, Tracer) else np.asarray(kernel)).astype(np.int64)
    kept = [w for _, w in node.attributes["channels"]]
    summed = tuple(axis for axis in range(kernel.ndim) if axis not in kept)
    sums = function(kernel).sum(axis=summed, keepdims=True)
    return weight_to_result(sums, node.attributes["channels"], node.attributes["rank"])


def _count(graph: Graph, node: Node) -> int:
    return math.prod(size for size in _summed_sizes(graph, node) if size is not None)


def _reach(tensor: Tensor) -> int:
    low, high = _span(tensor, stored=False)
    return max(high, -low)


def _span(tensor: Tensor, stored: bool) -> tuple[int, int]:
    """The least and the greatest factor that a tensor's codes are, zero among them."""
    q = tensor.quantization
    assert q is not None
    if stored:
        return min(q.qmin, 0), max(q.qmax, 0)
    z = _zero_point(tensor)
    return (q.qmin - q.qmax, q.qmax - q.qmin) if z is None else (q.qmin - z, q.qmax - z)


def _zero_point(tensor: Tensor) -> int | None:
    """The zero point of an activation, None while it is traced."""
    assert tensor.quantization is not None
    z = tensor.quantization.zero_point
    return None if isinstance(z, Tracer) else int(np.max(np.asarray(z)))
