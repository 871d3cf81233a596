"""Recognises log-softmax and logsumexp, from `jax.nn`, `jax.scipy.special` or spelled out.

    logsumexp = log(sum(exp(x - m))) + m,  log-softmax = (x - m) - log(sum(exp(x - m))) = x - logsumexp(x)

`m` can be anything that is constant along the summed axes, or absent, because the results do not depend on it.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from qjax.tracing.composite import composite, replaced
from qjax.tracing.program import Equation, Program, Value
from qjax.tracing.rewrites.dataflow import Flow, Found, pruned, spans, written
from qjax.tracing.rewrites.open_calls import opened

_NAMES = frozenset({"log_softmax", "logsumexp"})


@dataclasses.dataclass(frozen=True, eq=False)
class _Log:
    """log(sum(exp(exponent))) over axes, before moves. keep: whether the axes remain; None if it is broadcast to x."""

    exponent: Found
    axes: tuple[int, ...]
    keep: bool | None


@dataclasses.dataclass(frozen=True, eq=False)
class _Sum:
    """The logsumexp of x over axes. shifts: the values that serve as m."""

    x: Value
    log: _Log
    shifts: tuple[Value, ...] = ()


def find_log_softmax(program: Program) -> Program:
    """Replace each such function by one equation of x, "log_softmax" or "logsumexp"."""
    flow = Flow(program)
    groups: list[Equation] = []
    inside: set[Equation] = set()
    # from the last equation on, because a log-softmax contains a logsumexp, which would match on its own
    for eqn in reversed(program.equations):
        if eqn in inside:
            continue
        group = _match(flow, eqn)
        if group is not None:
            groups.append(group)
            inside |= set(flow.between(group.outputs, group.inputs))
    if not groups:
        return program
    done = replaced(program, groups)
    # logsumexp computes a sign that nothing reads
    unread = {eqn for eqn in program.equations if eqn.function in _NAMES}
    done = pruned(done, {*flow.between([v for g in groups for v in g.outputs], ()), *unread})
    return opened(done, groups, _NAMES)


def _match(flow: Flow, eqn: Equation) -> Equation | None:
    name, found = "logsumexp", None
    if eqn.primitive == "sub":
        name, found = "log_softmax", _difference(flow, eqn)
    elif eqn.primitive in ("add", "add_any", "log"):
        found = _sum(flow, Found(eqn.outputs[0], eqn, tuple(range(len(eqn.out_shapes[0])))), ())
    if found is None or not found.x.is_float:
        return None
    output = eqn.outputs[0]
    params: dict[str, Any] = {"axes": found.log.axes}
    if name == "logsumexp":
        if found.log.keep is None:
            return None
        params["keep"] = found.log.keep
    equations = flow.between([output], [found.x])
    if flow.leaves(equations, [found.x]):
        # m depends on a value before x, so use the maximum of x instead
        own = [
            written("reduce_max", _greatest(found.log.axes, m), found.x, m, eqn) for m in dict.fromkeys(found.shifts)
        ]
        equations = (*own, *flow.between([output], [found.x, *found.shifts]))
        if flow.leaves(equations, [found.x]):
            return None
    return composite(name, equations, [found.x], [output], params)


def _greatest(axes: tuple[int, ...], shift: Value) -> Any:
    def function(x: jax.Array) -> jax.Array:
        kept = len(shift.shape) == x.ndim
        greatest = lax.stop_gradient(jnp.max(x, axis=axes, keepdims=kept)).astype(shift.dtype)
        return jnp.broadcast_to(greatest, shift.shape)

    return function


def _difference(flow: Flow, eqn: Equation) -> _Sum | None:
    """x - logsumexp(x), or (x - m) - log(sum(exp(x - m)))."""
    whole, other = eqn.inputs
    shape = eqn.out_shapes[0]
    if whole.shape != shape:
        return None
    behind = flow.behind(other)
    log = _log(flow, behind, shape)
    if log is not None and flow.same(log.exponent.value, whole):
        x, shift = _split_shift(flow, log)
        return _Sum(x, log, () if shift is None else (shift,))
    found = _sum(flow, behind, shape)
    return found if found is not None and flow.same(found.x, whole) else None


def _sum(flow: Flow, found: Found, shape: Sequence[int]) -> _Sum | None:
    """log(sum(exp(x - m))) + m, or log(sum(exp(x))); shape: of x if the result is broadcast to it, else empty."""
    eqn = found.equation
    if eqn is None:
        return None
    if eqn.primitive == "log":
        log = _log(flow, found, shape)
        return None if log is None else _Sum(log.exponent.value, log)
    if eqn.primitive not in ("add", "add_any"):
        return None
    for first, second in (eqn.inputs, eqn.inputs[::-1]):
        if eqn.out_shapes[0] not in (first.shape, shape):
            continue
        log = _log(flow, flow.behind(first, found.axes), shape)
        if log is None:
            continue
        x, shift = _split_shift(flow, log)
        if shift is not None and _same_shift(flow, shift, second):
            return _Sum(x, log, (shift, second))
    return None


def _same_shift(flow: Flow, a: Value, b: Value) -> bool:
    """Whether two values are broadcast from the same one, with its axes in the same order."""
    first, second = flow.behind(a), flow.behind(b)
    if flow.first(first.value) is not flow.first(second.value):
        return False
    orders = [[axis for axis in found.axes if axis is not None] for found in (first, second)]
    return all(order == sorted(order) for order in orders)


def _split_shift(flow: Flow, log: _Log) -> tuple[Value, Value | None]:
    """The x and m of an exponent x - m, or the exponent and None."""
    eqn, value = log.exponent.equation, log.exponent.value
    if eqn is None or eqn.primitive != "sub":
        return value, None
    x, shift = eqn.inputs
    behind = flow.behind(shift)
    constant = all(shift.shape[axis : axis + 1] in ((), (1,)) or behind.axes[axis] is None for axis in log.axes)
    return (flow.plain(x).value, shift) if constant and x.shape == value.shape else (value, None)


def _log(flow: Flow, found: Found, shape: Sequence[int]) -> _Log | None:
    """A logarithm of a sum of exponentials; shape: as in `_sum`."""
    if found.equation is None or found.equation.primitive != "log":
        return None
    total = flow.behind(found.equation.inputs[0], found.axes)
    while total.equation is not None and total.equation.primitive == "abs":
        total = flow.behind(total.equation.inputs[0], total.axes)
    if total.equation is None or total.equation.primitive != "reduce_sum":
        return None
    axes = tuple(sorted(int(axis) for axis in total.equation.params["axes"]))
    power = flow.plain(total.equation.inputs[0])
    if power.equation is None or power.equation.primitive != "exp" or not axes:
        return None
    exponent = flow.plain(power.equation.inputs[0])
    whole = exponent.value.shape
    if shape:
        return _Log(exponent, axes, None) if whole == tuple(shape) and spans(total, whole, axes) else None
    kept = [size for axis, size in enumerate(whole) if axis not in axes]
    same = found.value.shape
    if same == tuple(1 if axis in axes else size for axis, size in enumerate(whole)) and spans(total, whole, axes):
        return _Log(exponent, axes, True)
    if same == tuple(kept) and total.axes == tuple(range(len(kept))):
        return _Log(exponent, axes, False)
    return None
