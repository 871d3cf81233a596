"""Proves that no int32 accumulator can overflow, from the bounds that each operation declares (`Op.accumulator`)."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from qjax.assign.bounds import operand
from qjax.graph.ir import Graph, Node
from qjax.graph.unsupported import ConversionError
from qjax.numerics.accumulator import EXACT, Accumulator
from qjax.ops import Site, accumulator_bounds, get
from qjax.ops.epilogue import BIAS_BITS
from qjax.support.errors import Unsupported

_LOWEST, _HIGHEST = -(2**31), 2**31 - 1


def check_accumulators(graph: Graph) -> Graph:
    """Check the worst case of every accumulator; returns the graph unchanged.

    An accumulator that wraps or saturates does so on purpose; what must fit int32 is its register plus the bias.
    Constants that are being traced cannot be checked; their bound was checked when the graph was first converted.
    """
    for node in graph.nodes:
        try:
            reached = bounds(graph, node)
        except Unsupported as error:
            raise ConversionError(
                f"{node.name!r} ({node.op}) {error}", "Sum behind the graph's output.", where=node.location
            ) from None
        if reached is not None and not (reached[0] >= _LOWEST and reached[1] <= _HIGHEST):
            bound = reached[1] if reached[1] > _HIGHEST else reached[0]
            raise ConversionError(
                f"the accumulator of {node.name!r} ({node.op}) may reach {bound}, beyond int32",
                "Use fewer bits for its activations or its weights.",
                where=node.location,
            )
    return graph


def bounds(graph: Graph, node: Node) -> tuple[int, int] | None:
    """The least and the greatest accumulator over all input codes, including its bias."""
    return get(node.op).accumulator(site(graph, node))


def may_wrap(graph: Graph) -> Any:
    """Whether traced weights can make an int32 accumulator wrap, as a boolean tracer; None if no weights could.

    Nothing can be raised inside a trace. Where this is true, the numbers that the graph computes must not be used.
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
            low, high = (b + _wide(bias) for b in accumulator_bounds.reached(site(graph, node), x.qmin - z, x.qmax - z))
            found.append(jnp.any((low < _LOWEST) | (high > _HIGHEST)))
    return functools.reduce(jnp.logical_or, found) if found else None


def _wide(value: Any) -> jax.Array:
    return jnp.asarray(value).astype(jnp.int64)


def product_bounds(graph: Graph, node: Node, *, stored: bool = False) -> tuple[np.ndarray, np.ndarray] | None:
    """`reach.product_bounds` of a node."""
    return accumulator_bounds.product_bounds(site(graph, node), stored=stored)


def site(graph: Graph, node: Node) -> Site:
    """The facts about a node that its operation needs before it runs."""
    return Site(
        node.attributes,
        {role: graph.constant(node, role) for role in node.constants},
        tuple(operand(graph.tensors[name]) for name in node.inputs),
        operand(graph.tensors[node.output]),
    )
