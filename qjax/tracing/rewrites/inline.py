"""Traces a JAX function to equations, so that a rewriter can write a replacement as ordinary JAX code."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from qjax.tracing.program import Equation, Value, from_jaxpr
from qjax.tracing.rewrites.mark_parameters import mark_fixed


def inlined(
    function: Callable[..., Any], inputs: Sequence[Value], outputs: Sequence[Value] | None, like: Equation
) -> tuple[list[Equation], tuple[Value, ...]]:
    """The equations of `function(*inputs)`, and the values of its results.

    outputs: the values that the results become, or None for new ones. like: the equation whose scope and line they get.
    """
    shapes = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in inputs]
    program = from_jaxpr(jax.make_jaxpr(function)(*shapes))
    made = {value for eqn in program.equations for value in eqn.outputs}
    if outputs is not None and len(made.intersection(program.outputs)) < len(program.outputs):
        # a result that is an operand, a constant or another result needs an equation to become a separate value
        program = from_jaxpr(jax.make_jaxpr(lambda *args: jax.tree.map(jnp.copy, function(*args)))(*shapes))
    mark_fixed(program, [value.fixed or value.constant is not None for value in inputs])
    known: dict[Value, Value] = dict(zip(program.inputs, inputs, strict=True))
    if outputs is not None:
        known.update(zip(program.outputs, outputs, strict=True))
    equations = [
        dataclasses.replace(
            eqn,
            inputs=tuple(known.get(v, v) for v in eqn.inputs),
            outputs=tuple(known.get(v, v) for v in eqn.outputs),
            scope=like.scope,
            location=like.location,
        )
        for eqn in program.equations
    ]
    return equations, tuple(known.get(v, v) for v in program.outputs)
