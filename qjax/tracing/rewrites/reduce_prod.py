"""Computes products of the elements of a tensor (`jnp.prod`, `jnp.cumprod`) by halving.

One product of many codes has no integer form, because its accumulator would grow by the bits of every factor. Halves
are multiplied elementwise instead, and every result has its own quantizer:

    prod(x)     =  prod(x[:n/2] * x[n/2:])
    cumprod(x)  :  x[s:] <- x[s:] * x[:-s]  for s = 1, 2, 4...  (Hillis and Steele, 1986)

Up to three elements are one operation, see `ops.prod`.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from qjax.ops.prod import MOST
from qjax.tracing.program import Equation, Program
from qjax.tracing.rewrites.inline import inlined

LONGEST = 4096
"""Elements, at most; with more, the last factors could hardly be seen in codes."""


def write_factors(program: Program) -> Program:
    """Compute such products of data by halving."""
    if not any(eqn.primitive in _FORMS for eqn in program.equations):
        return program
    equations: list[Equation] = []
    for eqn in program.equations:
        form = _FORMS.get(eqn.primitive) if eqn.inputs and eqn.inputs[0].is_float and not all(eqn.fixed) else None
        function = None if form is None else form(eqn)
        equations += [eqn] if function is None else inlined(function, eqn.inputs, eqn.outputs, eqn)[0]
    return dataclasses.replace(program, equations=tuple(equations))


def _whole(eqn: Equation) -> Callable[[Any], Any] | None:
    axes, (shape,) = [int(axis) for axis in eqn.params["axes"]], eqn.in_shapes
    count = math.prod(shape[axis] for axis in axes)
    if not MOST < count <= LONGEST:
        return None

    def product(x: Any) -> Any:
        kept = [axis for axis in range(x.ndim) if axis not in axes]
        x = jnp.transpose(x, [*kept, *axes]).reshape(*(shape[axis] for axis in kept), count)
        left: list[Any] = []
        while (size := x.shape[-1]) > MOST:
            if size % 2:
                left.append(x[..., -1])
            x = x[..., : size // 2] * x[..., size // 2 : 2 * (size // 2)]
        y = jnp.prod(x, axis=-1)
        for factor in left:
            y = y * factor
        return y

    return product


def _running(eqn: Equation) -> Callable[[Any], Any] | None:
    axis, reverse = int(eqn.params["axis"]), bool(eqn.params["reverse"])
    size = eqn.in_shapes[0][axis]
    if not 0 < size <= LONGEST:
        return None

    def running(x: Any) -> Any:
        for step in (2**n for n in range((size - 1).bit_length())):
            first, last = lax.slice_in_dim(x, 0, size - step, axis=axis), lax.slice_in_dim(x, step, size, axis=axis)
            done = (
                lax.slice_in_dim(x, size - step, size, axis=axis)
                if reverse
                else lax.slice_in_dim(x, 0, step, axis=axis)
            )
            parts = [first * last, done] if reverse else [done, first * last]
            x = lax.concatenate(parts, axis)
        return x

    return running


_FORMS: dict[str, Callable[[Equation], Callable[[Any], Any] | None]] = {"cumprod": _running, "reduce_prod": _whole}
KINDS = frozenset(_FORMS)
"""The primitives that this rewriter reads."""
