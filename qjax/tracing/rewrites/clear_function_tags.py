"""Clears the function's name from moves at the start of a `jax.nn` function, such as vmap's transposition."""

import dataclasses
from collections.abc import Collection, Sequence

from qjax.tracing.program import Equation, Program


def opened(program: Program, groups: Sequence[Equation], functions: Collection[str]) -> Program:
    """Clear `Equation.function` of the equations that lie before each group and name one of `functions`."""
    made = {value: eqn for eqn in program.equations for value in eqn.outputs}
    found: set[Equation] = set()
    for group in groups:
        eqn = made.get(group.inputs[0])
        while eqn is not None and eqn.function in functions:
            found.add(eqn)
            eqn = made.get(eqn.inputs[0]) if eqn.inputs else None
    equations = (dataclasses.replace(eqn, function=None) if eqn in found else eqn for eqn in program.equations)
    return dataclasses.replace(program, equations=tuple(equations))
