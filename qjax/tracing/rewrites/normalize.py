"""Normalisations as people and layers write them: (x - mean) / sqrt(variance + epsilon), and without the mean.

LayerNorm with either formula of the variance, RMSNorm, division by a norm; `a / sqrt(v)`, `a * rsqrt(v)` or
`a * (rsqrt(v) * gamma)`. A factor among them is multiplied to the normalised tensor instead, where it is an affine step
as what follows is.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from qjax.tracing.composite import composite, replaced
from qjax.tracing.program import Equation, Program, Value
from qjax.tracing.rewrites.flow import Flow, Found, pruned, spans, written


@dataclasses.dataclass(frozen=True)
class _Root:
    """The root under a fraction. square: behind it, without epsilon. factors: what it is multiplied with."""

    square: Found
    epsilon: float
    joined: str
    factors: tuple[Value, ...] = ()


@dataclasses.dataclass(frozen=True)
class _Statistic:
    """scale * sum(part^2) over axes; part: a tensor, or the centered form of it."""

    part: Value
    axes: tuple[int, ...]
    scale: float
    centered: bool = False


def find_normalize(program: Program) -> Program:
    """The program with each normalisation as one equation "normalize" of x; see `ops.normalize`."""
    flow = Flow(program)
    groups: dict[Equation, tuple[Equation, tuple[Value, ...]]] = {}
    for eqn in program.equations:
        if eqn.primitive in ("div", "mul"):
            found = _match(flow, eqn)
            if found is not None:
                groups[eqn] = found
    if not groups:
        return program
    equations: list[Equation] = []
    for eqn in program.equations:
        if eqn in groups and groups[eqn][1]:
            equations += _scaled(eqn, *groups[eqn])
        else:
            equations.append(eqn)
    members = set(flow.between([eqn.outputs[0] for eqn in groups], ()))
    made = dataclasses.replace(program, equations=tuple(equations))
    made = replaced(made, [group for group, factors in groups.values() if not factors])
    return pruned(made, members)


def _scaled(eqn: Equation, group: Equation, factors: Sequence[Value]) -> list[Equation]:
    """The normalised tensor, then the products with what its root was multiplied with."""
    steps, value = [group], group.outputs[0]
    for index, factor in enumerate(factors):
        last = index == len(factors) - 1
        result = eqn.outputs[0] if last else Value(value.shape, value.dtype)
        step = written("mul", _product(result), value, result, eqn)
        steps.append(dataclasses.replace(step, inputs=(value, factor)))
        value = result
    return steps


def _product(result: Value) -> Any:
    return lambda x, factor: (x * factor).astype(result.dtype)


def _match(flow: Flow, eqn: Equation) -> tuple[Equation, tuple[Value, ...]] | None:
    pairs = (eqn.inputs, eqn.inputs[::-1]) if eqn.primitive == "mul" else (eqn.inputs,)
    for numerator, other in pairs:
        if numerator.shape != eqn.out_shapes[0] or numerator.constant is not None or not numerator.is_float:
            continue
        root = _inverse(flow, flow.behind(other)) if eqn.primitive == "mul" else _root(flow, flow.behind(other))
        if root is None:
            continue
        for part, factor in _factored(flow, numerator):
            factors = (*root.factors, *factor)
            found = _normalized(flow, eqn, part, dataclasses.replace(root, factors=factors))
            if found is not None:
                return found
    return None


def _factored(flow: Flow, numerator: Value) -> list[tuple[Value, tuple[Value, ...]]]:
    """The numerator as it is, and as a product of something of its shape with a factor."""
    found: list[tuple[Value, tuple[Value, ...]]] = [(numerator, ())]
    made = flow.plain(numerator).equation
    if made is not None and made.primitive == "mul":
        for part, factor in (made.inputs, made.inputs[::-1]):
            if part.shape == numerator.shape and part.constant is None and not flow.same(part, factor):
                found.append((part, (factor,)))
    return found


def _normalized(flow: Flow, eqn: Equation, numerator: Value, root: _Root) -> tuple[Equation, tuple[Value, ...]] | None:
    statistic = _statistic(flow, root.square, numerator.shape)
    if statistic is None:
        return None
    shape, part = numerator.shape, flow.plain(numerator)
    x, center = part.value, False
    if part.equation is not None and part.equation.primitive == "sub":
        whole, mean = part.equation.inputs
        if flow.number(mean) == 0:
            x = flow.plain(whole).value
        elif whole.shape == shape and _is_mean(flow, flow.behind(mean), whole, shape, statistic.axes):
            x, center = flow.plain(whole).value, True
    compared = x if statistic.centered or not center else part.value
    same = flow.same(statistic.part, compared)
    if not center and not same and flow.same(statistic.part, part.value):
        # the mean of something else was taken off before: part is what is normalised
        x, same = part.value, True
    if not same or (statistic.centered and not center) or not x.is_float:
        return None
    count = 1
    for axis in statistic.axes:
        count *= shape[axis]
    divisor = 1 / statistic.scale
    if not 0 < divisor < 2**31 or abs(divisor - round(divisor)) > 1e-3 * divisor:
        return None
    params = {
        "axes": tuple(sorted(statistic.axes)),
        "center": center,
        "divisor": 0 if round(divisor) == count else round(divisor),
        "epsilon": root.epsilon,
        "feature_axes": (),
        "groups": 1,
        "joined": root.joined,
    }
    output = eqn.outputs[0]
    if not root.factors:
        equations = flow.between([output], [x])
        if flow.leaves(equations, [x]):
            return None
        return composite("normalize", equations, [x], [output], params), ()
    result = Value(shape, output.dtype)
    own = [written("normalize", _reference(params, result), x, result, eqn)]
    return composite("normalize", own, [x], [result], params), root.factors


def _reference(params: dict[str, Any], result: Value) -> Any:
    """The function itself, for a group whose own equations have a factor among them."""

    def function(x: Any) -> Any:
        axes = params["axes"]
        rows = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        rows = rows - jnp.mean(rows, axis=axes, keepdims=True) if params["center"] else rows
        count = 1
        for axis in axes:
            count *= x.shape[axis]
        power = jnp.sum(rows * rows, axis=axes, keepdims=True) / (params["divisor"] or count)
        epsilon = params["epsilon"]
        power = jnp.maximum(power, epsilon * epsilon) if params["joined"] == "max" else power + epsilon
        return (rows / jnp.sqrt(power)).astype(result.dtype)

    return function


# ---------------------------------------------------------------------------- roots


def _inverse(flow: Flow, found: Found) -> _Root | None:
    """1 / root: rsqrt, or a quotient, times any factors."""
    eqn = found.equation
    if eqn is None:
        return None
    if eqn.primitive == "rsqrt":
        return _bounded(flow, flow.behind(eqn.inputs[0], found.axes))
    if eqn.primitive == "div" and flow.number(eqn.inputs[0]) == 1:
        return _root(flow, flow.behind(eqn.inputs[1], found.axes))
    if eqn.primitive == "mul" and tuple(found.axes) == tuple(range(len(eqn.out_shapes[0]))):
        for first, second in (eqn.inputs, eqn.inputs[::-1]):
            inner = _inverse(flow, flow.behind(first, found.axes))
            if inner is not None:
                return dataclasses.replace(inner, factors=(*inner.factors, second))
    return None


def _root(flow: Flow, found: Found) -> _Root | None:
    """sqrt(square + epsilon), or the greater of a root and epsilon."""
    eqn = found.equation
    if eqn is None:
        return None
    if eqn.primitive == "max":
        for number, other in (eqn.inputs, eqn.inputs[::-1]):
            least = flow.number(number)
            inner = flow.behind(other, found.axes)
            if least is not None and least > 0 and inner.equation is not None and inner.equation.primitive == "sqrt":
                return _Root(flow.behind(inner.equation.inputs[0], inner.axes), least, "max")
        return None
    if eqn.primitive != "sqrt":
        return None
    return _bounded(flow, flow.behind(eqn.inputs[0], found.axes))


def _bounded(flow: Flow, found: Found) -> _Root | None:
    """What is under a root: square + epsilon, or the greater of square and epsilon^2."""
    eqn = found.equation
    if eqn is None:
        return None
    if eqn.primitive in ("add", "max"):
        for number, other in (eqn.inputs, eqn.inputs[::-1]):
            epsilon = flow.number(number)
            if epsilon is None or epsilon < 0 or (epsilon == 0 and eqn.primitive == "max"):
                continue
            inner = flow.behind(other, found.axes)
            return _Root(inner, epsilon if eqn.primitive == "add" else epsilon**0.5, eqn.primitive)
    return _Root(found, 0.0, "add")


# ---------------------------------------------------------------------------- statistics


def _statistic(flow: Flow, found: Found, shape: Sequence[int]) -> _Statistic | None:
    """A mean or a sum of squares, or a variance by the mean of squares."""
    eqn = found.equation
    if eqn is not None and eqn.primitive == "select_n" and len(eqn.inputs) == 3:
        # jnp.var guards against a division by zero
        known = flow.number(eqn.inputs[0])
        return None if known is None else _statistic(flow, flow.behind(eqn.inputs[1 + int(known)], found.axes), shape)
    if eqn is not None and eqn.primitive == "max":
        for number, other in (eqn.inputs, eqn.inputs[::-1]):
            if flow.number(number) == 0:
                return _statistic(flow, flow.behind(other, found.axes), shape)
    if eqn is not None and eqn.primitive == "sub":
        squares = _squares(flow, flow.behind(eqn.inputs[0], found.axes), shape)
        mean = flow.behind(eqn.inputs[1], found.axes)
        of = None if mean.equation is None else _squared(flow, mean.equation)
        if squares is None or of is None:
            return None
        if not _is_mean(flow, flow.behind(of, mean.axes), squares.part, shape, squares.axes):
            return None
        return dataclasses.replace(squares, centered=True)
    return _squares(flow, found, shape)


def _squares(flow: Flow, found: Found, shape: Sequence[int]) -> _Statistic | None:
    scaled = _sum(flow, found, shape)
    if scaled is None:
        return None
    total, scale = scaled
    squared = flow.plain(total.inputs[0])
    part = None if squared.equation is None else _squared(flow, squared.equation)
    if part is None or part.shape != tuple(shape):
        return None
    return _Statistic(part, tuple(int(axis) for axis in total.params["axes"]), scale)


def _sum(flow: Flow, found: Found, shape: Sequence[int]) -> tuple[Equation, float] | None:
    """A sum over axes of a tensor of `shape`, and the number that it is multiplied with."""
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


def _is_mean(flow: Flow, found: Found, x: Value, shape: Sequence[int], axes: Sequence[int]) -> bool:
    """Whether a value is the mean of x over the axes."""
    scaled = _sum(flow, found, shape)
    if scaled is None:
        return False
    total, scale = scaled
    count = 1
    for axis in axes:
        count *= shape[axis]
    over = {int(axis) for axis in total.params["axes"]}
    return over == set(axes) and flow.same(total.inputs[0], x) and abs(scale * count - 1) < 1e-3


def _squared(flow: Flow, eqn: Equation) -> Value | None:
    """x of x^2."""
    if eqn.primitive == "square" or (eqn.primitive == "integer_pow" and eqn.params["y"] == 2):
        return eqn.inputs[0]
    if eqn.primitive == "mul" and flow.same(*eqn.inputs):
        return eqn.inputs[0]
    return None
