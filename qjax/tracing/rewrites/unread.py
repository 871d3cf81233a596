"""Removes the unread results of a scan: stacked outputs, and carries that only such outputs need.

    logits, words = scan(...); return logits    ->    a scan that computes no words and draws no random numbers

A decoder that samples words returns them together with its logits. A model that uses only the logits must not fail
because of the random numbers. Unread equations outside of scans can stay, because the conversion starts from the
outputs.
"""

import dataclasses

from qjax.tracing.program import Equation, Program, Value


def drop_unread(program: Program) -> Program:
    """Remove from scans what nothing reads; a carry that nobody reads returns as it came."""
    if not any(eqn.is_scan for eqn in program.walk()):
        return program
    return _dropped(program, set(program.outputs))


def needed(program: Program) -> list[Equation]:
    """The equations on which an output depends, in order, with those of bodies instead of a scan or remat."""
    return _find_needed(program, set(program.outputs))[0]


def _dropped(program: Program, outputs: set[Value]) -> Program:
    wanted = _find_needed(program, outputs, bodies=False)[1]
    equations: list[Equation] = []
    gone: set[Value] = set()
    for eqn in program.equations:
        if gone.intersection(eqn.inputs):
            # also unread: it only moves an output that the scan no longer returns
            gone.update(eqn.outputs)
            continue
        kept = eqn
        if eqn.body is not None and wanted.intersection(eqn.outputs):
            inner = _read_inside(eqn, eqn.body, wanted)[0]
            kept = _without(eqn, eqn.body, inner) if eqn.is_scan else _inside(eqn, eqn.body, inner)
            gone.update(set(eqn.outputs).difference(kept.outputs))
        equations.append(kept)
    return dataclasses.replace(program, equations=tuple(equations))


def _inside(eqn: Equation, body: Program, inner: set[Value]) -> Equation:
    return dataclasses.replace(eqn, body=_dropped(body, inner))


def _without(eqn: Equation, body: Program, inner: set[Value]) -> Equation:
    """A scan without unread stacked outputs; unread carries stay as they are; inner: the outputs that are read."""
    first, carried = eqn.params["num_consts"], eqn.params["num_carry"]
    if all(value in inner for value in body.outputs):
        return _inside(eqn, body, inner)
    starts = body.inputs[first : first + carried]
    carries = [value if value in inner else start for value, start in zip(body.outputs, starts, strict=False)]
    pairs = zip(body.outputs[carried:], eqn.outputs[carried:], strict=True)
    stacked = [(value, outer) for value, outer in pairs if value in inner]
    equations, _ = _find_needed(body, inner, bodies=False)
    body = dataclasses.replace(body, equations=tuple(equations), outputs=(*carries, *(value for value, _ in stacked)))
    outputs = (*eqn.outputs[:carried], *(outer for _, outer in stacked))
    return dataclasses.replace(eqn, outputs=outputs, body=_dropped(body, inner))


def _read_inside(eqn: Equation, body: Program, wanted: set[Value]) -> tuple[set[Value], list[Equation], set[Value]]:
    """Of a scan or remat: the body's outputs that are read, the equations that compute them, and their inputs."""
    first = eqn.params.get("num_consts", 0)
    carries = body.inputs[first : first + eqn.params.get("num_carry", 0)]
    inner = {value for value, outer in zip(body.outputs, eqn.outputs, strict=True) if outer in wanted}
    while True:
        equations, read = _find_needed(body, inner)
        # an iteration reads parts of its carry, so the iteration before must compute them
        more = inner | {after for after, start in zip(body.outputs, carries, strict=False) if start in read}
        if more == inner:
            return inner, equations, read
        inner = more


def _find_needed(program: Program, wanted: set[Value], *, bodies: bool = True) -> tuple[list[Equation], set[Value]]:
    """The equations that compute some values, and all values that they read. bodies: open scans into equations."""
    wanted, found = set(wanted), list[Equation]()
    for eqn in reversed(program.equations):
        if not wanted.intersection(eqn.outputs):
            continue
        if eqn.body is None:
            found.append(eqn)
            wanted.update(eqn.inputs)
            continue
        _, equations, read = _read_inside(eqn, eqn.body, wanted)
        found += equations[::-1] if bodies else [eqn]
        wanted.update(outer for outer, v in zip(eqn.inputs, eqn.body.inputs, strict=True) if v in read)
    return found[::-1], wanted
