"""Runs one node at a time: its constants, its attributes, its kernel.

The kernels are those of `qjax.ops`; this module contains no formulas. Whatever does not depend on the input (such as a
bias with the zero point folded in) is computed once.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from qjax import ops
from qjax.graph.ir import Graph, Node

Constants = Mapping[str, Mapping[str, Any]]
"""Name of a node -> the arrays of its kernel."""


def prepare(graph: Graph) -> dict[str, dict[str, Any]]:
    """The constants of every node's kernel, ready to run."""
    known: dict[object, Mapping[str, Any]] = {}
    return {node.name: dict(_prepare(graph, node, known)) for node in graph.nodes}


def _prepare(graph: Graph, node: Node, known: dict[object, Mapping[str, Any]]) -> Mapping[str, Any]:
    facts, constants = attributes(graph, node), constants_of(graph, node)
    # The iterations of a loop share constants, which are prepared once.
    key = (node.op, repr(sorted(facts.items())), *((role, id(constants[role])) for role in sorted(constants)))
    if key not in known:
        known[key] = ops.get(node.op).runtime(facts, constants)
    return known[key]


def constants_of(graph: Graph, node: Node) -> dict[str, Any]:
    """A node's constants and the zero points of its tensors, as stored."""
    constants: dict[str, Any] = {role: graph.constant(node, role) for role in node.constants}
    for index, name in enumerate(node.inputs):
        quantization = graph.tensors[name].quantization
        if quantization is not None:
            constants[f"zero_point{index}"] = quantization.zero_point
    output = graph.tensors[node.output].quantization
    if output is not None:
        constants["y_zero_point"] = output.zero_point
    return constants


def attributes(graph: Graph, node: Node) -> dict[str, Any]:
    """A node's attributes, extended by the static facts of its tensors."""
    output = graph.tensors[node.output]
    facts: dict[str, Any] = {
        "dtype": output.dtype,
        "input_dtypes": [graph.tensors[name].dtype for name in node.inputs],
    }
    if output.quantization is not None:
        facts |= {"qmin": output.quantization.qmin, "qmax": output.quantization.qmax}
    return {**node.attributes, **facts}


def run_node(graph: Graph, node: Node, constants: Mapping[str, Any], inputs: Sequence[Any]) -> jax.Array:
    """Run one node on codes.

    Raises:
      ValueError: the kernel cannot compute inputs of these shapes, for instance a slice that begins after the last
        example.
    """
    try:
        return ops.get(node.op).kernel(attributes(graph, node), constants, inputs)
    except TypeError as error:
        shapes = " and ".join(str(tuple(x.shape)) for x in inputs)
        raise ValueError(
            f"Node {node.name!r} ({node.op}): its kernel cannot compute with inputs of shapes {shapes}: "
            f"{str(error).rstrip('.')}. A graph that cuts or divides its batch takes only some sizes: choose another "
            "batch."
        ) from error


def forks(graph: Graph) -> set[str]:
    """The tensors that several nodes read, where a residual branch starts."""
    readers = Counter(name for node in graph.nodes for name in set(node.inputs))
    return {name for name, count in readers.items() if count > 1}


def alive(constants: Constants) -> jax.Array | None:
    """True in a form that the compiler cannot know; None outside a trace, or if every constant is part of it."""
    for name in constants:
        zero_point = constants[name].get("y_zero_point")
        if isinstance(zero_point, Tracer):
            return jnp.all(jnp.less(zero_point, np.int32(2**30)))
    return None
