"""Recognises the statistic under the root of a normalisation: a variance, a mean of squares or a sum of squares."""

import dataclasses
import math
from collections.abc import Sequence

from qjax.tracing.program import Equation, Value
from qjax.tracing.rewrites.dataflow import Flow, Found, spans


@dataclasses.dataclass(frozen=True)
class Statistic:
    """scale * sum(part^2) over axes; part: a tensor, or the tensor minus its mean."""

    part: Value
    axes: tuple[int, ...]
    scale: float
    centered: bool = False


def statistic_of(flow: Flow, found: Found, shape: Sequence[int]) -> Statistic | None:
    """A mean or a sum of squares, or a variance computed from the mean of squares."""
    eqn = found.equation
    if eqn is not None and eqn.primitive == "select_n" and len(eqn.inputs) == 3:
        # jnp.var guards against a division by zero
        known = flow.number(eqn.inputs[0])
        return None if known is None else statistic_of(flow, flow.behind(eqn.inputs[1 + int(known)], found.axes), shape)
    if eqn is not None and eqn.primitive == "max":
        for number, other in (eqn.inputs, eqn.inputs[::-1]):
            if flow.number(number) == 0:
                return statistic_of(flow, flow.behind(other, found.axes), shape)
    if eqn is not None and eqn.primitive == "sub":
        squares = _squares(flow, flow.behind(eqn.inputs[0], found.axes), shape)
        mean = flow.behind(eqn.inputs[1], found.axes)
        of = None if mean.equation is None else _squared(flow, mean.equation)
        if squares is None or of is None:
            return None
        if not is_mean(flow, flow.behind(of, mean.axes), squares.part, shape, squares.axes):
            return None
        return dataclasses.replace(squares, centered=True)
    return _squares(flow, found, shape)


def _squares(flow: Flow, found: Found, shape: Sequence[int]) -> Statistic | None:
    scaled = scaled_sum(flow, found, shape)
    if scaled is None:
        return None
    total, scale = scaled
    squared = flow.plain(total.inputs[0])
    part = None if squared.equation is None else _squared(flow, squared.equation)
    if part is None or part.shape != tuple(shape):
        return None
    return Statistic(part, tuple(int(axis) for axis in total.params["axes"]), scale)


def scaled_sum(flow: Flow, found: Found, shape: Sequence[int]) -> tuple[Equation, float] | None:
    """A sum over axes of a tensor of `shape`, and its factor."""
    scale = 1.0
    while (eqn := found.equation) is not None and eqn.primitive in ("div", "mul"):
        first, second = eqn.inputs
        number = flow.number(second)
        if number is None and eqn.primitive == "mul":
            first, number = second, flow.number(first)
        if not number or number != number:
            return None
        scale = scale / number if eqn.primitive == "div" else scale * number
        found = flow.behind(first, found.axes)
    if eqn is None or eqn.primitive != "reduce_sum" or eqn.in_shapes[0] != tuple(shape):
        return None
    axes = tuple(int(axis) for axis in eqn.params["axes"])
    return (eqn, scale) if spans(found, shape, axes) else None


def is_mean(flow: Flow, found: Found, x: Value, shape: Sequence[int], axes: Sequence[int]) -> bool:
    """Whether a value is the mean of x over the axes."""
    scaled = scaled_sum(flow, found, shape)
    if scaled is None:
        return False
    total, scale = scaled
    count = 1
    for axis in axes:
        count *= shape[axis]
    over = {int(axis) for axis in total.params["axes"]}
    return over == set(axes) and flow.same(total.inputs[0], x) and abs(scale * count - 1) < 1e-3


def _squared(flow: Flow, eqn: Equation) -> Value | None:
    """The x of x^2."""
    if eqn.primitive == "square" or (eqn.primitive == "integer_pow" and eqn.params["y"] == 2):
        return eqn.inputs[0]
    if eqn.primitive == "mul" and flow.same(*eqn.inputs):
        return eqn.inputs[0]
    return None


def divisor_of(statistic: Statistic, shape: Sequence[int]) -> int | None:
    """The integer by which the sum of squares is divided; 0 means the number of elements."""
    divisor = 1 / statistic.scale
    if not 0 < divisor < 2**31 or abs(divisor - round(divisor)) > 1e-3 * divisor:
        return None
    count = math.prod(shape[axis] for axis in statistic.axes)
    return 0 if round(divisor) == count else round(divisor)
