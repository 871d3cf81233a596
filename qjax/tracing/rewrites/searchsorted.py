"""Rewrites searches of sorted constants (`jnp.digitize`, `jnp.searchsorted`, `jnp.interp`) as comparisons.

    searchsorted(edges, x)    ->    (x > edges[0]) + (x > edges[1]) + ...

A bin's index is a count of edges, and an interpolation between knots is a function of one number, which becomes a
table. Both have integer forms, whereas binary search in a loop has none. Which comparison a call means depends on its
arguments (`right`, `side`, falling edges), so each form is tried on the edges, next to them and between them. If no
form agrees everywhere, the call stays as it is and becomes an error with a cure.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun

from qjax.tracing.program import Equation, Program, Value
from qjax.tracing.rewrites.inline import inlined
from qjax.tracing.rewrites.literals import numbers

_EDGES, _KNOTS = 4096, 64
"""At most so many edges and knots; every knot is a few steps of a table's expression."""

Function = Callable[[Any], Any]


def write_searches(program: Program) -> Program:
    """Rewrite such searches as comparisons."""
    if not any(eqn.primitive in _FORMS for eqn in program.equations):
        return program
    number = numbers(program)
    equations: list[Equation] = []
    for eqn in program.equations:
        found = _find_function(eqn, [number(value) for value in eqn.inputs]) if eqn.primitive in _FORMS else None
        if found is None:
            equations.append(eqn)
        else:
            function, searched = found
            equations += inlined(function, [searched], eqn.outputs, eqn)[0]
    return dataclasses.replace(program, equations=tuple(equations))


def _find_function(eqn: Equation, known: Sequence[np.ndarray | None]) -> tuple[Function, Value] | None:
    """A function that equals the call, and the value that it searches for."""
    searched = [index for index, number in enumerate(known) if number is None]
    if len(searched) != 1 or len(eqn.outputs) != 1 or "jaxpr" not in eqn.params:
        return None
    (index,) = searched
    value, constants = eqn.inputs[index], [number for number in known if number is not None]
    if not value.is_float or any(number.ndim > 1 or not number.size for number in constants) or not constants[0].ndim:
        return None
    call = jaxpr_as_fun(eqn.params["jaxpr"])

    def own(x: Any) -> Any:
        return call(*(x if number is None else number for number in known))[0]

    with jax.ensure_compile_time_eval():
        for function in _FORMS[eqn.primitive](constants):
            if _agree(function, own, constants, value):
                return function, value
    return None


def _agree(function: Function, own: Function, constants: Sequence[np.ndarray], value: Value) -> bool:
    """Whether two functions agree on every edge, on its float32 neighbours, between the edges and far away."""
    edges = np.unique(np.asarray(constants[0], np.float32))
    points = np.concatenate(
        [
            edges,
            np.nextafter(edges, np.float32(-np.inf)),
            np.nextafter(edges, np.float32(np.inf)),
            (edges[1:] + edges[:-1]) / 2,
            [edges[0] - 1, edges[-1] + 1, -1e30, 1e30],
        ]
    ).astype(np.float32)
    size = max(1, int(np.prod(value.shape)))
    chunks = np.pad(points, (0, -len(points) % size), mode="edge").reshape(-1, *value.shape).astype(value.dtype)
    largest = max((float(np.abs(x).max()) for x in constants[1:]), default=0.0)
    tolerance = 1e-5 * largest
    expected = np.asarray(jax.vmap(own)(chunks), np.float64).reshape(-1)[: len(points)]
    found = np.asarray(function(jnp.asarray(points, value.dtype)), np.float64)
    return bool(np.allclose(found, expected, 0, tolerance))


def _counts(constants: Sequence[np.ndarray]) -> list[Function]:
    """Functions that count the edges below a number, or above it."""
    if len(constants) != 1 or constants[0].size > _EDGES:
        return []
    (edges,) = constants

    def count(compare: Callable[[Any, Any], Any]) -> Function:
        def function(x: Any) -> Any:
            wide = lax.broadcast_in_dim(x, (*x.shape, edges.size), tuple(range(x.ndim)))
            beside = jnp.asarray(edges, x.dtype).reshape((1,) * x.ndim + (edges.size,))
            return jnp.sum(compare(wide, jnp.broadcast_to(beside, wide.shape)), axis=-1, dtype=jnp.int32)

        return function

    return [count(compare) for compare in (lax.ge, lax.gt, lax.lt, lax.le)]


def _pieces(constants: Sequence[np.ndarray]) -> list[Function]:
    """A line between every two knots, and constants beyond them; scalars define the values on the left or the right."""
    ends = [float(x) for x in constants if not x.ndim]
    arrays = [np.asarray(x, np.float64) for x in constants if x.ndim]
    if len(arrays) != 2 or arrays[0].size > _KNOTS or arrays[0].shape != arrays[1].shape:
        return []
    knots, values = arrays
    if not np.all(np.diff(knots) > 0):
        return []
    slopes = [*(np.diff(values) / np.diff(knots)), 0.0]

    def between(left: float, right: float) -> Function:
        def function(x: Any) -> Any:
            y = jnp.full_like(x, left)
            for knot, value, slope in zip(knots, values, slopes, strict=True):
                line = x * np.asarray(slope, x.dtype) + np.asarray(value - slope * knot, x.dtype)
                y = jnp.where(x < np.asarray(knot, x.dtype), y, line if slope else jnp.full_like(x, value))
            return (
                y if right == values[-1] else jnp.where(x > np.asarray(knots[-1], x.dtype), jnp.full_like(x, right), y)
            )

        return function

    first, last = float(values[0]), float(values[-1])
    if not ends:
        return [between(first, last)]
    if len(ends) == 1:
        return [between(ends[0], last), between(first, ends[0])]
    return [between(*ends[:2]), between(*ends[1::-1])] if len(ends) == 2 else []


_FORMS: dict[str, Callable[[Sequence[np.ndarray]], list[Function]]] = {
    "digitize": _counts,
    "interp": _pieces,
    "searchsorted": _counts,
}
