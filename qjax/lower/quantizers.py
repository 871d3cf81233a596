"""Quantizes any value with the scale and zero point of a quantizer, and makes one node of a float part.

A float part ends where a float result reaches a quantizer or an output of the model.
"""

from typing import Any

import numpy as np

from qjax.graph import float_parts
from qjax.graph.ir import Node, Tensor
from qjax.graph.unsupported import unsupported
from qjax.lower import experts
from qjax.lower.builder import Builder
from qjax.lower.stacks import joined
from qjax.lower.values import Accumulator, Codes, Constant, Found, Real, Stack, Step
from qjax.lower.weights import weight_tensor
from qjax.ops import island
from qjax.ops.fill import Fill
from qjax.ops.rescale import Rescale
from qjax.tracing import Equation, Place, Value


def quantized(builder: Builder, place: Place, value: Value, found: Found, eqn: Equation, step: Step) -> Codes:
    """The codes of a value in any lowered form. eqn: the equation that makes it, or the scan that reads it."""
    if isinstance(found, Constant):
        return _fill_codes(builder, place, value, found.value, eqn, step)
    if isinstance(found, Stack):
        return joined(builder, place, value, found, eqn, step)
    if isinstance(found, float_parts.Float):
        label = builder.fresh(builder.label(place, step))
        return island_node(builder, found, builder.on_grid(label, value.shape, place, step))
    if isinstance(found, Codes):
        found = builder.accumulator(Rescale.name, eqn, [found.tensor], {}, {}, step)
    if not isinstance(found, Accumulator):
        raise unsupported(eqn)
    label = builder.fresh(builder.label(place, step))
    if found.routes is not None:
        return experts.chosen(builder, found, found.routes, label, place, value, eqn, step)
    return Codes(builder.quantize(label, found.tensor, value.shape, place, eqn, step))


def _fill_codes(builder: Builder, place: Place, value: Value, number: Any, eqn: Equation, step: Step) -> Codes:
    """A constant where codes are expected, such as the zeros from which a loop starts."""
    if not builder.inputs:
        raise unsupported(eqn)
    label = builder.fresh(builder.label(place, step))
    output = builder.on_grid(label, value.shape, place, step)
    params = builder.params_of(place, builder.own(place, step), None)
    codes = weight_tensor(builder.fresh(f"{label}/value"), place, number, params, eqn)
    builder.add(codes)
    attributes = {"shape": list(value.shape), "times": 1}
    builder.nodes.append(
        Node(label, Fill.name, (builder.inputs[0],), output, {"value": codes.name}, attributes, eqn.location)
    )
    return Codes(output)


def island_node(builder: Builder, found: float_parts.Float, output: str) -> Codes:
    """A node that computes a float result, and puts it on the output's grid if it has one."""
    program = float_parts.program_of(found, lambda f: isinstance(f, Constant))
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


def island_output(builder: Builder, found: float_parts.Float, value: Value) -> Codes:
    """A float result that leaves the model, or that other nodes read, unchanged."""
    held = float_parts.passing(found)
    if isinstance(held, Codes) and builder.tensors[held.tensor].dtype == "float32":
        return held
    dtype = "bool" if value.dtype == np.bool_ else "float32" if value.is_float else "int32"
    name = builder.fresh(f"{found.eqn.scope}/output" if found.eqn.scope else "output")
    builder.add(Tensor(name, value.shape, dtype))
    return island_node(builder, found, name)
