"""Steps that PyTorch's formulas share: a reciprocal, whole vectors and the remaining elements.

PyTorch's vectorised kernels (AVX2) process a tensor in blocks and the last elements one by one. The two halves round
differently. A block multiplies and adds in one step, and adds the zero point to the integer. The scalar code rounds
every operation, and adds the zero point before it rounds. Therefore the bits of an element can depend on its position
in memory, which here is the row-major order of the array. This models one thread: several threads split a tensor of
more than 32,768 elements into pieces.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from qjax.numerics import float32
from qjax.numerics.float32 import Float32
from qjax.ops.formulas.joined_axes import joined_axes

BLOCK = 64
"""Elements per iteration of the elementwise loops: two vectors of 32 codes."""

CHANNELS = 8
"""Channels per iteration of the pooling loops."""


def reciprocal(x: Any) -> Float32:
    """float32(1 / x)."""
    return float32.divide(float32.of(1.0), x if isinstance(x, Float32) else float32.of(x))


def in_blocks(
    first: Sequence[Any], second: Sequence[Any], block: Callable[[], jax.Array], rest: Callable[[], jax.Array]
) -> jax.Array:
    """`block()` for the elements in whole blocks of `BLOCK`, `rest()` for those after them.

    first, second: the shapes of the operands. TensorIterator merges neighbouring axes that it treats alike; with
    operands of one shape these are all axes. Its inner loop runs over the last merged axis, and has its own blocks and
    its own rest.
    """
    shape = jnp.broadcast_shapes(tuple(first), tuple(second))
    inner = shape[len(shape) - _inner_axes(first, second) :]
    size = math.prod(inner)

    def places() -> jax.Array:
        return jnp.broadcast_to(jax.lax.iota(jnp.int32, size).reshape(inner), shape)

    return _split(size, BLOCK, places, block, rest)


def _inner_axes(first: Sequence[Any], second: Sequence[Any]) -> int:
    """How many of the last axes the inner loop of two operands covers."""
    rank = max(len(first), len(second))
    shapes = ((1,) * (rank - len(shape)) + tuple(shape) for shape in (first, second))
    groups = joined_axes(*([size != 1 for size in shape] for shape in shapes))
    return len(groups[-1]) if groups else 0


def in_channel_blocks(
    shape: tuple[int, ...], block: Callable[[], jax.Array], rest: Callable[[], jax.Array]
) -> jax.Array:
    """`block()` for the channels (the last axis) in whole blocks of `CHANNELS`, `rest()` for those after them."""
    channels = shape[-1] if shape else 1
    return _split(channels, CHANNELS, lambda: jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1), block, rest)


def _split(
    size: Any,
    step: int,
    places: Callable[[], jax.Array],
    block: Callable[[], jax.Array],
    rest: Callable[[], jax.Array],
) -> jax.Array:
    """Computes `block` or `rest` only if some element needs it, unless the size is symbolic."""
    limit = size - size % step
    if isinstance(size, int) and limit == size:
        return block()
    if isinstance(size, int) and limit == 0:
        return rest()
    return jnp.where(places() < jnp.asarray(limit, jnp.int32), block(), rest())
