"""Traces a JAX function to equations, with which a rewriter replaces others."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from qjax.tracing.program import Equation, Value, from_jaxpr
from qjax.tracing.rewrites.fixed import mark_fixed


def inlined(
    function: Callable[..., Any], inputs: Sequence[Value], outputs: Sequence[Value] | None, like: Equation
) -> tuple[list[Equation], tuple[Value, ...]]:
    """The equations of `function(*inputs)`, and the values that they end in.

    outputs: the values that the results shall be, or None for new ones. like: whose scope and line they take.
    """
    program = from_jaxpr(jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in inputs)))
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
