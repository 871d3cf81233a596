"""Lays a tensor out as one row per scale, so that every observer reduces along the last axis."""

import math
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from qjax.numerics.affine import QSpec, split_groups

ArrayT = TypeVar("ArrayT", jax.Array, np.ndarray)

_TINY = np.float32(2.0**-126)


def batch_rows(x: Array, spec: QSpec) -> tuple[Array, Array]:
    """A batch as float32 (scales, values per scale), and which of the values are finite.

    Rows are in row-major order of the parameters' shape. What is not finite is replaced by 0, and so
    are magnitudes below 2**-126, which some devices flush and others do not.

    Raises:
        TypeError, ValueError: see `check_batch`.
    """
    check_batch(x)
    rows = to_rows(x.astype(jnp.float32), spec)
    finite = jnp.isfinite(rows)
    return jnp.where(finite & (jnp.abs(rows) >= _TINY), rows, jnp.float32(0)), finite


def check_batch(x: Array) -> None:
    """Raises unless x is a batch that the counters can take.

    Raises:
        TypeError: x is not of a floating dtype.
        ValueError: x is empty, or has 2**32 elements or more.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"an observer expected a floating tensor. Got {x.dtype}: observe the values before quantizing.")
    if not 0 < x.size < 2**32:
        raise ValueError(
            f"an observer expected a batch of 1 to 2**32 - 1 elements. Got shape {x.shape}: "
            + ("drop the empty batch." if x.size == 0 else "split the batch.")
        )


def row_bounds(rows: Array, finite: Array) -> tuple[Array, Array]:
    """Smallest and largest finite value of each row; +inf and -inf where there is none."""
    lo = jnp.min(jnp.where(finite, rows, jnp.float32(jnp.inf)), axis=1)
    hi = jnp.max(jnp.where(finite, rows, jnp.float32(-jnp.inf)), axis=1)
    return lo, hi


def to_rows(x: ArrayT, spec: QSpec) -> ArrayT:
    """The elements of each scale as one row: (number of scales, elements per scale)."""
    view, reduced = split_groups(x, spec)
    kept = tuple(axis for axis in range(view.ndim) if axis not in reduced)
    scales = math.prod(view.shape[axis] for axis in kept)
    return view.transpose((*kept, *reduced)).reshape(scales, -1)  # pyright: ignore[reportReturnType]
