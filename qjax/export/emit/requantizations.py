"""The epilogue of a node with weights, from its accumulator to its codes, as one multiplication and one shift.

    code = clamp((factor * acc + offset) >> shift)

`requantize_as_shift` finds the numbers, from the rule's own kernel and the accumulators that the weights allow. The
result is called a line, because it is linear up to the floor. A rule that is not monotone has none, and neither have
codes of 16 bits; their kernel is then translated unchanged.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from qjax.export.emit.remembered import remembered
from qjax.export.emit.requantize_as_shift import NEVER, Codes, Integers, Line, Span, evaluated, fit
from qjax.export.emit.requantize_float32 import Scaled
from qjax.jaxprs.evaluator import run_in_numpy
from qjax.numerics import float32
from qjax.numerics.float32 import Float32
from qjax.numerics.rules import Rule, get_rule
from qjax.numerics.softfloat import Real
from qjax.ops.channels import weight_to_result
from qjax.ops.epilogue import finish, finish_weighted
from qjax.ops.formulas import get as get_formula

_INT32, _TAME = 2**31, 2**29
_MOST_CODES = 2**10
"""Codes of 16 bits have too many thresholds."""
_MOST_THRESHOLDS = 2**22
"""Of all channels: finding the lines of 65,536 channels takes minutes, but each is used for only one product."""


@dataclasses.dataclass(frozen=True)
class Product:
    """What is known of a node with weights when its file is written.

    attributes: of the node. values: its constants by role, and "y_zero_point". low, high: the lowest and the highest
    code minus zero point of its input, with 0 between them.
    """

    attributes: Mapping[str, Any]
    values: Mapping[str, np.ndarray]
    low: int
    high: int


@dataclasses.dataclass(frozen=True)
class Finish:
    """What follows a sum of stored codes, whose zero point and bias are part of the offset.

    line: per channel; None if the rule has none, but is a product in float32. shape: of the channels; it broadcasts
    against the result's trailing axes. scaled: the same codes by one product in float32, for a rule that is one.
    """

    line: Line | None
    shape: tuple[int, ...]
    scaled: Scaled | None = None


def finish_of_codes(
    attributes: Mapping[str, Any], values: Mapping[str, np.ndarray], codes: tuple[int, int]
) -> Finish | None:
    """For the sum of stored codes times their weights, of inputs with any code in `codes`; None if there is no line.

    values: the constants of the node by role, with "zero_point0", which is the code outside of the input.
    """
    zero_point = int(values["zero_point0"].reshape(()))
    product = Product(attributes, values, min(codes[0] - zero_point, 0), max(codes[1] - zero_point, 0))
    facts = _facts_of(product)
    if facts is None:
        return None
    line, shape = _line_of(facts, product, bits=31), facts.shape
    kernel = values["kernel"].astype(np.int64)
    kept = [axis for _, axis in attributes["channels"]]
    sums = kernel.sum(axis=tuple(axis for axis in range(kernel.ndim) if axis not in kept), keepdims=True)
    sums = np.broadcast_to(weight_to_result(sums, attributes["channels"], attributes["rank"]), shape).reshape(-1)
    moved = None if line is None else _shift_line(line, zero_point * sums)
    scaled = _scaled_of(facts, product, line)
    if scaled is not None:
        scaled = dataclasses.replace(scaled, bias=scaled.bias - zero_point * sums)
    return None if moved is None and scaled is None else Finish(moved, shape, scaled)


def finish_of_sum(
    attributes: Mapping[str, Any], values: Mapping[str, np.ndarray], ends: tuple[int, int]
) -> Finish | None:
    """For a sum between two numbers, of a node without weights (a formula or an exact sum); None if there is no line.

    values: the constants of the node by role, one number each.
    """
    name = attributes.get("formula")
    rounding = attributes.get("rounding")
    if name is not None:
        pointwise = get_formula(name).is_pointwise(attributes, values)
    else:
        pointwise = rounding is not None and int(values["factor0"]) > 0
    if not pointwise or any(value.size != 1 for value in values.values()) or max(-ends[0], ends[1]) >= _INT32:
        return None
    constants = {role: value for role, value in values.items() if role not in ("clamp_min", "clamp_max")}
    program = _program_of_sum(name, rounding)

    def raw(acc: Integers, channels: np.ndarray) -> Integers:
        return np.asarray(program(acc.astype(np.int32), constants)).astype(np.int64)

    lowest, highest = _bounds(attributes, values)
    low, high = (np.asarray([end], np.int64) for end in ends)
    span = Span(low, high, np.zeros(1, np.int64))
    if not 0 <= highest - lowest < _MOST_CODES or not _is_tame(raw, span):
        return None
    line = fit(
        lambda acc, channels: np.clip(raw(acc, channels), lowest, highest),
        span,
        lowest,
        highest,
        bits=31,
    )
    if line is None:
        return None
    scaled = None
    if name is not None and values.keys() >= {"mantissa", "exponent"}:
        # a float32 formula of another form than this product is not proven to equal it, so it is left alone
        number = Float32(*(values[role].reshape(1) for role in ("mantissa", "exponent")))
        zero_point = int(values["y_zero_point"].reshape(()))
        found = Scaled(np.zeros(1, np.int64), np.asarray(float32.to_array(number)), zero_point, lowest, highest)
        scaled = found if found.is_line(line, low, high) else None
    return Finish(line, (1,), scaled)


@functools.cache
def _program_of_sum(formula: str | None, rounding: str | None) -> Callable[..., jax.Array]:
    own = {"formula": formula} if formula is not None else {"rounding": rounding}
    attributes = {**own, "qmin": -(2**30), "qmax": 2**30 - 1, "dtype": "int32"}

    def raw(acc: jax.Array, constants: Mapping[str, jax.Array]) -> jax.Array:
        return finish([acc], constants, attributes)

    return run_in_numpy(raw)


def _scaled_of(facts: "_Facts", product: Product, line: Line | None) -> Scaled | None:
    """The rule as one product in float32; None for a rule that is none, or whose codes differ.

    line: the rule's, or None if it has none.
    """
    if facts.rule.constants is not Float32:
        return None
    flat, zero_point, ends = facts.flat, product.values["y_zero_point"], (facts.low, facts.high)
    scale = np.asarray(float32.to_array(Float32(flat["mantissa"], flat["exponent"])))
    bounds = _bounds(product.attributes, product.values)
    found = Scaled(flat["bias"].astype(np.int64), scale, int(zero_point.reshape(())), *bounds)
    if line is not None:
        return found if found.is_line(line, *ends) else None
    spanned = _on_span(facts.rule, flat, zero_point, ends, bounds)
    return found if spanned is not None and found.is_rule(*spanned) else None


def _shift_line(line: Line, by: Integers) -> Line | None:
    """The line for accumulators that are greater by a number per channel; None if it exceeds 62 bits."""
    more = line.factor.astype(object) * by.astype(object)
    product = line.product + int(max(abs(more), default=0))
    if product >= 2**62:
        return None
    return dataclasses.replace(
        line,
        offset=line.offset - line.factor * by,
        product=product,
        kink=None if line.kink is None else line.kink + by,
        below=None if line.below is None else line.below - line.factor * by,
        raised=None if line.raised is None else np.where(line.raised == NEVER, NEVER, line.raised + by),
    )


def line_of(product: Product, *, bits: int | None = None) -> tuple[Line, tuple[int, ...]] | None:
    """The line, and the shape of its channels, which broadcasts against the result's trailing axes; bits: see `fit`."""
    facts = _facts_of(product)
    line = None if facts is None else _line_of(facts, product, bits)
    return None if facts is None or line is None else (line, facts.shape)


@dataclasses.dataclass(frozen=True)
class _Facts:
    """shape: of the channels. flat: "bias" and the rule's constants, as vectors. low, high: of the accumulators."""

    rule: Rule
    shape: tuple[int, ...]
    flat: Mapping[str, np.ndarray]
    low: Integers
    high: Integers


def _line_of(facts: _Facts, product: Product, bits: int | None = None) -> Line | None:
    values, ends = product.values, (facts.low, facts.high)
    codes = _bounds(product.attributes, values)
    return line_within(facts.rule, facts.flat, values["y_zero_point"], ends, codes, bits)


def _facts_of(product: Product) -> _Facts | None:
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
    return _Facts(rule, shape, flat, low, high)


@remembered
def line_within(
    rule: Rule,
    flat: Mapping[str, np.ndarray],
    zero_point: np.ndarray,
    ends: tuple[Integers, Integers],
    codes: tuple[int, int],
    bits: int | None = None,
) -> Line | None:
    """The line of a monotone rule between two accumulators per channel; None if there is none.

    flat: the rule's constants and "bias", which is added to the accumulator, as vectors. codes: the lowest and the
    highest one. bits: see `fit`.
    """
    found = _on_span(rule, flat, zero_point, ends, codes)
    return None if found is None else fit(*found, *codes, bits=bits)


def _on_span(
    rule: Rule,
    flat: Mapping[str, np.ndarray],
    zero_point: np.ndarray,
    ends: tuple[Integers, Integers],
    codes: tuple[int, int],
) -> tuple[Codes, Span] | None:
    """The rule's codes and the accumulators, as `fit` takes them; None if it is not proven to be monotone there."""
    bias = flat["bias"].astype(np.int64)
    if rule.real_bias is not None:
        # the rule adds its own bias; in steps of the accumulator, if it adds it to that
        own = rule.real_bias(rule.constants(**{role: flat[role] for role in rule.fields}), Real.of(np.float32(1)))
        bias = bias + np.rint(np.clip(own.to_float64(), -(2.0**32), 2.0**32)).astype(np.int64)
    (low, high), (lowest, highest) = ends, codes
    for end in (low, high, low + bias, high + bias):
        if not low.size or end.min() <= -_INT32 or end.max() >= _INT32 - 1:
            return None
    if not 0 <= highest - lowest < _MOST_CODES or low.size * (highest - lowest) > _MOST_THRESHOLDS:
        return None
    raw = _raw(rule.name, flat, zero_point.reshape(()))
    span = Span(low, high, -bias)
    if not _is_tame(raw, span):
        return None
    return lambda acc, channels: np.clip(raw(acc, channels), lowest, highest), span


def _bounds(attributes: Mapping[str, Any], values: Mapping[str, np.ndarray]) -> tuple[int, int]:
    """The lowest and the highest code after the clamps."""
    lowest, highest = attributes["qmin"], attributes["qmax"]
    if "clamp_min" in values:
        lowest = max(lowest, int(values["clamp_min"].reshape(())))
    if "clamp_max" in values:
        highest = min(highest, int(values["clamp_max"].reshape(())))
    return lowest, highest


def _raw(rule: str, flat: Mapping[str, np.ndarray], zero_point: np.ndarray) -> Codes:
    """The rule's kernel, with bias and zero point but without a clamp, on any accumulators of any channels."""
    program = _program(rule)

    def raw(acc: Integers, channels: np.ndarray) -> Integers:
        given = {role: value[channels] for role, value in flat.items()}
        return np.asarray(program(acc.astype(np.int32), given, zero_point)).astype(np.int64)

    return raw


@functools.cache
def _program(rule: str) -> Callable[..., jax.Array]:
    """The rule's function, traced once per rule, for vectors of one length."""
    attributes = {"rule": rule, "qmin": -(2**30), "qmax": 2**30 - 1, "dtype": "int32"}

    def raw(acc: jax.Array, given: Mapping[str, jax.Array], zero_point: jax.Array) -> jax.Array:
        return finish_weighted(acc, {**given, "y_zero_point": zero_point}, attributes)

    return run_in_numpy(raw)


def _is_tame(raw: Codes, span: Span) -> bool:
    """Whether the rule stays within (-2^29, 2^29) on the span, before any clamp, so that it is monotone there.

    From one power of two to the next its result doubles, so it cannot exceed the bound in between unnoticed.
    """
    powers = np.int64(1) << np.arange(32, dtype=np.int64)
    probes = np.concatenate([-powers[::-1], np.zeros(1, np.int64), powers])[:, None] + span.kink
    probes = np.clip(probes, span.low, span.high)
    channels = np.broadcast_to(np.arange(span.low.size), probes.shape)
    return bool(np.all(np.abs(evaluated(raw, probes.reshape(-1), channels.reshape(-1))) < _TAME))
