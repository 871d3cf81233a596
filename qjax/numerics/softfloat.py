"""Real numbers as sign, 53-bit mantissa and exponent: IEEE binary64 arithmetic in integers.

Runtimes derive their fixed-point constants from scales in C doubles. Under XLA neither float64 nor a division
that rounds as IEEE asks can be relied on, so `prepare` would give other bits inside `jit` than on the host.
`Real` computes +, -, *, / and sqrt in 64-bit integers, each rounded once to 53 bits, ties to even: the same
bits as a C double as long as nothing over- or underflows there, and the same on the host, inside jit, and
under vmap.

Not a general float: there is no NaN, no infinity and no signed zero, and the exponent is unbounded (int32).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qjax.numerics._namespace import host_or_trace, traced, wide
from qjax.numerics._words import (
    FLOAT_FORMATS,
    apart,
    multiply_wide,
    normalized,
    repeat,
    round_off,
    sticky_right_shift,
    unpack_float,
)
from qjax.numerics.rounding import Rounding

_U = np.uint64
_BITS = 53


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Real:
    """An array of real numbers, value = sign * mantissa * 2^exponent; arithmetic broadcasts by numpy's rules.

    Build one with `Real.of`; the fields are in canonical form, zero being (0, 0, 0).

    A `Real` is a pytree, to be carried inside one trace. It should not cross the boundary of a `jit` where
    64-bit types are disabled: JAX truncates a uint64 argument there, which the next operation reports as a
    TypeError.

    Attributes:
      sign: int32, -1, 0 or 1.
      mantissa: uint64, 0 or in [2^52, 2^53).
      exponent: int32.
    """

    sign: Any
    mantissa: Any
    exponent: Any

    # numpy operands leave the operation to this class instead of building an object array
    __array_ufunc__ = None

    @classmethod
    def of(cls, x: Any) -> "Real":
        """The exact value of x (integers beyond 53 bits are rounded to nearest even, as a C cast to double).

        Args:
          x: a Real, a Python number, or an array of float16, bfloat16, float32, float64 or integers.
            Subnormal numbers are exact. Concrete JAX arrays are read to the host.

        Raises:
          TypeError: another type.
          ValueError: NaN or infinity on the host; inside a trace they give a meaningless finite value.
        """
        if isinstance(x, Real):
            if str(x.mantissa.dtype) != "uint64":
                raise TypeError(
                    f"a Real's mantissa must be uint64. Got {x.mantissa.dtype}: it crossed the boundary of a "
                    "jit where 64-bit types are disabled. Build it inside the jitted function from float32."
                )
            return x
        xp = host_or_trace(x)
        if xp is np:
            x = np.asarray(x)
        dtype = str(x.dtype)
        with wide(xp):
            if dtype in FLOAT_FORMATS:
                return _rounded(xp, *unpack_float(xp, x, *FLOAT_FORMATS[dtype]))
            if np.issubdtype(x.dtype, np.integer):
                negative = x < 0
                wrapped = x.astype(_U)
                magnitude = xp.where(negative, _U(0) - wrapped, wrapped)
                return _rounded(xp, xp.where(negative, np.int32(-1), np.int32(1)), magnitude, np.int32(0))
        raise TypeError(f"a Real is made of float or integer arrays. Got dtype {dtype}.")

    @staticmethod
    def where(condition: Any, a: Any, b: Any) -> "Real":
        """Take a where the boolean condition holds, b elsewhere; the three broadcast together."""
        xp, a, b = _operands(a, b, condition)
        with wide(xp):
            shape = np.broadcast_shapes(np.shape(condition), np.shape(a.sign))
            a, b = a.broadcast_to(shape), b.broadcast_to(shape)
            c = xp.broadcast_to(xp.asarray(condition), shape)
            return Real(*(xp.where(c, p, q) for p, q in zip(a._parts(), b._parts(), strict=True)))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape shared by the three fields."""
        return tuple(np.shape(self.sign))

    @property
    def is_zero(self) -> Any:
        """Boolean array: where the value is 0."""
        return self.sign == 0

    def broadcast_to(self, shape: tuple[int, ...]) -> "Real":
        """The same values, broadcast to `shape`."""
        xp = host_or_trace(*self._parts())
        with wide(xp):
            return Real(*(xp.broadcast_to(xp.asarray(p), shape) for p in self._parts()))

    def __neg__(self) -> "Real":
        return Real(-self.sign, self.mantissa, self.exponent)

    def __abs__(self) -> "Real":
        return Real(abs(self.sign), self.mantissa, self.exponent)

    def __add__(self, other: Any) -> "Real":
        """The sum, with 10 guard bits and one sticky bit for what is shifted out of the smaller operand.

        The sticky sum is an odd integer within 1 of the exact one whenever bits were lost, and every number
        where the rounding could turn is even there; so the rounding of the two agrees.
        """
        xp, a, b = _operands(self, other)

        def compute(a: Real, b: Real) -> Any:
            swap = b.is_zero | (~a.is_zero & _magnitude_less(b, a))
            big = Real(*(xp.where(swap, p, q) for p, q in zip(a._parts(), b._parts(), strict=True)))
            small = Real(*(xp.where(swap, q, p) for p, q in zip(a._parts(), b._parts(), strict=True)))
            gap = xp.where(small.is_zero, np.int32(0), big.exponent - small.exponent)
            aligned = sticky_right_shift(xp, small.mantissa << _U(10), xp.minimum(gap, np.int32(63)).astype(_U))
            top = big.mantissa << _U(10)
            total = xp.where(big.sign == small.sign, top + aligned, top - aligned)
            return _rounded(xp, big.sign, total, big.exponent - np.int32(10))

        with wide(xp):
            return apart(xp, compute, a, b)

    def __sub__(self, other: Any) -> "Real":
        return self + (-Real.of(other))

    def __mul__(self, other: Any) -> "Real":
        """The product: 106 bits by 32-bit limbs, of which 64 and a sticky bit are kept before rounding."""
        xp, a, b = _operands(self, other)

        def compute(a: Real, b: Real) -> Any:
            high, low = multiply_wide(a.mantissa, b.mantissa)
            kept = (high << _U(22)) | (low >> _U(42))
            sticky = (low & _U((1 << 42) - 1)) != 0
            return _rounded(xp, a.sign * b.sign, kept | sticky.astype(_U), a.exponent + b.exponent + np.int32(42))

        with wide(xp):
            return apart(xp, compute, a, b)

    def __truediv__(self, other: Any) -> "Real":
        """The quotient: schoolbook division, 11 bits a step, to at least 55 bits and a sticky remainder.

        Raises:
          ZeroDivisionError: a zero divisor on the host. Inside a trace the quotient there is a meaningless
            finite number.
        """
        xp, a, b = _operands(self, other)
        if xp is np and np.any(b.is_zero):
            raise ZeroDivisionError("division of a Real by zero; a scale must be greater than 0.")

        def compute(a: Real, b: Real) -> Any:
            divisor = xp.where(b.is_zero, _U(1 << 52), b.mantissa)
            rest, quotient = a.mantissa, xp.zeros_like(a.mantissa)
            for _ in range(5):
                rest = rest << _U(11)
                digit = rest // divisor
                rest = rest - digit * divisor
                quotient = (quotient << _U(11)) | digit
            quotient = quotient | (rest != 0).astype(_U)
            return _rounded(xp, a.sign * b.sign, quotient, a.exponent - b.exponent - np.int32(55))

        with wide(xp):
            return apart(xp, compute, a, b)

    def __radd__(self, other: Any) -> "Real":
        return self + other

    def __rsub__(self, other: Any) -> "Real":
        return Real.of(other) - self

    def __rmul__(self, other: Any) -> "Real":
        return self * other

    def __rtruediv__(self, other: Any) -> "Real":
        return Real.of(other) / self

    def sqrt(self) -> "Real":
        """The square root, rounded to nearest even.

        The mantissa is brought to an even exponent and extended to 112 bits, whose integer root has 56; the
        remainder is the sticky bit. One root bit per step: try 4 root + 1 against the rest.

        Raises:
          ValueError: a negative number on the host. Inside a trace the root of |x| is returned, negated.
        """
        xp, a, _ = _operands(self, self)
        if xp is np and np.any(a.sign < 0):
            raise ValueError("sqrt needs numbers of at least 0. Got a negative one.")

        def compute(a: Real) -> Any:
            odd = (a.exponent & np.int32(1)).astype(_U)
            # 54 bits in the top of a word, taken two at a time; the zeros that follow are the extension
            digits = a.mantissa << (odd + _U(10))

            def step(state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
                digits, rest, root = state
                rest = (rest << _U(2)) | (digits >> _U(62))
                trial = (root << _U(2)) | _U(1)
                fits = (rest >= trial).astype(_U)
                return digits << _U(2), rest - fits * trial, (root << _U(1)) | fits

            zero = xp.zeros_like(digits)
            _, rest, root = repeat(xp, 56, step, (digits, zero, zero))
            root = root | (rest != 0).astype(_U)
            return _rounded(xp, a.sign, root, ((a.exponent - odd.astype(np.int32)) >> np.int32(1)) - np.int32(29))

        with wide(xp):
            return apart(xp, compute, a)

    def __lt__(self, other: Any) -> Any:
        # rounding never moves a difference of two numbers to or across zero, the exponent being unbounded
        return (self - other).sign < 0

    def __le__(self, other: Any) -> Any:
        return (self - other).sign <= 0

    def __gt__(self, other: Any) -> Any:
        return (self - other).sign > 0

    def __ge__(self, other: Any) -> Any:
        return (self - other).sign >= 0

    def __eq__(self, other: object) -> Any:
        return (self - other).sign == 0

    def __ne__(self, other: object) -> Any:
        return (self - other).sign != 0

    __hash__ = None  # type: ignore[assignment]

    def maximum(self, other: Any) -> "Real":
        """The greater of the two, elementwise."""
        other = Real.of(other)
        return Real.where(self < other, other, self)

    def minimum(self, other: Any) -> "Real":
        """The smaller of the two, elementwise."""
        other = Real.of(other)
        return Real.where(other < self, other, self)

    def scale_by_power_of_two(self, k: Any) -> "Real":
        """This number times 2^k, exact; k is an integer or an int32 array."""
        xp, a, _ = _operands(self, self, k)
        with wide(xp):
            k = xp.asarray(k).astype(np.int32)
            shape = np.broadcast_shapes(a.shape, k.shape)
            a, k = a.broadcast_to(shape), xp.broadcast_to(k, shape)
            return Real(a.sign, a.mantissa, xp.where(a.is_zero, np.int32(0), a.exponent + k))

    def to_float32(self) -> Any:
        """The nearest float32, ties to even, with subnormal results and overflow to infinity as a C cast.

        The bits are assembled in integers: no float operation that XLA could flush or fuse takes part.
        """
        xp, a, _ = _operands(self, self)

        def compute(a: Real) -> Any:
            leading = a.exponent + np.int32(_BITS - 1)
            below = xp.maximum(np.int32(-126) - leading, np.int32(0))
            # a shift of 60 already rounds every mantissa to 0
            q = round_off(xp, a.mantissa, xp.minimum(below + np.int32(29), np.int32(60)).astype(_U)).astype(np.int32)
            # a carry out of the 24 bits of q runs into the exponent field: the next binade
            field = xp.clip(leading + np.int32(126), np.int32(0), np.int32(254)) << np.int32(23)
            bits = xp.where(leading > 127, np.int32(0x7F800000), q + field)
            bits = xp.where(a.is_zero, np.int32(0), bits)
            bits = xp.where(a.sign < 0, bits | np.int32(-(2**31)), bits)
            return jax.lax.bitcast_convert_type(bits, jnp.float32) if xp is jnp else np.asarray(bits).view(np.float32)

        with wide(xp):
            return apart(xp, compute, a)

    def to_float64(self) -> Any:
        """The value as numpy float64, on the host only; out of its range it behaves as ldexp does."""
        if traced(*self._parts()):
            raise TypeError("to_float64 works on the host only. Inside a trace use to_float32.")
        return np.ldexp((np.asarray(self.sign) * np.asarray(self.mantissa).astype(np.float64)), self.exponent)

    def to_int32(self, rounding: Rounding | str = Rounding.NEAREST_EVEN) -> Any:
        """The nearest integer by `rounding` (not stochastic), clamped to [-2^31, 2^31 - 1]."""
        with wide(host_or_trace(*self._parts())):
            return self._to_integer(32, Rounding.of(rounding)).astype(np.int32)

    def to_int64(self, rounding: Rounding | str = Rounding.NEAREST_EVEN) -> Any:
        """The nearest integer by `rounding` (not stochastic), clamped to [-2^63, 2^63 - 1].

        Inside a trace the result is used where 64-bit types are enabled.
        """
        return self._to_integer(64, Rounding.of(rounding))

    def _to_integer(self, bits: int, rounding: Rounding) -> Any:
        xp, a, _ = _operands(self, self)

        def compute(a: Real) -> Any:
            # mantissas are at least 2^52: shifted left by 11 they are at least 2^63, beyond either type
            left = xp.clip(a.exponent, np.int32(0), np.int32(11)).astype(_U)
            right = xp.clip(-a.exponent, np.int32(0), np.int32(60)).astype(_U)
            magnitude = round_off(xp, a.mantissa << left, right, rounding, a.sign)
            limit = xp.where(a.sign < 0, _U(1 << (bits - 1)), _U((1 << (bits - 1)) - 1))
            # the magnitude 2^63 wraps to the least int64, and so does its negative
            return xp.minimum(magnitude, limit).astype(np.int64) * a.sign.astype(np.int64)

        with wide(xp):
            return apart(xp, compute, a)

    def __getitem__(self, index: Any) -> "Real":
        return Real(*(p[index] for p in self._parts()))

    def reshape(self, *shape: Any) -> "Real":
        """The same values in another shape."""
        return Real(*(p.reshape(*shape) for p in self._parts()))

    def _parts(self) -> tuple[Any, Any, Any]:
        return self.sign, self.mantissa, self.exponent


def _operands(a: Any, b: Any, *more: Any) -> tuple[Any, Real, Real]:
    """The namespace for the operands, and the two broadcast to one shape in it."""
    a, b = Real.of(a), Real.of(b)
    xp = host_or_trace(*a._parts(), *b._parts(), *more)
    shape = np.broadcast_shapes(a.shape, b.shape)
    with wide(xp):
        fields = [[xp.broadcast_to(xp.asarray(p), shape) for p in x._parts()] for x in (a, b)]
    return xp, Real(*fields[0]), Real(*fields[1])


def _rounded(xp: Any, sign: Any, mantissa: Any, exponent: Any) -> Real:
    """The canonical Real of sign * mantissa * 2^exponent for any uint64, rounded to 53 bits, ties to even.

    A mantissa of 55 bits or more may carry in its last bit whatever was lost below it (a sticky bit).
    """
    zero = (mantissa == 0) | (sign == 0)
    mantissa, lifted = normalized(xp, mantissa)
    mantissa = round_off(xp, mantissa, _U(64 - _BITS))
    carry = mantissa == _U(1 << _BITS)
    mantissa = xp.where(carry, _U(1 << (_BITS - 1)), mantissa)
    exponent = exponent - lifted + np.int32(64 - _BITS) + carry.astype(np.int32)
    return Real(
        xp.where(zero, np.int32(0), sign),
        xp.where(zero, _U(0), mantissa),
        xp.where(zero, np.int32(0), exponent),
    )


def _magnitude_less(a: Real, b: Real) -> Any:
    """|a| < |b| for nonzero canonical numbers: by exponent, then by mantissa."""
    return (a.exponent < b.exponent) | ((a.exponent == b.exponent) & (a.mantissa < b.mantissa))
