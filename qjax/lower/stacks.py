"""Splits the inputs that a scan slices, and stacks its outputs: one tensor outside, one per iteration inside.

A scan with y[t] = f(x[t]) becomes y0 = f(x[0]), y1 = f(x[1]), ..., y = concatenate(y0, y1, ...).
"""

from collections.abc import Sequence
from typing import Any

import jax

from qjax.graph.ir import Node, Tensor
from qjax.graph.unsupported import stacked
from qjax.lower.builder import Builder, stepped
from qjax.lower.values import Accumulator, Codes, Constant, Found, Stack, Step
from qjax.ops.concatenate import Concatenate
from qjax.ops.rescale import Rescale
from qjax.ops.reshape import Reshape
from qjax.ops.slice import Slice
from qjax.tracing import Equation, Place, Value


def part_of(builder: Builder, found: Found, iteration: int, eqn: Equation, step: Step) -> Found:
    """One iteration's part of a value that a scan iterates over."""
    if isinstance(found, Constant):
        if isinstance(found.value, jax.ShapeDtypeStruct):
            return Constant(jax.ShapeDtypeStruct(found.value.shape[1:], found.value.dtype))
        return Constant(found.value[iteration])
    if not isinstance(found, Codes):
        return found
    whole = builder.tensors[found.tensor]
    shape, rank = whole.shape[1:], len(whole.shape)
    bounds = {
        "start": [iteration] + [0] * (rank - 1),
        "limit": [iteration + 1, *shape],
        "strides": [1] * rank,
    }
    part = _move_codes(builder, Slice.name, whole, (1, *shape), [whole.name], bounds, eqn, step)
    return Codes(_move_codes(builder, Reshape.name, whole, shape, [part], {"shape": list(shape)}, eqn, step))


def stack_of(builder: Builder, parts: list[Found | None], eqn: Equation, step: Step) -> Found:
    """The stacked output of a scan, from one part per iteration."""
    values = [part.value for part in parts if isinstance(part, Constant)]
    if parts and len(values) == len(parts):
        if any(isinstance(value, jax.ShapeDtypeStruct) for value in values):
            return Constant(jax.ShapeDtypeStruct((len(parts), *values[0].shape), values[0].dtype))
        return Constant(jax.numpy.stack([jax.numpy.asarray(value) for value in values]))
    tensors = [builder.tensors[part.tensor] for part in parts if isinstance(part, Codes)]
    alike = all(tensor.quantization is tensors[0].quantization for tensor in tensors)
    if parts and len(tensors) == len(parts) and alike:
        return Codes(_concatenate(builder, tensors, eqn, step))
    return Stack(eqn, tuple(parts))


def joined(builder: Builder, place: Place, value: Value, found: Stack, eqn: Equation, step: Step) -> Codes:
    """Join parts with different quantization parameters, which are requantized to the same ones."""
    shape = value.shape[1:]
    parts: list[Tensor] = []
    for iteration, part in enumerate(found.parts):
        if isinstance(part, Codes):
            part = builder.accumulator(Rescale.name, eqn, [part.tensor], {}, {}, (*step, iteration), shape)
        if not isinstance(part, Accumulator):
            raise stacked(found.eqn)
        label = builder.fresh(stepped(builder.label(place, step), (iteration,)))
        parts.append(builder.tensors[builder.quantize(label, part.tensor, shape, place, eqn, step)])
    return Codes(_concatenate(builder, parts, eqn, step, builder.fresh(builder.label(place, step))))


def _concatenate(builder: Builder, parts: Sequence[Tensor], eqn: Equation, step: Step, name: str | None = None) -> str:
    rows: list[str] = []
    for iteration, part in enumerate(parts):
        shape = (1, *part.shape)
        attributes = {"shape": list(shape)}
        label = builder.fresh(stepped(f"{eqn.scope}/row" if eqn.scope else "row", (*step, iteration)))
        rows.append(_move_codes(builder, Reshape.name, part, shape, [part.name], attributes, eqn, step, label))
    shape = (len(parts), *parts[0].shape)
    return _move_codes(builder, Concatenate.name, parts[0], shape, rows, {"axis": 0}, eqn, step, name)


def _move_codes(
    builder: Builder,
    op: str,
    like: Tensor,
    shape: Sequence[int | None],
    inputs: Sequence[str],
    attributes: dict[str, Any],
    eqn: Equation,
    step: Step,
    name: str | None = None,
) -> str:
    """Add a node that moves codes, or integers, of tensors like the given one."""
    name = name or builder.fresh(stepped(f"{eqn.scope}/{op}" if eqn.scope else op, step))
    builder.add(Tensor(name, tuple(shape), like.dtype, like.quantization))
    builder.nodes.append(Node(name, op, tuple(inputs), name, {}, attributes, eqn.location))
    return name
