"""Broadcasts data of size 1 before an affine step or a clamp combines it with a wider constant.

    x[..., :1] * arange(8.0)    ->    broadcast_to(x[..., :1], (..., 8)) * arange(8.0)
    c / x                       ->    c * (1 / x)

An affine step or a clamp is folded into the producer of its tensor, so it cannot enlarge the tensor. The tensor is
therefore broadcast first, and the step applies to each element. A constant divided by data becomes the constant times
the reciprocal of the data, which is one table.
"""

import dataclasses
import math

from jax import lax

from qjax.tracing.program import Equation, Program, Value
from qjax.tracing.rewrites.inline import inlined

_BINARY = frozenset({"add", "sub", "mul", "div", "max", "min", "add_any"})


def divide_constants(program: Program) -> Program:
    """Replace `constant / x` by `constant * (1 / x)`, unless the constant is a single number."""
    equations: list[Equation] = []
    for eqn in program.equations:
        if eqn.primitive == "div" and _is_wide(eqn.inputs[0]) and not _is_fixed(eqn.inputs[1]):
            equations += inlined(lambda c, x: c * (1.0 / x), eqn.inputs, eqn.outputs, eqn)[0]
        else:
            equations.append(eqn)
    return dataclasses.replace(program, equations=tuple(equations))


def spread_operands(program: Program) -> Program:
    """Broadcast the data of such steps to the shape of their result."""
    equations: list[Equation] = []
    for eqn in program.equations:
        (data,) = [v for v in eqn.inputs if not _is_fixed(v)] if _is_step(eqn) else [None]
        if data is None or data.shape == eqn.out_shapes[0]:
            equations.append(eqn)
            continue
        shape = eqn.out_shapes[0]
        found, (wide,) = inlined(
            lambda x, shape=shape: lax.broadcast_in_dim(x, shape, range(len(shape))), [data], None, eqn
        )
        inputs = tuple(wide if value is data else value for value in eqn.inputs)
        equations += [*found, dataclasses.replace(eqn, inputs=inputs)]
    return dataclasses.replace(program, equations=tuple(equations))


def _is_step(eqn: Equation) -> bool:
    if eqn.primitive not in _BINARY or eqn.function is not None or not eqn.outputs[0].is_float:
        return False
    fixed = [_is_fixed(value) for value in eqn.inputs]
    ranks = {len(value.shape) for value in eqn.inputs if value.shape}
    return sum(fixed) == 1 and len(ranks) == 1 and len(eqn.out_shapes[0]) in ranks and all(v.shape for v in eqn.inputs)


def _is_fixed(value: Value) -> bool:
    return value.fixed or value.constant is not None


def _is_wide(value: Value) -> bool:
    return _is_fixed(value) and value.is_float and math.prod(value.shape) > 1
