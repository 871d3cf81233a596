"""The logarithm of a sum of exponentials of codes, in integers; the main part of log-softmax and logsumexp.

    L = log(sum_i exp(-s (max q - q_i))),  log-softmax_i = -s (max q - q_i) - L,  logsumexp = s (max q - z) + L

The exponentials and their sum S are those of `integer_softmax`, in steps of 2^-30. With j so that m = floor(S / 2^j)
lies in [2^30, 2^31), `log(S / 2^30) = j log 2 + log(m / 2^30)`, and the last term is interpolated linearly in a table
of 1025 logarithms.

The error: S is at least 2^30 and off by (n - 1) / 2 for n elements; the floor loses less than 2^-30 of m; a chord of
the logarithm is below it by 2^-23 at most (h^2 / 8 for steps of h = 2^-10); entries, the chord's floor and j log 2 add
less than 2^-28 together, and the last rounding 2^-26. So `|2^-25 l - L| <= 2^-22 + (n - 1) / (2^31 - n)`.
"""

from decimal import ROUND_HALF_EVEN, Decimal, localcontext
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

from qjax.numerics._namespace import like_inputs, wide
from qjax.numerics.integer_softmax import BITS, leading, looked_up

LOG_BITS = 25
"""l is in steps of 2^-25: below 22 * 2^25 < 2^30 for rows of up to 2^31 elements."""

_ENTRY_BITS = 10
_BETWEEN = np.int64(BITS - _ENTRY_BITS)
_LOG2_BITS = 40
_LOG2 = np.int64(762123384786)
"""rint(2^40 log 2)."""


@cache
def logarithms() -> np.ndarray:
    """rint(2^30 log(1 + i / 1024)) for i = 0, ..., 1024, ties to even: int32 of shape (1025,)."""
    with localcontext() as context:
        context.prec = 40
        whole = 2**_ENTRY_BITS
        entries = [(1 + Decimal(i) / whole).ln() * 2**BITS for i in range(whole + 1)]
        return np.array([int(entry.to_integral_value(ROUND_HALF_EVEN)) for entry in entries], np.int32)


def log_sums(
    codes: Any, exponentials: Any, logs: Any, axes: tuple[int, ...], taking_part: Any = None
) -> tuple[Any, Any]:
    """The greatest code of each row and l = 2^25 L: int32 of the codes' shape with one element along the axes.

    Both only consider the codes that take part.

    Args:
      codes: integers of at most 16 bits. axes: not empty, none negative; at most 2^31 - 1 elements in a row.
      exponentials: of `integer_softmax.exponentials`, for all differences that occur or until it is 0.
      logs: of `logarithms`.
      taking_part: booleans of the shape of `codes`; None: all take part, as in a row without any that does.

    Returns:
      numpy arrays for host inputs, JAX arrays otherwise.
    """
    xp = like_inputs(codes, exponentials, logs)
    q = xp.asarray(codes).astype(np.int32)
    if taking_part is not None:
        taking_part = xp.asarray(taking_part)
        some = xp.max(taking_part.astype(np.int32), axis=axes, keepdims=True)
        taking_part = taking_part | xp.broadcast_to(some == np.int32(0), q.shape)
        visible = xp.where(taking_part, q, np.int32(np.iinfo(codes.dtype).min))
    else:
        visible = q
    greatest = xp.max(visible, axis=axes, keepdims=True)
    powers = looked_up(xp, xp.asarray(exponentials), xp.broadcast_to(greatest, q.shape) - visible)
    if taking_part is not None:
        powers = xp.where(taking_part, powers, np.int32(0))
    with wide(xp):
        total = xp.sum(powers.astype(np.int64), axis=axes, keepdims=True)
        shift, mantissa = leading(xp, total, int(np.prod([q.shape[axis] for axis in axes])))
        return greatest, logarithm(xp, shift, mantissa, xp.asarray(logs))


def logarithm(xp: ModuleType, shift: Any, mantissa: Any, logs: Any) -> Any:
    """rint(2^25 (shift log 2 + log(mantissa / 2^30))), ties up: int32; mantissa in [2^30, 2^31)."""
    rest = mantissa - np.int64(1 << BITS)
    index = (rest >> _BETWEEN).astype(np.int32)
    low = looked_up(xp, logs, index).astype(np.int64)
    step = looked_up(xp, logs, index + np.int32(1)).astype(np.int64) - low
    fraction = rest & np.int64((1 << int(_BETWEEN)) - 1)
    found = low + ((step * fraction) >> _BETWEEN) + ((shift * _LOG2) >> np.int64(_LOG2_BITS - BITS))
    places = BITS - LOG_BITS
    return ((found + np.int64(1 << (places - 1))) >> np.int64(places)).astype(np.int32)
