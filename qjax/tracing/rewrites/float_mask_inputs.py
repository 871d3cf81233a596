"""Turns float masks that are inputs of the model (1 for a visible element, 0 for a hidden one) into boolean masks.

    scores - 1e30 * (1 - mask.astype(float32))    ->    scores - 1e30 * (1 - (mask > 0).astype(float32))
    scores - 1e30 * (1 - mask)                    ->    scores - 1e30 * (1 - (mask > 0.5).astype(mask.dtype))
    scores - 1e30 * (1 - a * b)                   ->    scores - 1e30 * (1 - ((a > 0.5) & (b > 0.5)).astype(a.dtype))

`softmax` and `split_additive_masks` read the second form. The two are equal only for 0 and 1, so the comparison is
marked, and a quantized model rejects other numbers.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qjax.tracing.program import Equation, Program, Value
from qjax.tracing.rewrites.dataflow import Flow, moved_axes
from qjax.tracing.rewrites.inline import inlined
from qjax.tracing.rewrites.softmax import HIDDEN

MARK = "flags"
"""The parameter that marks such a comparison."""


def turned(program: Program) -> Program:
    """Replace `(m - 1) * 1e9` by `(1 - m) * -1e9`, which is the same number, bit for bit."""
    made = {eqn.outputs[0]: eqn for eqn in program.equations if eqn.primitive == "sub"}
    if not made:
        return program
    flow = Flow(program)

    def rest(eqn: Equation) -> Value | None:
        """The m of such a product."""
        if eqn.primitive == "mul":
            for value in eqn.inputs:
                source = made.get(value)
                if source is not None and flow.number(source.inputs[1]) == 1 and _hides(flow, eqn, value):
                    return source.inputs[0]
        return None

    equations: list[Equation] = []
    for eqn in program.equations:
        m = rest(eqn)
        if m is None or m.shape != eqn.outputs[0].shape:
            equations.append(eqn)
            continue
        (number,) = (known for value in eqn.inputs if (known := flow.number(value)) is not None)
        equations += inlined(lambda m, number=number: (1 - m) * -number, [m], eqn.outputs, eqn)[0]
    read = {*program.outputs, *(value for eqn in equations for value in eqn.inputs)}
    kept = tuple(eqn for eqn in equations if eqn.primitive != "sub" or eqn.outputs[0] in read)
    return dataclasses.replace(program, equations=kept)


def find_flags(program: Program) -> Program:
    """Replace such masks, if they are inputs of the model, by truth values.

    Not among `REWRITERS`, because no one checks the inputs of a body.
    """
    casts = {eqn for eqn in program.equations if _is_cast(eqn)}
    rests = {eqn for eqn in program.equations if eqn.primitive == "sub" and eqn.inputs[1].is_float}
    if not casts and not rests:
        return program
    flow = Flow(program)
    # only inputs of the model, because the plan can check that these are 0 or 1
    masks = {eqn: eqn.inputs[0] for eqn in casts if _is_mask(flow, eqn.outputs[0])}
    masks |= {eqn: eqn.inputs[1] for eqn in rests if _from_one(flow, eqn, eqn.inputs[1])}
    joined = {eqn for value in masks.values() if (eqn := _find_joint(flow, value)) is not None}
    equations: list[Equation] = []
    for eqn in program.equations:
        given = eqn in masks and _is_given(flow, masks[eqn])
        if eqn in joined:
            equations += _truth(eqn.inputs, _JOINED[eqn.primitive], eqn.outputs[0], eqn, marked=True)
        elif eqn in casts and (given or (eqn in masks and _find_joint(flow, masks[eqn]) is not None)):
            equations += _truth([masks[eqn]], lambda x: x, eqn.outputs[0], eqn, marked=given)
        elif eqn in rests and given:
            flag = Value(masks[eqn].shape, masks[eqn].dtype)
            equations += _truth([masks[eqn]], lambda x: x, flag, eqn, marked=True)
            equations.append(dataclasses.replace(eqn, inputs=(eqn.inputs[0], flag)))
        else:
            equations.append(eqn)
    return dataclasses.replace(program, equations=tuple(equations))


_JOINED = {"mul": jnp.logical_and, "min": jnp.logical_and, "max": jnp.logical_or}
"""The logical operation that an operation on two masks amounts to."""


def _find_joint(flow: Flow, value: Value) -> Equation | None:
    """The equation that combines two masks, both inputs of the model, if a value is its result up to moves."""
    eqn = flow.behind(value).equation
    if eqn is None or eqn.primitive not in _JOINED or not all(_is_given(flow, v) for v in eqn.inputs):
        return None
    return eqn


def _truth(
    given: Sequence[Value], join: Callable[..., Any], flag: Value, like: Equation, *, marked: bool
) -> list[Equation]:
    """The equations that compute `flag` as 1 or 0 from the given masks. marked: whether the plan checks the masks."""
    truths: list[Value] = []
    equations: list[Equation] = []
    for value in given:
        limit = 0.5 if value.is_float else 0
        compared, (truth,) = inlined(lambda x, limit=limit: x > limit, [value], None, like)
        truths.append(truth)
        for one in compared:
            own = marked and truth in one.outputs
            equations.append(dataclasses.replace(one, params={**one.params, MARK: True}) if own else one)
    return [*equations, *inlined(lambda *x: join(*x).astype(flag.dtype), truths, [flag], like)[0]]


def _is_given(flow: Flow, value: Value) -> bool:
    """Whether a value is an input of the model, up to moves."""
    found = flow.behind(value).value
    return found in flow.program.inputs and not found.fixed


def flag_roots(program: Program) -> Iterator[tuple[Value, Equation]]:
    """The inputs that are such masks, each with its comparison."""
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
    """Whether a value is only used as `(1 - value) * number`, where the number hides what it is added to."""
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
