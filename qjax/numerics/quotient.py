"""The quotient of two tensors of codes, rounded once.

    y = rint(c0 m / (c1 2^t)),  m 2^-t = s0 / (s1 s_y) with m below 2^30, t in [-14, 44]

exact for these m and t, ties to even. m is the ratio's 30 leading bits; a ratio below 2^-14 has fewer, and is exact to
2^-45. Numerator and divisor are below 2^62 for centered codes of 17 bits.
"""

from typing import Any

import numpy as np

from qjax.numerics._namespace import host_or_trace, like_inputs, wide
from qjax.numerics.division import divide_to_even
from qjax.numerics.softfloat import Real

_BITS = 30
_LEAST, _MOST = -14, 44
_END = np.int64(1 << 20)
"""Beyond every code of 16 bits, a zero point included."""


def fold_quotient(x_scale: Any, divisor_scale: Any, y_scale: Any) -> dict[str, Any]:
    """The constants of `quotient`, int32 scalars: factor (m) and shift (t). Scales are float32, also traced."""
    ratio = Real.of(x_scale) / (Real.of(divisor_scale) * Real.of(y_scale))
    xp = host_or_trace(ratio.mantissa)
    with wide(xp):
        # ratio = mantissa * 2^exponent, with a mantissa of 53 bits.
        shift = xp.clip(np.int32(_BITS - 53) - ratio.exponent, np.int32(_LEAST), np.int32(_MOST)).astype(np.int32)
        factor = ratio.scale_by_power_of_two(shift).minimum(Real.of(np.float32(2.0**_BITS - 64)))
    return {"factor": factor.to_int32(), "shift": shift}


def quotient(dividend: Any, divisor: Any, constants: Any) -> Any:
    """int32 of one shape -> int32 in steps of y; what lies beyond +-2^20 is that.

    A divisor of 0 gives +-2^20 by the sign of the dividend, and 0 / 0 is 0.
    """
    xp = like_inputs(dividend, divisor)
    with wide(xp):
        a, b = (xp.asarray(x).astype(np.int64) for x in (dividend, divisor))
        factor, shift = (
            xp.broadcast_to(xp.asarray(constants[name]).astype(np.int64), a.shape) for name in ("factor", "shift")
        )
        zero = np.int64(0)
        numerator = (abs(a) * factor) << xp.maximum(-shift, zero)
        below = xp.maximum(abs(b), np.int64(1)) << xp.maximum(shift, zero)
        found = xp.minimum(divide_to_even(xp, numerator, below), _END)
        found = xp.where(b == zero, xp.where(a == zero, zero, _END), found)
        return xp.where((a < zero) != (b < zero), -found, found).astype(np.int32)
