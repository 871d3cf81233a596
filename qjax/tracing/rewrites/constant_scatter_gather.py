"""Rewrites reads and writes at constant positions as slices, concatenations, choices and a gather along one axis.

| program | becomes |
| --- | --- |
| `x.at[:, 0].set(y)`, `lax.dynamic_update_slice` | a concatenation of the parts of x around y |
| `x.at[:, rows].set(y)` | a gather from the concatenation of x and y |
| `x.at[:, rows].set(0.0)` | a choice by a mask |
| `jnp.diagonal`, `x[:, i, j]` | a gather along the flattened axes |

Positions that are data are rewritten by `dynamic_slices`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.tracing.program import Equation, Program
from qjax.tracing.rewrites.dataflow import Flow
from qjax.tracing.rewrites.inline import inlined
from qjax.tracing.rewrites.literals import numbers
from qjax.tracing.rewrites.moves import read

Array = Any

_COMBINED: dict[str, Callable[[Array, Array], Array]] = {
    "scatter": lambda old, new: new,
    "scatter-add": lax.add,
    "scatter-sub": lax.sub,
    "scatter-mul": lax.mul,
    "scatter-min": lax.min,
    "scatter-max": lax.max,
}

KINDS = frozenset({"gather", "dynamic_update_slice", *_COMBINED})
"""The primitives that this rewriter reads."""


def place_constants(program: Program) -> Program:
    """Rewrite those reads and writes."""
    if not any(eqn.primitive in KINDS for eqn in program.equations):
        return program
    number, flow = numbers(program), Flow(program)
    equations: list[Equation] = []
    for eqn in program.equations:
        function, count = None, 1
        if eqn.primitive == "dynamic_update_slice":
            starts = [number(v) for v in eqn.inputs[2:]]
            if all(start is not None for start in starts):
                function, count = _update([int(np.asarray(start)) for start in starts]), 2
        elif eqn.primitive == "gather" and (indices := number(eqn.inputs[1])) is not None:
            function = _flatten_gather(eqn, indices)
        elif eqn.primitive in _COMBINED and (indices := number(eqn.inputs[1])) is not None:
            function, count = _write_scatter(eqn, indices, flow)
        if function is None:
            equations.append(eqn)
            continue
        given = (eqn.inputs[0], eqn.inputs[-1 if eqn.primitive in _COMBINED else 1])[:count]
        equations += inlined(function, given, eqn.outputs, eqn)[0]
    return dataclasses.replace(program, equations=tuple(read(equations, program.outputs)))


# ---------------------------------------------------------------------------- writing


def _put(x: Array, part: Array, starts: Sequence[int]) -> Array:
    """x with a part of it replaced."""
    axis = next((axis for axis in range(x.ndim) if part.shape[axis] != x.shape[axis]), None)
    if axis is None:
        return part
    start = starts[axis]
    stop = start + part.shape[axis]
    middle = _put(lax.slice_in_dim(x, start, stop, axis=axis), part, starts)
    around = (lax.slice_in_dim(x, 0, start, axis=axis), middle, lax.slice_in_dim(x, stop, None, axis=axis))
    return lax.concatenate([piece for piece in around if piece.shape[axis]], axis)


def _update(starts: Sequence[int]) -> Callable[..., Array]:
    def update(x: Array, part: Array) -> Array:
        sizes = zip(starts, x.shape, part.shape, strict=True)
        # earlier equations have wrapped negative starts; the rest is clamped, as in JAX
        return _put(x, part, [min(max(start, 0), size - own) for start, size, own in sizes])

    return update


def _write_scatter(eqn: Equation, indices: np.ndarray, flow: Flow) -> tuple[Callable[..., Array] | None, int]:
    """A scatter as a function of its operand and, if the count is 2, of what it writes."""
    x, updates, n = eqn.inputs[0], eqn.inputs[-1], eqn.params["dimension_numbers"]
    mapped, window = tuple(n.scatter_dims_to_operand_dims), tuple(n.update_window_dims)
    if tuple(getattr(n, "operand_batching_dims", ())):
        return None, 1
    inserted = set(n.inserted_window_dims)
    sizes = iter(updates.shape[axis] for axis in window)
    shape = [1 if axis in inserted else next(sizes) for axis in range(len(x.shape))]
    if indices.size == len(mapped):
        starts = [0] * len(x.shape)
        for axis, start in zip(mapped, indices.reshape(-1), strict=True):
            starts[axis] = int(start)
        if any(not 0 <= s <= size - own for s, size, own in zip(starts, x.shape, shape, strict=True)):
            return None, 1
        return _one_place(_COMBINED[eqn.primitive], starts, shape), 2
    if eqn.primitive not in ("scatter", "scatter-add"):
        return None, 1
    value = flow.number(updates)
    if value is not None and eqn.primitive == "scatter":
        with jax.ensure_compile_time_eval():
            ones = [np.zeros(x.shape, x.dtype), indices, np.ones(updates.shape, x.dtype)]
            mask = np.asarray(eqn.bind(*ones)[0]) != 0
        if x.shape and (mask == mask[:1]).all():
            mask = mask[:1]
        return lambda x: jnp.where(jnp.broadcast_to(mask, x.shape), np.asarray(value, x.dtype), x), 1
    whole = all(
        own == (1 if axis in mapped else size) for axis, (own, size) in enumerate(zip(shape, x.shape, strict=True))
    )
    if len(mapped) != 1 or inserted != set(mapped) or not whole or indices.ndim != 2:
        return None, 1
    (axis,), rows = mapped, indices[:, 0]
    if (rows < 0).any() or (rows >= x.shape[axis]).any():
        return None, 1
    (counted,) = (i for i in range(len(updates.shape)) if i not in window)
    if eqn.primitive == "scatter-add":
        return _add_slices(axis, counted, rows, alone=flow.number(x) == 0), 2
    return _rows(axis, counted, rows), 2


def _one_place(combine: Callable[..., Array], starts: list[int], shape: list[int]) -> Callable[..., Array]:
    def write(x: Array, updates: Array) -> Array:
        part = lax.reshape(updates, shape)
        if combine is not _COMBINED["scatter"]:
            old = lax.slice(x, starts, [start + size for start, size in zip(starts, shape, strict=True)])
            part = combine(old, part)
        return _put(x, part, starts)

    return write


def _rows(axis: int, counted: int, rows: np.ndarray) -> Callable[..., Array]:
    """Slices along an axis, each from x or from what is written; if a row is written twice, the last one counts."""

    def write(x: Array, updates: Array) -> Array:
        size = x.shape[axis]
        source = np.arange(size)
        source[rows] = size + np.arange(len(rows))
        both = lax.concatenate([x, jnp.moveaxis(updates, counted, axis)], axis)
        return jnp.take(both, source, axis=axis, mode="clip")

    return write


def _add_slices(axis: int, counted: int, rows: np.ndarray, alone: bool) -> Callable[..., Array]:
    """Slices added at given rows (`jax.ops.segment_sum`), as a sum of as many slices per row as any row receives.

    Rows that receive fewer add a slice of zeros. alone: the slices are added to zero.
    """

    def write(x: Array, updates: Array) -> Array:
        size = x.shape[axis]
        most = int(np.bincount(rows, minlength=1).max(initial=1))
        source = np.full((size, most), len(rows))
        filled = np.zeros(size, int)
        for place, row in enumerate(rows):
            source[row, filled[row]] = place
            filled[row] += 1
        moved = jnp.moveaxis(updates, counted, axis)
        padded = lax.pad(moved, np.zeros((), x.dtype), [(0, int(a == axis), 0) for a in range(moved.ndim)])
        taken = jnp.take(padded, source.reshape(-1), axis=axis, mode="clip")
        parts = lax.reshape(taken, (*x.shape[:axis], size, most, *x.shape[axis + 1 :]))
        total = jnp.sum(parts, axis=axis + 1, dtype=x.dtype)
        return total if alone else x + total

    return write


# ---------------------------------------------------------------------------- reading


def _flatten_gather(eqn: Equation, indices: np.ndarray) -> Callable[..., Array] | None:
    """A gather of single elements along neighbouring axes, as a gather along those axes flattened."""
    x, n = eqn.inputs[0], eqn.params["dimension_numbers"]
    mapped, sizes = tuple(n.start_index_map), tuple(eqn.params["slice_sizes"])
    if len(mapped) < 2 or tuple(n.collapsed_slice_dims) != mapped or tuple(getattr(n, "operand_batching_dims", ())):
        return None
    first, stop = mapped[0], mapped[-1] + 1
    lengths = x.shape[first:stop]
    if mapped != tuple(range(first, stop)) or any(
        size != (1 if axis in mapped else x.shape[axis]) for axis, size in enumerate(sizes)
    ):
        return None
    rank = indices.ndim - 1
    kept = (*range(first), *range(first + rank, rank + len(x.shape) - len(mapped)))
    if tuple(n.offset_dims) != kept or (indices < 0).any() or (indices >= np.array(lengths)).any():
        return None
    flat = np.ravel_multi_index(tuple(np.moveaxis(indices, -1, 0)), lengths)

    def take(x: Array) -> Array:
        row = lax.reshape(x, (*x.shape[:first], int(np.prod(lengths)), *x.shape[stop:]))
        return jnp.take(row, flat, axis=first, mode="clip")

    return take
