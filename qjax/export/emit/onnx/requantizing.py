"""The requantization of an accumulator in few operators: a product, a sum, a shift and a clamp.

`lines` finds the numbers, from the rule's own kernel and the accumulators that can occur. The function of a node then
holds them as constants, one per channel:

| operator | what for |
| --- | --- |
| Equal, Or, Cast, Add | only for rules in float32: the accumulators that are taken for the next one |
| Cast, Mul | factor * acc in int64 |
| Add, or Less, Where, Add | the offset, or one of two; what keeps the sum positive is part of it |
| Cast, BitShift, Cast | the floor, for BitShift takes unsigned integers and is several times as fast as Div of int64 |
| Clip, Cast | the codes; what was added for the sign is a multiple of 2^bits, which the cast drops |

Where all fits in 32 bits: Mul, Add, Div, Clip, Cast. None of it applies to rules that are not monotone, or whose codes
no line gives; their kernel is translated as it is.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from qjax.export.emit.onnx.lines import Codes, Integers, Line, Span, evaluated, fit
from qjax.export.emit.onnx.views import View, Views
from qjax.numerics.rules import get_rule
from qjax.numerics.softfloat import Real
from qjax.ops.channels import weight_to_result
from qjax.ops.epilogue import finish_weighted

_INT32, _TAME = 2**31, 2**29
_MOST_CODES = 2**10
"""Codes of 16 bits have too many thresholds."""


@dataclasses.dataclass(frozen=True)
class Product:
    """What is known of a node with weights when its file is written.

    attributes: of the node. values: its constants by role, and "y_zero_point". low, high: the least and the greatest
    code minus zero point of its input, 0 among them.
    """

    attributes: Mapping[str, Any]
    values: Mapping[str, np.ndarray]
    low: int
    high: int


def short(t: Views, product: Product, acc: View) -> View | None:
    """The codes of an int32 accumulator without its bias; None where no line is the rule."""
    found = line_of(product)
    return None if found is None else _written(t, product.attributes["dtype"], acc, *found)


def line_of(product: Product) -> tuple[Line, tuple[int, ...]] | None:
    """The line, and the shape of its channels, which broadcasts against the result's trailing axes."""
    attributes, values = product.attributes, product.values
    rule = get_rule(attributes["rule"])
    if not rule.monotone or attributes["qmin"] is None:
        return None
    if any(values[role].size != 1 for role in ("clamp_min", "clamp_max", "y_zero_point") if role in values):
        return None
    kernel = values["kernel"].astype(np.int64)
    kept = [axis for _, axis in attributes["channels"]]
    summed = tuple(axis for axis in range(kernel.ndim) if axis not in kept)
    positive, negative = (
        weight_to_result(part.sum(axis=summed, keepdims=True), attributes["channels"], attributes["rank"])
        for part in (kernel.clip(min=0), kernel.clip(max=0))
    )
    roles = ("bias", *rule.fields)
    shape = np.broadcast_shapes(positive.shape, *(values[role].shape for role in roles))
    flat = {role: np.broadcast_to(values[role], shape).reshape(-1) for role in roles}
    low, high = (
        np.broadcast_to(a * product.low + b * product.high, shape).reshape(-1)
        for a, b in ((positive, negative), (negative, positive))
    )
    bias = flat["bias"].astype(np.int64)
    if rule.real_bias is not None:
        # the rule adds a bias of its own; in steps of the accumulator, if it adds it to that
        own = rule.real_bias(rule.constants(**{role: flat[role] for role in rule.fields}), Real.of(np.float32(1)))
        bias = bias + np.rint(np.clip(own.to_float64(), -(2.0**32), 2.0**32)).astype(np.int64)
    for end in (low, high, low + bias, high + bias):
        if not low.size or end.min() <= -_INT32 or end.max() >= _INT32 - 1:
            return None
    lowest, highest = _bounds(attributes, values)
    if not 0 <= highest - lowest < _MOST_CODES:
        return None
    raw = _raw(rule.name, flat, values["y_zero_point"].reshape(()))
    span = Span(low, high, -bias)
    if not _is_tame(raw, span):
        return None
    line = fit(lambda acc, channels: np.clip(raw(acc, channels), lowest, highest), span, lowest, highest)
    return None if line is None else (line, shape)


def _bounds(attributes: Mapping[str, Any], values: Mapping[str, np.ndarray]) -> tuple[int, int]:
    """The least and the greatest code after the clamps."""
    lowest, highest = attributes["qmin"], attributes["qmax"]
    if "clamp_min" in values:
        lowest = max(lowest, int(values["clamp_min"].reshape(())))
    if "clamp_max" in values:
        highest = min(highest, int(values["clamp_max"].reshape(())))
    return lowest, highest


def _raw(rule: str, flat: Mapping[str, np.ndarray], zero_point: np.ndarray) -> Codes:
    """The rule's kernel, bias and zero point included and without a clamp, on any accumulators of any channels."""
    program = _program(rule)

    def raw(acc: Integers, channels: np.ndarray) -> Integers:
        given = {role: value[channels] for role, value in flat.items()}
        return np.asarray(program(acc.astype(np.int32), given, zero_point)).astype(np.int64)

    return raw


@functools.cache
def _program(rule: str) -> Callable[..., jax.Array]:
    """Compiled once per rule, for vectors of one length."""
    attributes = {"rule": rule, "qmin": -(2**30), "qmax": 2**30 - 1, "dtype": "int32"}

    def raw(acc: jax.Array, given: Mapping[str, jax.Array], zero_point: jax.Array) -> jax.Array:
        return finish_weighted(acc, {**given, "y_zero_point": zero_point}, attributes)

    return jax.jit(raw)


def _is_tame(raw: Codes, span: Span) -> bool:
    """Whether the rule stays within (-2^29, 2^29) on the span, before any clamp, so that it is monotone there.

    From one power of two to the next, what it gives doubles. So it cannot pass a greater number unseen.
    """
    powers = np.int64(1) << np.arange(32, dtype=np.int64)
    probes = np.concatenate([-powers[::-1], np.zeros(1, np.int64), powers])[:, None] + span.kink
    probes = np.clip(probes, span.low, span.high)
    channels = np.broadcast_to(np.arange(span.low.size), probes.shape)
    return bool(np.all(np.abs(evaluated(raw, probes.reshape(-1), channels.reshape(-1))) < _TAME))


def _written(t: Views, dtype: str, acc: View, line: Line, shape: Sequence[int]) -> View:
    b = t.builder
    bits = np.iinfo(dtype).bits
    # a multiple of 2^bits that keeps the quotient positive
    lift = max(0, -(line.least >> bits)) << bits
    narrow = max(line.product, (line.most + lift + 1) << line.shift) < _INT32
    wide = np.int32 if narrow else np.int64

    def constant(values: Integers, kind: Any) -> str:
        return b.constant(_laid(values.astype(kind), shape, acc))

    x = acc.name
    if line.raised is not None:
        flags = [b.op("Equal", x, constant(row, np.int32)) for row in line.raised]
        late = flags[0]
        for flag in flags[1:]:
            late = b.op("Or", late, flag)
        x = b.op("Add", x, b.cast(late, "int32"))
    scaled = b.op("Mul", x if narrow else b.cast(x, "int64"), constant(line.factor, wide))
    more = np.int64(lift) << np.int64(line.shift)
    offset = constant(line.offset + more, wide)
    if line.kink is not None:
        assert line.below is not None
        negative = b.op("Less", x, constant(line.kink, np.int32))
        offset = b.op("Where", negative, constant(line.below + more, wide), offset)
    total = b.op("Add", scaled, offset)
    if narrow:
        quotient = b.op("Div", total, b.constant(np.int32(2**line.shift)))
    else:
        moved = b.op("BitShift", b.cast(total, "uint64"), b.constant(np.uint64(line.shift)), direction="RIGHT")
        quotient = b.cast(moved, "int32")
    if line.least < line.lowest or line.most > line.highest:
        bounds = (b.constant(np.int32(bound + lift)) for bound in (line.lowest, line.highest))
        quotient = b.op("Clip", quotient, *bounds)
    return dataclasses.replace(acc, name=b.cast(quotient, dtype), dtype=dtype)


def _laid(values: np.ndarray, shape: Sequence[int], acc: View) -> np.ndarray:
    """Values of channels in the order in which the accumulator's axes are stored; one number if all are equal."""
    if values.size and np.all(values == values[0]):
        return values[0]
    full = values.reshape((1,) * (len(acc.shape) - len(shape)) + tuple(shape)).transpose(acc.axes)
    while full.shape[0] == 1:
        full = full[0]
    return full
