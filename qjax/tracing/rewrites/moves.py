"""Writes moves (stack, tile, ...) with the few primitives that operations know, and drops empty and unread values."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.ops.indices import has_number
from qjax.ops.take import axis_of
from qjax.tracing.composite import composite
from qjax.tracing.expressions import IDENTITIES
from qjax.tracing.program import Equation, Program, Value
from qjax.tracing.rewrites.inline import inlined

_PURE = frozenset(
    """slice broadcast_in_dim reshape squeeze expand_dims concatenate iota select_n lt add convert_element_type rev
    gather""".split()  # noqa: SIM905
)


def simplify_moves(program: Program) -> Program:
    """Write `jnp.stack` as a concatenation and `jnp.tile` as a broadcast.

    Slices of size zero from `jnp.pad` are dropped, and so are equations that do not change integers and truth values:
    copies (`jnp.array(ids)`), names, sharding constraints.
    """
    equations: list[Equation] = []
    renamed: dict[Value, Value] = {}
    for original in program.equations:
        eqn = dataclasses.replace(original, inputs=tuple(renamed.get(v, v) for v in original.inputs))
        if all(a is b for a, b in zip(eqn.inputs, original.inputs, strict=True)):
            eqn = original
        if eqn.primitive in IDENTITIES and len(eqn.inputs) == 1 and not eqn.outputs[0].is_float:
            renamed[eqn.outputs[0]] = eqn.inputs[0]
            continue
        if eqn.primitive == "concatenate" and any(0 in shape for shape in eqn.in_shapes):
            kept = [v for v in eqn.inputs if 0 not in v.shape]
            if len(kept) == 1:
                renamed[eqn.outputs[0]] = kept[0]
                continue
            if kept:
                axis = eqn.params["dimension"]
                equations += inlined(lambda *x, axis=axis: lax.concatenate(x, axis), kept, eqn.outputs, eqn)[0]
                continue
        if eqn.primitive == "select_n" and eqn.in_dtypes[0] != np.bool_:
            equations += inlined(_select, eqn.inputs, eqn.outputs, eqn)[0]
            continue
        if eqn.primitive == "dot_general" and eqn.outputs[0].is_float and not all(v.is_float for v in eqn.inputs):
            equations += _in_floats(eqn)
            continue
        if eqn.primitive == "gather" and (axis := _looked_along(eqn)) is not None:
            equations += _lookup(eqn, axis)
            continue
        moved = eqn.outputs[0].is_float or eqn.primitive not in _OF_REALS
        if eqn.primitive in WRITTEN and set(eqn.params.get("base_dilation", ())) <= {1} and moved:
            equations += inlined(WRITTEN[eqn.primitive](eqn.params), eqn.inputs, eqn.outputs, eqn)[0]
            continue
        equations.append(eqn)
    outputs = tuple(renamed.get(v, v) for v in program.outputs)
    return dataclasses.replace(program, outputs=outputs, equations=tuple(read(equations, outputs)))


def _in_floats(eqn: Equation) -> Iterator[Equation]:
    """A product of floats and integers, with the cast of the integers that JAX implies."""
    inputs: list[Value] = []
    for value in eqn.inputs:
        if not value.is_float:
            cast, (value,) = inlined(lambda x: x.astype(eqn.outputs[0].dtype), [value], None, eqn)
            yield from cast
        inputs.append(value)
    yield dataclasses.replace(eqn, inputs=tuple(inputs), function=None)


def _select(which: Any, first: Any, *others: Any) -> Any:
    """`lax.select_n` by an integer, as boolean choices. `jax.vmap` turns `lax.cond` into such a `select_n`."""
    chosen = first
    for number, case in enumerate(others, 1):
        chosen = lax.select_n(which >= np.asarray(number, which.dtype), chosen, case)
    return chosen


def lookups(equations: Sequence[Equation]) -> list[Equation]:
    """The equations, in which a gather of rows of parameters becomes an embedding."""
    found: list[Equation] = []
    for eqn in equations:
        axis = _looked_along(eqn) if eqn.primitive == "gather" else None
        found += [eqn] if axis is None else _lookup(eqn, axis)
    return found


def _looked_along(eqn: Equation) -> int | None:
    """The axis of a parameter table along which data selects: an embedding without `nnx.Embed`."""
    table, indices = eqn.inputs
    fixed = (table.fixed or table.constant is not None) and not indices.fixed and indices.constant is None
    if not fixed or not table.is_float or has_number(eqn.params, eqn.in_dtypes[0]):
        return None
    return axis_of(eqn)


def _lookup(eqn: Equation, axis: int) -> list[Equation]:
    """Move that axis of the table to the front, take rows, and order the result's axes like the gather's."""
    table, indices = eqn.inputs
    numbers = eqn.params["dimension_numbers"]
    rank, mode, fill = len(indices.shape) - 1, eqn.params["mode"], eqn.params["fill_value"]
    rest = [size for a, size in enumerate(table.shape) if a != axis]
    rows = lax.GatherDimensionNumbers(tuple(range(rank, rank + len(rest))), (0,), (0,))

    def chosen(at: Any, table: Any) -> Any:
        return lax.gather(table, lax.reshape(at, (*at.shape, 1)), rows, (1, *rest), mode=mode, fill_value=fill)

    before, (own,) = inlined(lambda x: lax.reshape(x, x.shape[:-1]), [indices], None, eqn)
    if axis:
        turned, (table,) = inlined(lambda x: jnp.moveaxis(x, axis, 0), [table], None, eqn)
        before += turned
    places = [i for i in range(len(eqn.out_shapes[0])) if i not in numbers.offset_dims]
    order = [
        places.index(i) if i in places else rank + numbers.offset_dims.index(i) for i in range(len(places) + len(rest))
    ]
    if order == list(range(len(order))):
        inner, _ = inlined(chosen, [own, table], eqn.outputs, eqn)
        return [*before, composite("embed", inner, [own, table], eqn.outputs, {"mode": mode})]
    inner, looked = inlined(chosen, [own, table], None, eqn)
    after, _ = inlined(lambda x: x.transpose(order), looked, eqn.outputs, eqn)
    return [*before, composite("embed", inner, [own, table], looked, {"mode": mode}), *after]


def read(equations: Sequence[Equation], outputs: Sequence[Value]) -> list[Equation]:
    """The equations without the moves, and without the empty results, that nothing reads."""
    needed = set(outputs)
    kept: list[Equation] = []
    for eqn in reversed(equations):
        droppable = eqn.primitive in _PURE or all(0 in shape for shape in eqn.out_shapes)
        if droppable and eqn.body is None and not needed & set(eqn.outputs):
            continue
        needed.update(eqn.inputs)
        if eqn.body is not None:
            needed.update(_inside(eqn.body))
        kept.append(eqn)
    return kept[::-1]


def _inside(body: Program) -> Iterator[Value]:
    for eqn in body.walk():
        yield from eqn.inputs
    yield from body.outputs


def _stack(params: Any) -> Callable[..., Any]:
    axis = params["axis"]

    def stack(*parts: Any) -> Any:
        return lax.concatenate([lax.reshape(x, (*x.shape[:axis], 1, *x.shape[axis:])) for x in parts], axis)

    return stack


def _tile(params: Any) -> Callable[..., Any]:
    reps = [int(n) for n in params["reps"]]

    def tile(x: Any) -> Any:
        pairs = [size for pair in zip(reps, x.shape, strict=True) for size in pair]
        wide = lax.broadcast_in_dim(x, pairs, range(1, 2 * x.ndim, 2))
        return lax.reshape(wide, [n * size for n, size in zip(reps, x.shape, strict=True)])

    return tile


def _unstack(params: Any) -> Callable[..., Any]:
    axis = params["axis"]

    def unstack(x: Any) -> Any:
        rest = (*x.shape[:axis], *x.shape[axis + 1 :])
        return [lax.reshape(lax.slice_in_dim(x, i, i + 1, axis=axis), rest) for i in range(x.shape[axis])]

    return unstack


def _min_pool(params: Any) -> Callable[..., Any]:
    """Minima of strided slices, one axis after the other; the padding is higher than every code."""

    def min_pool(x: Any) -> Any:
        if any(low or high for low, high in params["padding"]):
            x = lax.pad(x, np.asarray(np.inf, x.dtype), [(low, high, 0) for low, high in params["padding"]])
        steps = zip(params["window_dimensions"], params["window_strides"], params["window_dilation"], strict=True)
        for axis, (size, stride, dilation) in enumerate(steps):
            last = x.shape[axis] - dilation * (size - 1)
            starts = range(0, dilation * size, dilation)
            parts = [lax.slice_in_dim(x, start, start + last, stride, axis) for start in starts]
            x = functools.reduce(lax.min, parts)
        return x

    return min_pool


def _angle(y: Any, x: Any) -> Any:
    """`jnp.arctan2` by the octant, and the arc tangent of a number from 0 to 1."""
    wide, high = jnp.abs(x), jnp.abs(y)
    larger, smaller = jnp.maximum(wide, high), jnp.minimum(wide, high)
    # the angle of (0, 0) is 0, with a finite derivative
    angle = jnp.arctan(smaller / jnp.where(larger > 0, larger, jnp.ones_like(larger)))
    angle = jnp.where(high > wide, np.asarray(np.pi / 2, x.dtype) - angle, angle)
    angle = jnp.where(x < 0, np.asarray(np.pi, x.dtype) - angle, angle)
    return jnp.where(y < 0, -angle, angle)


WRITTEN: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "stack": _stack,
    "tile": _tile,
    "unstack": _unstack,
    "reduce_window_min": _min_pool,
    "atan2": lambda params: _angle,
}
"""Primitive -> a function of its parameters that returns the same function in other primitives."""

_OF_REALS = frozenset({"atan2", "reduce_window_min"})
"""Primitives that are rewritten for floats only."""
