"""Replaces operands that are broadcast explicitly by the tensors before the broadcast.

    select(broadcast(m, (batch, heads, n, n)), x, y)    ->    select(m, x, y)

`jnp.where` broadcasts its mask and its cases to the full shape; models broadcast a class token or a positional
embedding to every example. But a graph takes any batch size, so its constants must not have the batch's size, and a
mask for one head is enough for all heads. The operations broadcast on their own.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from qjax.tracing.composite import composite
from qjax.tracing.program import Composite, Equation, Program, Value
from qjax.tracing.rewrites.dataflow import Flow, moved_axes
from qjax.tracing.rewrites.inline import inlined
from qjax.tracing.rewrites.moves import read

_REPEATS = frozenset({"broadcast_in_dim", "reshape", "squeeze", "expand_dims"})
_BROADCAST = frozenset("add sub mul div max min eq ne lt le gt ge and or xor".split())  # noqa: SIM905
"""Primitives whose operands may have size 1 where the result has more."""


def read_unrepeated(program: Program) -> Program:
    """Give the operands of choices, concatenations and sums the sizes that they had before a broadcast."""
    flow = Flow(program)
    equations: list[Equation] = []
    for eqn in program.equations:
        equations += _unrepeated(eqn, flow)
    return dataclasses.replace(program, equations=tuple(read(equations, program.outputs)))


def _unrepeated(eqn: Equation, flow: Flow) -> list[Equation]:
    if eqn.primitive == "dot_general":
        return _dot(eqn, flow)
    if eqn.primitive not in ("select_n", "concatenate") and eqn.primitive not in _BROADCAST:
        return [eqn]
    if eqn.function is not None:
        return [eqn]
    fixed = eqn.params["dimension"] if eqn.primitive == "concatenate" else None
    shapes = [_own_shape(value, flow, fixed) for value in eqn.inputs]
    if eqn.primitive in _BROADCAST:
        # broadcast data stays, because rewriters and operations expect that form
        fixed_values = [v.fixed or v.constant is not None for v in eqn.inputs]
        triples = zip(shapes, eqn.inputs, fixed_values, strict=True)
        shapes = [own if known and len(v.shape) > 1 else v.shape for own, v, known in triples]
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
        own = _reshaped(value, shape, flow, before, eqn)
        inputs.append(own)
        group += inlined(lambda x, to=value.shape: jnp.broadcast_to(x, to), [own], [value], eqn)[0]
    if eqn.primitive in _BROADCAST:
        return [*before, dataclasses.replace(eqn, inputs=tuple(inputs))]
    return [*before, composite(eqn.primitive, [*group, eqn], inputs, eqn.outputs, eqn.params)]


def _dot(eqn: Equation, flow: Flow) -> list[Equation]:
    """A product whose constant operand is the same along a batch axis: the constant loses that axis.

    The axis becomes a free axis of the other operand, and a transposition restores its position.
    """
    fixed = [index for index, value in enumerate(eqn.inputs) if value.fixed or value.constant is not None]
    if len(fixed) != 1 or isinstance(eqn.source, Composite):
        return [eqn]
    (side,) = fixed
    value = eqn.inputs[side]
    own = _own_shape(value, flow, None)
    contracting, batch = eqn.params["dimension_numbers"]
    dropped = [position for position, axis in enumerate(batch[side]) if own[axis] == 1]
    if not dropped:
        return [eqn]
    gone = {batch[side][position] for position in dropped}
    kept_shape = tuple(n for axis, n in enumerate(value.shape) if axis not in gone)
    row = tuple(1 if axis in gone else n for axis, n in enumerate(value.shape))
    before: list[Equation] = []
    if row == value.shape:
        start = value
    else:
        start = _reshaped(value, own, flow, before, eqn)
    # if the constant repeats along other axes too, it gets its full size along them
    equations, (constant,) = inlined(
        lambda x: lax.reshape(jnp.broadcast_to(x, row) if x.shape != row else x, kept_shape), [start], None, eqn
    )
    before += equations
    place = [axis - sum(g < axis for g in gone) for axis in range(len(value.shape))]
    kept = [position for position in range(len(batch[side])) if position not in dropped]
    shared = [[axes[position] for position in kept] for axes in batch]
    numbers: Any = tuple(
        tuple(tuple(place[a] for a in axes) if s == side else tuple(axes) for s, axes in enumerate(pair))
        for pair in (contracting, shared)
    )
    params = {**eqn.params, "dimension_numbers": numbers}
    other = 1 - side
    free = [a for a in range(len(eqn.in_shapes[other])) if a not in contracting[other] and a not in batch[other]]
    # the free axes of the other operand, including former batch axes, in the order of the product
    ordered = sorted([*free, *(batch[other][position] for position in dropped)])
    count = len(value.shape) - len(gone) - len(contracting[side]) - len(kept)
    first = len(kept) + (count if side == 0 else 0)
    at = {axis: first + index for index, axis in enumerate(ordered)}
    mine = [len(kept) + (0 if side == 0 else len(ordered)) + index for index in range(count)]
    others = [at[axis] for axis in free]
    front = [
        kept.index(position) if position in kept else at[batch[other][position]] for position in range(len(batch[0]))
    ]
    order = (*front, *(mine if side == 0 else others), *(others if side == 0 else mine))

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        return lax.transpose(eqn.source.primitive.bind(a, b, **params), order)

    operands = [constant, eqn.inputs[1]] if side == 0 else [eqn.inputs[0], constant]
    return [*before, *inlined(product, operands, eqn.outputs, eqn)[0]]


def _reshaped(value: Value, shape: tuple[int, ...], flow: Flow, out: list[Equation], like: Equation) -> Value:
    """The source that the value repeats, in the value's rank and in `shape`; new equations are added to `out`."""
    source, ones = _behind(value, flow)[0], _ones(value, flow)
    if source.constant is not None and _whole(source) != source.shape:
        source = Value(_whole(source), source.dtype, np.asarray(source.constant)[:1])
    if source.constant is not None and ones == shape:
        return Value(shape, source.dtype, np.reshape(source.constant, shape))
    equations, (own,) = inlined(
        lambda x: jnp.broadcast_to(lax.reshape(x, ones) if x.shape != ones else x, shape), [source], None, like
    )
    out += equations
    return own


def _ones(value: Value, flow: Flow) -> tuple[int, ...]:
    """The value's shape with size 1 where it repeats its source."""
    source, axes = _behind(value, flow)
    whole = _whole(source)
    return tuple(1 if axis is None else whole[axis] for axis in axes)


def _whole(source: Value) -> tuple[int, ...]:
    """The shape of a source, with size 1 for the examples if it is a literal with the same numbers for each."""
    array = source.constant
    if array is None or isinstance(array, Tracer) or len(source.shape) < 2 or source.shape[0] < 2:
        return source.shape
    array = np.asarray(array)
    return (1, *source.shape[1:]) if (array == array[:1]).all() else source.shape


def _own_shape(value: Value, flow: Flow, fixed: int | None) -> tuple[int, ...]:
    """`_ones`, but the axis `fixed` has its full size."""
    own = _ones(value, flow)
    return tuple(size if axis == fixed else n for axis, (size, n) in enumerate(zip(value.shape, own, strict=True)))


def _behind(value: Value, flow: Flow) -> tuple[Value, tuple[int | None, ...]]:
    axes: tuple[int | None, ...] = tuple(range(len(value.shape)))
    while (eqn := flow.made.get(value)) is not None and eqn.primitive in _REPEATS:
        moved = moved_axes(eqn)
        if moved is None:
            break
        value, axes = eqn.inputs[0], tuple(None if axis is None else moved[axis] for axis in axes)
    return value, axes


def _covering(eqn: Equation, shapes: Sequence[tuple[int, ...]], fixed: int | None) -> list[tuple[int, ...]]:
    """The shapes, with the first operand in full size if no other operand would determine the size of the result."""
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
