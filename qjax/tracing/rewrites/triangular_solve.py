"""Solves triangular systems of equations by products of matrices, which have integer forms.

Linear attention by the delta rule (Gated DeltaNet, Qwen 3 Next, Kimi Linear) solves one system for each chunk of a
text. The inverse of a triangular matrix is built up from blocks along the diagonal:

    [a 0]^-1   [a^-1           0   ]
    [c b]    = [-b^-1 c a^-1   b^-1]

With blocks of 1, 2, 4... rows it takes two products for every power of two below the number of rows. The intermediate
results are as large as the matrix and its inverse, so they suit codes. (A series of powers is as short, but the powers
vanish.) A matrix of parameters is inverted once, when the graph is made.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.ops import products
from qjax.tracing.program import Equation, Program
from qjax.tracing.rewrites.dataflow import Flow, Found
from qjax.tracing.rewrites.inline import inlined
from qjax.tracing.rewrites.literals import numbers

LARGEST = 128
"""Rows of a matrix that depends on data, at most; every doubling rounds twice more."""


def write_solves(program: Program) -> Program:
    """Solve triangular systems that depend on data by products."""
    if not any(eqn.primitive == "triangular_solve" for eqn in program.equations):
        return program
    number, flow = numbers(program), Flow(program)
    equations: list[Equation] = []
    for eqn in program.equations:
        if eqn.primitive != "triangular_solve" or all(eqn.fixed):
            equations.append(eqn)
        elif eqn.fixed[0]:
            equations += _multiply_by_inverse(eqn, flow.behind(eqn.inputs[0]))
        elif eqn.in_shapes[0][-1] > LARGEST or not eqn.inputs[0].is_float:
            equations.append(eqn)
        else:
            equations += inlined(_solution(eqn, number(eqn.inputs[1])), eqn.inputs, eqn.outputs, eqn)[0]
    return dataclasses.replace(program, equations=tuple(equations))


def _multiply_by_inverse(eqn: Equation, found: Found) -> list[Equation]:
    """The product with the inverse of a parameter matrix; found: where the matrix comes from."""
    a, b = eqn.inputs
    left = bool(eqn.params["left_side"])
    # the same matrix for every example of the batch is one constant
    repeated = found.axes == (*[None] * (len(a.shape) - 2), 0, 1) and found.value.shape == a.shape[-2:]

    def function(a_own: jax.Array, b: jax.Array) -> jax.Array:
        identity = jnp.broadcast_to(jnp.eye(a.shape[-1], dtype=a_own.dtype), a_own.shape)
        inverse = lax.linalg.triangular_solve(a_own, identity, **{**eqn.params, "left_side": True})
        inverse = jnp.broadcast_to(inverse, a.shape)
        return _product(inverse, b) if left else _product(b, inverse)

    return inlined(function, (found.value if repeated else a, b), eqn.outputs, eqn)[0]


def _solution(eqn: Equation, known: np.ndarray | None) -> Callable[..., Any]:
    """The function of a and b that returns the solution; known: b, if it is made of literals."""
    left, params = bool(eqn.params["left_side"]), eqn.params
    size = eqn.in_shapes[0][-1]
    # x a = b is solved as a' x' = b'
    turned = bool(params["transpose_a"]) == left
    lower = bool(params["lower"]) != turned
    is_identity = known is not None and np.array_equal(known, np.broadcast_to(np.eye(size), known.shape))

    def function(a: jax.Array, b: jax.Array) -> jax.Array:
        a = jnp.swapaxes(a, -1, -2) if turned else a
        b = b if left else jnp.swapaxes(b, -1, -2)
        if not params["unit_diagonal"]:
            diagonal = _masked(a, np.eye(size, dtype=bool)).sum(-1, keepdims=True)
            a, b = a / diagonal, b / diagonal
        inverse = jnp.broadcast_to(jnp.eye(size, dtype=a.dtype), a.shape)
        for rows in (2**n for n in range((size - 1).bit_length())):
            between = _masked(a, _between_blocks(size, rows, lower))
            inverse = inverse - (between if rows == 1 else _product(_product(inverse, between), inverse))
        x = inverse if is_identity and params["unit_diagonal"] else _product(inverse, b)
        return x if left else jnp.swapaxes(x, -1, -2)

    return function


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    batch = tuple(range(a.ndim - 2))
    return products.dot_general(a, b, (((a.ndim - 1,), (a.ndim - 2,)), (batch, batch)), a.dtype)


def _masked(a: jax.Array, mask: np.ndarray) -> jax.Array:
    return jnp.where(mask, a, jnp.zeros((), a.dtype))


def _between_blocks(size: int, rows: int, lower: bool) -> np.ndarray:
    """Where the two blocks of each pair of `rows` rows meet, in the given triangle."""
    block = np.arange(size) // rows
    row, column = block[:, None], block[None, :]
    return (row // 2 == column // 2) & (row > column if lower else row < column)
