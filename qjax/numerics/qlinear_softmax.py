"""Softmax of 8-bit codes over the last axis as ONNX Runtime's operator QLinearSoftmax computes it.

For n codes a row, scales s_x and s_y and the zero point z_y, with d the difference to the greatest code of the row:

    e_d = float32(exp((l - 5 / s_x - d) s_x)),  l = max(0, float32(log(float32(max / n))) - 5) / s_x, in doubles
    c = floor(float32(1 / s_y));  S = e_0 + ... + e_n, in float32 from left to right
    y = min(rint(float32(float32(e_d c) / S)) + z_y, the greatest code)

max is the greatest float32. So 1 / s_y becomes a whole number, and values are off by up to that much. The runtime's
product e_d c overflows for small n (n = 1) or small s_y; `overflows` tells when. Here it does not, because exponents
have more room.

Source: onnxruntime/contrib_ops/cpu/quantization/qlinear_softmax.cc. Compared with ONNX Runtime 1.31: there int8 stops
at 127; the conversion of earlier versions wraps a sum above that.

In integers: q = rint(float32(x)) with x = p / S for p = float32(e_d c). float32(x) lies above q - 1/2, or is equal to
it and q is even, exactly if x > h + u/2 (q odd) or x >= h - u/2 (q even), with h = q - 1/2 and u the last bit of a
float32 at h. A reciprocal of S results in q or q + 1, and one comparison decides.
"""

from decimal import Decimal, localcontext
from typing import Any, NamedTuple

import numpy as np

from qjax.numerics import float32, positive_sums
from qjax.numerics._namespace import like_inputs, wide
from qjax.numerics.calls import named
from qjax.numerics.division import truncated
from qjax.numerics.float32 import Float32

_I32, _I64 = np.int32, np.int64
_RESERVE = 5.0
_DIGITS = 40
_RECIPROCAL_BITS = 47
_UNITS = 14
"""A first guess at x is in steps of 2^-14."""
_LEAST, _GREATEST = -3, 10
"""Powers of two apart at which x rounds to 0 and lies beyond all codes."""


class Onnx(NamedTuple):
    """Constants of the method `onnx`, int32.

    Attributes:
      mantissa, exponent: of e_d for d = 0, ..., 255.
      share_mantissa, share_exponent: of float32(e_d c).
      zero_point: z_y, a scalar.
    """

    mantissa: Any
    exponent: Any
    share_mantissa: Any
    share_exponent: Any
    zero_point: Any


def prepare(x_scale: np.float32, length: int, y_scale: np.float32, zero_point: int) -> Onnx:
    """The constants for rows of that length, on the host.

    Raises:
      ValueError: a scale that is not finite and positive, or an output's scale above 1.
    """
    if not (np.isfinite(y_scale) and 0 < y_scale <= 1):
        raise ValueError(f"softmax: the output's scale must be positive and at most 1. Got {y_scale}.")
    powers = Float32(*(np.asarray(part, _I32) for part in float32.of(_powers(x_scale, length))))
    shares = float32.multiply(powers, float32.of(_steps(y_scale)))
    return Onnx(*powers, *shares, _I32(zero_point))


def overflows(x_scale: np.float32, length: int, y_scale: np.float32) -> bool:
    """Whether the runtime's product of the greatest exponential and 1 / s_y exceeds float32, so it has no result."""
    with np.errstate(over="ignore"):
        return not np.isfinite(_powers(x_scale, length)[0] * _steps(y_scale))


def _steps(y_scale: np.float32) -> np.float32:
    return np.floor(np.float32(1) / y_scale)


def _powers(x_scale: np.float32, length: int) -> np.ndarray:
    """e_d for d = 0, ..., 255; float32. The exponential is correctly rounded to a double first."""
    scale = float(x_scale)
    if not (np.isfinite(scale) and scale > 0):
        raise ValueError(f"softmax: the input's scale must be finite and positive. Got {x_scale}.")
    room = float(np.float32(np.log(float(np.finfo(np.float32).max / np.float32(length)))))
    lift = max(0.0, room - _RESERVE) / scale
    with localcontext() as context:
        context.prec = _DIGITS
        found = [float(Decimal((-d + lift) * scale).exp()) for d in range(256)]
    return np.asarray(found, np.float64).astype(np.float32)


@named()
def qlinear_softmax(codes: Any, constants: Onnx) -> Any:
    """int32 codes of the softmax over the last axis, zero point included, not yet clamped to the greatest code.

    Args:
      codes: int32, (..., n), n from 1 to 4095.
      constants: of `prepare` for that n.
    """
    xp = like_inputs(codes, *constants)
    exponentials = positive_sums.keys(Float32(constants.mantissa, constants.exponent))
    shares = positive_sums.keys(Float32(constants.share_mantissa, constants.share_exponent))
    with wide(xp):
        # Mode "clip" is the form of a lookup that the emitters know. All differences lie within the table.
        difference = xp.max(codes, axis=-1, keepdims=True) - codes
        terms = xp.take(exponentials, xp.moveaxis(difference, -1, 0), mode="clip")
        mantissa, exponent = (xp.expand_dims(part, -1) for part in positive_sums.total(terms))
        found = _quotient(xp, xp.take(shares, difference, mode="clip"), mantissa, exponent)
        return found + xp.asarray(constants.zero_point)


def _quotient(xp: Any, shares: Any, s: Any, e_s: Any) -> Any:
    """rint(float32(p / S)) of keys and of S = s 2^e_s; int32, some number above 255 for all quotients beyond."""
    p, e_p = positive_sums.fields(shares)
    reciprocal = truncated(xp, xp.full_like(s, 1 << _RECIPROCAL_BITS), s)
    g = xp.clip(e_p - e_s, _I64(_LEAST), _I64(_GREATEST))
    # too small by less than 3 units, and float32 may round up by another one
    units = (p * reciprocal) >> (_I64(_RECIPROCAL_BITS - _UNITS) - g)
    q = (units + _I64((1 << (_UNITS - 1)) + 8)) >> _I64(_UNITS)
    # B 2^-26 is h + u/2 or h - u/2; for q = 0 it is negative
    twice = q + q - _I64(1)
    half = _I64(1) << float32.bit_length(xp, xp.maximum(twice, _I64(1))).astype(_I64)
    odd = q & _I64(1)
    bound = (twice << _I64(25)) + xp.where(odd == 1, half, -half)
    reached = (p << (g + _I64(26))) >= bound * s + odd
    return (q - _I64(1) + reached.astype(_I64)).astype(_I32)
