"""Moves masks before a log-softmax or logsumexp into the function, so that hidden elements are not summed.

    log_softmax(where(m, x, -1e9))  ->  where(m, x - log(sum of exp(x) where m), -1e9)

On the left side, the masked numbers would widen the range of the operand and of the result. On the right side, -1e9
becomes the lowest code of the range of the visible numbers. A row with all elements hidden counts as a row without a
mask.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from qjax.ops.masked_rows import taking_part, visible
from qjax.tracing.composite import composite
from qjax.tracing.program import Equation, Program, Value
from qjax.tracing.rewrites.dataflow import Flow, pruned
from qjax.tracing.rewrites.inline import inlined
from qjax.tracing.rewrites.softmax import HIDDEN, inserted, operands_of, unmasked


def mask_logs(program: Program) -> Program:
    """Make such masks operands of the function."""
    logs = [eqn for eqn in program.equations if eqn.primitive in ("log_softmax", "logsumexp") and "axes" in eqn.params]
    if not logs:
        return program
    flow = Flow(program)
    cuts: dict[Value, Equation] = {}
    new: dict[Equation, list[Equation]] = {}
    for eqn in logs:
        x, masks = unmasked(flow, eqn.inputs[0])
        if not masks or not x.is_float or x.shape != eqn.in_shapes[0]:
            continue
        operands, _ = operands_of(flow, masks, cuts)
        params = {
            **eqn.params,
            "mask_axes": tuple(mask.axes for mask in masks),
            "mask_inverted": tuple(mask.inverted for mask in masks),
        }
        group, (result,) = inlined(_function(eqn.primitive, params), [x, *operands], None, eqn)
        new[eqn] = [composite(eqn.primitive, group, [x, *operands], [result], params)]
        last = [result, *(operands if eqn.primitive == "log_softmax" else ())]
        new[eqn] += inlined(
            _hide_elements(params) if len(last) > 1 else lambda y: y + 0.0, last, [eqn.outputs[0]], eqn
        )[0]
    if not new:
        return program
    before = set(flow.between([eqn.inputs[0] for eqn in new], ()))
    program = dataclasses.replace(program, equations=inserted(program, cuts))
    equations = tuple(part for eqn in program.equations for part in new.get(eqn, [eqn]))
    return pruned(dataclasses.replace(program, equations=equations), before)


def _function(name: str, params: dict[str, Any]) -> Callable[..., jax.Array]:
    def function(x: jax.Array, *masks: jax.Array) -> jax.Array:
        keep = name == "log_softmax" or params["keep"]
        total = jax.nn.logsumexp(visible(params, masks, x), axis=params["axes"], keepdims=keep)
        return x - total if name == "log_softmax" else total

    return function


def _hide_elements(params: dict[str, Any]) -> Callable[..., jax.Array]:
    def function(y: jax.Array, *masks: jax.Array) -> jax.Array:
        return jnp.where(taking_part(params, masks, y.shape), y, jnp.full_like(y, 1e5 * HIDDEN))

    return function
