"""Arranges a tensor as one row per scale, so that every observer reduces along the last axis."""

import math
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from qjax.numerics.affine import QSpec, split_groups

ArrayT = TypeVar("ArrayT", jax.Array, np.ndarray)

_TINY = np.float32(2.0**-126)


def batch_rows(x: Array, spec: QSpec) -> tuple[Array, Array]:
    """A batch as float32 (scales, values per scale), and a mask of the finite values.

    Rows are in row-major order of the parameters' shape. Values that are not finite are replaced by 0, and so are
    magnitudes below 2**-126, which some devices flush to zero and others do not.
    """
    check_batch(x)
    rows = to_rows(x.astype(jnp.float32), spec)
    finite = jnp.isfinite(rows)
    return jnp.where(finite & (jnp.abs(rows) >= _TINY), rows, jnp.float32(0)), finite


def check_batch(x: Array) -> None:
    """Raise unless x is a batch that the counters support.

    Raises:
        TypeError: x is not of a floating dtype.
        ValueError: x is empty, or has 2**32 elements or more.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"observer: expected a floating tensor, got {x.dtype}. Observe the values before quantizing.")
    if not 0 < x.size < 2**32:
        raise ValueError(
            f"observer: expected a batch of 1 to 2**32 - 1 elements, got shape {x.shape}: "
            + (_empty(x.shape) if x.size == 0 else "split the batch.")
        )


def batch_summary(x: Array, spec: QSpec) -> tuple[Array, Array, Array]:
    """The statistics of a batch that most observers need.

    Returns:
        float32 (scales,), twice: the smallest and the largest finite value of each row of `batch_rows`; +inf and -inf
        where there is none. uint32 (3,): the numbers of values, of NaNs and of infinities in the batch.

    One loop over the batch computes all of it. As four reductions it took XLA more than twice as long to compile, and
    on a CPU more than four times as long to run.
    """
    rows, finite = batch_rows(x, spec)
    nan = to_rows(jnp.isnan(x), spec)
    infinity = jnp.float32(jnp.inf)
    operands = (
        jnp.where(finite, rows, infinity),
        jnp.where(finite, rows, -infinity),
        nan.astype(jnp.uint32),
        (~finite & ~nan).astype(jnp.uint32),
    )
    starts = (np.float32(np.inf), np.float32(-np.inf), np.uint32(0), np.uint32(0))
    lo, hi, nans, infinities = lax.reduce(operands, starts, _combine, (1,))
    counts = (jnp.uint32(x.size), *(jnp.sum(count, dtype=jnp.uint32) for count in (nans, infinities)))
    return lo, hi, jnp.stack(counts)


def _combine(a: tuple[Array, ...], b: tuple[Array, ...]) -> tuple[Array, ...]:
    return jnp.minimum(a[0], b[0]), jnp.maximum(a[1], b[1]), a[2] + b[2], a[3] + b[3]


def to_rows(x: ArrayT, spec: QSpec) -> ArrayT:
    """The elements of each scale as one row: (number of scales, elements per scale)."""
    view, reduced = split_groups(x, spec)
    kept = tuple(axis for axis in range(view.ndim) if axis not in reduced)
    scales = math.prod(view.shape[axis] for axis in kept)
    return view.transpose((*kept, *reduced)).reshape(scales, -1)  # pyright: ignore[reportReturnType]


def _empty(shape: tuple[int, ...]) -> str:
    """The cure for an array without elements."""
    if shape[0] == 0:
        return "drop the empty batch."
    return "the model computes an array without elements, so remove the layer or the slice of width 0 that makes it."
