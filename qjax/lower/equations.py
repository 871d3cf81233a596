"""Makes the nodes of one equation, in the mode that the annotator chose."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from qjax.graph import float_parts
from qjax.graph.ir import Node, Quantization, Tensor
from qjax.graph.unsupported import ConversionError, unsupported
from qjax.lower import experts
from qjax.lower.builder import Builder
from qjax.lower.quantizers import island_output
from qjax.lower.values import Accumulator, Codes, Constant, Found, Real, Step, tensor_of, value_of
from qjax.numerics._namespace import traced
from qjax.ops import Op, dynamic_rows
from qjax.ops.dynamic import DynamicProduct
from qjax.ops.facts import ProductFacts
from qjax.ops.fields import plain
from qjax.ops.grouped_dot import GroupedDot, layout
from qjax.ops.ragged_dot import RaggedDot
from qjax.ops.rescale import Rescale
from qjax.tracing import Equation, Value, keeps_number, product_of

# ----------------------------------------------------------------------------------------------------------------------
# Lowers products under `qjax.Dynamic` that a runtime has as one operator to a node between float parts.


def rows_product(builder: Builder, eqn: Equation, product: DynamicProduct, found: Sequence[Any]) -> float_parts.Float:
    """Make a node for a float product that a runtime has as one operator; returns its result in float."""
    op, attributes = dynamic_rows.operator(product)
    name = f"{eqn.scope}/{op}" if eqn.scope else op
    x = _float_tensor(builder, found[0], eqn)
    codes, scale = (found[index].value for index in (-3, -2))
    if isinstance(codes, jax.ShapeDtypeStruct):
        kernel, scale = jax.eval_shape(partial(dynamic_rows.kernel, product), codes, scale)
        data = None
    else:
        kernel, scale = dynamic_rows.kernel(product, codes, scale)
        data = kernel
    low, high = dynamic_rows.quantization_range(product)
    axes = tuple(range(len(scale.shape)))
    zero_point = np.zeros((), np.int32)
    held = builder.fresh(f"{name}/kernel")
    if data is None:
        # Only the structure is needed here, so any scale will do.
        scale = np.ones(scale.shape, np.float32)
    builder.add(Tensor(held, tuple(kernel.shape), "int8", Quantization(scale, zero_point, low, high, axes), data))
    output = builder.unlabelled(name)
    builder.add(Tensor(output, eqn.out_shapes[0], "float32"))
    builder.nodes.append(Node(output, op, (x,), output, {"kernel": held}, attributes, eqn.location))
    return float_parts.passed(eqn, eqn.outputs[0], Codes(output))


def _float_tensor(builder: Builder, found: Any, eqn: Equation) -> str:
    """The float tensor that a product reads; codes are dequantized."""
    value = eqn.inputs[0]
    if isinstance(found, Real):
        if found.name not in builder.tensors:
            builder.add(Tensor(found.name, value.shape, "float32"))
        return found.name
    if isinstance(found, Codes):
        if builder.tensors[found.tensor].dtype == "float32":
            return found.tensor
        if found.tensor not in builder.floats:
            builder.floats[found.tensor] = island_output(builder, float_parts.passed(eqn, value, found), value).tensor
        return builder.floats[found.tensor]
    if not isinstance(found, float_parts.Float):
        raise unsupported(eqn)
    key = found.call, found.index
    if key not in builder.floats:
        builder.floats[key] = island_output(builder, found, value).tensor
    return builder.floats[key]


@dataclasses.dataclass(frozen=True, eq=False)
class _Reading:
    """An equation as an op reads it.

    constant: per input, whether it is computed from parameters and literals only. found: per input, its lowered form.
    """

    op: Op
    eqn: Equation
    constant: tuple[bool, ...]
    found: list[Found]
    step: Step

    @property
    def data(self) -> int:
        """The index of the first operand that is data."""
        return self.op.data(self.eqn, self.constant)[0]

    @property
    def weight(self) -> int | None:
        """The index of the operand that is a weight."""
        return self.op.weight(self.eqn, self.constant)


def equation(builder: Builder, eqn: Equation, found: list[Found], step: Step) -> list[Found]:
    """The lowered outputs of an equation without a body."""
    annotated = builder.annotation.ops.get(eqn)
    product = product_of(eqn)
    if isinstance(product, DynamicProduct) and dynamic_rows.is_operator(product):
        return [rows_product(builder, eqn, product, found)]
    if eqn in builder.annotation.floats or any(isinstance(f, float_parts.Float) for f in found):
        return list(float_parts.calls(eqn, found))
    if annotated is None or any(isinstance(f, Real) for f in found):
        # A cast between integers, or of floats without a quantizer so far, needs no node: its reader decides.
        if keeps_number(eqn):
            return found
        raise unsupported(eqn)
    op, mode = annotated
    reading = _Reading(op, eqn, builder.annotation.is_constant(eqn), found, step)
    if op.vanishes:
        return [found[0]]
    if not op.has_integer_form(eqn):
        raise unsupported(eqn)
    if mode == "permute":
        first = found[0]
        assert isinstance(first, Accumulator)
        return [_move_accumulator(builder, eqn, first)]
    if mode == "start":
        data = reading.data
        acc = builder.accumulator(Rescale.name, eqn, [tensor_of(found[data])], {}, {}, step)
        return [_chain(builder, dataclasses.replace(reading, found=[*found[:data], acc, *found[data + 1 :]]))]
    if mode == "chain":
        return [_chain(builder, reading)]
    if mode == "integer":
        return _integers(builder, reading)
    if mode == "grid":
        return _grid(builder, reading)
    if isinstance(op, RaggedDot):
        return [experts.products(builder, eqn, found, step)]
    return [_producer(builder, reading)]


def _attributes(reading: _Reading) -> dict[str, Any]:
    """The operation's attributes of an equation, as JSON values."""
    return {name: plain(value) for name, value in reading.op.attributes(reading.eqn).items()}


def _producer(builder: Builder, reading: _Reading) -> Accumulator:
    op, eqn, found, step = reading.op, reading.eqn, reading.found, reading.step
    attributes = _attributes(reading)
    weight = reading.weight
    constants: dict[str, str] = {}
    channels: list[list[int]] = []
    if isinstance(op, ProductFacts):
        channels = op.channels(eqn, weight) if weight is not None else []
        attributes |= {
            "weight": weight,
            "channels": channels,
            "rank": len(eqn.out_shapes[0]),
            "permutation": None,
        }
    inputs = _operands(builder, reading)
    if weight is not None:
        constants["kernel"] = builder.kernel(eqn, weight, value_of(found[weight]), step)
        if op.scales_rows:
            return _by_row(builder, reading, inputs, constants["kernel"])
        if len(builder.tensors[constants["kernel"]].shape) > len(eqn.in_shapes[weight]):
            return _grouped_product(builder, eqn, weight, inputs, constants["kernel"], channels, step)
    constants |= _chain_constants(builder, reading)
    acc = builder.accumulator(op.name, eqn, inputs, constants, attributes, step)
    return Accumulator(acc.tensor, tuple((r, w) for r, w in channels))


def _by_row(builder: Builder, reading: _Reading, inputs: list[str], kernel: str) -> Accumulator:
    """A lookup in a table that has a scale per row."""
    weights = builder.tensors[kernel]
    assert weights.quantization is not None
    scale = weights.quantization.scale
    scale = builder.constant(f"{kernel}/scale", scale.reshape(scale.shape[0], -1))
    attributes = {**_attributes(reading), "table": [int(n) for n in reading.eqn.in_shapes[1]]}
    constants = {"weights": kernel, "weight_scale": scale}
    return builder.accumulator(reading.op.name, reading.eqn, inputs, constants, attributes, reading.step)


def _grouped_product(
    builder: Builder,
    eqn: Equation,
    weight: int,
    inputs: list[str],
    kernel: str,
    channels: list[list[int]],
    step: Step,
) -> Accumulator:
    """A product whose weight has a scale for every group along the summed axis."""
    weights = builder.tensors[kernel]
    assert weights.quantization is not None
    place = builder.annotation.weights[eqn, weight]
    shape = jax.ShapeDtypeStruct(eqn.in_shapes[weight], np.dtype(np.float32))
    try:
        attributes = layout(eqn, weight, builder.params_of(place, builder.own(place, step), shape), channels)
    except ValueError as error:
        raise ConversionError(f"weight {place.name!r} has {error}.", where=eqn.where) from None
    axes = weights.quantization.axes
    sizes = [n if axis in axes else 1 for axis, n in enumerate(weights.shape)]
    scale = builder.constant(f"{kernel}/scale", weights.quantization.scale.reshape(tuple(n or 1 for n in sizes)))
    constants = {"weights": kernel, "weight_scale": scale}
    acc = builder.accumulator(GroupedDot.name, eqn, inputs, constants, attributes, step)
    return Accumulator(acc.tensor, tuple((r, w) for r, w in channels))


def _operands(builder: Builder, reading: _Reading) -> list[str]:
    """The tensors that a node reads, in the equation's order: codes and plain integers."""
    op, eqn, constant, step = reading.op, reading.eqn, reading.constant, reading.step
    integers, weight = op.integers(eqn, constant), reading.weight
    names: list[str] = []
    for index in sorted({*op.data(eqn, constant), *integers} - {weight}):
        value = reading.found[index]
        if not isinstance(value, Constant):
            names.append(tensor_of(value))
        elif index in integers or not eqn.inputs[index].is_float:
            wrong = None if _is_unknown(value.value) else op.refuses(eqn, index, np.asarray(value.value))
            if wrong is not None:
                raise ConversionError(f"{wrong}.", where=eqn.where)
            names.append(builder.integer_constant(f"{builder.name(eqn, step)}/operand{index}", value.value))
        else:
            names.append(builder.kernel(eqn, index, value.value, step))
    return names


def _is_unknown(value: Any) -> bool:
    return isinstance(value, jax.ShapeDtypeStruct) or traced(value)


def _chain_constants(builder: Builder, reading: _Reading) -> dict[str, str]:
    """The constants that the op uses as float numbers, by role."""
    name = builder.name(reading.eqn, reading.step)
    roles = reading.op.chain_constants(reading.eqn, reading.constant)
    return {role: builder.constant(f"{name}/{role}", value_of(reading.found[index])) for role, index in roles.items()}


def _integers(builder: Builder, reading: _Reading) -> list[Found]:
    """Make nodes for integers and booleans, which have no grid."""
    inputs = _operands(builder, reading)
    constants = _chain_constants(builder, reading)

    def tensor(name: str, value: Value) -> Tensor:
        return Tensor(name, value.shape, "bool" if value.dtype == np.bool_ else "int32")

    return _node_per_output(builder, reading, inputs, constants, _attributes(reading), tensor)


def _chain(builder: Builder, reading: _Reading) -> Accumulator:
    data = reading.data
    before = reading.found[data]
    assert isinstance(before, Accumulator)
    attributes = _attributes(reading)
    if attributes.get("step") == "sub" and data == 1:
        attributes["reversed"] = True
    constants = _chain_constants(builder, reading)
    shape = experts.shape_behind(builder, before, reading.eqn, constants)
    acc = builder.accumulator(reading.op.name, reading.eqn, [before.tensor], constants, attributes, reading.step, shape)
    return dataclasses.replace(before, tensor=acc.tensor)


def _grid(builder: Builder, reading: _Reading) -> list[Found]:
    attributes = _attributes(reading)
    weight = reading.weight
    if weight is not None:
        kernel = builder.kernel(reading.eqn, weight, value_of(reading.found[weight]), reading.step)
        source, constants = builder.tensors[kernel], {"kernel": kernel}
        inputs = _operands(builder, reading)
    else:
        constants = _chain_constants(builder, reading)
        inputs = _operands(builder, reading)
        source = next(builder.tensors[name] for name in inputs if builder.tensors[name].quantization is not None)

    def tensor(name: str, value: Value) -> Tensor:
        if value.is_float:
            return Tensor(name, value.shape, source.dtype, source.quantization)
        # A second result of a selection holds the indices of a top_k.
        return Tensor(name, value.shape, "int32")

    return _node_per_output(builder, reading, inputs, constants, attributes, tensor)


def _node_per_output(
    builder: Builder,
    reading: _Reading,
    inputs: list[str],
    constants: dict[str, str],
    attributes: dict[str, Any],
    tensor: Callable[[str, Value], Tensor],
) -> list[Found]:
    """Make a node for each output; if there are several, an attribute tells which one it computes."""
    op, eqn = reading.op, reading.eqn
    outputs: list[Found] = []
    for index, value in enumerate(eqn.outputs):
        extra = {"index": index} if len(eqn.outputs) > 1 else {}
        name = builder.unlabelled(builder.name(eqn, reading.step))
        builder.add(tensor(name, value))
        builder.nodes.append(Node(name, op.name, tuple(inputs), name, constants, {**attributes, **extra}, eqn.location))
        outputs.append(Codes(name))
    return outputs


def _move_accumulator(builder: Builder, eqn: Equation, found: Accumulator) -> Accumulator:
    permutation = list(eqn.params["permutation"])
    index = next(i for i, node in enumerate(builder.nodes) if node.output == found.tensor)
    node = builder.nodes[index]
    before = node.attributes["permutation"]
    total = permutation if before is None else [before[axis] for axis in permutation]
    channels = tuple((permutation.index(r), w) for r, w in found.channels)
    attributes = {**node.attributes, "permutation": total, "channels": [list(pair) for pair in channels]}
    builder.nodes[index] = dataclasses.replace(node, attributes=attributes)
    builder.tensors[found.tensor] = dataclasses.replace(builder.tensors[found.tensor], shape=eqn.out_shapes[0])
    return Accumulator(found.tensor, channels)
