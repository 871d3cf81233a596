"""Moves functions of integers out of the body of a scan or remat, and additive masks into it.

    scan(x -> f(x, sin(positions / c)))    ->    s = sin(positions / c); scan(x -> f(x, s))
    b = (1 - m) * -1e9; scan(x -> softmax(x + b))    ->    scan(x -> softmax(x + (1 - m) * -1e9))

A layer inside `nnx.scan` or `nnx.remat` may compute the sines of positions, which are the same in every iteration. A
function of integers becomes a table, and the range of the integers is known only outside, so these equations move out.
An additive mask may be made once and passed to every layer, where adding it would widen the range of the scores. It
therefore moves in, next to the softmax that reads it.
"""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from qjax.tracing.expressions import IDENTITIES
from qjax.tracing.program import Equation, Program, Value
from qjax.tracing.rewrites.dataflow import Flow, pruned
from qjax.tracing.rewrites.softmax import HIDDEN

_MOVES = IDENTITIES | frozenset(
    "broadcast_in_dim reshape squeeze expand_dims transpose slice concatenate convert_element_type rev".split()  # noqa: SIM905
)
_ELEMENTWISE = frozenset(
    """add sub mul div neg pow integer_pow exp exp2 log sqrt rsqrt sin cos tanh floor rem max min clamp abs sign square
    eq ne lt le gt ge and or not xor select_n""".split()  # noqa: SIM905
)
_OUT = _MOVES | _ELEMENTWISE | {"iota", "pad"}
_PROPER = frozenset("pow integer_pow exp exp2 log sqrt rsqrt sin cos tanh floor square".split())  # noqa: SIM905
"""Functions that are more than affine steps. Without any of these, the integer itself is the accumulator."""
_IN = _MOVES | {"select_n", "sub", "mul", "and", "or", "not", "neg"}


def hoist_functions(program: Program) -> Program:
    """Move functions of integers that scans and remats receive in front of the scan or remat."""
    return _each(program, _hoist_equations)


def sink_masks(program: Program) -> Program:
    """Move the computation of additive masks into the scans and remats that receive them."""
    flow = Flow(program)
    return _each(program, lambda eqn, body: ([], _sunk(flow, eqn, body)))


def _each(program: Program, change: Callable[[Equation, Program], tuple[list[Equation], Equation]]) -> Program:
    if not any(eqn.body is not None for eqn in program.equations):
        return program
    equations: list[Equation] = []
    for eqn in program.equations:
        if eqn.body is None:
            equations.append(eqn)
            continue
        before, changed = change(eqn, eqn.body)
        equations += [*before, changed]
    return dataclasses.replace(program, equations=tuple(equations))


def _constants(eqn: Equation) -> int:
    """How many of a body's first inputs are the same in every iteration."""
    return int(eqn.params["num_consts"]) if eqn.is_scan else len(eqn.inputs)


def _with_inputs(eqn: Equation, body: Program, outer: list[Value], inner: list[Value]) -> Equation:
    """The equation with additional constants."""
    if not outer:
        return dataclasses.replace(eqn, body=body)
    first = _constants(eqn)
    body = dataclasses.replace(body, inputs=(*body.inputs[:first], *inner, *body.inputs[first:]))
    inputs = (*eqn.inputs[:first], *outer, *eqn.inputs[first:])
    params = eqn.params
    if eqn.is_scan:
        params = {**params, "num_consts": first + len(outer)}
    return dataclasses.replace(eqn, inputs=inputs, params=params, body=body)


def _is_integer(value: Value) -> bool:
    return bool(jax.dtypes.issubdtype(value.dtype, np.integer))


def _copy(value: Value) -> Value:
    return Value(value.shape, value.dtype, fixed=value.fixed)


# ---------------------------------------------------------------------------- out


def _hoist_equations(eqn: Equation, body: Program) -> tuple[list[Equation], Equation]:
    """The equations that move out of a body, and the equation without them."""
    body = hoist_functions(body)
    count = _constants(eqn)
    given = dict(zip(body.inputs[:count], eqn.inputs[:count], strict=True))
    # `known`: values computed from parameters and integers; `data`: those that depend on integers of the data;
    # `proper`: those that are more than affine steps
    fixed = {v for v, outer in given.items() if outer.fixed or outer.constant is not None}
    data = {v for v in given if _is_integer(v) and v not in fixed}
    known, proper = fixed | data, set[Value]()
    leaving: list[Equation] = []
    for inside in body.equations:
        inputs = [v for v in inside.inputs if v.constant is None]
        if inside.primitive not in _OUT or inside.body is not None or not known.issuperset(inputs):
            continue
        leaving.append(inside)
        known.update(inside.outputs)
        if data.intersection(inputs):
            data.update(inside.outputs)
            if inside.primitive in _PROPER or proper.intersection(inputs):
                proper.update(inside.outputs)
    rest = [inside for inside in body.equations if not proper.intersection(inside.outputs)]
    read = {v for inside in rest for v in inside.inputs} | set(body.outputs)
    exits = [v for inside in leaving for v in inside.outputs if v in proper and v in read]
    if not any(value.is_float for value in exits):
        return [], dataclasses.replace(eqn, body=body)
    outside = dict(given)
    moved: list[Equation] = []
    for inside in Flow(dataclasses.replace(body, equations=tuple(leaving))).between(exits, given):
        outside.update({v: _copy(v) for v in inside.outputs})
        moved.append(
            dataclasses.replace(
                inside,
                inputs=tuple(outside.get(v, v) for v in inside.inputs),
                outputs=tuple(outside[v] for v in inside.outputs),
            )
        )
    body = pruned(dataclasses.replace(body, equations=tuple(rest)), set(leaving))
    return moved, _with_inputs(eqn, body, [outside[v] for v in exits], exits)


# ---------------------------------------------------------------------------- in


def _sunk(flow: Flow, eqn: Equation, body: Program) -> Equation:
    count = _constants(eqn)
    entered: list[Equation] = []
    outer: list[Value] = []
    inner: list[Value] = []
    for value, inside in zip(eqn.inputs[:count], body.inputs[:count], strict=True):
        leaves = _mask_of(flow, value)
        if leaves is None:
            continue
        own = {value: inside}
        for leaf in leaves:
            if leaf not in outer:
                outer.append(leaf)
                inner.append(_copy(leaf))
            own[leaf] = inner[outer.index(leaf)]
        # the body's old input stays, but nothing reads it; pruning removes its equations if nothing else reads them
        made = Value(inside.shape, inside.dtype)
        for made_of in flow.between([value], leaves):
            for v in made_of.outputs:
                own[v] = made if v is value else _copy(v)
            entered.append(
                dataclasses.replace(
                    made_of,
                    inputs=tuple(own.get(v, v) for v in made_of.inputs),
                    outputs=tuple(own[v] for v in made_of.outputs),
                )
            )
        body = _replace_value(body, inside, made)
    body = dataclasses.replace(body, equations=(*entered, *body.equations))
    eqn = _with_inputs(eqn, body, outer, inner)
    assert eqn.body is not None
    return dataclasses.replace(eqn, body=sink_masks(eqn.body))


def _replace_value(body: Program, old: Value, new: Value) -> Program:
    """A body that reads another value instead of `old`."""
    equations = tuple(
        dataclasses.replace(eqn, inputs=tuple(new if v is old else v for v in eqn.inputs)) if old in eqn.inputs else eqn
        for eqn in body.equations
    )
    return dataclasses.replace(body, equations=equations, outputs=tuple(new if v is old else v for v in body.outputs))


def _mask_of(flow: Flow, value: Value) -> list[Value] | None:
    """The truth values and integers of which an additive mask is made, if it is made of nothing else; or None."""
    if not value.is_float or value.constant is not None or flow.made.get(value) is None:
        return None
    leaves: dict[Value, None] = {}
    hides, waiting, seen = False, [value], set[Value]()
    while waiting:
        current = waiting.pop()
        if current in seen or current.constant is not None:
            continue
        seen.add(current)
        if not current.is_float:
            leaves[current] = None
            continue
        eqn = flow.made.get(current)
        if eqn is None or eqn.body is not None or eqn.primitive not in _IN:
            return None
        numbers = [flow.number(v) for v in eqn.inputs if v.is_float]
        hides = hides or any(number is not None and abs(number) >= -HIDDEN for number in numbers)
        # a float with the same number everywhere is computed again inside
        waiting += eqn.inputs
    return list(leaves) if hides and leaves else None
