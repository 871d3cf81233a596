"""Functions of an integer in the data: sines of positions, decays of distances, times of day.

`sin(positions[..., None] / timescale)` is a function of one integer, and its constants vary along other axes. So it is
a table with one row per integer. With a quantized angle, all positions would share 256 angles. Such a chain becomes one
equation "integer_function", and `tracing.integers` makes its table once the range of the integers is known.

Affine steps and clamps alone need no table: there the integer itself is the accumulator.
"""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from qjax.tracing.arrays import OUTER, knows
from qjax.tracing.composite import composite, replaced
from qjax.tracing.expressions import IDENTITIES
from qjax.tracing.program import Equation, Program, Value
from qjax.tracing.rewrites.flow import Axes, Flow, moved_axes, pruned
from qjax.tracing.rewrites.inline import inlined
from qjax.tracing.rewrites.literals import numbers

NAME = "integer_function"
"""The primitive of such an equation: operands are the integers, then the parameters that the function reads."""

Number = Callable[[Value], np.ndarray | None]

_OTHERS = frozenset({"softmax", "log_softmax", "logsumexp", "standardize"})
_AFFINE = IDENTITIES | frozenset(
    """add add_any sub mul div neg max min clamp relu convert_element_type concatenate slice rev broadcast_in_dim
    reshape squeeze expand_dims transpose""".split()  # noqa: SIM905
)


@dataclasses.dataclass(frozen=True, eq=False)
class _Chain:
    """A value that is a function of integers.

    root: the integers. axes: per axis of the value, the axis of the root that it is, or None. proper: whether affine
    steps and clamps alone cannot say it.
    """

    root: Value
    axes: Axes
    proper: bool


def find_integer_functions(program: Program) -> Program:
    """The program with each such function that something else reads as one equation."""
    if not any(_begins(eqn) for eqn in program.equations):
        return program
    flow, number = Flow(program), numbers(program)
    chains: dict[Value, _Chain] = {}
    for eqn in program.equations:
        found = _chain(flow, eqn, chains, number)
        if found is not None:
            chains[eqn.outputs[0]] = found
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
    # the transposition back defines the chain's last value, which the group's own equation defined before
    equations = tuple(new for eqn in done.equations for new in (eqn, *behind.get(eqn, ())))
    done = dataclasses.replace(done, equations=equations)
    return pruned(done, set(flow.between(list(ends), ())))


def _begins(eqn: Equation) -> bool:
    """Whether an equation makes floats of integers that the data holds: a cast, or an outer product with floats."""
    if eqn.primitive not in ("convert_element_type", OUTER) or not eqn.outputs[0].is_float or not knows(eqn):
        return False
    data = [value for value in eqn.inputs if not _fixed(value)]
    return len(data) == 1 and bool(jax.dtypes.issubdtype(data[0].dtype, np.integer))


def _end(flow: Flow, value: Value, chains: dict[Value, _Chain]) -> Value:
    """The chain's end, or what it repeats: the table holds everything once."""
    while (eqn := flow.made[value]).primitive == "broadcast_in_dim" and eqn.inputs[0] in chains:
        value = eqn.inputs[0]
    return value


def _is_read(flow: Flow, value: Value, chains: dict[Value, _Chain]) -> bool:
    readers = flow.readers.get(value, ())
    return value in flow.program.outputs or any(reader.outputs[0] not in chains for reader in readers)


def _chain(flow: Flow, eqn: Equation, chains: dict[Value, _Chain], number: Number) -> _Chain | None:
    """What the result of an equation is of integers, if it is that."""
    if eqn.body is not None or len(eqn.outputs) != 1 or eqn.function in _OTHERS or not knows(eqn):
        return None
    (output,) = eqn.outputs
    if not output.is_float and output.dtype != np.bool_:
        return None
    data = [value for value in eqn.inputs if not _fixed(value)]
    if _begins(eqn):
        source = flow.behind(data[0])
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
    """Which axes of the result are the integers' own; None where a constant differs from integer to integer."""
    rank = len(eqn.out_shapes[0])
    moved = moved_axes(eqn)
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


def _fixed(value: Value) -> bool:
    return value.fixed or value.constant is not None


def _readable(flow: Flow, value: Value, number: Number) -> bool:
    """Whether a constant has the same bits wherever it is computed: of literals, or of parameters in float64."""
    if number(value) is not None:
        return True
    eqn = flow.made.get(value)
    if eqn is None:
        return value.constant is None
    return eqn.body is None and knows(eqn) and all(_readable(flow, v, number) for v in eqn.inputs)
