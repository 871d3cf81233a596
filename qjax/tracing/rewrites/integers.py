"""Finds functions of an integer in the data: sines of positions, decays of distances, times of day.

    sin(cast(positions)[..., None] / timescale)    ->    integer_function(positions)

This is a function of one integer, whose constants vary along other axes, so it can be a table with one row per integer.
If the angle were quantized instead, all positions would share 256 angles. Such a chain becomes one equation
"integer_function", and `tracing.integer_tables` makes its table once the range of the integers is known.

Affine steps and clamps alone need no table, because there the integer itself is the accumulator.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from qjax.tracing.composite import composite, replaced
from qjax.tracing.expressions import IDENTITIES
from qjax.tracing.numpy_evaluator import OUTER, knows
from qjax.tracing.program import Equation, Program, Value
from qjax.tracing.rewrites.dataflow import Axes, Flow, moved_axes, pruned
from qjax.tracing.rewrites.inline import inlined
from qjax.tracing.rewrites.literals import numbers

NAME = "integer_function"
"""The primitive of such an equation; its operands are the integers, then the parameters that the function reads."""

Number = Callable[[Value], np.ndarray | None]

_OTHERS = frozenset({"softmax", "log_softmax", "logsumexp", "standardize"})
_AFFINE = IDENTITIES | frozenset(
    """add add_any sub mul div neg max min clamp relu convert_element_type concatenate slice rev broadcast_in_dim
    reshape squeeze expand_dims transpose""".split()  # noqa: SIM905
)


_CURVES = frozenset({"cos", "exp", "exp2", "log", "log1p", "logistic", "rsqrt", "sin", "sqrt", "square", "tan", "tanh"})


@dataclasses.dataclass(frozen=True, eq=False)
class _Chain:
    """A value that is a function of integers.

    root: the integers. axes: per axis of the value, the axis of the root that it is, or None. proper: whether it is
    more than affine steps and clamps.
    """

    root: Value
    axes: Axes
    proper: bool


def find_integer_functions(program: Program) -> Program:
    """Replace each such function that something else reads by one equation."""
    if not any(_begins(eqn) for eqn in program.equations):
        return program
    slices = _slices(program)
    if not slices:
        return _find_chains(program)
    sliced, integers = _with_slices_of_integers(program, slices)
    roots = {eqn.inputs[0] for eqn in _find_chains(sliced).equations if eqn.primitive == NAME}
    wanted = {value: moves for value, moves in slices.items() if integers[value] in roots}
    return _find_chains(_with_slices_of_integers(program, wanted)[0])


def _slices(program: Program) -> dict[Value, list[Equation]]:
    """Float slices of integers in the data, such as one of the coordinates of a position.

    Each consists of the cast before it, the slice, and the equation that drops the axis of one element after it.
    """
    flow, found = Flow(program), dict[Value, list[Equation]]()
    casts = {eqn.outputs[0]: eqn for eqn in program.equations if eqn.primitive != OUTER and _begins(eqn)}
    for eqn in program.equations:
        if eqn.primitive != "slice" or eqn.inputs[0] not in casts:
            continue
        moves = [casts[eqn.inputs[0]], eqn]
        readers = flow.readers.get(eqn.outputs[0], ())
        if len(readers) == 1 and readers[0].primitive == "squeeze" and eqn.outputs[0] not in program.outputs:
            moves.append(readers[0])
        found[moves[-1].outputs[0]] = moves
    return found


def _with_slices_of_integers(
    program: Program, slices: Mapping[Value, Sequence[Equation]]
) -> tuple[Program, dict[Value, Value]]:
    """The program that slices the integers before casting them, and these integer slices."""
    ends = {moves[-1]: moves for moves in slices.values()}
    equations: list[Equation] = []
    integers: dict[Value, Value] = {}
    for eqn in program.equations:
        if eqn not in ends:
            equations.append(eqn)
            continue
        cast, *moves = ends[eqn]
        (value,) = cast.inputs
        for move in moves:
            moved = Value(move.out_shapes[0], value.dtype)
            equations.append(dataclasses.replace(move, inputs=(value,), outputs=(moved,)))
            value = moved
        equations.append(dataclasses.replace(cast, inputs=(value,), outputs=eqn.outputs))
        integers[eqn.outputs[0]] = value
    unread = {eqn for moves in slices.values() for eqn in moves[:-1]}
    return pruned(dataclasses.replace(program, equations=tuple(equations)), unread), integers


def _before_joins(program: Program) -> Program:
    """Move a function of concatenated integers in front of the concatenation: each part has one integer only."""
    flow = Flow(program)
    chains = _chains(flow)

    def joint(value: Value) -> Equation | None:
        eqn = flow.made.get(value)
        if value in chains or eqn is None or eqn.primitive != "concatenate":
            return None
        return eqn if all(part in chains or joint(part) for part in eqn.inputs) else None

    def moved(eqn: Equation, value: Value, output: Value) -> list[Equation]:
        if (join := joint(value)) is None:
            return [dataclasses.replace(eqn, inputs=(value,), outputs=(output,))]
        parts = tuple(Value(part.shape, output.dtype) for part in join.inputs)
        own = [new for part, result in zip(join.inputs, parts, strict=True) for new in moved(eqn, part, result)]
        return [*own, dataclasses.replace(join, inputs=parts, outputs=(output,))]

    curves = {eqn for eqn in program.equations if eqn.primitive in _CURVES and joint(eqn.inputs[0]) is not None}
    if not curves:
        return program
    equations: list[Equation] = []
    for eqn in program.equations:
        equations += moved(eqn, eqn.inputs[0], eqn.outputs[0]) if eqn in curves else [eqn]
    joints = {eqn for eqn in program.equations if eqn.primitive == "concatenate"}
    return pruned(dataclasses.replace(program, equations=tuple(equations)), joints)


def _chains(flow: Flow) -> dict[Value, _Chain]:
    number, chains = numbers(flow.program), dict[Value, _Chain]()
    for eqn in flow.program.equations:
        found = _chain(flow, eqn, chains, number)
        if found is not None:
            chains[eqn.outputs[0]] = found
    return chains


def _find_chains(program: Program) -> Program:
    program = _before_joins(program)
    flow = Flow(program)
    chains = _chains(flow)
    groups: list[Equation] = []
    behind: dict[Equation, list[Equation]] = {}
    ends = dict.fromkeys(
        _end(flow, v, chains) for v, chain in chains.items() if chain.proper and _is_read(flow, v, chains)
    )
    for value in ends:
        chain, rank = chains[value], len(value.shape)
        own = [axis for axis in range(rank) if chain.axes[axis] is not None]
        if not chain.proper or not value.is_float or sorted(chain.axes[a] or 0 for a in own) != list(range(len(own))):
            continue
        if len(own) != len(chain.root.shape):
            continue
        order = [*sorted(own, key=lambda axis, axes=chain.axes: axes[axis] or 0)]
        order += [axis for axis in range(rank) if axis not in own]
        equations = list(flow.between([value], [chain.root]))
        parameters = sorted(flow.leaves(equations, [chain.root]), key=program.inputs.index)
        result = value
        if order != list(range(rank)):
            before, (result,) = inlined(lambda x, order=order: x.transpose(order), [value], None, equations[-1])
            back = [order.index(axis) for axis in range(rank)]
            after, _ = inlined(lambda x, back=back: x.transpose(back), [result], [value], equations[-1])
            equations += before
        group = composite(NAME, equations, (chain.root, *parameters), (result,))
        groups.append(group)
        behind[group] = after if result is not value else []
    if not groups:
        return program
    done = replaced(program, groups)
    # the transposition back now defines the chain's last value, which the group's own equation defined before
    equations = tuple(new for eqn in done.equations for new in (eqn, *behind.get(eqn, ())))
    done = dataclasses.replace(done, equations=equations)
    return pruned(done, set(flow.between(list(ends), ())))


def _begins(eqn: Equation) -> bool:
    """Whether an equation turns integers of the data into floats: a cast, or an outer product with floats."""
    if eqn.primitive not in ("convert_element_type", OUTER) or not eqn.outputs[0].is_float or not knows(eqn):
        return False
    data = [value for value in eqn.inputs if not _fixed(value)]
    return len(data) == 1 and bool(jax.dtypes.issubdtype(data[0].dtype, np.integer))


def _end(flow: Flow, value: Value, chains: dict[Value, _Chain]) -> Value:
    """The chain's end, or the value that it repeats, because the table holds each number once."""
    while (eqn := flow.made[value]).primitive == "broadcast_in_dim" and eqn.inputs[0] in chains:
        value = eqn.inputs[0]
    return value


def _is_read(flow: Flow, value: Value, chains: dict[Value, _Chain]) -> bool:
    readers = flow.readers.get(value, ())
    return value in flow.program.outputs or any(reader.outputs[0] not in chains for reader in readers)


def _chain(flow: Flow, eqn: Equation, chains: dict[Value, _Chain], number: Number) -> _Chain | None:
    """The result of an equation as a function of integers, if it is one."""
    if eqn.body is not None or len(eqn.outputs) != 1 or eqn.function in _OTHERS or not knows(eqn):
        return None
    (output,) = eqn.outputs
    if not output.is_float and output.dtype != np.bool_:
        return None
    data = [value for value in eqn.inputs if not _fixed(value)]
    if _begins(eqn):
        source = flow.unrepeated(data[0])
        fixed = [value for value in eqn.inputs if value is not data[0]]
        if _fixed(source.value) or any(not _readable(flow, value, number) for value in fixed):
            return None
        parts = [source.axes if value is data[0] else (None,) * len(value.shape) for value in eqn.inputs]
        return _Chain(source.value, tuple(axis for part in parts for axis in part), False)
    if not data or any(value not in chains for value in data):
        return None
    known = [chains[value] for value in data]
    if any(chain.root is not known[0].root for chain in known):
        return None
    if any(not _readable(flow, value, number) for value in eqn.inputs if _fixed(value)):
        return None
    axes = _axes(flow, eqn, chains)
    if axes is None:
        return None
    affine = (eqn.primitive in _AFFINE and (len(data) == 1 or eqn.primitive not in ("mul", "div"))) or (
        eqn.primitive == OUTER
    )
    affine = affine and not (eqn.primitive == "div" and eqn.inputs[0] is not data[0])
    return _Chain(known[0].root, axes, not affine or any(chain.proper for chain in known))


def _axes(flow: Flow, eqn: Equation, chains: dict[Value, _Chain]) -> Axes | None:
    """Which axes of the result are axes of the integers; None if a constant differs between integers."""
    rank = len(eqn.out_shapes[0])
    moved = moved_axes(eqn)
    if moved is None and eqn.primitive == "reshape":
        return _reshaped(chains[eqn.inputs[0]].axes, eqn.in_shapes[0], eqn.out_shapes[0])
    if moved is not None:
        inner = chains[eqn.inputs[0]].axes
        return tuple(None if axis is None else inner[axis] for axis in moved)
    if eqn.primitive == OUTER:
        parts = [chains[v].axes if v in chains else (None,) * len(v.shape) for v in eqn.inputs]
        return (*parts[0], *parts[1])
    found: list[int | None] = [None] * rank
    for value in eqn.inputs:
        for axis, source in enumerate(chains[value].axes if value in chains else ()):
            if source is not None and found[axis] not in (None, source):
                return None
            found[axis] = found[axis] if source is None else source
    fixed = [value for value in eqn.inputs if value not in chains and value.shape]
    if any(found[axis] is not None for value in fixed for axis in flow.varies(value)):
        return None
    if eqn.primitive in ("concatenate", "slice", "rev"):
        changed = {
            "concatenate": lambda: [eqn.params["dimension"]],
            "rev": lambda: eqn.params["dimensions"],
            "slice": lambda: [a for a in range(rank) if eqn.in_shapes[0][a] != eqn.out_shapes[0][a]],
        }[eqn.primitive]()
        if any(found[axis] is not None for axis in changed):
            return None
    return tuple(found)


def _reshaped(axes: Axes, before: Sequence[int], after: Sequence[int]) -> Axes | None:
    """The axes after a reshape that only joins or splits axes other than the integers' own; None for any other."""
    found: list[int | None] = []
    start = 0
    if 0 in before:
        return None
    while len(found) < len(after):
        if start == len(before):
            return (*found, *(None,) * (len(after) - len(found)))  # the remaining axes have one element
        first, stop = len(found), start + 1
        end = first + 1
        while (own := math.prod(before[start:stop])) != (other := math.prod(after[first:end])):
            if own < other:
                stop += 1
            else:
                end += 1
        block = [axis for axis in axes[start:stop] if axis is not None]
        if (stop - start, end - first) == (1, 1):
            found.append(axes[start])
        elif block:
            return None
        else:
            found += [None] * (end - first)
        start = stop
    return tuple(found) if all(axis is None for axis in axes[start:]) else None


def _fixed(value: Value) -> bool:
    return value.fixed or value.constant is not None


def _readable(flow: Flow, value: Value, number: Number) -> bool:
    """Whether a constant has the same bits wherever it is computed: from literals, or from parameters in float64."""
    if number(value) is not None:
        return True
    eqn = flow.made.get(value)
    if eqn is None:
        return value.constant is None
    return eqn.body is None and knows(eqn) and all(_readable(flow, v, number) for v in eqn.inputs)
