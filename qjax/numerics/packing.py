"""Packs many small arrays into one vector and back, in programs that compile fast.

XLA compiles equal loops once. A slice becomes a loop that contains its offset, so n slices are n different loops. Here
the offset is an operand of the loop, so all pieces of one size are one loop. Every piece is computed before it is read,
because the CPU's compiler would otherwise fuse it into its reader, and equal blocks of a network would become different
programs.
"""

import functools
import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

Shape = tuple[int, ...]


def packed(arrays: Sequence[jax.Array]) -> jax.Array:
    """All elements of arrays of one dtype, one array after the other. Arrays of one size should be neighbours."""
    return _packed(tuple(jnp.shape(array) for array in arrays), list(arrays))


def unpacked(vector: jax.Array, shapes: Sequence[Shape]) -> list[jax.Array]:
    """The arrays of these shapes whose elements make up the vector."""
    if not isinstance(vector, Tracer):
        # Outside of a trace each slice would be compiled, which takes a second for a thousand slices.
        ends = itertools.accumulate(math.prod(shape) for shape in shapes)
        pieces = np.split(np.asarray(vector), list(ends)[:-1])
        return [jnp.asarray(piece.reshape(shape)) for piece, shape in zip(pieces, shapes, strict=True)]
    return _unpacked(tuple(shapes), vector)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _packed(shapes: tuple[Shape, ...], arrays: list[jax.Array]) -> jax.Array:
    return jnp.concatenate([jnp.reshape(array, (-1,)) for array in arrays])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _unpacked(shapes: tuple[Shape, ...], vector: jax.Array) -> list[jax.Array]:
    # XLA for GPUs (jax 0.11) fails on a slice without elements
    sizes = [size for size in map(math.prod, shapes) if size]
    # Compilers for other platforms merge slices themselves.
    pieces = iter(
        lax.platform_dependent(
            vector, cpu=lambda vector: _pieces(vector, sizes), default=lambda vector: lax.split(vector, sizes)
        )
    )
    empty = jnp.zeros((0,), vector.dtype)
    return [jnp.reshape(next(pieces) if math.prod(shape) else empty, shape) for shape in shapes]


# Each is the other's transpose. JAX's own transpose would be a scatter for every array and a sum of as many vectors.
_packed.defvjp(
    lambda shapes, arrays: (_packed(shapes, arrays), None), lambda shapes, _, vector: (_unpacked(shapes, vector),)
)
_unpacked.defvjp(
    lambda shapes, vector: (_unpacked(shapes, vector), None), lambda shapes, _, arrays: (_packed(shapes, arrays),)
)


def _pieces(vector: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
    ends = list(itertools.accumulate(sizes))
    # The barrier hides the numbers from the compiler. They are unsigned, because signed ones could be negative, which
    # costs operations.
    starts = lax.optimization_barrier([np.uint32(end - size) for end, size in zip(ends, sizes, strict=True)])
    cut = [lax.dynamic_slice(vector, (start,), (size,)) for start, size in zip(starts, sizes, strict=True)]
    return lax.optimization_barrier(cut)
