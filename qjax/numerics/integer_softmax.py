"""Softmax over any axes of codes of any width, in integers, for targets without their own method.

    e_i = rint(2^30 exp(-s (max q - q_i))),  p_i = rint(e_i R / 2^(31 + j)),  R = rint(2^61 / rint(sum e / 2^j))

with the least j for which `sum e / 2^j` is below 2^31. p is the softmax in steps of 2^-30: one table, one division of
64 bits per row, one product and one shift per element; ties to even.

The error: the greatest code's e is 2^30 exactly, and every other e is off by half a step at most, so the sum is at
least 2^30 and off by (n - 1) / 2; rounding it to 31 bits and rounding R change p by 2^-30 of itself; the last rounding
adds half a step. So `|2^30 P - p| <= 1 + P (n + 1) / 2 <= (n + 3) / 2` for n elements, where P is the real softmax.
"""

from decimal import ROUND_HALF_EVEN, Decimal, localcontext
from types import ModuleType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from qjax.numerics._namespace import like_inputs, traced, wide
from qjax.numerics.calls import named, within
from qjax.numerics.division import divide_to_even
from qjax.numerics.rounding import Rounding, right_shift_with_headroom

BITS = 30
"""p is in steps of 2^-30."""

Empty = Literal["uniform", "zero"]
"""The result of a row in which no element takes part: the same share for each, or 0."""

_DIGITS = 60
_RECIPROCAL_BITS = 61


def exponentials(scale: ArrayLike, count: int) -> Any:
    """rint(2^30 exp(-scale * d)) for d = 0, ..., count - 1, ties to even: int32 of shape (count,).

    Each entry is correctly rounded, because powers of exp(-scale) with 60 decimal digits are off by less than 10^-54.
    On the host a tail of zeros is shortened to one; a traced scale (a scalar) is sent to the host, with the same
    entries as a result.

    Raises:
      ValueError: a scale on the host that is not finite and positive.
    """
    if traced(scale):
        shape = jax.ShapeDtypeStruct((count,), np.int32)
        return jax.pure_callback(lambda s: _powers(s, count), shape, scale, vmap_method="sequential")
    value = np.float32(np.asarray(scale).reshape(()))
    if not (np.isfinite(value) and value > 0):
        raise ValueError(f"softmax: the input's scale must be finite and positive. Got {value}.")
    found = _powers(value, count)
    return found[: int(np.count_nonzero(found)) + 1]


def _powers(scale: ArrayLike, count: int) -> np.ndarray:
    step = float(np.asarray(scale).reshape(()))
    found = np.zeros(count, np.int32)
    if not (np.isfinite(step) and step > 0):
        return found
    with localcontext() as context:
        context.prec = _DIGITS
        factor, power = (-Decimal(step)).exp(), Decimal(2**BITS)
        for d in range(count):
            entry = int(power.to_integral_value(ROUND_HALF_EVEN))
            if not entry:
                break
            found[d] = entry
            power *= factor
    return found


def shares(codes: Any, table: Any, axes: tuple[int, ...], taking_part: Any = None, empty: Empty = "uniform") -> Any:
    """The softmax over some axes together, int32 in steps of 2^-30.

    Args:
      codes: integers of at most 16 bits. axes: not empty, none negative; at most 2^31 elements in a row.
      table: of `exponentials`, for all differences that occur or until it is 0.
      taking_part: booleans of the shape of `codes`: others count as minus infinity; None: all take part.
      empty: the result of a row without any element that takes part.

    Returns:
      int32 of the codes' shape: a numpy array for host inputs, a JAX array otherwise.
    """
    xp = like_inputs(codes, table, taking_part)
    q = xp.asarray(codes).astype(np.int32)
    counts = None
    if taking_part is not None:
        taking_part = xp.asarray(taking_part)
        # Rows without any such element are recognized by their greatest code, which is the filler.
        q = xp.where(taking_part, q, np.int32(np.iinfo(codes.dtype).min))
        counts = taking_part
        if empty == "uniform":
            some = xp.max(taking_part.astype(np.int32), axis=axes, keepdims=True)
            counts = taking_part | xp.broadcast_to(some == np.int32(0), q.shape)
    difference = xp.broadcast_to(xp.max(q, axis=axes, keepdims=True), q.shape) - q
    powers = looked_up(xp, xp.asarray(table), difference)
    if counts is not None:
        powers = xp.where(counts, powers, np.int32(0))
    return _shares(xp, powers, axes)


def looked_up(xp: ModuleType, table: Any, index: Any) -> Any:
    """table[index] for int32 indices of any shape; indices beyond the table read its last entry."""
    if xp is jnp:
        return jnp.take(table, index, axis=0, mode="clip")
    return table[np.minimum(index, table.shape[0] - 1)]


def _shares(xp: ModuleType, powers: Any, axes: tuple[int, ...]) -> Any:
    count = int(np.prod([powers.shape[axis] for axis in axes]))
    with wide(xp):
        total = xp.sum(powers.astype(np.int64), axis=axes, keepdims=True)
        # A row of zeros, because nothing took part: any divisor leads to 0.
        total = xp.maximum(total, np.int64(1))
        shift, _ = leading(xp, total, count)
        divisor = within(right_shift_with_headroom(xp, total, shift, Rounding.NEAREST_EVEN), 1, 1 << (BITS + 1))
        numerator = xp.full_like(divisor, np.int64(1 << _RECIPROCAL_BITS))
        reciprocal = divide_to_even(xp, numerator, divisor)
        # no exponential exceeds its row's sum
        product = within(powers.astype(np.int64) * xp.broadcast_to(reciprocal, powers.shape), 0, 1 << 62)
        places = xp.broadcast_to(shift + np.int64(_RECIPROCAL_BITS - BITS), powers.shape)
        return right_shift_with_headroom(xp, product, places, Rounding.NEAREST_EVEN).astype(np.int32)


@named(0, 2)
def leading(xp: ModuleType, total: Any, count: int) -> tuple[Any, Any]:
    """The least j for which `total / 2^j` is below 2^31, and the floor of that quotient; call it inside `wide`.

    total: int64 of any shape, positive, at most 2^30 count; count: at most 2^31.
    """
    shift, rest = xp.zeros_like(total), total
    for step in (16, 8, 4, 2, 1):
        if count >> step or step == 1:
            large = rest >= np.int64(1 << (BITS + step))
            rest = xp.where(large, rest >> np.int64(step), rest)
            shift = xp.where(large, shift + np.int64(step), shift)
    return shift, rest
