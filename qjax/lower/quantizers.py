"""Applies a quantizer to a value: the result are codes with the quantizer's scale and zero point."""

from typing import Any

from qjax.graph import islands
from qjax.graph.ir import Node
from qjax.graph.unsupported import unsupported
from qjax.lower.builder import Builder
from qjax.lower.reals import island_node
from qjax.lower.stacks import joined
from qjax.lower.values import Accumulator, Codes, Constant, Stack, Step
from qjax.lower.weights import weight_tensor
from qjax.ops.fill import Fill
from qjax.ops.rescale import Rescale
from qjax.tracing import Equation, Place, Value


def quantized(builder: Builder, place: Place, value: Value, found: Any, eqn: Equation, step: Step) -> Codes:
    """The codes of a value, whatever it was before. eqn: the one that makes it, or the scan that takes it in."""
    if isinstance(found, Constant):
        return _filled(builder, place, value, found.value, eqn, step)
    if isinstance(found, Stack):
        return joined(builder, place, value, found, eqn, step)
    if isinstance(found, islands.Float):
        label = builder.fresh(builder.label(place, step))
        return island_node(builder, found, builder.on_grid(label, value.shape, place, step))
    if isinstance(found, Codes):
        found = builder.accumulator(Rescale.name, eqn, [found.tensor], {}, {}, step)
    if not isinstance(found, Accumulator):
        raise unsupported(eqn)
    label = builder.fresh(builder.label(place, step))
    return Codes(builder.quantize(label, found.tensor, value.shape, place, eqn, step))


def _filled(builder: Builder, place: Place, value: Value, number: Any, eqn: Equation, step: Step) -> Codes:
    """A constant where codes are expected, such as the zeros that a loop starts from."""
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
