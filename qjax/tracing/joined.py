"""Finds results that share their operand's quantizer although they may contain numbers outside of its range.

An operation that moves or selects codes shares the quantizer of its operand. A constant that it inserts among them can
lie outside of the range for which this quantizer was calibrated:

    jnp.where(mask, x, 50.0)        jnp.pad(x, 2, constant_values=50.0)        jnp.maximum(x, 50.0)

The calibration therefore observes the result as well, unless the constant is known to fit (zero always has a code). If
only a maximum or a softmax reads the result, a constant below the range may become the lowest code without any loss.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from qjax.ops import Op, Role
from qjax.ops.facts import End
from qjax.tracing.annotation import Annotation, Joined
from qjax.tracing.program import Equation, Program, Value
from qjax.tracing.rewrites.inline import inlined


def may_leave_range(op: Op, eqn: Equation, constant: Sequence[bool], number: Callable[[Value], Any]) -> bool:
    """Whether the result may contain numbers outside of the range of its operand.

    number: returns the array of a value that is known, and None for any other.
    """
    filling = op.filling(op.attributes(eqn))
    if filling != "constants":
        return filling == "lowest"
    known = {role: number(eqn.inputs[index]) for role, index in op.chain_constants(eqn, constant).items()}

    def fits(role: str, value: np.ndarray | None) -> bool:
        if value is None:
            return False
        if op.clamps:
            # the range contains zero, so a bound on the far side of zero can only narrow it
            return bool(np.all(value <= 0) if role == "low" else np.all(value >= 0))
        return not np.any(value)

    return not all(fits(role, value) for role, value in known.items())


def hide_ends(annotation: Annotation, whole: Program) -> None:
    """Record for every joined result which ends of the range its readers ignore.

    A maximum ignores small numbers, but returns them where there is nothing else, so its own result is checked in turn.
    """
    if not annotation.joined:
        return
    readers: dict[Value, list[Equation]] = {}
    outputs: set[Value] = set()
    programs = [whole]
    while programs:
        program = programs.pop()
        outputs.update(program.outputs)
        for eqn in program.equations:
            for value in eqn.inputs:
                readers.setdefault(value, []).append(eqn)
        programs += [eqn.body for eqn in program.equations if eqn.body is not None]
    waiting = list(annotation.joined)
    while waiting:
        value = waiting.pop()
        joined = annotation.joined[value]
        hidden, extrema = _hidden(value, annotation, readers, outputs)
        annotation.joined[value] = dataclasses.replace(joined, hidden=frozenset(hidden))
        for eqn in extrema if hidden else ():
            result = eqn.outputs[0]
            if result not in annotation.joined:
                place = dataclasses.replace(
                    joined.place,
                    label=f"{joined.place.label}/{annotation.ops[eqn][0].name}#{len(annotation.joined)}",
                    shape=result.shape,
                    location=eqn.location,
                )
                annotation.joined[result] = Joined(place, extremum=True)
                waiting.append(result)


def with_own_quantizers(program: Program, annotation: Annotation) -> Program:
    """Give an operand that others read too a copy with its own quantizer, before a constant joins it.

        y = select(mask, 50.0, x)    ->    x2 = mul(x, 1.0); y = select(mask, 50.0, x2)

    The product ends at a quantizer of its own, which the constant may widen, so the other readers of x lose no codes.
    The same program is returned if there is nothing to do.
    """
    forks, made = program.forks, {value: eqn for eqn in program.equations for value in eqn.outputs}

    def is_shared(value: Value) -> bool:
        while value not in forks and value not in annotation.values and value in made:
            value = next(v for v in made[value].inputs if v.is_float and v not in annotation.constants)
        return value in forks

    equations: list[Equation] = []
    for eqn in program.equations:
        own = eqn
        if eqn.body is not None:
            body = with_own_quantizers(eqn.body, annotation)
            own = eqn if body is eqn.body else dataclasses.replace(eqn, body=body)
        if eqn.outputs and eqn.outputs[0] in annotation.joined and _adds_constants(annotation, eqn):
            for value in dict.fromkeys(eqn.inputs):
                is_data = value.is_float and value.constant is None and value not in annotation.constants
                if is_data and is_shared(value):
                    copied, (copy,) = inlined(lambda x: x * 1.0, [value], None, own)
                    equations += copied
                    inputs = tuple(copy if v is value else v for v in own.inputs)
                    own = dataclasses.replace(own, inputs=inputs)
        equations.append(own)
    if all(a is b for a, b in zip(equations, program.equations, strict=False)):
        return program
    return dataclasses.replace(program, equations=tuple(equations))


def _adds_constants(annotation: Annotation, eqn: Equation) -> bool:
    """Whether an equation inserts constants that its readers can see among the codes of an operand."""
    op, _ = annotation.ops[eqn]
    joined = annotation.joined[eqn.outputs[0]]
    return (
        op.role is Role.GRID
        and not joined.hidden
        and not joined.extremum
        and op.filling(op.attributes(eqn)) == "constants"
    )


def _hidden(
    value: Value, annotation: Annotation, readers: Mapping[Value, Sequence[Equation]], outputs: Collection[Value]
) -> tuple[set[End], list[Equation]]:
    """The ends that all readers ignore, and those readers whose results are on the same grid."""
    found: set[End] = {"low", "high"}
    extrema: list[Equation] = []
    waiting, seen = [value], {value}
    while waiting and found:
        value = waiting.pop()
        if value in outputs:
            return set(), []
        for eqn in readers.get(value, ()):
            op, mode = annotation.ops.get(eqn, (None, None))
            hides = set(op.hides(eqn)) if op is not None else set[End]()
            if hides:
                found &= hides
                extrema += [eqn] if mode == "grid" else []
            elif mode == "grid":
                waiting += [output for output in eqn.outputs if output not in seen]
                seen.update(eqn.outputs)
            else:
                return set(), []
    return found, extrema
