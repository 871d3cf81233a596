"""Opens calls that remain after tracing: functions with custom derivatives, and branches.

    cond(data, f, g, x)    ->    select(data, g(x), f(x))

If a literal selects a branch, only that branch is read. If data selects it, all branches are computed and one result is
selected, because an integer graph has no jumps and branches have no side effects.

An elementwise function of one tensor remains one equation and becomes a table; it has its own derivative. Any other
function (`jnp.hypot`, a normalisation with a custom backward) is replaced by its equations, and training differentiates
those. Functions of rows that `jax.nn` compiles as calls are opened too. Their equations have the function's name, so an
error about an equation that no later rewriter recognises can name the function.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun

from qjax.tracing.expressions import Builder, NotElementwise
from qjax.tracing.program import CUSTOM, WRITTEN_ANEW, Equation, Program, Value
from qjax.tracing.rewrites.inline import inlined
from qjax.tracing.rewrites.literals import numbers

# ----------------------------------------------------------------------------------------------------------------------
# Clears the function's name from moves at the start of a `jax.nn` function, such as vmap's transposition.


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


_ROWS = frozenset({"log_softmax", "logsumexp", "standardize"})


def _hypot(x: jax.Array, y: jax.Array) -> list[jax.Array]:
    return [jnp.sqrt(x * x + y * y)]


def _signbit(x: jax.Array) -> list[jax.Array]:
    return [x < jnp.zeros((), x.dtype)]


def _copysign(x: jax.Array, y: jax.Array) -> list[jax.Array]:
    return [jnp.where(y < jnp.zeros((), y.dtype), -jnp.abs(x), jnp.abs(x))]


_WRITTEN_ANEW: Mapping[str, Callable[..., list[jax.Array]]] = {
    "copysign": _copysign,
    "hypot": _hypot,
    "signbit": _signbit,
}
"""Functions whose equations in `jax.numpy` do not work on codes, and simpler ones.

They omit the factors of 2^75 by which jax 0.12 protects float32 from overflow, because codes do not overflow and have
no such scales. They also do not look at the bits of floats, because codes have no negative zero.
"""
assert _WRITTEN_ANEW.keys() == WRITTEN_ANEW


def open_calls(program: Program) -> Program:
    """Replace such calls by their equations."""
    opened = {*CUSTOM, *WRITTEN_ANEW, "cond"}
    if not any(eqn.primitive in opened or _is_row(eqn) for eqn in program.equations):
        return program
    number = numbers(program)
    equations: list[Equation] = []
    renamed: dict[Value, Value] = {}
    for original in program.equations:
        eqn = dataclasses.replace(original, inputs=tuple(renamed.get(v, v) for v in original.inputs))
        inner, inputs = None, eqn.inputs
        if eqn.primitive == "cond" and number(eqn.inputs[0]) is None:
            opened = open_calls(Program(eqn.inputs, eqn.outputs, tuple(_select_branch(eqn))))
            equations += opened.equations
            renamed.update({a: b for a, b in zip(eqn.outputs, opened.outputs, strict=True) if a is not b})
            continue
        if eqn.primitive in CUSTOM and not _is_elementwise(eqn):
            inner = eqn.params[CUSTOM[eqn.primitive]]
        elif _is_row(eqn) or eqn.primitive in WRITTEN_ANEW:
            inner = eqn.params["jaxpr"]
        elif eqn.primitive == "cond" and (branch := number(eqn.inputs[0])) is not None:
            branches = eqn.params["branches"]
            inner, inputs = branches[int(np.clip(branch, 0, len(branches) - 1))], eqn.inputs[1:]
        if inner is None:
            same = all(a is b for a, b in zip(eqn.inputs, original.inputs, strict=True))
            equations.append(original if same else eqn)
            continue
        function = jaxpr_as_fun(inner)
        if (anew := _WRITTEN_ANEW.get(eqn.primitive)) is not None and _are_one(anew, function, eqn):
            function = anew
        found, results = inlined(function, inputs, None, eqn)
        if _is_row(eqn):
            found = [dataclasses.replace(part, function=eqn.primitive) for part in found]
        opened = open_calls(Program(inputs, results, tuple(found)))
        equations += opened.equations
        renamed.update(zip(eqn.outputs, opened.outputs, strict=True))
    outputs = tuple(renamed.get(v, v) for v in program.outputs)
    return dataclasses.replace(program, outputs=outputs, equations=tuple(equations))


def _select_branch(eqn: Equation) -> list[Equation]:
    """A branch selected by data: every branch is computed, and one of the results is selected."""
    branches = [jaxpr_as_fun(branch) for branch in eqn.params["branches"]]

    def function(index: jax.Array, *operands: jax.Array) -> list[jax.Array]:
        results = [branch(*operands) for branch in branches]
        chosen = results[0]
        for number in range(1, len(branches)):
            # `>=`, so that an index beyond the last branch selects the last one, as in `lax.switch`
            here = index >= np.asarray(number, index.dtype)
            chosen = [lax.select_n(here, a, b) for a, b in zip(chosen, results[number], strict=True)]
        return list(chosen)

    return inlined(function, eqn.inputs, eqn.outputs, eqn)[0]


def _is_elementwise(eqn: Equation) -> bool:
    """Whether a call acts on each element of its one tensor, so that a table can hold it."""
    data = {v for v in eqn.inputs if not _is_number(v)}
    if len(data) != 1 or len(eqn.outputs) != 1:
        return False
    builder = Builder(next(iter(data)).shape)
    try:
        builder.equation(eqn, [0 if v in data else builder.parameter(v) for v in eqn.inputs])
    except NotElementwise:
        return False
    return True


def _are_one(anew: Callable[..., Any], own: Callable[..., Any], eqn: Equation) -> bool:
    """Whether a function of that name is the one of `jax.numpy`, because users have functions of the same name."""
    rng = np.random.default_rng(0)
    given = [rng.normal(size=value.shape).astype(value.dtype) for value in eqn.inputs if value.is_float]
    arguments = len(inspect.signature(anew).parameters)
    if not len(given) == len(eqn.inputs) == arguments or len(eqn.outputs) != 1:
        return False
    with jax.ensure_compile_time_eval():
        found, expected = np.asarray(anew(*given)[0], np.float64), np.asarray(own(*given)[0], np.float64)
    return found.shape == expected.shape and np.allclose(found, expected, rtol=float(8 * jnp.finfo(given[0].dtype).eps))


def _is_row(eqn: Equation) -> bool:
    return eqn.primitive in _ROWS and "jaxpr" in eqn.params


def _is_number(value: Value) -> bool:
    return (value.fixed or value.constant is not None) and math.prod(value.shape) == 1
