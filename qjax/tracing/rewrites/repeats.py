"""Operands that only repeat something, read before they are repeated.

`jnp.where` repeats its mask and its cases to the full shape, a class token is repeated for every example, a positional
embedding as well. A constant that has the size of the batch has no place in a graph for any batch, and a mask of one
head serves all of them: the operations broadcast by themselves.
"""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.tracing.composite import composite
from qjax.tracing.program import Equation, Program, Value
from qjax.tracing.rewrites.flow import Flow, moved_axes
from qjax.tracing.rewrites.inline import inlined
from qjax.tracing.rewrites.moves import read

_REPEATS = frozenset({"broadcast_in_dim", "reshape", "squeeze", "expand_dims"})
_BROADCAST = frozenset("add sub mul div max min eq ne lt le gt ge and or xor".split())  # noqa: SIM905
"""Primitives whose operands may have size 1 where the result has more."""


def read_unrepeated(program: Program) -> Program:
    """The program with the operands of choices, concatenations and sums in the sizes that they have of themselves."""
    flow = Flow(program)
    equations: list[Equation] = []
    for eqn in program.equations:
        equations += _unrepeated(eqn, flow)
    return dataclasses.replace(program, equations=tuple(read(equations, program.outputs)))


def _unrepeated(eqn: Equation, flow: Flow) -> list[Equation]:
    if eqn.primitive not in ("select_n", "concatenate") and eqn.primitive not in _BROADCAST:
        return [eqn]
    if eqn.function is not None:
        return [eqn]
    fixed = eqn.params["dimension"] if eqn.primitive == "concatenate" else None
    shapes = [_own_shape(value, flow, fixed) for value in eqn.inputs]
    if eqn.primitive in _BROADCAST:
        # only what is repeated for every example: a constant of the batch's size
        shapes = [
            s if v.fixed and s and s[0] == 1 != v.shape[0] and len(v.shape) > 1 else v.shape
            for s, v in zip(shapes, eqn.inputs, strict=True)
        ]
    shapes = _covering(eqn, shapes, fixed)
    if all(shape == value.shape for shape, value in zip(shapes, eqn.inputs, strict=True)):
        return [eqn]
    before: list[Equation] = []
    group: list[Equation] = []
    inputs: list[Value] = []
    for value, shape in zip(eqn.inputs, shapes, strict=True):
        if shape == value.shape:
            inputs.append(value)
            continue
        source = _source(value, flow)
        own = _reshaped(source, shape, value, before, eqn)
        inputs.append(own)
        group += inlined(lambda x, to=value.shape: jnp.broadcast_to(x, to), [own], [value], eqn)[0]
    if eqn.primitive in _BROADCAST:
        return [*before, dataclasses.replace(eqn, inputs=tuple(inputs))]
    return [*before, composite(eqn.primitive, [*group, eqn], inputs, eqn.outputs, eqn.params)]


def _reshaped(source: Value, shape: tuple[int, ...], value: Value, out: list[Equation], like: Equation) -> Value:
    """The source in the rank of the value; new equations go to `out`."""
    ones = _shape_of(source, value)
    if source.constant is not None and ones == shape:
        return Value(shape, source.dtype, np.reshape(source.constant, shape))
    equations, (own,) = inlined(
        lambda x: jnp.broadcast_to(lax.reshape(x, ones) if x.shape != ones else x, shape), [source], None, like
    )
    out += equations
    return own


def _shape_of(source: Value, value: Value) -> tuple[int, ...]:
    """The source's sizes along the value's axes, 1 where it is repeated: sizes of a source keep their order."""
    left = [size for size in source.shape if size != 1]
    found: list[int] = []
    for size in reversed(value.shape):
        found.append(left.pop() if left and left[-1] == size else 1)
    return tuple(reversed(found))


def _own_shape(value: Value, flow: Flow, fixed: int | None) -> tuple[int, ...]:
    """The value's shape with size 1 where it repeats what it is made from; the fixed axis keeps its size."""
    source, axes = _behind(value, flow)
    own = tuple(
        size if axis is not None and source.shape[axis] == size else 1
        for size, axis in zip(value.shape, axes, strict=True)
    )
    if _shape_of(source, value) != own:
        # sizes that occur twice leave open which axis is repeated
        return value.shape
    return tuple(size if axis == fixed else n for axis, (size, n) in enumerate(zip(value.shape, own, strict=True)))


def _source(value: Value, flow: Flow) -> Value:
    return _behind(value, flow)[0]


def _behind(value: Value, flow: Flow) -> tuple[Value, tuple[int | None, ...]]:
    axes: tuple[int | None, ...] = tuple(range(len(value.shape)))
    while (eqn := flow.made.get(value)) is not None and eqn.primitive in _REPEATS:
        moved = moved_axes(eqn)
        if moved is None:
            break
        value, axes = eqn.inputs[0], tuple(None if axis is None else moved[axis] for axis in axes)
    return value, axes


def _covering(eqn: Equation, shapes: Sequence[tuple[int, ...]], fixed: int | None) -> list[tuple[int, ...]]:
    """The shapes, with the first operand whole where nothing else would give the result its size."""
    out = eqn.out_shapes[0]
    ranks = {len(shape) for shape in shapes if shape}
    if ranks != {len(out)}:
        return [tuple(shape) for shape in eqn.in_shapes]
    whole = [max((shape[axis] for shape in shapes if shape), default=1) for axis in range(len(out))]
    missing = [axis for axis, size in enumerate(whole) if axis != fixed and size != out[axis]]
    found = [tuple(shape) for shape in shapes]
    if missing:
        for index, own in enumerate(eqn.in_shapes):
            if own and all(own[axis] == out[axis] for axis in missing):
                found[index] = tuple(own)
                return found
        return [tuple(shape) for shape in eqn.in_shapes]
    return found
