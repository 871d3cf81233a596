"""Functions of the kernels that have a shorter form in ONNX than their operations one by one.

A trace contains them as calls with a name, see `numerics.calls`. Each entry computes the same integers on the ranges
that it checks. If it has no proof it returns None, and the operations of the function are translated.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from qjax.export.emit import bounds
from qjax.export.emit.onnx import named_gemmlowp, requantizing, sums
from qjax.export.emit.onnx.arithmetic import unsigned
from qjax.export.emit.onnx.carried import EXACT, FLOATS, Carried
from qjax.export.emit.onnx.named_normalize import normalized_codes
from qjax.export.emit.onnx.named_roots import divide_to_even, leading, lift, lifted_root, ranged
from qjax.export.emit.onnx.ranged import read_table
from qjax.export.emit.onnx.views import View
from qjax.export.emit.requantizations import line_within
from qjax.numerics.calls import Named
from qjax.numerics.rounding import Rounding

# ----------------------------------------------------------------------------------------------------------------------
# A requantization rule inside of a traced kernel, as one multiplication and shift on the possible accumulators.


def rounded_codes(t: Carried, call: Named, operands: Sequence[View]) -> list[View] | None:
    """For constants that are one number each; None for any other, and if the rule has no such form."""
    rule, qmin, qmax = call.static
    acc, *values, zero_point = operands
    numbers = [view.value for view in (*values, zero_point)]
    code = next((dtype for dtype in ("int8", "uint8") if bounds.fits((qmin, qmax), dtype)), None)
    plain = (
        rule.monotone
        and acc.dtype == "int32"
        and code is not None
        and len(values) == len(rule.fields)
        and all(number is not None for number in numbers)
    )
    if not plain or code is None:
        return None
    flat = {role: np.asarray([number], np.int32) for role, number in zip(rule.fields, numbers, strict=False)}
    flat["bias"] = np.zeros(1, np.int32)
    ends = np.asarray([acc.range[0]], np.int64), np.asarray([acc.range[1]], np.int64)
    line = line_within(rule, flat, np.asarray(numbers[-1], np.int32), ends, (qmin, qmax))
    if line is None:
        return None
    found = requantizing.written(t, code, t.settled(acc), line, ())
    return [dataclasses.replace(found, dtype="int32", held=code, low=qmin, high=qmax, value=None, known=None)]


# ----------------------------------------------------------------------------------------------------------------------
# ONNX Runtime's softmax of codes inside of a traced kernel, in float32 as in the runtime.
#
# Its sum goes from left to right and is therefore the last element of CumSum, which adds in that order in ONNX Runtime
# and in the reference evaluator; ReduceSum has an order of its own.

_MOST = 2.0**16
"""A bound on the quotient, so that its conversion to int32 and the zero point stay exact."""


Number = tuple[np.ndarray, np.ndarray]
"""Mantissas and exponents."""


def _in_float32(powers: Number, shares: Number) -> tuple[np.ndarray, np.ndarray] | None:
    """Both tables divided by one power of two, if no number then is too large and none loses a bit.

    Neither sums nor quotients change by it. S is at least the greatest exponential, so the greatest share divided by
    that bounds the quotient.
    """
    wide = [np.ldexp(m.astype(np.float64), e) for m, e in (powers, shares)]
    if wide[1][0] / wide[0][0] > _MOST:
        return None
    excess = max(0, int(np.frexp(wide[1].max())[1]) - 127)
    wide = [np.ldexp(table, -excess) for table in wide]
    least = min(float(table[table > 0].min()) for table in wide)
    if excess and least < float(np.finfo(np.float32).tiny):
        return None
    return wide[0].astype(np.float32), wide[1].astype(np.float32)


def qlinear_softmax(t: Carried, call: Named, operands: Sequence[View]) -> list[View] | None:
    """For known constants that float32 represents, maybe scaled; for ONNX Runtime, whose additions have an order."""
    codes, *constants = operands
    known = [view.known if view.known is not None else view.value for view in constants]
    if not t.for_runtime or any(value is None for value in known):
        return None
    mantissa, exponent, share_mantissa, share_exponent, zero_point = (np.asarray(value, np.int32) for value in known)
    scaled = _in_float32((mantissa, exponent), (share_mantissa, share_exponent))
    if scaled is None:
        return None
    powers, shares = scaled
    b, last = t.builder, len(codes.shape) - 1
    x = t.materialized(t.carried(codes, "int32"))
    difference = b.op("Sub", b.op("ReduceMax", x, b.integers([last]), keepdims=1), x)
    place = View.full(difference, "int32", codes.shape)
    terms, parts = (read_table(t, b.constant(table), place) for table in (powers, shares))
    sums = b.op("CumSum", terms, b.constant(np.int64(last)))
    total = b.op("Gather", sums, b.integers([codes.shape[last] - 1]), axis=last)
    rounded = b.op("Round", b.op("Div", parts, total))
    moved = b.op("Add", b.cast(rounded, "int32"), b.constant(zero_point.reshape(())))
    low = int(zero_point)
    return [dataclasses.replace(place, name=moved, low=low, high=low + int(_MOST) + 1)]


Entry = Callable[[Carried, Named, Sequence[View]], list[View] | None]
"""(translator, the call, operands) -> the results, or None."""


def _within(t: Carried, call: Named, x: Sequence[View]) -> list[View] | None:
    low, high = call.static
    (view,) = x
    return [ranged(view, (max(low, view.range[0]), min(high, view.range[1])))]


# ---------------------------------------------------------------------------- rounded shifts


def _rounded_shift(t: Carried, call: Named, operands: Sequence[View]) -> list[View] | None:
    _, rounding = call.static
    x, shift = operands
    shape = np.broadcast_shapes(x.shape, shift.shape)
    if x.value is not None or shift.range[1] >= 8 * np.dtype(x.dtype).itemsize:
        return None
    found = bounds.of_rounded_shift(x.range, shift.range, rounding)
    if found is None:
        return None
    result = _shift_of_float(t, x, shift, shape, rounding)
    if result is None:
        result = _shift_of_unsigned(t, x, shift, shape, rounding)
    return None if result is None else [ranged(result, found)]


def _shift_of_float(t: Carried, x: View, shift: View, shape: tuple[int, ...], rounding: Rounding) -> View | None:
    """x / 2^shift is exact in float64, as a product with a power of two."""
    operator = {Rounding.NEAREST_EVEN: "Round", Rounding.FLOOR: "Floor"}.get(rounding)
    if operator is None or not t.for_runtime or max(-x.range[0], x.range[1]) > EXACT:
        return None
    if shift.value is not None:
        power = t.number(math.ldexp(1.0, -int(shift.value)), FLOATS)
    else:
        table = t.builder.constant(np.ldexp(1.0, -np.arange(shift.range[1] + 1)))
        settled = t.settled(shift)
        power = dataclasses.replace(settled, name=t.builder.op("Gather", table, settled.name, axis=0))
    given = [t.carried(x, FLOATS), power]
    result = t.apply(lambda *names: t.builder.op(operator, t.builder.op("Mul", *names)), given, shape, x.dtype)
    return dataclasses.replace(result, held=FLOATS)


def _shift_of_unsigned(t: Carried, x: View, shift: View, shape: tuple[int, ...], rounding: Rounding) -> View | None:
    """(x + half - 1 + (bit `shift` of x)) >> shift, for a number that is not negative and a shift of at least 1."""
    if rounding is not Rounding.NEAREST_EVEN or x.range[0] < 0 or shift.range[0] < 1:
        return None
    b, dtype, kind = t.builder, x.dtype, unsigned(x.dtype)
    one = b.constant(np.asarray(1, kind))
    amount = t.settled(shift)
    bits = b.cast(amount.name, kind)
    below = b.op("Sub", b.op("BitShift", one, b.op("Sub", bits, one), direction="LEFT"), one)
    whole = t.settled(x)
    given = [dataclasses.replace(whole, name=b.cast(whole.name, kind))]
    given += [dataclasses.replace(amount, name=name, value=None) for name in (bits, below)]

    def write(x: str, bits: str, below: str) -> str:
        odd = b.op("BitwiseAnd", b.op("BitShift", x, bits, direction="RIGHT"), one)
        total = b.op("Add", x, b.op("Add", odd, below))
        return b.cast(b.op("BitShift", total, bits, direction="RIGHT"), dtype)

    return t.apply(write, given, shape, dtype)


# ---------------------------------------------------------------------------- requantization of a sum


def _finished_sum(t: Carried, call: Named, operands: Sequence[View]) -> list[View] | None:
    """For one accumulator with known constants: in float64, or by a floor in int64, if `sums` proves one of them."""
    roles, rounding, (qmin, qmax, dtype) = call.static
    acc, count = operands[0], len(operands) - len(roles)
    values = {role: view.known for role, view in zip(roles, operands[count:], strict=True)}
    known = {role: np.asarray(value, np.int64) for role, value in values.items() if value is not None}
    single = [role for role in ("y_zero_point", "clamp_min", "clamp_max") if role in roles]
    if count != 1 or len(known) < len(roles) or any(known[role].size != 1 for role in single):
        return None
    lowest = max([qmin, *(int(known[role].item()) for role in single if role == "clamp_min")])
    highest = min([qmax, *(int(known[role].item()) for role in single if role == "clamp_max")])
    shape = np.broadcast_shapes(*(known[role].shape for role in ("shift", "offset_high", "offset_low", "factor0")))
    if lowest > highest or 0 in shape or max(-acc.range[0], acc.range[1]) > 2**31:
        return None
    offset = (known["offset_high"] << 31) + known["offset_low"]
    factor, offset, shift = (np.broadcast_to(x, shape).reshape(-1) for x in (known["factor0"], offset, known["shift"]))
    form = sums.Sum(factor, offset, shift, int(known["y_zero_point"].item()), Rounding(rounding), lowest, highest)
    write = _in_floats if t.for_runtime else _in_integers
    found = write(t, form, acc, shape, dtype)
    return None if found is None else [dataclasses.replace(found, dtype=dtype, held=None, low=lowest, high=highest)]


def _channels(t: Carried, values: np.ndarray, shape: tuple[int, ...], whole: tuple[int, ...]) -> View:
    """A constant per channel, which broadcasts against the trailing axes; one number if all are equal."""
    if np.all(values == values[0]):
        return t.number(values[0], values.dtype.name)
    laid = values.reshape(shape)
    axes = tuple(range(len(whole) - laid.ndim, len(whole)))
    return View(t.builder.constant(laid), values.dtype.name, whole, laid.shape, axes)


def _in_floats(t: Carried, form: sums.Sum, acc: View, shape: tuple[int, ...], dtype: str) -> View | None:
    found, b = sums.exact(form, acc.range), t.builder
    if found is None:
        return None
    slope, start = (_channels(t, x, shape, acc.shape) for x in (found.slope, found.start))
    scaled = t.apply(lambda *names: b.op("Mul", *names), [t.carried(acc, FLOATS), slope], acc.shape, FLOATS)
    if start.value != 0:
        scaled = t.apply(lambda *names: b.op("Add", *names), [scaled, start], acc.shape, FLOATS)
    name = b.op(found.operator, scaled.name)
    if found.after:
        name = b.op("Add", name, b.constant(np.float64(found.after)))
    name = b.op("Clip", name, *(b.constant(np.float64(bound)) for bound in (form.lowest, form.highest)))
    return dataclasses.replace(scaled, name=b.cast(name, dtype))


def _in_integers(t: Carried, form: sums.Sum, acc: View, shape: tuple[int, ...], dtype: str) -> View | None:
    found, b = sums.floored(form, acc.range), t.builder
    if found is None:
        return None
    ends = np.stack([found.factor.astype(object) * end + found.offset for end in acc.range])
    quotients = ends >> found.shift.astype(object)
    # a multiple of 2^bits that keeps the sum positive; the last cast drops it
    bits = np.iinfo(dtype).bits
    lift = max(0, -(int(quotients.min()) >> bits)) << bits
    offset = found.offset.astype(object) + (lift << found.shift.astype(object))
    if int(quotients.max()) + lift >= 2**31 or (abs(ends).max() + offset.max()) >= 2**63 or abs(ends).max() >= 2**62:
        return None
    factor, offset, shift = (
        _channels(t, x, shape, acc.shape)
        for x in (found.factor, offset.astype(np.int64), found.shift.astype(np.uint64))
    )
    scaled = t.apply(lambda *names: b.op("Mul", *names), [t.carried(acc, "int64"), factor], acc.shape, "int64")
    total = t.apply(lambda *names: b.op("Add", *names), [scaled, offset], acc.shape, "int64")
    positive = dataclasses.replace(total, name=b.cast(total.name, "uint64"))
    moved = t.apply(lambda *names: b.op("BitShift", *names, direction="RIGHT"), [positive, shift], acc.shape, "uint64")
    name = b.cast(moved.name, "int32")
    if quotients.min() < form.lowest or quotients.max() > form.highest:
        name = b.op("Clip", name, *(b.constant(np.int32(bound + lift)) for bound in (form.lowest, form.highest)))
    return dataclasses.replace(moved, name=b.cast(name, dtype))


NAMED: dict[str, Entry] = {
    "within": _within,
    "rounded_shift": _rounded_shift,
    "divide_to_even": divide_to_even,
    "lift": lift,
    "lifted_root": lifted_root,
    "leading": leading,
    "finished_sum": _finished_sum,
    "normalized_codes": normalized_codes,
    "rounded_codes": rounded_codes,
    "qlinear_softmax": qlinear_softmax,
    "gemmlowp_powers": named_gemmlowp.powers,
    "gemmlowp_reciprocal": named_gemmlowp.reciprocal,
    "gemmlowp_shares": named_gemmlowp.shares,
    "one_over_one_plus_x": named_gemmlowp.one_over_one_plus_x,
}
"""The name of a function -> its entry."""
