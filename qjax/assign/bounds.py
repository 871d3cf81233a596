"""Turns clamps of float numbers into clamps of codes: because rounding is monotone, each bound becomes its own code.

With scale 0.05 and zero point -128, for example, clamp(x, 0.0, 6.0) clamps the codes of x to [-128, -8].
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from qjax.graph.ir import Graph, Node, Quantization, Tensor
from qjax.ops import Operand, get
from qjax.ops.constant_codes import code


def codes_of_bounds(graph: Graph) -> Graph:
    """Convert the float constants of nodes on codes (a clamp's bounds, a comparison's threshold) to int32.

    Requires: their inputs have per-tensor quantization parameters.
    """
    tensors = dict(graph.tensors)
    nodes: list[Node] = []
    for node in graph.nodes:
        reals = {role for role, name in node.constants.items() if tensors[name].dtype.startswith(("float", "bfloat"))}
        found: Mapping[str, Any] | None = None
        op = get(node.op)
        if op.clamps and not {"clamp_min", "clamp_max"} & set(node.constants):
            quantization = tensors[node.inputs[0]].quantization
            assert quantization is not None
            constants = {role: graph.constant(node, role) for role in node.constants}
            found = bound_constants(*op.bounds(node.attributes, constants), quantization)
            node = dataclasses.replace(node, constants={}, attributes={})
        elif reals and not op.reals:
            grid = next(tensors[name] for name in node.inputs if tensors[name].quantization is not None)
            constants = {role: graph.constant(node, role) for role in reals}
            found = op.in_codes(node.attributes, constants, operand(grid))
        if found is not None:
            roles = dict(node.constants)
            for role, value in found.items():
                name = f"{node.output}/{role}"
                tensors[name] = Tensor(name, tuple(np.shape(value)), "int32", None, value)
                roles[role] = name
            node = dataclasses.replace(node, constants=roles)
        nodes.append(node)
    return graph.replace(nodes=tuple(nodes), tensors=tensors)


def operand(tensor: Tensor) -> Operand:
    """A tensor in the form that `Op.prepare` and `Op.in_codes` take."""
    q = tensor.quantization
    if q is None:
        return Operand(tensor.shape, tensor.dtype)
    return Operand(tensor.shape, tensor.dtype, q.scale, q.zero_point, q.qmin, q.qmax)


def bound_constants(low: Any, high: Any, quantization: Quantization) -> dict[str, Any]:
    """The constants clamp_min and clamp_max as int32 codes, for the bounds that exist."""
    found: dict[str, Any] = {}
    for role, bound in (("clamp_min", low), ("clamp_max", high)):
        if bound is not None:
            found[role] = _code(bound, quantization)
    return found


def _code(bound: Any, q: Quantization) -> Any:
    if not isinstance(bound, Tracer) and float(np.asarray(bound).reshape(())) == 0:
        # Return the zero point itself, because this object identifies a ReLU inside a trace too, see `NodeView.relu`.
        return q.zero_point if isinstance(q.zero_point, Tracer) else np.asarray(q.zero_point)
    return code(jnp.asarray(bound).reshape(()), Operand((), "", q.scale, q.zero_point, q.qmin, q.qmax))
