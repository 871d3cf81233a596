"""Masks that are integers: 1 for an element that counts, 0 for a hidden one.

    scores - 1e30 * (1 - mask.astype(float32))    ->    scores - 1e30 * (1 - (mask > 0).astype(float32))

`softmax` and `masks` read the second form, a boolean mask. The two are equal only for the integers 0 and 1. So the
comparison is marked, and a quantized model refuses other integers.
"""

import dataclasses
from collections.abc import Callable, Iterator

import jax
import numpy as np

from qjax.tracing.program import Equation, Program, Value
from qjax.tracing.rewrites.flow import Flow, moved_axes
from qjax.tracing.rewrites.inline import inlined
from qjax.tracing.rewrites.softmax import HIDDEN

MARK = "flags"
"""A parameter of the comparison."""


def find_flags(program: Program) -> Program:
    """The program with such masks, of its inputs, as truth values.

    Not among `REWRITERS`: no one checks the inputs of a body.
    """
    casts = [eqn for eqn in program.equations if _is_cast(eqn)]
    if not casts:
        return program
    flow = Flow(program)
    equations: list[Equation] = []
    for eqn in program.equations:
        # only for inputs of the model: the plan can check that those are 0 or 1
        given = eqn in casts and flow.behind(eqn.inputs[0]).value in program.inputs
        if not given or not _is_mask(flow, eqn.outputs[0]):
            equations.append(eqn)
            continue
        compared, (truth,) = inlined(lambda x: x > 0, [eqn.inputs[0]], None, eqn)
        equations += (
            dataclasses.replace(one, params={**one.params, MARK: True}) if truth in one.outputs else one
            for one in compared
        )
        dtype = eqn.outputs[0].dtype
        equations += inlined(lambda x, dtype=dtype: x.astype(dtype), [truth], [eqn.outputs[0]], eqn)[0]
    return dataclasses.replace(program, equations=tuple(equations))


def flag_roots(program: Program) -> Iterator[tuple[Value, Equation]]:
    """The integers that are such masks, and the comparison of each."""
    flow = Flow(program)
    for eqn in program.walk():
        if eqn.params.get(MARK):
            yield flow.behind(eqn.inputs[0]).value, eqn


def _is_cast(eqn: Equation) -> bool:
    if eqn.primitive != "convert_element_type" or not eqn.outputs[0].is_float:
        return False
    source = eqn.inputs[0]
    return not source.fixed and source.constant is None and bool(jax.dtypes.issubdtype(source.dtype, np.integer))


def _is_mask(flow: Flow, value: Value) -> bool:
    """Whether all that is done with a value is `(1 - value) * number`, the number hiding what it is added to."""
    return _all_readers(flow, value, lambda eqn, v: eqn.primitive == "sub" and _from_one(flow, eqn, v))


def _from_one(flow: Flow, eqn: Equation, value: Value) -> bool:
    if eqn.inputs[1] is not value or flow.number(eqn.inputs[0]) != 1:
        return False
    return _all_readers(flow, eqn.outputs[0], lambda reader, v: _hides(flow, reader, v))


def _hides(flow: Flow, eqn: Equation, value: Value) -> bool:
    if eqn.primitive != "mul":
        return False
    number = flow.number(eqn.inputs[1] if eqn.inputs[0] is value else eqn.inputs[0])
    return number is not None and abs(number) >= -HIDDEN


def _all_readers(flow: Flow, value: Value, test: Callable[[Equation, Value], bool]) -> bool:
    readers = flow.readers.get(value, [])
    if not readers or value in flow.program.outputs:
        return False
    for eqn in readers:
        if eqn.body is None and len(eqn.outputs) == 1 and moved_axes(eqn) is not None:
            if not _all_readers(flow, eqn.outputs[0], test):
                return False
        elif not test(eqn, value):
            return False
    return True
