"""Rewrites reads and writes at data-dependent positions: a cache of keys and values, a ring buffer, `x.at[i].set(y)`.

    dynamic_slice(x, (0, s, 0), sizes)         ->    take(x, s + arange(n), axis=1)
    dynamic_update_slice(x, y, (0, s, 0))      ->    where(s <= place < s + n, y[place - s], x)
    x.at[:, s].set(y)                          ->    where(place == s, y, x)
    x.at[:, s].add(y)                          ->    x + where(place == s, y, 0)

As in JAX, slices are moved so that they fit, and `.at` drops writes that do not fit. Under `jax.vmap` slices are
gathers and scatters. A scatter can have positions for each example (`jax.vmap`, `x.at[jnp.arange(n), s]`); several
writes happen one after the other. Codes are selected and never computed, because a cache, the values written into it
and the result share one quantizer. The code that is read many steps later is therefore the one that was written.

For constant positions see `constant_scatter_gather`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.tracing.program import Equation, Program, Value
from qjax.tracing.rewrites.dataflow import Flow
from qjax.tracing.rewrites.inline import inlined
from qjax.tracing.rewrites.literals import numbers
from qjax.tracing.rewrites.moves import lookups

Array = Any
Number = Callable[[Value], np.ndarray | None]

_SCATTERS = ("scatter", "scatter-add")
KINDS = frozenset({"gather", "dynamic_slice", "dynamic_update_slice", *_SCATTERS})
"""The primitives that this rewriter reads."""

_MOST_WRITES = 32
"""A scatter with more writes is reported as an error, because each write is a choice over the whole tensor."""


def place_slices(program: Program) -> Program:
    """Rewrite those reads and writes as comparisons and choices."""
    if not any(eqn.primitive in KINDS for eqn in program.equations):
        return program
    number, flow = numbers(program), Flow(program)
    equations: list[Equation] = []
    for eqn in program.equations:
        function, inputs = None, eqn.inputs
        if eqn.primitive in ("gather", "scatter"):
            function, inputs = _one_slice(eqn, flow, number)
        if function is None and eqn.primitive in _SCATTERS:
            function, inputs = _scatter(eqn, flow, number)
        elif eqn.primitive.startswith("dynamic") and any(number(v) is None for v in eqn.inputs if not v.shape):
            reads = eqn.primitive == "dynamic_slice"
            function = _slice_function(eqn.out_shapes[0]) if reads else _updated(eqn.in_shapes[1])
        equations += [eqn] if function is None else lookups(inlined(function, inputs, eqn.outputs, eqn)[0])
    return dataclasses.replace(program, equations=tuple(equations))


def _partial(part: Sequence[int], whole: Sequence[int]) -> list[int]:
    """The axes along which a slice does not cover the whole array."""
    return [axis for axis, (length, size) in enumerate(zip(part, whole, strict=True)) if length != size]


def _slice_function(part: Sequence[int]) -> Callable[..., Array]:
    """The slice of that shape, as a function of the array and of the slice's start along each axis."""

    def taken(x: Array, *starts: Array) -> Array:
        for axis in _partial(part, x.shape):
            length = part[axis]
            indices = clamped(starts[axis], x.shape[axis] - length) + jnp.arange(length, dtype=jnp.int32)
            x = jnp.take(x, indices, axis=axis, mode="clip")
        return x

    return taken


def _updated(part: Sequence[int]) -> Callable[..., Array]:
    """The array with a slice of that shape replaced, as a function of the array, the slice and the slice's starts."""

    def updated(x: Array, update: Array, *starts: Array) -> Array:
        inside: list[Array] = []
        for axis in _partial(part, x.shape):
            size, length = x.shape[axis], part[axis]
            places = _places(x, axis) - clamped(starts[axis], size - length)
            inside.append((places >= 0) & (places < length) if length > 1 else places == 0)
            if length > 1:
                update = jnp.take(update, jnp.clip(places.reshape(-1), 0, length - 1), axis=axis, mode="clip")
        if not inside:
            # everything is overwritten
            return update
        return jnp.where(_all(inside), jnp.broadcast_to(update, x.shape), x)

    return updated


def _one_slice(eqn: Equation, flow: Flow, number: Number) -> tuple[Callable[..., Array] | None, tuple[Value, ...]]:
    """A gather or scatter of one slice, which `jax.vmap` makes of a dynamic slice with one start for all.

    None for a gather of single elements along one axis, which is a `take` or a choice already, and for any other.
    """
    n, reads, x = eqn.params["dimension_numbers"], eqn.primitive == "gather", eqn.in_shapes[0]
    dropped = set(n.collapsed_slice_dims if reads else n.inserted_window_dims)
    mapped = list(map(int, n.start_index_map if reads else n.scatter_dims_to_operand_dims))
    parts = _components(eqn.inputs[1], flow) if np.prod(eqn.in_shapes[1][:-1]) == 1 else None
    clips = any(mode in str(eqn.params["mode"]) for mode in ("CLIP", "PROMISE_IN_BOUNDS"))
    if parts is None or not clips or n.operand_batching_dims or all(number(part) is not None for part in parts):
        return None, ()
    if reads:
        part = tuple(eqn.params["slice_sizes"])
    else:
        lengths = iter(eqn.in_shapes[2][axis] for axis in n.update_window_dims)
        part = tuple(1 if axis in dropped else next(lengths) for axis in range(len(x)))
    axes = _partial(part, x)
    if len(axes) == 1 and part[axes[0]] == 1 and (len(mapped) == 1 or not reads):
        return None, ()

    def starts(places: Sequence[Array]) -> list[Array]:
        known = dict(zip(mapped, places, strict=True))
        return [known[axis].reshape(()) if axis in known else np.int32(0) for axis in range(len(x))]

    def read(whole: Array, *places: Array) -> Array:
        return _slice_function(part)(whole, *starts(places)).reshape(eqn.out_shapes[0])

    def write(whole: Array, update: Array, *places: Array) -> Array:
        return _updated(part)(whole, update.reshape(part), *starts(places))

    return (read, (eqn.inputs[0], *parts)) if reads else (write, (eqn.inputs[0], eqn.inputs[2], *parts))


def _int32(place: Array) -> Array:
    """A position as int32; unsigned positions beyond int32 become its greatest number and not a negative one."""
    if place.dtype == jnp.uint32:
        bits = place.astype(jnp.int32)
        return jnp.where(bits < np.int32(0), np.int32(2**31 - 1), bits)
    if jnp.issubdtype(place.dtype, jnp.unsignedinteger) and place.dtype.itemsize > 4:
        place = jnp.minimum(place, np.array(2**31 - 1, place.dtype))
    return place.astype(jnp.int32)


def clamped(start: Array, last: int) -> Array:
    """A position as int32, clamped to 0 to `last`."""
    return jnp.clip(_int32(start), 0, last)


def _places(x: Array, axis: int) -> Array:
    """The positions along an axis, in the rank of x."""
    return lax.broadcasted_iota(jnp.int32, [size if a == axis else 1 for a, size in enumerate(x.shape)], axis)


def _all(masks: list[Array]) -> Array:
    whole = masks[0]
    for mask in masks[1:]:
        whole = whole & mask
    return whole


# ---------------------------------------------------------------------------- scatters


def _scatter(eqn: Equation, flow: Flow, number: Number) -> tuple[Callable[..., Array] | None, tuple[Value, ...]]:
    """A scatter with a position for each example, as a function of its operand, its updates and the positions.

    None for any other scatter: too many positions, or part of an axis that is longer than one element.
    """
    n = eqn.params["dimension_numbers"]
    window, inserted = tuple(n.update_window_dims), tuple(int(axis) for axis in n.inserted_window_dims)
    # axis of the operand -> axis of the indices, for axes along which each example has its own position
    paired = dict(zip(map(int, n.operand_batching_dims), map(int, n.scatter_indices_batching_dims), strict=True))
    x, indices, update = eqn.in_shapes
    starts: dict[int, Value] = {}
    parts = _components(eqn.inputs[1], flow)
    if parts is None:
        return None, ()
    for axis, part in zip(map(int, n.scatter_dims_to_operand_dims), parts, strict=True):
        known = number(part)
        along = None if known is None else _counts(known[..., 0], x[axis])
        if along is not None and along not in paired.values() and axis in inserted:
            paired[axis] = along
        elif known is None or known.any() or axis in inserted:
            starts[axis] = part
    # each entry along the other axes of the indices is one write
    several = [axis for axis in range(len(indices) - 1) if axis not in paired.values()]
    writes = list(np.ndindex(*(indices[axis] for axis in several)))
    if not starts or not writes or len(writes) > _MOST_WRITES:
        return None, ()
    if all(number(part) is not None for part in starts.values()):
        return None, ()
    scattered = [axis for axis in range(len(update)) if axis not in window]
    kept = [axis for axis in range(len(x)) if axis not in paired and axis not in inserted]
    source = {axis: scattered[along] for axis, along in paired.items()} | dict(zip(kept, window, strict=True))
    lengths = [update[source[axis]] if axis in source else 1 for axis in range(len(x))]
    if any(lengths[axis] != (1 if axis in starts else size) for axis, size in enumerate(x)):
        return None, ()
    axes = list(starts)
    clips = "CLIP" in str(eqn.params["mode"])
    order = [*(source[axis] for axis in range(len(x)) if axis in source), *(scattered[axis] for axis in several)]

    def one(old: Array, new: Array, places: list[Array]) -> Array:
        """One write at each position."""
        found: list[Array] = []
        for axis, place in zip(axes, places, strict=True):
            place = place.reshape([x[a] if a in paired else 1 for a in range(len(x))])
            found.append(_places(old, axis) == (jnp.clip(place, 0, x[axis] - 1) if clips else place))
        here, new = _all(found), jnp.broadcast_to(new.reshape(lengths), old.shape)
        if eqn.primitive == "scatter":
            return jnp.where(here, new, old)
        return old + jnp.where(here, new, jnp.zeros((), old.dtype))

    def written(old: Array, new: Array, *places: Array) -> Array:
        new = jnp.transpose(new, order)
        ordered = [
            jnp.transpose(_int32(place[..., 0]), [*(paired[a] for a in sorted(paired)), *several]) for place in places
        ]
        for write in writes:
            old = one(old, new[(..., *write)], [place[(..., *write)] for place in ordered])
        return old

    return written, (eqn.inputs[0], eqn.inputs[2], *starts.values())


def _components(indices: Value, flow: Flow) -> list[Value] | None:
    """The index along each axis, each with a last axis of size 1."""
    count = indices.shape[-1]
    if count == 1:
        return [indices]
    made = flow.made.get(indices)
    if made is None or made.primitive != "concatenate" or made.params["dimension"] != len(indices.shape) - 1:
        return None
    return list(made.inputs) if len(made.inputs) == count else None


def _counts(known: np.ndarray, size: int) -> int | None:
    """The axis along which constant indices count 0 to size - 1; None if there is none."""
    for axis in range(known.ndim):
        if known.shape[axis] == size:
            places = np.arange(size).reshape([-1 if a == axis else 1 for a in range(known.ndim)])
            if np.array_equal(known, np.broadcast_to(places, known.shape)):
                return axis
    return None
