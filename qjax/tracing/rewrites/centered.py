"""Reorders normalisations that subtract the mean last, as Keras and TensorFlow do.

    x * s + (beta - mean * s)    ->    (x - mean) * s + beta

`normalize` recognises the second form.
"""

import dataclasses

from qjax.tracing.program import Equation, Program, Value
from qjax.tracing.rewrites.dataflow import Flow
from qjax.tracing.rewrites.inline import inlined
from qjax.tracing.rewrites.variance import is_mean


def center_first(program: Program) -> Program:
    """Bring such sums into that form."""
    flow = Flow(program)
    equations: list[Equation] = []
    for eqn in program.equations:
        found = _centered(flow, eqn) if eqn.primitive in ("add", "sub") else None
        equations += [eqn] if found is None else found
    return dataclasses.replace(program, equations=tuple(equations))


def _centered(flow: Flow, eqn: Equation) -> list[Equation] | None:
    pairs = (eqn.inputs, eqn.inputs[::-1]) if eqn.primitive == "add" else ()
    for scaled, rest in pairs:
        made, shift = _product(flow, scaled), flow.plain(rest).equation
        if made is None or shift is None or shift.primitive != "sub":
            continue
        beta, taken = shift.inputs
        for x, scale in (made, made[::-1]):
            mean = _mean(flow, x, scale, taken)
            if mean is not None and x.shape == eqn.out_shapes[0]:
                return inlined(lambda x, m, s, b: (x - m) * s + b, [x, mean, scale, beta], eqn.outputs, eqn)[0]
    return None


def _product(flow: Flow, value: Value) -> tuple[Value, Value] | None:
    made = flow.plain(value).equation
    return (made.inputs[0], made.inputs[1]) if made is not None and made.primitive == "mul" else None


def _mean(flow: Flow, x: Value, scale: Value, taken: Value) -> Value | None:
    """The mean of x, if `taken` is that mean times the scale."""
    product = _product(flow, taken)
    for mean, same in () if product is None else (product, product[::-1]):
        axes = [axis for axis, size in enumerate(mean.shape) if size == 1 and x.shape[axis : axis + 1] != (1,)]
        if (
            flow.same(same, scale)
            and len(mean.shape) == len(x.shape)
            and is_mean(flow, flow.behind(mean), x, x.shape, axes)
        ):
            return mean
    return None
