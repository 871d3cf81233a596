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
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
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

_MOST_SUMS = 32
"""A scatter that adds more often is reported as an error, because each addition is a choice over the whole tensor."""


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
            moving = [axis for axis, start in enumerate(eqn.inputs[2:]) if number(start) is None]
            function = _slice_function(eqn.out_shapes[0]) if reads else _updated(eqn.in_shapes[1], moving)
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


def _updated(part: Sequence[int], moving: Sequence[int]) -> Callable[..., Array]:
    """The array with a slice of that shape replaced, as a function of the array, the slice and the slice's starts.

    A slice of the whole array replaces all of it, yet is a choice too, so that a text as long as its cache has the
    quantizers of a shorter one. moving: the axes along which the start is data.
    """

    def updated(x: Array, update: Array, *starts: Array) -> Array:
        inside: list[Array] = []
        for axis in _partial(part, x.shape) or moving:
            size, length = x.shape[axis], part[axis]
            places = _places(x, axis) - clamped(starts[axis], size - length)
            inside.append((places >= 0) & (places < length) if length > 1 else places == 0)
            if 1 < length < size:
                update = jnp.take(update, jnp.clip(places.reshape(-1), 0, length - 1), axis=axis, mode="clip")
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

    moving = [axis for axis, place in zip(mapped, parts, strict=True) if number(place) is None]

    def starts(places: Sequence[Array]) -> list[Array]:
        known = dict(zip(mapped, places, strict=True))
        return [known[axis].reshape(()) if axis in known else np.int32(0) for axis in range(len(x))]

    def read(whole: Array, *places: Array) -> Array:
        return _slice_function(part)(whole, *starts(places)).reshape(eqn.out_shapes[0])

    def write(whole: Array, update: Array, *places: Array) -> Array:
        return _updated(part, moving)(whole, update.reshape(part), *starts(places))

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
    """A scatter with positions for each example, as a function of its operand, its updates and the positions.

    None for any other scatter, such as a sum of slices or of too many elements.
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
    count = math.prod(indices[axis] for axis in several)
    if not count or all(number(part) is not None for part in starts.values()):
        return None, ()
    scattered = [axis for axis in range(len(update)) if axis not in window]
    kept = [axis for axis in range(len(x)) if axis not in paired and axis not in inserted]
    source = {axis: scattered[along] for axis, along in paired.items()} | dict(zip(kept, window, strict=True))
    lengths = [update[source[axis]] if axis in source else 1 for axis in range(len(x))]
    single = all(lengths[axis] == 1 for axis in starts)
    adds = eqn.primitive != "scatter"
    if any(axis not in starts and length != x[axis] for axis, length in enumerate(lengths)) or (
        adds and not (single and count <= _MOST_SUMS)
    ):
        return None, ()
    clips = "CLIP" in str(eqn.params["mode"])
    order = [*(source[axis] for axis in range(len(x)) if axis in source), *(scattered[axis] for axis in several)]

    def offsets(place: Array, axis: int) -> Array:
        """How far each element along an axis lies behind where a slice begins; negative where it is not in the slice.

        place: [the paired axes, or 1, in the operand's rank; the writes].
        """
        last = x[axis] - lengths[axis]
        start = jnp.clip(place, 0, last) if clips else place
        found = lax.broadcasted_iota(jnp.int32, [s if a == axis else 1 for a, s in enumerate((*x, 1))], axis) - start
        inside = (found >= 0) & (found < lengths[axis])
        # as in JAX, a slice that does not fit is dropped
        fits = inside if clips or lengths[axis] == 1 else inside & (start >= 0) & (start <= last)
        return jnp.where(fits, found, np.int32(-1))

    def written(old: Array, new: Array, *places: Array) -> Array:
        new = jnp.transpose(new, order).reshape([*lengths, count])
        found: list[Array] = []
        for axis, place in zip(starts, places, strict=True):
            ordered = jnp.transpose(_int32(place[..., 0]), [*(paired[a] for a in sorted(paired)), *several])
            found.append(offsets(ordered.reshape([*(s if a in paired else 1 for a, s in enumerate(x)), count]), axis))
        if adds or (single and count == 1):
            here = _all([offset == 0 for offset in found])
            for write in range(count):
                chosen, value = here[..., write], jnp.broadcast_to(new[..., write], old.shape)
                old = (
                    old + jnp.where(chosen, value, jnp.zeros((), old.dtype)) if adds else jnp.where(chosen, value, old)
                )
            return old
        return _put_last(old, new, dict(zip(starts, found, strict=True)), list(paired))

    return written, (eqn.inputs[0], eqn.inputs[2], *starts.values())


def _put_last(old: Array, new: Array, offsets: dict[int, Array], paired: list[int]) -> Array:
    """Several writes as one choice: each element takes the last write that reaches it, or stays.

    new: [the axes of `old`, with the length of a slice along those of `offsets`; the writes].
    offsets: per axis, the element of each write that lies there or a negative number, [axes of `old`, or 1; writes].
    """
    axes, count = list(offsets), new.shape[-1]
    lengths = [new.shape[axis] for axis in axes]
    index = lax.broadcasted_iota(jnp.int32, (*(1,) * old.ndim, count), old.ndim)
    here = _all([offset >= 0 for offset in offsets.values()])
    for axis, length in zip(axes, lengths, strict=True):
        index = index * np.int32(length) + jnp.maximum(offsets[axis], 0)
    chosen = jnp.max(jnp.where(here, index, np.int32(-1)), axis=-1)
    # one row of slices for each example: [the paired axes, slices, the other axes]
    others = [axis for axis in range(old.ndim) if axis not in axes and axis not in paired]
    rows = jnp.transpose(new, [*paired, old.ndim, *axes, *others])
    rows = rows.reshape([*(old.shape[axis] for axis in paired), -1, *(old.shape[axis] for axis in others)])
    places = (
        jnp.maximum(chosen, 0).transpose([*paired, *axes, *others]).reshape([*(old.shape[axis] for axis in paired), -1])
    )
    take = lambda row, place: jnp.take(row, place, axis=0, mode="clip")  # noqa: E731
    for _ in paired:
        take = jax.vmap(take)
    taken = take(rows, places).reshape([old.shape[axis] for axis in (*paired, *axes, *others)])
    back = [(*paired, *axes, *others).index(axis) for axis in range(old.ndim)]
    return jnp.where(chosen >= 0, jnp.transpose(taken, back), old)


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
