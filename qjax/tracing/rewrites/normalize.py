"""Recognises normalisations: (x - mean) / sqrt(variance + epsilon), with or without the mean.

These are LayerNorm with both formulas of the variance, Linen's GroupNorm, RMSNorm and division by a norm, written as `a
/ sqrt(v)`, `a * rsqrt(v)` or `a * (rsqrt(v) * gamma)`. A factor inside moves after the normalisation, where it is an
affine step:

    (x - mean) * (rsqrt(variance + epsilon) * gamma)    ->    normalize(x) * gamma
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from qjax.tracing.composite import composite, replaced
from qjax.tracing.program import Equation, Program, Value
from qjax.tracing.rewrites.dataflow import Flow, Found, pruned, written
from qjax.tracing.rewrites.variance import divisor_of, is_mean, scaled_sum, statistic_of

# ----------------------------------------------------------------------------------------------------------------------
# Groups of channels in a normalisation: statistics over a split last axis, broadcast back to the channels.


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """found: a statistic, before the moves that broadcast it to `shape`: (..., channels) as (..., groups, width)."""

    found: Found
    shape: tuple[int, ...]


def splits(flow: Flow, found: Found, shape: Sequence[int]) -> list[Split]:
    """The statistic before a reshape of (..., groups, width) to (..., channels), as in Linen's GroupNorm.

    found: a value broadcast to a tensor of `shape`, whose last axis is the channels. With one group, or groups of one
    channel, the reshape is an ordinary move, which `found` has skipped already, so both readings are possible.
    """
    if len(found.axes) != len(shape) or not shape:
        return []
    channels, before, axis = shape[-1], found.axes[:-1], found.axes[-1]
    eqn, last = found.equation, len(found.value.shape) - 1
    if eqn is None or eqn.primitive != "reshape":
        one = Split(Found(found.value, eqn, (*before, None, axis)), (*shape[:-1], 1, channels))
        each = Split(Found(found.value, eqn, (*before, axis, None)), (*shape[:-1], channels, 1))
        return [one, each]
    (source,) = eqn.inputs
    inner, outer = source.shape, found.value.shape
    whole = axis == last and last not in before and outer[-1] == channels
    if len(inner) != len(outer) + 1 or inner[:-2] != outer[:-1] or not whole:
        return []
    return [Split(flow.behind(source, (*before, last, last + 1)), (*shape[:-1], *inner[-2:]))]


def reference(params: Mapping[str, Any], result: Value) -> Callable[[jax.Array], jax.Array]:
    """The float normalisation, for a group whose own equations include a factor."""

    def function(x: jax.Array) -> jax.Array:
        axes, groups = params["axes"], params["groups"]
        rows = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        if groups > 1:
            rows = rows.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)
            axes = tuple(axis + 1 if axis == x.ndim - 1 else axis for axis in axes)
        rows = rows - jnp.mean(rows, axis=axes, keepdims=True) if params["center"] else rows
        count = math.prod(rows.shape[axis] for axis in axes)
        power = jnp.sum(rows * rows, axis=axes, keepdims=True) / (params["divisor"] or count)
        epsilon = params["epsilon"]
        power = jnp.maximum(power, epsilon * epsilon) if params["joined"] == "max" else power + epsilon
        return (rows / jnp.sqrt(power)).reshape(x.shape).astype(result.dtype)

    return function


@dataclasses.dataclass(frozen=True)
class _Root:
    """The root in the denominator. square: its operand without epsilon. factors: what it is multiplied by."""

    square: Found
    epsilon: float
    joined: str
    factors: tuple[Value, ...] = ()


def find_normalize(program: Program) -> Program:
    """Replace each normalisation by one equation "normalize" of x; see `ops.normalize`."""
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
            equations += _multiply_by_factors(eqn, *groups[eqn])
        else:
            equations.append(eqn)
    members = set(flow.between([eqn.outputs[0] for eqn in groups], ()))
    made = dataclasses.replace(program, equations=tuple(equations))
    made = replaced(made, [group for group, factors in groups.values() if not factors])
    return pruned(made, members)


def _multiply_by_factors(eqn: Equation, group: Equation, factors: Sequence[Value]) -> list[Equation]:
    """The normalised tensor, followed by the products with the root's factors."""
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
    """The numerator unchanged, and as products of a tensor of its shape with a factor."""
    found: list[tuple[Value, tuple[Value, ...]]] = [(numerator, ())]
    made = flow.plain(numerator).equation
    if made is not None and made.primitive == "mul":
        for part, factor in (made.inputs, made.inputs[::-1]):
            if part.shape == numerator.shape and part.constant is None and not flow.same(part, factor):
                found.append((part, (factor,)))
    return found


def _normalized(flow: Flow, eqn: Equation, numerator: Value, root: _Root) -> tuple[Equation, tuple[Value, ...]] | None:
    statistic = statistic_of(flow, root.square, numerator.shape)
    if statistic is None:
        found = (
            _match_groups(flow, eqn, numerator, root, split) for split in splits(flow, root.square, numerator.shape)
        )
        return next((group for group in found if group is not None), None)
    shape, part = numerator.shape, flow.plain(numerator)
    x, center = part.value, False
    if part.equation is not None and part.equation.primitive == "sub":
        whole, mean = part.equation.inputs
        if flow.number(mean) == 0:
            x = flow.plain(whole).value
        elif whole.shape == shape and is_mean(flow, flow.behind(mean), whole, shape, statistic.axes):
            x, center = flow.plain(whole).value, True
    compared = x if statistic.centered or not center else part.value
    same = flow.same(statistic.part, compared)
    if not center and not same and flow.same(statistic.part, part.value):
        # another mean was subtracted before, so `part` is the tensor that is normalised
        x, same = part.value, True
    if not same or (statistic.centered and not center) or not x.is_float:
        return None
    divisor = divisor_of(statistic, shape)
    if divisor is None:
        return None
    params = {
        "axes": tuple(sorted(statistic.axes)),
        "center": center,
        "divisor": divisor,
        "epsilon": root.epsilon,
        "feature_axes": (),
        "groups": 1,
        "joined": root.joined,
    }
    return _make_group(flow, eqn, x, root, params)


def _match_groups(
    flow: Flow, eqn: Equation, numerator: Value, root: _Root, split: Split
) -> tuple[Equation, tuple[Value, ...]] | None:
    """A normalisation with statistics over groups of channels."""
    shape = split.shape
    statistic, last = statistic_of(flow, split.found, shape), len(shape) - 1
    if statistic is None or last not in statistic.axes or last - 1 in statistic.axes:
        return None
    x, center = flow.plain(numerator).value, False
    part = flow.plain(numerator).equation
    if part is not None and part.primitive == "sub":
        whole, mean = part.inputs
        for same in splits(flow, flow.behind(mean), numerator.shape):
            total = (
                scaled_sum(flow, same.found, shape) if same.shape == shape == (*whole.shape[:-1], *shape[-2:]) else None
            )
            if total is not None and _is_split(flow, total[0].inputs[0], whole):
                center = is_mean(flow, same.found, total[0].inputs[0], shape, statistic.axes)
                x = flow.plain(whole).value if center else x
    of, centered = statistic.part, statistic.centered
    deviation = flow.plain(of).equation
    if not centered and deviation is not None and deviation.primitive == "sub":
        of, mean = deviation.inputs
        centered = is_mean(flow, flow.behind(mean), of, shape, statistic.axes)
        if not centered:
            return None
    divisor = divisor_of(statistic, shape)
    if centered != center or divisor is None or not _is_split(flow, of, x) or not x.is_float:
        return None
    params = {
        "axes": (*(axis for axis in sorted(statistic.axes) if axis != last), last - 1),
        "center": center,
        "divisor": divisor,
        "epsilon": root.epsilon,
        "feature_axes": (),
        "groups": shape[-2],
        "joined": root.joined,
    }
    return _make_group(flow, eqn, x, root, params)


def _is_split(flow: Flow, part: Value, x: Value) -> bool:
    """Whether a value is x in another shape; the caller knows which shape."""
    eqn = flow.plain(part).equation
    return eqn is not None and eqn.primitive == "reshape" and flow.same(eqn.inputs[0], x)


def _make_group(
    flow: Flow, eqn: Equation, x: Value, root: _Root, params: dict[str, Any]
) -> tuple[Equation, tuple[Value, ...]] | None:
    """The group, and the factors by which its result still has to be multiplied."""
    output = eqn.outputs[0]
    if not root.factors:
        equations = flow.between([output], [x])
        if flow.leaves(equations, [x]):
            return None
        return composite("normalize", equations, [x], [output], params), ()
    result = Value(x.shape, output.dtype)
    own = [written("normalize", reference(params, result), x, result, eqn)]
    return composite("normalize", own, [x], [result], params), root.factors


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
    """sqrt(square + epsilon), or the maximum of a root and epsilon."""
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
    """The operand of a root: square + epsilon, or the maximum of square and epsilon^2."""
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
