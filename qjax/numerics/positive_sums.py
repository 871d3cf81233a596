"""Sums of positive float32 numbers, one addition after the other, in integers: each addition rounds once, to even.

A number is one int64, its key: (e + 214) 2^23 + m - 2^23 stands for m 2^e, with m in [2^23, 2^24). Keys have the order
of their numbers. The exponent has more room than in float32, so that subnormal numbers are no special case: below
2^-125 every sum is a multiple of 2^-149 that 24 bits hold, and so is exact in both.

Zero has no key. 2^-190 takes its place. Fewer than 2^12 such numbers add up to less than 2^-177. That is less than
half of the last bit of any other number, so they change no sum with one.
"""

from typing import Any

import jax
import numpy as np

from qjax.numerics._namespace import like_inputs, wide
from qjax.numerics.calls import within
from qjax.numerics.float32 import Float32, bit_length
from qjax.numerics.rounding import Rounding, right_shift_with_headroom

MOST_TERMS = 1 << 12
"""A sum has fewer numbers."""

_I32, _I64 = np.int32, np.int64
_BITS = 23
_LEADING = _I64(1 << _BITS)
_OFFSET = 214
_ZERO = _LEADING
"""The key of 2^-190."""
_MANTISSAS = (1 << _BITS, 1 << (_BITS + 1))
_EXPONENTS = (-214, 300)
"""Exponents of keys and their sums; those of float32 numbers are less than 117."""
_ROOM = 30


def keys(numbers: Float32) -> Any:
    """The keys of numbers that are not negative, int64 of their shape."""
    xp = like_inputs(*numbers)
    with wide(xp):
        mantissa = xp.asarray(numbers.mantissa).astype(_I64)
        exponent = xp.asarray(numbers.exponent).astype(_I64)
        lift = _I64(_BITS + 1) - bit_length(xp, mantissa).astype(_I64)
        field = exponent - lift + _I64(_OFFSET)
        return xp.where(mantissa == 0, _ZERO, (field << _I64(_BITS)) + (mantissa << lift) - _LEADING)


def numbers(found: tuple[Any, Any]) -> Float32:
    """The numbers of `fields` or of a sum."""
    mantissa, exponent = found
    with wide(like_inputs(mantissa)):
        return Float32(mantissa.astype(_I32), exponent.astype(_I32))


def total(terms: Any) -> tuple[Any, Any]:
    """The sum along the first axis, from left to right: m and e of m 2^e, int64, with m from 2^23 to 2^24.

    Args:
      terms: keys, int64 of shape (n, ...), n from 1 to `MOST_TERMS` - 1.
    """
    xp = like_inputs(terms)
    with wide(xp):
        mantissa, exponent = fields(terms)
        found = mantissa[0], exponent[0]
        if xp is np:
            for index in range(1, len(terms)):
                found = _added(found, (mantissa[index], exponent[index]))
        elif len(terms) > 1:
            found, _ = jax.lax.scan(lambda sum, term: (_added(sum, term), None), found, (mantissa[1:], exponent[1:]))
        return found


def _added(a: tuple[Any, Any], b: tuple[Any, Any]) -> tuple[Any, Any]:
    """a + b, rounded to 24 bits once, ties to even; mantissas up to 2^24, which the next addition accepts, too."""
    (m, e), (term, e_term) = ((within(x, *_MANTISSAS), within(y, *_EXPONENTS)) for x, y in (a, b))
    xp = like_inputs(m, term)
    # Further apart than 30 bits, the smaller number is less than a quarter of the last bit: nothing, but not zero.
    apart = e - e_term
    down, down_term = (within(xp.clip(d, _I64(0), _I64(_ROOM)), 0, _ROOM) for d in (-apart, apart))
    exact = ((m << _I64(_ROOM)) >> down) + ((term << _I64(_ROOM)) >> down_term)
    # the mask tells a compiler that this is one bit
    carry = within((exact >> _I64(_ROOM + _BITS + 1)) & _I64(1), 0, 1)
    shift = carry + _I64(_ROOM)
    rounded = right_shift_with_headroom(xp, exact, shift, Rounding.NEAREST_EVEN)
    return within(rounded, *_MANTISSAS), within(xp.maximum(e, e_term) + carry, *_EXPONENTS)


def fields(key: Any) -> tuple[Any, Any]:
    """Mantissa in [2^23, 2^24) and exponent of keys, int64."""
    with wide(like_inputs(key)):
        field = key >> _I64(_BITS)
        mantissa = key - ((field - _I64(1)) << _I64(_BITS))
        return within(mantissa, *_MANTISSAS), within(field - _I64(_OFFSET), *_EXPONENTS)
