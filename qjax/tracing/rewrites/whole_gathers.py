"""Rewrites gathers that need no table: they only move axes, or compute what they would look up.

| program | becomes |
| --- | --- |
| `x[jnp.arange(n)]` | `x` |
| `jnp.arange(n)[i]` | `i` where it is in range |

The first also comes from `jax.lax.map(lambda i: f(x[i]), jnp.arange(n))` when all iterations run at once, the second
from `jnp.repeat(jnp.arange(experts), sizes, total_repeat_length=rows)`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.tracing.program import Equation, Program, Value
from qjax.tracing.rewrites.inline import inlined
from qjax.tracing.rewrites.literals import numbers
from qjax.tracing.rewrites.moves import read


def read_whole(program: Program) -> Program:
    """Rewrite such gathers."""
    if not any(eqn.primitive == "gather" for eqn in program.equations):
        return program
    number = numbers(program)
    equations: list[Equation] = []
    for eqn in program.equations:
        if eqn.primitive != "gather":
            equations.append(eqn)
        elif (axis := _axis(eqn, number)) is not None:
            equations += inlined(_move_axes(eqn, axis), eqn.inputs[:1], eqn.outputs, eqn)[0]
        elif (computed := _progression(eqn, number)) is not None:
            equations += inlined(computed, eqn.inputs[1:], eqn.outputs, eqn)[0]
        else:
            equations.append(eqn)
    return dataclasses.replace(program, equations=tuple(read(equations, program.outputs)))


def _axis(eqn: Equation, number: Callable[[Value], np.ndarray | None]) -> int | None:
    """The axis whose rows a gather takes completely and in order; along the other axes it takes everything."""
    n, shape, sizes = eqn.params["dimension_numbers"], eqn.in_shapes[0], eqn.params["slice_sizes"]
    mapped = [int(axis) for axis in n.start_index_map]
    parts = [axis for axis in range(len(shape)) if axis in n.collapsed_slice_dims or sizes[axis] != shape[axis]]
    # in a batch of one, the only row is all of it
    parts = parts or [axis for axis in mapped if shape[axis] == 1][:1]
    if getattr(n, "operand_batching_dims", ()) or len(parts) != 1 or sizes[parts[0]] != 1 or parts[0] not in mapped:
        return None
    (axis,) = parts
    if (indices := number(eqn.inputs[1])) is None:
        return None
    columns = indices.reshape(-1, len(mapped)).T
    rows = np.arange(shape[axis])
    same = (np.array_equal(a, rows if b == axis else 0 * rows) for a, b in zip(columns, mapped, strict=True))
    return axis if all(same) else None


def _move_axes(eqn: Equation, axis: int) -> Callable[[Any], Any]:
    n, shape = eqn.params["dimension_numbers"], eqn.out_shapes[0]
    offset = tuple(n.offset_dims)
    # the axes of the indices, then those of the slices
    order = [*(place for place in range(len(shape)) if place not in offset), *offset]

    def moved(x: Any) -> Any:
        apart = jnp.moveaxis(x, axis, 0).reshape([shape[place] for place in order])
        return jnp.transpose(apart, np.argsort(order).tolist())

    return moved


def _progression(eqn: Equation, number: Callable[[Value], np.ndarray | None]) -> Callable[[Any], Any] | None:
    """The function of the indices that a gather from integers at equal distances computes; None for other gathers."""
    n, table = eqn.params["dimension_numbers"], number(eqn.inputs[0])
    if table is None or table.ndim != 1 or table.size < 2 or not jnp.issubdtype(table.dtype, jnp.integer):
        return None
    mode, modes = eqn.params["mode"], lax.GatherScatterMode
    if mode not in (modes.CLIP, modes.FILL_OR_DROP, modes.PROMISE_IN_BOUNDS):
        return None
    if tuple(n.collapsed_slice_dims) != (0,) or number(eqn.inputs[1]) is not None:
        return None
    first, step = table[0], (table[1:] - table[:-1])[0]  # numpy warns where scalars wrap, as unsigned steps do
    if not np.array_equal(table, first + step * np.arange(table.size, dtype=table.dtype)):
        return None
    last, fill = np.asarray(table.size - 1, eqn.in_dtypes[1]), eqn.params["fill_value"]
    known = jnp.iinfo(table.dtype)
    unknown = known.min if jnp.issubdtype(table.dtype, jnp.signedinteger) else known.max

    def computed(at: Any) -> Any:
        at = at.reshape(at.shape[:-1])
        if mode == modes.CLIP:
            at = jnp.clip(at, np.zeros_like(last), last)
        found = first + step * at.astype(table.dtype)
        if mode != modes.FILL_OR_DROP:
            return found
        inside = (at >= np.zeros_like(last)) & (at <= last)
        return jnp.where(inside, found, np.asarray(unknown if fill is None else fill, table.dtype))

    return computed
