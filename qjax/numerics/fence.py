"""Keeps XLA from fusing a computation into its readers, which would repeat it for each of them."""

import contextlib
import contextvars
from collections.abc import Callable, Generator
from typing import Any

import jax
import jax.numpy as jnp

from qjax.numerics.calls import traced_once
from qjax.numerics.meshes import zeros_of

KEEPS_BARRIERS = jax.__version_info__ >= (0, 12)
"""Whether XLA for CPUs fuses nothing across a barrier. That of jax 0.10.2 drops optimization barriers before fusion."""

_shared: contextvars.ContextVar[jax.Array | None] = contextvars.ContextVar("_shared", default=None)


@contextlib.contextmanager
def sharing(alive: jax.Array) -> Generator[None]:
    """A context in which all fences use this boolean; under `vmap`, booleans that differ would prevent branches."""
    token = _shared.set(alive)
    try:
        yield
    finally:
        _shared.reset(token)


def apart(alive: jax.Array, compute: Callable[..., Any], *operands: Any) -> Any:
    """`compute(*operands)`, compiled by itself and computed once.

    XLA's fusion copies a chain of cheap operations into every reader. A constant that takes fifty integer operations to
    derive from a scale would be derived again for each element that it multiplies, and a few chained steps would take
    minutes to compile. Versions that drop optimization barriers before fusion still keep a branch on a value that is
    only known at run time. The barrier compiles faster: it needs no predicate and no second branch.

    Args:
      alive: a boolean scalar that is always true, computed from traced values so that the compiler cannot know it.
    """
    if KEEPS_BARRIERS:
        return jax.lax.optimization_barrier(compute(*operands))
    shared = _shared.get()
    alive = alive if shared is None else shared
    shapes = jax.eval_shape(compute, *operands)

    def never(*_: Any) -> Any:
        return jax.tree.map(zeros_of, shapes)

    return jax.lax.cond(alive, compute, never, *operands)


def computed_once(alive: jax.Array, value: jax.Array) -> jax.Array:
    """The value itself, which XLA then computes once and not again for each reader.

    Along a residual stream every block's output has two readers. Copied into both, a chain of n blocks has 2^n terms,
    and the compile time grows faster than n^2. With this function it is linear in n.

    Args:
      alive: as for `apart`. Its branch copies the value, so a barrier is used instead if barriers survive fusion.
    """
    if KEEPS_BARRIERS:
        return jax.lax.optimization_barrier(value)
    return jax.lax.cond(alive, lambda v: v, jnp.zeros_like, value)


@traced_once()
def finished_on_cpu(x: jax.Array) -> jax.Array:
    """x, and its cotangent, as an array that the CPU computes before anything reads it; elsewhere the plain value.

    If the loop that computes x is fused with an operation that moves its elements (a pad of channels, the shape and
    order of a matrix product's operand), it has no vector instructions, and each reader of x would compute it again.
    """
    return jax.lax.platform_dependent(x, cpu=jax.lax.optimization_barrier, default=lambda x: x)


@traced_once()
def laid_out_on_cpu(x: jax.Array) -> jax.Array:
    """`finished_on_cpu`, with the elements in memory in the order of x's axes.

    XLA represents a transposed array by another order in memory if it can. Its int8 products are fast only in the order
    of the axes.
    """

    def in_order(x: jax.Array) -> jax.Array:
        return jax.lax.optimization_barrier(x.reshape(-1)).reshape(x.shape)

    return jax.lax.platform_dependent(x, cpu=in_order, default=lambda x: x)


@traced_once()
def computed_once_on_cpu(alive: jax.Array, value: jax.Array) -> jax.Array:
    """`computed_once` if a program is compiled for the CPU, and the plain value elsewhere.

    This is for training: the compilers for GPU and TPU weigh a copy against its cost, and a branch would make their
    loop wait for the host.
    """
    return jax.lax.platform_dependent(alive, value, cpu=computed_once, default=lambda _, v: v)
