"""Finds frozen weights: parameters whose codes are inputs of the program (see `ops.frozen`).

    w = frozen(codes); y = dot(x, w)    ->    y = dot(x, codes)

The model's own equations read floats, which an equation "frozen" computes from the codes. A product that was declared
when the weight was frozen reads the codes instead, and the equation is dropped if nothing else reads it.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import jax

from qjax.ops.base import read
from qjax.ops.embed import Embed
from qjax.ops.frozen import Frozen, FrozenLookup, Move
from qjax.tracing.composite import Computed
from qjax.tracing.expressions import IDENTITIES
from qjax.tracing.marker import Layer, bind
from qjax.tracing.program import Equation, Program, Value

FROZEN, ADAPTED = "frozen", "adapted_weight"


def thaw(frozen: Frozen, packed: Sequence[jax.Array]) -> jax.Array:
    """The parameter as floats, computed by one equation that is visible in the program."""
    names = tuple(f"part{index}" for index in range(len(packed)))
    return bind(Layer(FROZEN, names, (), frozen), *packed)[0]


def frozen_of(eqn: Equation) -> Frozen | None:
    """The frozen parameter that an equation turns into floats."""
    return eqn.params["layer"].function if eqn.primitive == FROZEN else None


def move_of(eqn: Equation) -> Move | None:
    """An equation that moves elements one to one, as a `Move`; a cast or copy is a reshape to the same shape."""
    shape = eqn.out_shapes[0]
    if eqn.primitive == "transpose":
        return "transpose", tuple(int(axis) for axis in eqn.params["permutation"])
    places = [int(axis) for axis in eqn.params.get("broadcast_dimensions", ())]
    same = eqn.primitive == "broadcast_in_dim" and math.prod(shape) == math.prod(eqn.in_shapes[0])
    in_order = eqn.primitive in ("squeeze", "expand_dims") or (same and places == sorted(places))
    in_order = in_order or (eqn.primitive == "reshape" and not eqn.params.get("dimensions"))
    cast = eqn.primitive == "convert_element_type" and eqn.inputs[0].is_float and eqn.outputs[0].is_float
    return ("reshape", shape) if in_order or cast or eqn.primitive in IDENTITIES else None


def behind(made: Mapping[Value, Equation], value: Value) -> tuple[Value, tuple[Move, ...]]:
    """The value before casts and moves, and the moves in order, without those that change nothing."""
    moves: list[Move] = []
    while (eqn := made.get(value)) is not None and len(eqn.inputs) == 1 and eqn.body is None:
        move = move_of(eqn)
        if move is None:
            break
        if move != ("reshape", eqn.in_shapes[0]):
            moves.append(move)
        value = eqn.inputs[0]
    return value, tuple(reversed(moves))


def sunk(program: Program) -> Program:
    """Move "frozen" equations into the bodies of scans and remats, so that no stack of floats is made."""
    equations: list[Equation] = []
    thawing = _thawed(program)
    for eqn in program.equations:
        if eqn.body is not None:
            eqn = _with_codes(eqn, eqn.body, thawing)
        equations.append(eqn)
    return dataclasses.replace(program, equations=tuple(equations))


def _thawed(program: Program) -> dict[Value, Equation]:
    """The floats of frozen parameters, and the equations that compute them."""
    return {eqn.outputs[0]: eqn for eqn in program.equations if frozen_of(eqn) is not None}


def _with_codes(eqn: Equation, body: Program, thawing: Mapping[Value, Equation]) -> Equation:
    scan = eqn.is_scan
    fixed, carried = (eqn.params["num_consts"], eqn.params["num_carry"]) if scan else (len(eqn.inputs), 0)
    outer: list[Value] = []
    inner: list[Value] = []
    inside: list[Equation] = []
    added = 0
    for index, (value, own) in enumerate(zip(eqn.inputs, body.inputs, strict=True)):
        source, sliced = thawing.get(value), index >= fixed + carried
        frozen = None if source is None else frozen_of(source)
        if source is None or frozen is None or fixed <= index < fixed + carried or (sliced and not frozen.stack):
            outer.append(value)
            inner.append(own)
            continue
        parts = tuple(Value(v.shape[1:] if sliced else v.shape, v.dtype, fixed=True) for v in source.inputs)
        outer += source.inputs
        inner += parts
        inside.append(_thawing(source, frozen.of_iteration() if sliced else frozen, parts, own))
        if not sliced:
            added += len(parts) - 1
    if not inside:
        return dataclasses.replace(eqn, body=sunk(body))
    params = {**eqn.params, "num_consts": fixed + added} if scan else eqn.params
    body = dataclasses.replace(body, inputs=tuple(inner), equations=(*inside, *body.equations))
    return dataclasses.replace(eqn, inputs=tuple(outer), params=params, body=sunk(body))


def _thawing(source: Equation, frozen: Frozen, inputs: tuple[Value, ...], output: Value) -> Equation:
    layer = dataclasses.replace(source.params["layer"], function=frozen)
    computed = Computed((source,), inputs, (output,), frozen)
    return dataclasses.replace(source, inputs=inputs, outputs=(output,), params={"layer": layer}, source=computed)


def lookup_of(eqn: Equation) -> bool:
    """Whether an equation looks up rows of a table, its second input, for which nothing but the rows is computed."""
    return eqn.body is None and len(eqn.inputs) == 2 and isinstance(read(eqn, eqn.fixed), Embed)


def with_lookups(program: Program, is_float: Callable[[str], bool]) -> Program:
    """Let lookups in float parts unpack the rows that they read, and not the whole table."""
    equations: list[Equation] = []
    thawing = _thawed(program)
    for eqn in program.equations:
        if eqn.body is not None:
            eqn = dataclasses.replace(eqn, body=with_lookups(eqn.body, is_float))
        elif lookup_of(eqn) and is_float(eqn.scope) and (source := thawing.get(eqn.inputs[1])) is not None:
            frozen = frozen_of(source)
            if frozen is not None and frozen.has_rows:
                eqn = _unpacking(eqn, frozen, source.inputs)
        equations.append(eqn)
    return dataclasses.replace(program, equations=tuple(equations))


def _unpacking(eqn: Equation, frozen: Frozen, packed: tuple[Value, ...]) -> Equation:
    known = Embed().attributes(eqn)
    function = FrozenLookup(frozen, known.get("wraps", False), known.get("fills", False))
    inputs = (eqn.inputs[0], *packed)
    source = Computed((eqn,), inputs, eqn.outputs, function)
    return dataclasses.replace(eqn, primitive="frozen_rows", inputs=inputs, params={}, source=source)


def without_unread(program: Program) -> Program:
    """The program without frozen weights that nothing reads as floats, and without moves of those."""
    return _without(program, set(program.outputs))


def _without(program: Program, read: set[Value]) -> Program:
    kept: list[Equation] = []
    read = set(read)
    for eqn in reversed(program.equations):
        only_moves = move_of(eqn) is not None if len(eqn.inputs) == 1 and eqn.body is None else False
        if (eqn.primitive == FROZEN or (only_moves and eqn.outputs[0].fixed)) and eqn.outputs[0] not in read:
            continue
        if eqn.body is not None:
            eqn = dataclasses.replace(eqn, body=_without(eqn.body, set(eqn.body.outputs)))
        read.update(eqn.inputs)
        kept.append(eqn)
    return dataclasses.replace(program, equations=tuple(reversed(kept)))


def made_of(program: Program, inputs: Collection[Value]) -> set[Value]:
    """The values that are made from some of these inputs and otherwise from parameters and literals only."""
    found = set(inputs)
    for eqn in program.equations:
        if eqn.body is not None:
            pairs = zip(eqn.inputs, eqn.body.inputs, strict=True)
            found |= made_of(eqn.body, {own for value, own in pairs if value in found and own.fixed})
        if all(eqn.fixed) and any(value in found for value in eqn.inputs) and eqn.primitive != ADAPTED:
            found.update(eqn.outputs)
    return found


def uses_of_parameter(
    program: Program, value: Value, *, through: bool = True
) -> Iterator[tuple[Equation, int, tuple[Move, ...], int]]:
    """Every equation that reads a parameter after moves: (equation, operand, moves, scans around it).

    Casts and moves themselves are not among them. A carry of a scan counts as read by the scan. through: if true, what
    reads the parameter with its adapters counts, and not the equation that adds these.
    """
    yield from _uses(program, {value: ()}, 0, through)


def _uses(
    program: Program, known: dict[Value, tuple[Move, ...]], depth: int, through: bool
) -> Iterator[tuple[Equation, int, tuple[Move, ...], int]]:
    known = dict(known)
    for eqn in program.equations:
        found = [(index, known[value]) for index, value in enumerate(eqn.inputs) if value in known]
        if not found:
            continue
        if eqn.body is not None:
            scan = eqn.is_scan
            fixed, carried = (eqn.params["num_consts"], eqn.params["num_carry"]) if scan else (len(eqn.inputs), 0)
            consts, slices = dict[Value, tuple[Move, ...]](), dict[Value, tuple[Move, ...]]()
            for index, moves in found:
                if fixed <= index < fixed + carried or (index >= fixed and moves):
                    yield eqn, index, moves, depth
                elif index < fixed:
                    consts[eqn.body.inputs[index]] = moves
                else:
                    slices[eqn.body.inputs[index]] = moves
            yield from _uses(eqn.body, consts, depth, through)
            yield from _uses(eqn.body, slices, depth + 1, through)
            continue
        move = move_of(eqn) if len(eqn.inputs) == 1 else None
        if eqn.primitive == ADAPTED and found[0][0] == 0 and through:
            known[eqn.outputs[0]] = found[0][1]
            continue
        if move is None:
            for index, moves in found:
                yield eqn, index, moves, depth
            continue
        moved = found[0][1] if move == ("reshape", eqn.in_shapes[0]) else (*found[0][1], move)
        known[eqn.outputs[0]] = moved
