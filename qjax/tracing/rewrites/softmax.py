"""Recognises softmaxes: exp(x - m) / sum(exp(x - m)), masked or not, from `jax.nn`, attention layers or spelled out.

    e = exp(where(mask, x, -1e9) - m); e / sum(e)    ->    softmax(x, mask)

`m` can be anything that is constant along the summed axes, because the softmax does not depend on it. A mask replaces
numbers by a large negative number (or -inf) before the exponential, or adds one to them. Several masks are combined.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from qjax.tracing.composite import composite, replaced
from qjax.tracing.program import Equation, Program, Value
from qjax.tracing.rewrites.dataflow import Axes, Flow, pruned, spans, written
from qjax.tracing.rewrites.open_calls import opened

HIDDEN = -1e4
"""Adding this or less hides a number from a softmax, because exp(-10000) is 0 in every format."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Mask:
    """A boolean tensor before moves. axes: per axis of x, the mask's. inverted: whether True hides."""

    value: Value
    axes: Axes
    inverted: bool


def find_softmax(program: Program) -> Program:
    """Replace each softmax by one equation with the operands x and masks; see `ops.softmax`."""
    flow = Flow(program)
    groups: list[Equation] = []
    cuts: dict[Value, Equation] = {}
    for eqn in program.equations:
        if eqn.primitive not in ("div", "mul"):
            continue
        found = _match(flow, eqn, cuts)
        if found is not None:
            groups.append(found)
    if not groups:
        return program
    done = replaced(dataclasses.replace(program, equations=inserted(program, cuts)), groups)
    done = pruned(done, set(flow.between([v for g in groups for v in g.outputs], ())))
    return opened(done, groups, frozenset({"softmax"}))


def _match(flow: Flow, eqn: Equation, cuts: dict[Value, Equation]) -> Equation | None:
    found = _quotient(flow, eqn)
    if found is None:
        return None
    power, axes, hidden = found
    exponent = flow.plain(power.inputs[0])
    shape = exponent.value.shape
    own: list[Equation] = []
    if exponent.equation is not None and exponent.equation.primitive == "sub":
        x, shift = exponent.equation.inputs
        # constant along the axes, so the softmax does not depend on it
        behind = flow.behind(shift)
        if x.shape == shape and all(shift.shape[a : a + 1] in ((), (1,)) or behind.axes[a] is None for a in axes):
            exponent = flow.plain(x)
            if not flow.closed(shift):
                own = [written("reduce_max", _greatest(axes, shift), exponent.value, shift, eqn)]
    if exponent.value.shape != eqn.out_shapes[0]:
        return None
    x, masks = unmasked(flow, exponent.value)
    output, empty = eqn.outputs[0], "uniform"
    for reader in flow.readers.get(output, ()):
        # softmax(where=mask): the quotient of a hidden number is replaced by 0
        chosen = _choice(flow, reader)
        if chosen is not None and chosen[1] == 0 and chosen[2] is output and flow.readers[output] == [reader]:
            output, empty = reader.outputs[0], "zero"
            hidden = [*hidden, chosen[0]]
    if empty == "zero" and not masks:
        return None
    if not x.is_float or any(not _known(flow, mask, masks) for mask in hidden):
        return None
    operands, added = operands_of(flow, masks, cuts)
    inputs = [x, *(mask.value for mask in masks)]
    equations = flow.between([output], inputs)
    if flow.leaves(equations, inputs):
        # the shift depends on a value before x, so use the maximum of x instead
        shifts = [value for eqn in own for value in eqn.outputs]
        rest = flow.between([output], [*inputs, *shifts])
        masked = flow.between([value for eqn in own for value in eqn.inputs], inputs)
        equations = (*masked, *own, *(eqn for eqn in rest if eqn not in masked))
        if not own or flow.leaves(equations, inputs):
            return None
    params = {
        "axes": tuple(sorted(axes)),
        "empty": empty,
        "mask_axes": tuple(mask.axes for mask in masks),
        "mask_inverted": tuple(mask.inverted for mask in masks),
    }
    return composite("softmax", (*added, *equations), [x, *operands], [output], params)


def _greatest(axes: tuple[int, ...], shift: Value) -> Any:
    def function(x: jax.Array) -> jax.Array:
        greatest = lax.stop_gradient(jnp.max(x, axis=axes, keepdims=True)).astype(shift.dtype)
        return jnp.broadcast_to(greatest, shift.shape)

    return function


def _quotient(flow: Flow, eqn: Equation) -> tuple[Equation, tuple[int, ...], list[_Mask]] | None:
    """exp(...), the axes of its sum, and the masks of elements that the sum omits: e / sum(e), or e * (1 / sum(e))."""
    for first, second in (eqn.inputs, eqn.inputs[::-1]) if eqn.primitive == "mul" else (eqn.inputs,):
        power = flow.plain(first)
        if power.equation is None or power.equation.primitive != "exp":
            continue
        total = flow.behind(second)
        if eqn.primitive == "mul":
            inverse = total.equation
            if inverse is None or inverse.primitive != "div" or flow.number(inverse.inputs[0]) != 1:
                continue
            total = flow.behind(inverse.inputs[1], total.axes)
        if total.equation is None or total.equation.primitive != "reduce_sum":
            continue
        axes = tuple(int(axis) for axis in total.equation.params["axes"])
        if not spans(total, power.value.shape, axes):
            continue
        summed = flow.plain(total.equation.inputs[0])
        hidden: list[_Mask] = []
        chosen = None if summed.equation is None else _choice(flow, summed.equation)
        if chosen is not None and chosen[1] == 0:
            hidden, summed = [chosen[0]], flow.plain(chosen[2])
        if flow.same(summed.value, power.value):
            return power.equation, axes, hidden
    return None


def _choice(flow: Flow, eqn: Equation) -> tuple[_Mask, float, Value] | None:
    """where(mask, x, number) or the reverse: the mask, the number, x."""
    if eqn.primitive != "select_n" or len(eqn.inputs) != 3:
        return None
    which, no, yes = eqn.inputs
    if which.shape != eqn.out_shapes[0] or str(which.dtype) != "bool":
        return None
    for x, other, inverted in ((yes, no, False), (no, yes, True)):
        number = flow.number(other)
        if number is not None and flow.number(x) is None:
            found = flow.behind(which)
            return _Mask(found.value, found.axes, inverted), number, x
    return None


def unmasked(flow: Flow, value: Value) -> tuple[Value, list[_Mask]]:
    """The operand of a softmax without its masks, and the masks."""
    masks: list[_Mask] = []
    while (eqn := flow.made.get(value)) is not None:
        chosen = _choice(flow, eqn)
        if chosen is not None and chosen[1] <= HIDDEN:
            masks += _parts(flow, chosen[0])
            value = flow.plain(chosen[2]).value
            continue
        if eqn.primitive in ("add", "sub"):
            added = next(
                (
                    (mask, x)
                    for x, other, sign in _terms(eqn)
                    if x.shape == value.shape and (mask := added_mask(flow, other, len(value.shape), sign)) is not None
                ),
                None,
            )
            if added is not None:
                masks += _parts(flow, added[0])
                value = flow.plain(added[1]).value
                continue
        break
    return value, masks


def _terms(eqn: Equation) -> list[tuple[Value, Value, int]]:
    """For each term of a sum or difference: the term, the other one, and the other one's sign."""
    a, b = eqn.inputs
    return [(a, b, 1), (b, a, 1)] if eqn.primitive == "add" else [(a, b, -1)]


def added_mask(flow: Flow, value: Value, rank: int, sign: int = 1) -> _Mask | None:
    """A tensor of zeros and, times `sign`, large negative numbers: where(m, 0, -1e9) or (1 - m) * -1e9."""
    found = flow.behind(value)
    if len(found.axes) != rank or found.equation is None:
        return None
    eqn = found.equation
    if eqn.primitive == "select_n":
        which, no, yes = eqn.inputs[0], *(flow.number(v) for v in eqn.inputs[1:3])
        if no is None or yes is None or str(which.dtype) != "bool":
            return None
        no, yes = sign * no, sign * yes
        if {no, yes} - {min(no, yes), 0.0}:
            return None
        behind = flow.behind(which, found.axes)
        return _Mask(behind.value, behind.axes, yes != 0) if min(no, yes) <= HIDDEN else None
    if eqn.primitive == "mul":
        for factor, other in (eqn.inputs, eqn.inputs[::-1]):
            number = flow.number(factor)
            if number is None or sign * number > HIDDEN:
                continue
            inner = flow.behind(other, found.axes)
            inverted = True
            if inner.equation is not None and inner.equation.primitive == "sub":
                if flow.number(inner.equation.inputs[0]) != 1:
                    return None
                inner, inverted = flow.behind(inner.equation.inputs[1], inner.axes), False
            cast = inner.equation
            if cast is not None and cast.primitive == "convert_element_type" and str(cast.inputs[0].dtype) == "bool":
                inner = flow.behind(cast.inputs[0], inner.axes)
                return _Mask(inner.value, inner.axes, inverted)
    return None


def _parts(flow: Flow, mask: _Mask) -> list[_Mask]:
    """The parts of a conjunction, without those that hide nothing."""
    number = flow.number(mask.value)
    if number is not None and bool(number) != mask.inverted:
        return []
    eqn = flow.made.get(mask.value)
    if eqn is not None and eqn.primitive == "not":
        inner = flow.behind(eqn.inputs[0], mask.axes)
        return _parts(flow, _Mask(inner.value, inner.axes, not mask.inverted))
    both = "or" if mask.inverted else "and"
    if eqn is None or eqn.primitive != both or flow.closed(mask.value):
        return [mask]
    found: list[_Mask] = []
    for value in eqn.inputs:
        if len(value.shape) != len(mask.value.shape):
            return [mask]
        inner = flow.behind(value, mask.axes)
        found += _parts(flow, _Mask(inner.value, inner.axes, mask.inverted))
    return found


def _known(flow: Flow, mask: _Mask, masks: Sequence[_Mask]) -> bool:
    """Whether a mask found elsewhere in the function is that of the exponent, which may be a conjunction."""
    met, own = ({(part.value, part.axes, part.inverted) for part in parts} for parts in (_parts(flow, mask), masks))
    return met == own


def operands_of(flow: Flow, masks: Sequence[_Mask], cuts: dict[Value, Equation]) -> tuple[list[Value], list[Equation]]:
    """The masks as operands, reduced to one element along axes on which they only repeat (the batch, for example).

    Returns the operands, and equations that give the masks their full size inside the group; `cuts` receives the
    equations that reduce them.
    """
    operands: list[Value] = []
    added: list[Equation] = []
    for mask in masks:
        value = mask.value
        varies = flow.varies(value)
        if not flow.closed(value) or all(axis in varies for axis, size in enumerate(value.shape) if size != 1):
            operands.append(value)
            continue
        if value not in cuts:
            limits = tuple(size if axis in varies else min(size, 1) for axis, size in enumerate(value.shape))
            params = {"start_indices": (0,) * len(limits), "limit_indices": limits, "strides": None}
            cuts[value] = _equation(lax.slice_p, value, Value(limits, value.dtype), params, flow.made.get(value))
        (small,) = cuts[value].outputs
        params = {"shape": value.shape, "broadcast_dimensions": tuple(range(len(value.shape))), "sharding": None}
        added.append(_equation(lax.broadcast_in_dim_p, small, value, params, flow.made.get(value)))
        operands.append(small)
    return operands, added


def _equation(
    primitive: Any, source: Value, result: Value, params: dict[str, Any], beside: Equation | None
) -> Equation:
    scope, location = (beside.scope, beside.location) if beside is not None else ("", None)
    bound = SimpleNamespace(primitive=primitive, params=params)
    return Equation(primitive.name, (source,), (result,), params, scope, location, bound)


def inserted(program: Program, cuts: Mapping[Value, Equation]) -> tuple[Equation, ...]:
    """The program's equations with each cut after the equation of its value, or in front of all."""
    waiting = dict(cuts)
    equations: list[Equation] = []
    for eqn in program.equations:
        equations.append(eqn)
        equations += [waiting.pop(value) for value in eqn.outputs if value in waiting]
    return (*waiting.values(), *equations)
