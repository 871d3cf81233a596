"""Groups of equations: a rewriter found that together they compute one function, which has one integer form.

    y = exp(x - m); y / sum(y)    becomes one equation "softmax" of x, whose source holds those equations

In float parts of the model a group still computes, differentiates and batches by its own equations.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from qjax.tracing.program import Composite, Equation, Program, Value


@dataclasses.dataclass(frozen=True, eq=False)
class Computed(Composite):
    """A group that is computed by a function instead of its equations.

    function: arrays -> list of arrays.
    """

    function: Callable[..., list[Any]] = lambda *args: list(args)

    def bind(self, args: Sequence[Any]) -> list[Any]:
        return self.function(*args)


def composite(
    primitive: str,
    equations: Sequence[Equation],
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    params: Mapping[str, Any] | None = None,
) -> Equation:
    """One equation for a group of equations, given in execution order.

    primitive: the name by which an operation recognises it. inputs, outputs: those of the group, in the operation's
    order; literals that the group reads inside need not be among the inputs. params: attributes for the operation.
    """
    last = equations[-1]
    located = next((eqn.location for eqn in reversed(equations) if eqn.location), None)
    group = Composite(tuple(equations), tuple(inputs), tuple(outputs))
    # the scope is that of the last equation; earlier ones, such as a mask, may belong to other modules
    return Equation(
        primitive, tuple(inputs), tuple(outputs), dict(params or {}), last.scope, located or last.location, group
    )


def replaced(program: Program, groups: Sequence[Equation]) -> Program:
    """Replace the last equation of each group by its composite, and remove the group's other equations.

    An equation whose outputs are read outside of the group stays too. It is then computed twice, once in float.
    """
    members: dict[Equation, Equation] = {}
    for group in groups:
        assert isinstance(group.source, Composite)
        for eqn in group.source.equations:
            members[eqn] = group
    read = _readers(program)
    kept: set[Equation] = set()
    for eqn, group in reversed(members.items()):
        # in reverse order, because an equation that stays also needs the equations that it reads
        outside = [r for value in eqn.outputs for r in read.get(value, ()) if members.get(r) is not group or r in kept]
        exits = set(group.outputs)
        if any(value not in exits and _is_read(value, outside, program) for value in eqn.outputs):
            kept.add(eqn)
    equations: list[Equation] = []
    for eqn in program.equations:
        group = members.get(eqn)
        if group is None or eqn in kept:
            equations.append(eqn)
        if group is not None and eqn is group.source.equations[-1]:
            equations.append(group)
    return dataclasses.replace(program, equations=tuple(equations))


def _readers(program: Program) -> dict[Value, list[Equation]]:
    found: dict[Value, list[Equation]] = {}
    for eqn in program.equations:
        for value in eqn.inputs:
            found.setdefault(value, []).append(eqn)
    return found


def _is_read(value: Value, outside: Collection[Equation], program: Program) -> bool:
    return value in program.outputs or any(value in eqn.inputs for eqn in outside)
