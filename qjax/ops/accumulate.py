"""Exact integer matrix products: int8 or wider codes in, int32 accumulators out.

XLA has one fast integer path on the CPU, int8 x int8 -> int32, and only for some shapes; the functions here bring
operands into that form. All formulations compute the same integers, namely sums modulo 2^32. They are exact if the true
accumulator fits int32, which the conversion verifies.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.ops import products

ONE_ROW = 2**18
"""From this many weights on, one row is multiplied as two.

XLA has no fast int8 product of a vector on the CPU, and converts all weights to int32 instead (`python -m benchmarks
kernels`).
"""

WORD = 16
"""On GPUs the number of terms of an int8 product is padded to a multiple of this.

XLA of jax 0.11.2 computes wrong sums if the number is no multiple of 4 (seen on an H200: 6, 9, 17 and 18), or fails to
compile. cuBLAS is fastest with rows of 16 bytes.
"""


def signed_offset(dtype: str) -> int:
    """What `signed` subtracts from codes, and what therefore must be subtracted from their zero point."""
    return {"uint8": 128, "uint16": 32768}.get(dtype, 0)


def signed(x: jax.Array) -> jax.Array:
    """Unsigned codes shifted into the signed type of the same width, for the int8 path; signed codes are unchanged."""
    if x.dtype == jnp.uint8:
        return lax.bitcast_convert_type(x ^ jnp.uint8(128), jnp.int8)
    if x.dtype == jnp.uint16:
        return lax.bitcast_convert_type(x ^ jnp.uint16(32768), jnp.int16)
    return x


def dot(x: jax.Array, w: jax.Array, numbers: Any) -> jax.Array:
    """`lax.dot_general` of integers with an int32 accumulator; numbers: its dimension numbers."""

    def plain(a: jax.Array, b: jax.Array) -> jax.Array:
        return products.dot_general(a, b, numbers, jnp.int32)

    def wide(a: jax.Array, b: jax.Array) -> jax.Array:
        return plain(a.astype(jnp.int32), b.astype(jnp.int32))

    kinds = (x.dtype, w.dtype)
    if kinds == (jnp.int16, jnp.int8):
        return lax.platform_dependent(x, w, cpu=lambda a, b: _in_bytes(a, b, numbers), default=wide)
    if kinds != (jnp.int8, jnp.int8):
        return wide(x, w)
    one_row = _one_row(x.shape, w.shape, numbers)

    def on_cpu(a: jax.Array, b: jax.Array) -> jax.Array:
        # XLA reshapes the operands to matrices. If it fuses this with the operation that computes them, the loop is not
        # vectorized; the barrier prevents the fusion. A second operand without a batch is a weight: no barrier, because
        # several products may share its preparation.
        a = lax.optimization_barrier(a)
        if numbers[1][1]:
            b = lax.optimization_barrier(b)
        return _as_two_rows(a, b, numbers) if one_row else plain(a, b)

    def on_gpu(a: jax.Array, b: jax.Array) -> jax.Array:
        return plain(*_whole_words(a, b, numbers))

    summed = numbers[0][0]
    if not summed or math.prod(x.shape[axis] for axis in summed) % WORD == 0:
        return lax.platform_dependent(x, w, cpu=on_cpu, default=plain)
    return lax.platform_dependent(x, w, cpu=on_cpu, cuda=on_gpu, rocm=on_gpu, default=plain)


def sums(x: jax.Array, summed: Sequence[int], batch: Sequence[int] = ()) -> jax.Array:
    """int32 sums of int8 codes over some axes, in the axis order of a dot: batch axes first, then the others.

    On the CPU this is a product with rows of ones, which is 3 to 5 times as fast as XLA's reduction, because that
    converts all codes first (`python -m benchmarks kernels`).
    """
    batch, summed = tuple(batch), tuple(summed)
    free = tuple(axis for axis in range(x.ndim) if axis not in summed and axis not in batch)

    def reduced(x: jax.Array) -> jax.Array:
        ordered = jnp.transpose(x, (*batch, *free, *summed))
        return jnp.sum(ordered, axis=range(len(batch) + len(free), x.ndim), dtype=jnp.int32)

    def multiplied(x: jax.Array) -> jax.Array:
        # two rows, because XLA has no fast product with one row
        ones = jnp.ones([*(x.shape[axis] for axis in batch), 2, *(x.shape[axis] for axis in summed)], x.dtype)
        first = len(batch) + 1
        numbers = ((tuple(range(first, first + len(summed))), summed), (tuple(range(len(batch))), batch))
        both = products.dot_general(ones, x, numbers, jnp.int32)
        return lax.index_in_dim(both, 0, len(batch), keepdims=False)

    if x.dtype != jnp.int8 or not summed:
        return reduced(x)
    return lax.platform_dependent(x, cpu=multiplied, default=reduced)


def corrected(acc: jax.Array, x: jax.Array, w: jax.Array, z_x: Any, z_w: Any, numbers: Any) -> jax.Array:
    """sum (x - z_x)(w - z_w) = sum x w - z_x sum w - z_w sum x + n z_x z_w, from acc = sum x w; a zero of None is 0."""
    (lc, rc), (lb, rb) = numbers
    batch = len(lb)
    if z_w is not None:
        x_sum = sums(x, lc, lb)
        x_sum = x_sum.reshape((*x_sum.shape, *(1,) * (acc.ndim - x_sum.ndim)))
        acc = acc - z_w * jnp.broadcast_to(x_sum, acc.shape)
    if z_x is not None:
        w_sum = sums(w, rc, rb)
        w_sum = w_sum.reshape((*w_sum.shape[:batch], *(1,) * (acc.ndim - w_sum.ndim), *w_sum.shape[batch:]))
        acc = acc - z_x * jnp.broadcast_to(w_sum, acc.shape)
    if z_x is not None and z_w is not None:
        acc = acc + math.prod(x.shape[axis] for axis in lc) * z_x * z_w
    return acc


def _whole_words(x: jax.Array, w: jax.Array, numbers: Any) -> tuple[jax.Array, jax.Array]:
    """The operands with zeros at the end of the last summed axis, so that a sum has a multiple of `WORD` products."""
    summed = numbers[0]
    missing = -x.shape[summed[0][-1]] % WORD

    def longer(value: jax.Array, last: int) -> jax.Array:
        return lax.pad(value, np.int8(0), [(0, missing * (axis == last), 0) for axis in range(value.ndim)])

    return longer(x, summed[0][-1]), longer(w, summed[1][-1])


def _in_bytes(x: jax.Array, w: jax.Array, numbers: Any) -> jax.Array:
    """int16 codes as two int8 products: x = 256 h + (l + 128), with h and l in [-128, 127]."""
    high = (x >> 8).astype(jnp.int8)
    low = ((x & np.int16(255)) - np.int16(128)).astype(jnp.int8)
    (_, summed), (_, batch) = numbers
    parts = [products.dot_general(part, w, numbers, jnp.int32) for part in (high, low)]
    total, rank = sums(w, summed, batch), parts[0].ndim
    places = (*range(len(batch)), *range(rank - total.ndim + len(batch), rank))
    return (parts[0] << 8) + parts[1] + (lax.broadcast_in_dim(total, parts[0].shape, places) << 7)


def _one_row(x: Sequence[Any], w: Sequence[Any], numbers: Any) -> bool:
    (summed, _), (batch, _) = numbers
    free = [size for axis, size in enumerate(x) if axis not in summed]
    known = all(isinstance(size, int) for size in (*x, *w))  # an exported batch size is symbolic, not an int
    return known and not batch and len(free) > 0 and math.prod(free) == 1 and math.prod(w) >= ONE_ROW


def _as_two_rows(x: jax.Array, w: jax.Array, numbers: Any) -> jax.Array:
    axis = next(axis for axis in range(x.ndim) if axis not in numbers[0][0])
    rows = lax.pad(x, np.int8(0), [(0, int(a == axis), 0) for a in range(x.ndim)])
    return lax.slice_in_dim(products.dot_general(rows, w, numbers, jnp.int32), 0, 1, axis=0)


def taps(x: jax.Array, window: Sequence[int], strides: Sequence[int], dilation: Sequence[int]) -> list[jax.Array]:
    """For each position of a window over all axes of x, in row-major order, the strided slice of x that it reads."""
    steps = list(zip(x.shape, window, strides, dilation, strict=True))
    # from the first element that this position reads to just after its last one
    spans = [(size - (n - 1) * d - 1) // stride * stride + 1 for size, n, stride, d in steps]
    slices: list[jax.Array] = []
    for position in np.ndindex(*window):
        start = [p * d for p, d in zip(position, dilation, strict=True)]
        slices.append(lax.slice(x, start, [a + b for a, b in zip(start, spans, strict=True)], tuple(strides)))
    return slices
