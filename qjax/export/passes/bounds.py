"""Clamps of reals as clamps of codes: rounding is monotone, so the bound's own code is the bound."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from qjax.export.ir import Graph, Node, Quantization, Tensor
from qjax.numerics.affine import centered_bounds, round_to_grid
from qjax.ops import get


def codes_of_bounds(graph: Graph) -> Graph:
    """Gives clamps that act on codes their bounds as int32 constants in place of reals.

    Requires: the clamp's input stands on a per-tensor grid.
    """
    tensors = dict(graph.tensors)
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.op == "clamp" and not {"clamp_min", "clamp_max"} & set(node.constants):
            quantization = tensors[node.inputs[0]].quantization
            assert quantization is not None
            constants = {role: graph.constant(node, role) for role in node.constants}
            roles: dict[str, str] = {}
            for role, value in bound_constants(*get("clamp").bounds(node.attributes, constants), quantization).items():
                name = f"{node.output}/{role}"
                tensors[name] = Tensor(name, (), "int32", None, value)
                roles[role] = name
            node = dataclasses.replace(node, constants=roles, attributes={})
        nodes.append(node)
    return graph.replace(nodes=tuple(nodes), tensors=tensors)


def bound_constants(low: Any, high: Any, quantization: Quantization) -> dict[str, Any]:
    """The constants clamp_min and clamp_max as int32 codes, for the bounds that exist."""
    found: dict[str, Any] = {}
    for role, bound in (("clamp_min", low), ("clamp_max", high)):
        if bound is not None:
            found[role] = _code(bound, quantization)
    return found


def _code(bound: Any, q: Quantization) -> Any:
    if not isinstance(bound, Tracer) and float(np.asarray(bound).reshape(())) == 0:
        # the zero point itself, by which a relu is known inside a trace too, see `NodeView.relu`
        return q.zero_point if isinstance(q.zero_point, Tracer) else np.asarray(q.zero_point)
    value = jnp.asarray(bound).astype(jnp.float32).reshape(())
    zero_point = jnp.asarray(q.zero_point)
    steps = round_to_grid(value, jnp.asarray(q.scale), "nearest_even")
    code = jnp.clip(steps, *centered_bounds(zero_point, q.qmin, q.qmax)).astype(jnp.int32) + zero_point
    return code if isinstance(code, Tracer) else np.asarray(code)
