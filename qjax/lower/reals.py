"""A float island as one node. It ends where a float result reaches a quantizer or an output of the model."""

import numpy as np

from qjax.graph import islands
from qjax.graph.ir import Node, Tensor
from qjax.lower.builder import Builder
from qjax.lower.values import Codes, Constant, Real
from qjax.ops import island
from qjax.tracing import Value


def island_node(builder: Builder, found: islands.Float, output: str) -> Codes:
    """A node that computes a real result, and puts it on the output's grid where it has one."""
    program = islands.program_of(found, lambda f: isinstance(f, Constant))
    inputs: list[str] = []
    for leaf in program.data:
        if isinstance(leaf.found, Real) and leaf.found.name not in builder.tensors:
            builder.add(Tensor(leaf.found.name, leaf.shape, "float32"))
        inputs.append(leaf.found.name if isinstance(leaf.found, Real) else leaf.found.tensor)
    constants = {role: builder.constant(f"{output}/{role}", value) for role, value in program.constants.items()}
    builder.nodes.append(
        Node(output, island.NAME, tuple(inputs), output, constants, program.attributes, found.eqn.location)
    )
    return Codes(output)


def island_output(builder: Builder, found: islands.Float, value: Value) -> Codes:
    """A result that leaves the model, or that integers read, as it is."""
    dtype = "bool" if value.dtype == np.bool_ else "float32" if value.is_float else "int32"
    name = builder.fresh(f"{found.eqn.scope}/output" if found.eqn.scope else "output")
    builder.add(Tensor(name, value.shape, dtype))
    return island_node(builder, found, name)
