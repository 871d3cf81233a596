"""Writes what sends tokens to experts by sorting them: orders, counts, and products of rows sorted by their expert.

| program | becomes |
| --- | --- |
| `jnp.argsort`, `lax.sort` of several tensors by one | the order of that tensor (`ops.sort.Argsort`), and gathers |
| `jnp.bincount`, `x.at[i].add(1)` of integers | comparisons with every bin, and a sum |
| `lax.ragged_dot(x, w, sizes)` | the same with the expert of each row, see `ops.ragged_dot` |
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.tracing.composite import Computed
from qjax.tracing.program import Equation, Program, Value
from qjax.tracing.rewrites.inline import inlined
from qjax.tracing.rewrites.literals import numbers
from qjax.tracing.rewrites.moves import lookups


def write_routing(program: Program) -> Program:
    """The program with those operations in forms that have integers."""
    if not any(eqn.primitive in _FORMS for eqn in program.equations):
        return program
    around = _Around(
        numbers(program), {value for eqn in program.equations for value in eqn.inputs} | set(program.outputs)
    )
    equations: list[Equation] = []
    for eqn in program.equations:
        form = None if all(eqn.fixed) else _FORMS.get(eqn.primitive)
        written = None if form is None else form(eqn, around)
        equations += [eqn] if written is None else written
    return dataclasses.replace(program, equations=tuple(equations))


@dataclasses.dataclass(frozen=True, eq=False)
class _Around:
    """What an equation has around it: the arrays that are known, the values that are read, and the routes so far."""

    number: Callable[[Value], np.ndarray | None]
    read: set[Value]
    routes: dict[tuple[Value, int], tuple[Value, ...]] = dataclasses.field(default_factory=dict)


# ---------------------------------------------------------------------------- orders


def _ordered(eqn: Equation, around: _Around) -> list[Equation] | None:
    """A sort of several tensors by the first, or of integers: its order, and each tensor taken in that order."""
    keys, axis = eqn.inputs[0], int(eqn.params["dimension"]) % len(eqn.in_shapes[0])
    alone = len(eqn.inputs) == 1 and keys.is_float  # the operation `sort`
    if alone or eqn.params["num_keys"] != 1 or not (keys.is_float or keys.dtype == np.int32):
        return None
    own = [_counting(around.number(value), axis) for value in eqn.inputs]
    results = [value for value, step in zip(eqn.outputs, own, strict=True) if step == 1 and value in around.read]
    order = results[0] if results else Value(keys.shape, np.dtype(np.int32))
    written = [_argsort(eqn, keys, order, axis)]
    for value, result, step in zip(eqn.inputs, eqn.outputs, own, strict=True):
        if result is order or result not in around.read:
            continue
        last = np.int32(keys.shape[axis] - 1)
        if step is not None:
            function: Callable[..., Any] = jnp.copy if step == 1 else lambda order, last=last: last - order
            written += inlined(function, [order], [result], eqn)[0]
        else:
            written += lookups(inlined(_taken(axis), [value, order], [result], eqn)[0])
    return written


def _counting(array: np.ndarray | None, axis: int) -> int | None:
    """1 for places along an axis, as `argsort` sorts them, -1 where they fall, None for anything else."""
    if array is None or array.dtype != np.int32:
        return None
    places = np.arange(array.shape[axis]).reshape([-1 if a == axis else 1 for a in range(array.ndim)])
    for step, counted in ((1, places), (-1, np.flip(places, axis))):
        if np.array_equal(array, np.broadcast_to(counted, array.shape)):
            return step
    return None


def _argsort(eqn: Equation, keys: Value, order: Value, axis: int) -> Equation:
    def function(x: Any) -> list[Any]:
        x = jnp.asarray(x)
        places = lax.broadcasted_iota(jnp.int32, x.shape, axis)
        return [lax.sort((x, places), dimension=axis, num_keys=1, is_stable=True)[1]]

    source = Computed((eqn,), (keys,), (order,), function)
    params = {"axis": axis}
    return dataclasses.replace(eqn, primitive="argsort", inputs=(keys,), outputs=(order,), params=params, source=source)


def _taken(axis: int) -> Callable[[Any, Any], Any]:
    return lambda x, order: jnp.take_along_axis(x, order, axis=axis, mode="clip")


# ---------------------------------------------------------------------------- counts


def _counted(eqn: Equation, around: _Around) -> list[Equation] | None:
    """Ones added to a row of zeros where integers say: how often each place is among them."""
    bins, indices, ones = eqn.inputs
    start, added, n = around.number(bins), around.number(ones), eqn.params["dimension_numbers"]
    plain = not n.update_window_dims and not getattr(n, "operand_batching_dims", ())
    if not plain or len(bins.shape) != 1 or bins.dtype != np.int32 or around.number(indices) is not None:
        return None
    if start is None or added is None or start.any() or not (added == 1).all():
        return None
    size, clips = bins.shape[0], "CLIP" in str(eqn.params["mode"]).upper()

    def count(indices: jax.Array) -> jax.Array:
        flat = indices.reshape(-1).astype(jnp.int32)
        flat = jnp.clip(flat, np.int32(0), np.int32(size - 1)) if clips else flat
        shape = (flat.shape[0], size)
        places = lax.broadcasted_iota(jnp.int32, shape, 1)
        return jnp.sum((jnp.broadcast_to(flat[:, None], shape) == places).astype(jnp.int32), axis=0, dtype=jnp.int32)

    return inlined(count, [indices], eqn.outputs, eqn)[0]


# ---------------------------------------------------------------------------- products


def _routed(eqn: Equation, around: _Around) -> list[Equation] | None:
    """A product of rows in groups, with two more operands: each row's expert, and whether it has one."""
    n = eqn.params["ragged_dot_dimension_numbers"]
    ragged = (*n.lhs_ragged_dimensions, *n.rhs_group_dimensions)
    (contracting, batch), own = n.dot_dimension_numbers, eqn.params.get("group_offset")
    if [*map(tuple, contracting), *map(tuple, batch)] != [(1,), (1,), (), ()] or ragged != (0, 0) or own is not None:
        return None
    (rows, _), (experts, _, _) = eqn.in_shapes[:2]

    def route(sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
        ends = jnp.cumsum(sizes.astype(jnp.int32), dtype=jnp.int32)
        places = lax.broadcasted_iota(jnp.int32, (rows, experts), 0)
        passed = places >= jnp.broadcast_to(ends[None], places.shape)
        expert = jnp.sum(passed.astype(jnp.int32), axis=1, keepdims=True, dtype=jnp.int32)
        return expert, expert < np.int32(experts)

    equations, key = list[Equation](), (eqn.inputs[2], rows)
    if key not in around.routes:
        # the products of a layer share them
        equations, around.routes[key] = inlined(route, [eqn.inputs[2]], None, eqn)
    inputs = (*eqn.inputs[:3], *around.routes[key])
    source = Computed((eqn,), inputs, eqn.outputs, lambda x, w, sizes, *_: eqn.bind(x, w, sizes))
    return [*equations, dataclasses.replace(eqn, primitive="ragged_dot", inputs=inputs, source=source)]


_FORMS: dict[str, Callable[[Equation, _Around], list[Equation] | None]] = {
    "ragged_dot_general": _routed,
    "scatter-add": _counted,
    "sort": _ordered,
}
