"""Folds integers and booleans that are computed from literals only: they become literals themselves.

    i = add(3, -1); y = slice(x, start=i)    ->    y = slice(x, start=2)

Programs compute indices, masks and bounds (`x[:, -1]`, `jnp.tril`, a resize), and some operations need them as numbers.
Floats are not folded, unless such an integer is computed from them.
"""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
from jax.core import Tracer

from qjax.tracing.program import Equation, Program, Value

_LARGEST = 2**22
"""Elements of an array that is folded, at most."""


def numbers(program: Program) -> Callable[[Value], np.ndarray | None]:
    """A function that returns the array of a value, or None for a value that depends on more than literals."""
    made = {value: eqn for eqn in program.equations for value in eqn.outputs}
    known: dict[Value, np.ndarray | None] = {}

    def number(value: Value) -> np.ndarray | None:
        if value.constant is not None:
            return None if isinstance(value.constant, Tracer) else np.asarray(value.constant)
        if value not in known:
            eqn = made.get(value)
            known.update(dict.fromkeys(eqn.outputs if eqn else (value,)))
            if eqn is not None and _plain(eqn):
                operands = [number(v) for v in eqn.inputs]
                if all(x is not None for x in operands):
                    with jax.ensure_compile_time_eval():
                        results = [np.asarray(x) for x in eqn.bind(*operands)]
                    known.update(zip(eqn.outputs, results, strict=True))
        return known[value]

    return number


def fold_literals(program: Program) -> Program:
    """Fold those values to literals."""
    made = {value for eqn in program.equations for value in eqn.outputs}
    number = numbers(program)
    replaced: dict[Value, Value] = {}

    def literal(value: Value) -> Value:
        if value.constant is not None or value.is_float or not _is_plain(value):
            return value
        if value not in replaced:
            array = number(value) if value in made else None
            replaced[value] = value if array is None else Value(value.shape, value.dtype, array)
        return replaced[value]

    equations = tuple(
        eqn if not eqn.inputs else _with_inputs(eqn, tuple(map(literal, eqn.inputs))) for eqn in program.equations
    )
    kept = tuple(eqn for eqn in equations if not all(v in replaced and replaced[v] is not v for v in eqn.outputs))
    return dataclasses.replace(program, equations=kept, outputs=tuple(map(literal, program.outputs)))


def _with_inputs(eqn: Equation, inputs: tuple[Value, ...]) -> Equation:
    same = all(a is b for a, b in zip(eqn.inputs, inputs, strict=True))
    return eqn if same else dataclasses.replace(eqn, inputs=inputs)


def _plain(eqn: Equation) -> bool:
    return eqn.body is None and eqn.function is None and all(map(_is_plain, (*eqn.inputs, *eqn.outputs)))


def _is_plain(value: Value) -> bool:
    extended = jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended)
    return not extended and int(np.prod(value.shape, dtype=np.int64)) <= _LARGEST
