"""Simplifies scans and remats that return some of their inputs unchanged.

    scan carry (x, w) -> (f(x, w), w)      ->    scan carry x -> f(x, w), with w as a constant
    remat (x, w) -> (f(x, w), w)           ->    remat (x, w) -> f(x, w)

`nnx.fori_loop` carries a whole module through its loop, parameters included, and `nnx.remat` returns it. A carried
parameter would count as data, for example in a table whose rows are looked up.
"""

import dataclasses

from qjax.tracing.program import Equation, Program, Value


def keep_carries(program: Program) -> Program:
    """Remove those carries and results, bodies included."""
    if not any(eqn.body is not None for eqn in program.equations):
        return program
    equations: list[Equation] = []
    renamed: dict[Value, Value] = {}
    for eqn in program.equations:
        if any(value in renamed for value in eqn.inputs):
            eqn = dataclasses.replace(eqn, inputs=tuple(renamed.get(v, v) for v in eqn.inputs))
        if eqn.body is not None:
            body = keep_carries(eqn.body)
            eqn = dataclasses.replace(eqn, body=body)
            eqn, same = (_drop_constant_carries if eqn.is_scan else _drop_returned_inputs)(eqn, body)
            renamed.update(same)
        equations.append(eqn)
    outputs = tuple(renamed.get(value, value) for value in program.outputs)
    return dataclasses.replace(program, equations=tuple(equations), outputs=outputs)


def _drop_constant_carries(eqn: Equation, body: Program) -> tuple[Equation, dict[Value, Value]]:
    """The scan without such carries, and which of its outputs equal which input."""
    first, carried = int(eqn.params["num_consts"]), int(eqn.params["num_carry"])
    kept = [index for index in range(carried) if body.outputs[index] is body.inputs[first + index]]
    if not kept:
        return eqn, {}
    left = [index for index in range(carried) if index not in kept]
    order = [*range(first), *(first + i for i in kept), *(first + i for i in left)]
    order += range(first + carried, len(eqn.inputs))
    results = [*left, *range(carried, len(eqn.outputs))]
    body = dataclasses.replace(
        body, inputs=tuple(body.inputs[i] for i in order), outputs=tuple(body.outputs[i] for i in results)
    )
    scan = dataclasses.replace(
        eqn,
        inputs=tuple(eqn.inputs[i] for i in order),
        outputs=tuple(eqn.outputs[i] for i in results),
        params={**eqn.params, "num_consts": first + len(kept), "num_carry": len(left)},
        body=body,
    )
    return scan, {eqn.outputs[i]: eqn.inputs[first + i] for i in kept}


def _drop_returned_inputs(eqn: Equation, body: Program) -> tuple[Equation, dict[Value, Value]]:
    """The remat without results that are inputs, and which of its outputs equal which input."""
    given = dict(zip(body.inputs, eqn.inputs, strict=True))
    left = [index for index, value in enumerate(body.outputs) if value not in given]
    if not left or len(left) == len(body.outputs):
        return eqn, {}
    same = {outer: given[value] for outer, value in zip(eqn.outputs, body.outputs, strict=True) if value in given}
    body = dataclasses.replace(body, outputs=tuple(body.outputs[i] for i in left))
    return dataclasses.replace(eqn, outputs=tuple(eqn.outputs[i] for i in left), body=body), same
