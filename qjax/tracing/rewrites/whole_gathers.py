"""Rewrites gathers that take every row of an axis once and in order: they only move axes.

    x[jnp.arange(n)]    ->    x

Such gathers also come from `jax.lax.map(lambda i: f(x[i]), jnp.arange(n))` when all iterations run at once.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from qjax.tracing.program import Equation, Program, Value
from qjax.tracing.rewrites.inline import inlined
from qjax.tracing.rewrites.literals import numbers
from qjax.tracing.rewrites.moves import read


def read_whole(program: Program) -> Program:
    """Rewrite such gathers as moves of axes."""
    if not any(eqn.primitive == "gather" for eqn in program.equations):
        return program
    number = numbers(program)
    equations: list[Equation] = []
    for eqn in program.equations:
        axis = _axis(eqn, number) if eqn.primitive == "gather" else None
        equations += [eqn] if axis is None else inlined(_move_axes(eqn, axis), eqn.inputs[:1], eqn.outputs, eqn)[0]
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
