"""Real numbers as sign, 53-bit mantissa and exponent: IEEE binary64 arithmetic, the same on the host and in a trace.

Runtimes derive their fixed-point constants from scales in C doubles. Under XLA the result of double arithmetic is not
reliable (products are fused into sums, quotients become products with reciprocals), so `prepare` would return other
bits inside `jit` than on the host. `Real` computes +, -, *, / and sqrt, each rounded once to 53 bits, ties to even.
These are the same bits as those of a C double as long as nothing over- or underflows there, and the same on the host,
inside jit, and under vmap.

On the host the arithmetic is that of 64-bit integers. Inside a trace it is the processor's, between bit patterns (see
`_binary64`); TPUs have no doubles, so they use the integers too.

This is no general float: there is no NaN, no infinity and no signed zero. The exponent is unbounded (int32) on the
host; inside a trace the range is that of normal doubles, below which a result is 0.
"""

import dataclasses
import operator
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from qjax.numerics import _binary64 as binary64
from qjax.numerics import _binary64_integers as integers
from qjax.numerics._binary64_integers import BITS, Parts
from qjax.numerics._namespace import host_or_trace, traced, wide
from qjax.numerics._words import FLOAT_FORMATS, round_off, unpack_float
from qjax.numerics.fence import apart
from qjax.numerics.rounding import Rounding

_U = np.uint64


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

    Examples:
      >>> from qjax import numerics
      >>> third = numerics.Real.of(1.0) / numerics.Real.of(3.0)
      >>> float(third.to_float32())
      0.3333333432674408
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
            mantissa = x.held()[-1] if "_bits" in x.__dict__ else x.mantissa
            if str(mantissa.dtype) != "uint64":
                raise TypeError(
                    f"a Real's mantissa must be uint64. Got {mantissa.dtype}: it crossed the boundary of a "
                    "jit where 64-bit types are disabled. Build it inside the jitted function from float32."
                )
            return x
        xp = host_or_trace(x)
        if xp is np:
            x = np.asarray(x)
        dtype = str(x.dtype)
        with wide(xp):
            if xp is jnp and dtype == "float32":
                return Real.of_pattern(binary64.of_float32(x))
            if xp is jnp and dtype in ("int32", "int16", "int8", "uint8", "uint16", "uint32"):
                return Real.of_pattern(binary64.of_integer(x))
            if dtype in FLOAT_FORMATS:
                return Real(*integers.rounded(xp, *unpack_float(xp, x, *FLOAT_FORMATS[dtype])))
            if np.issubdtype(x.dtype, np.integer):
                negative = x < 0
                wrapped = x.astype(_U)
                magnitude = xp.where(negative, _U(0) - wrapped, wrapped)
                sign = xp.where(negative, np.int32(-1), np.int32(1))
                return Real(*integers.rounded(xp, sign, magnitude, np.int32(0)))
        raise TypeError(f"a Real is made of float or integer arrays. Got dtype {dtype}.")

    @staticmethod
    def where(condition: Any, a: Any, b: Any) -> "Real":
        """Take a where the boolean condition holds, b elsewhere; the three broadcast together."""
        xp, a, b = _operands(a, b, condition)
        with wide(xp):
            shape = np.broadcast_shapes(np.shape(condition), a.shape)
            a, b = a.broadcast_to(shape), b.broadcast_to(shape)
            c = xp.broadcast_to(xp.asarray(condition), shape)
            if xp is jnp:
                return Real.of_pattern(jnp.where(c, _pattern(a), _pattern(b)))
            return Real(*(xp.where(c, p, q) for p, q in zip(a.parts(), b.parts(), strict=True)))

    @staticmethod
    def of_pattern(bits: Any) -> "Real":
        """The number that has this `pattern`; inside a trace."""
        result = object.__new__(Real)
        object.__setattr__(result, "_bits", bits)
        return result

    def pattern(self) -> Any:
        """The bits of the double, uint64, which represent a number inside a trace in one array."""
        with wide(host_or_trace(*self.held())):
            return _pattern(self)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape shared by the three fields."""
        return tuple(np.shape(self.held()[0]))

    @property
    def is_zero(self) -> Any:
        """Boolean array: where the value is 0."""
        return self.sign == 0

    def broadcast_to(self, shape: tuple[int, ...]) -> "Real":
        """The same values, broadcast to `shape`."""
        xp = host_or_trace(*self.held())
        with wide(xp):
            return _broadcast(xp, self, shape)

    def __neg__(self) -> "Real":
        return self._moved(binary64.negated) or Real(-self.sign, self.mantissa, self.exponent)

    def __abs__(self) -> "Real":
        return self._moved(binary64.magnitude) or Real(abs(self.sign), self.mantissa, self.exponent)

    def __add__(self, other: Any) -> "Real":
        xp, a, b = _operands(self, other)
        if xp is jnp and (_is(a, 0) or _is(b, 0)):
            return b if _is(a, 0) else a
        return _arithmetic("add", xp, a, b)

    def __sub__(self, other: Any) -> "Real":
        return self + (-Real.of(other))

    def __mul__(self, other: Any) -> "Real":
        xp, a, b = _operands(self, other)
        if xp is jnp and any(_is(x, n) for x in (a, b) for n in (0, 1)):
            return a if _is(a, 0) or _is(b, 1) else b
        return _arithmetic("multiply", xp, a, b)

    def __truediv__(self, other: Any) -> "Real":
        """The quotient, rounded to nearest even.

        Raises:
          ZeroDivisionError: a zero divisor on the host. Inside a trace the quotient there is a meaningless
            finite number.
        """
        xp, a, b = _operands(self, other)
        if xp is np and np.any(b.is_zero):
            raise ZeroDivisionError("division of a Real by zero; a scale must be greater than 0.")
        if xp is jnp and (_is(a, 0) or _is(b, 1)):
            return a
        return _arithmetic("divide", xp, a, b)

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

        Raises:
          ValueError: a negative number on the host. Inside a trace the root of |x| is returned, negated.
        """
        xp, a, _ = _operands(self, self)
        if xp is np and np.any(a.sign < 0):
            raise ValueError("sqrt needs numbers of at least 0. Got a negative one.")
        return _arithmetic("sqrt", xp, a)

    def __lt__(self, other: Any) -> Any:
        return _compared(operator.lt, self, other)

    def __le__(self, other: Any) -> Any:
        return _compared(operator.le, self, other)

    def __gt__(self, other: Any) -> Any:
        return _compared(operator.gt, self, other)

    def __ge__(self, other: Any) -> Any:
        return _compared(operator.ge, self, other)

    def __eq__(self, other: object) -> Any:
        return _compared(operator.eq, self, other)

    def __ne__(self, other: object) -> Any:
        return _compared(operator.ne, self, other)

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
            if xp is jnp and _is(a, 0):
                return a
            if xp is jnp:
                return Real.of_pattern(binary64.scaled(_pattern(a), k))
            return Real(a.sign, a.mantissa, xp.where(a.is_zero, np.int32(0), a.exponent + k))

    def to_float32(self) -> Any:
        """The nearest float32, ties to even, with subnormal results and overflow to infinity as a C cast.

        The bits are assembled in integers: no float operation that XLA could flush or fuse takes part.
        """
        xp, a, _ = _operands(self, self)

        def compute(a: Real) -> Any:
            leading = a.exponent + np.int32(BITS - 1)
            below = xp.maximum(np.int32(-126) - leading, np.int32(0))
            # a shift of 60 already rounds every mantissa to 0
            q = round_off(xp, a.mantissa, xp.minimum(below + np.int32(29), np.int32(60)).astype(_U)).astype(np.int32)
            # a carry out of the 24 bits of q runs into the exponent field: the next binade
            field = xp.clip(leading + np.int32(126), np.int32(0), np.int32(254)) << np.int32(23)
            bits = xp.where(leading > 127, np.int32(0x7F800000), q + field)
            bits = xp.where(a.is_zero, np.int32(0), bits)
            bits = xp.where(a.sign < 0, bits | np.int32(-(2**31)), bits)
            return jax.lax.bitcast_convert_type(bits, jnp.float32) if xp is jnp else np.asarray(bits).view(np.float32)

        return a.read(compute)

    def to_float64(self) -> Any:
        """The value as numpy float64, on the host only; out of its range it behaves as ldexp does."""
        if traced(*self.held()):
            raise TypeError("to_float64 works on the host only. Inside a trace use to_float32.")
        return np.ldexp((np.asarray(self.sign) * np.asarray(self.mantissa).astype(np.float64)), self.exponent)

    def to_int32(self, rounding: Rounding | str = Rounding.NEAREST_EVEN) -> Any:
        """The nearest integer by `rounding` (not stochastic), clamped to [-2^31, 2^31 - 1]."""
        return self._to_integer(np.int32, Rounding.of(rounding))

    def to_int64(self, rounding: Rounding | str = Rounding.NEAREST_EVEN) -> Any:
        """The nearest integer by `rounding` (not stochastic), clamped to [-2^63, 2^63 - 1].

        Inside a trace the result is used where 64-bit types are enabled.
        """
        return self._to_integer(np.int64, Rounding.of(rounding))

    def _to_integer(self, dtype: Any, rounding: Rounding) -> Any:
        xp, a, _ = _operands(self, self)
        bits = np.iinfo(dtype).bits

        def compute(a: Real) -> Any:
            # Mantissas are at least 2^52. Shifted left by 11 they are at least 2^63, beyond either type.
            left = xp.clip(a.exponent, np.int32(0), np.int32(11)).astype(_U)
            right = xp.clip(-a.exponent, np.int32(0), np.int32(60)).astype(_U)
            magnitude = round_off(xp, a.mantissa << left, right, rounding, a.sign)
            limit = xp.where(a.sign < 0, _U(1 << (bits - 1)), _U((1 << (bits - 1)) - 1))
            # the magnitude 2^63 wraps to the least int64, and so does its negative
            return (xp.minimum(magnitude, limit).astype(np.int64) * a.sign.astype(np.int64)).astype(dtype)

        return a.read(compute)

    def read(self, compute: Callable[["Real"], Any]) -> Any:
        """`compute(self)`: arrays from the three fields; in a trace as a separate computation, see `fence.apart`."""
        xp = host_or_trace(*self.held())
        with wide(xp):
            if xp is np or 0 in self.shape:
                return compute(self)
            # Only the pattern goes in, because XLA would otherwise make one array of each field.
            pattern = _pattern(self)
            return apart(binary64.alive(pattern), lambda pattern: compute(Real.of_pattern(pattern)), pattern)

    def __getitem__(self, index: Any) -> "Real":
        return self._moved(lambda p: p[index]) or Real(*(p[index] for p in self.parts()))

    def reshape(self, *shape: Any) -> "Real":
        """The same values in another shape."""
        return self._moved(lambda p: p.reshape(*shape)) or Real(*(p.reshape(*shape) for p in self.parts()))

    def _moved(self, change: Any) -> "Real | None":
        """The number whose pattern is a changed one of this number's; None on the host."""
        if not traced(*self.held()):
            return None
        with wide(jnp):
            return Real.of_pattern(change(_pattern(self)))

    def parts(self) -> Parts:
        """The three fields."""
        return Parts(self.sign, self.mantissa, self.exponent)

    def __getattr__(self, name: str) -> Any:
        """A field of a number that is stored as its pattern. A chain of operations reads none between two of them."""
        if name not in Parts._fields or "_bits" not in self.__dict__:
            raise AttributeError(name)
        with wide(jnp):
            # Not stored, because inside of a branch or a loop it would be a value of that trace.
            return getattr(binary64, name)(self.__dict__["_bits"])

    def held(self) -> tuple[Any, ...]:
        """The arrays that exist: the fields, the pattern, or both."""
        return tuple(self.__dict__.values())


def _operands(a: Any, b: Any, *more: Any) -> tuple[Any, Real, Real]:
    """The namespace for the operands, and the two broadcast to one shape in it."""
    a, b = Real.of(a), Real.of(b)
    xp = host_or_trace(*a.held(), *b.held(), *more)
    shape = np.broadcast_shapes(a.shape, b.shape)
    with wide(xp):
        return xp, _broadcast(xp, a, shape), _broadcast(xp, b, shape)


def _is(x: Real, number: Literal[0, 1]) -> bool:
    """Whether x is known to be `number` everywhere.

    A sum with 0, a product with 0 or 1, a quotient of 0 or by 1 is then one of the operands, and no operation of the
    program. This is common, because most accumulators have no factor and no bias after them.
    """
    if traced(*x.held()):
        return False
    mantissa = (0, 1 << (BITS - 1))[number]
    return bool(np.all((x.sign == np.int32(number)) & (x.mantissa == _U(mantissa)))) and bool(
        number == 0 or np.all(x.exponent == np.int32(1 - BITS))
    )


def _broadcast(xp: ModuleType, x: Real, shape: tuple[int, ...]) -> Real:
    if xp is np or not traced(*x.held()):
        return Real(*(np.broadcast_to(np.asarray(p), shape) for p in x.parts()))
    if "_bits" in x.__dict__ and x.shape == shape:
        return x
    return Real.of_pattern(jnp.broadcast_to(_pattern(x), shape))


def _on_patterns(name: str) -> Any:
    """An operation in integers, on patterns; a separate function in a program, traced once per shape."""

    @jax.jit
    def run(*patterns: Any) -> Any:
        return binary64.pack(jnp, *integers.FORMULAS[name](jnp, *(Parts(*binary64.unpack(p)) for p in patterns)))

    return run


_PATTERNS = {name: _on_patterns(name) for name in integers.FORMULAS}


def _arithmetic(name: str, xp: ModuleType, *operands: Real) -> Real:
    """On the host in integers; in a trace by the processor's own binary64, or in integers if it has none."""
    with wide(xp):
        if xp is np:
            return Real(*integers.FORMULAS[name](np, *(x.parts() for x in operands)))
        return Real.of_pattern(getattr(binary64, name)(*(_pattern(x) for x in operands), _PATTERNS[name]))


def _pattern(x: Real) -> Any:
    if "_bits" not in x.__dict__:
        # For known numbers the packed bits are a constant of the program instead of a computation in it.
        xp = host_or_trace(*x.held())
        object.__setattr__(x, "_bits", xp.asarray(binary64.pack(xp, *(xp.asarray(p) for p in x.parts()))))
    return x.__dict__["_bits"]


def _compared(compare: Any, a: Any, b: Any) -> Any:
    xp, a, b = _operands(a, b)
    if xp is np:
        # With an unbounded exponent, rounding never moves a difference of two numbers to or across zero.
        return compare((a - b).sign, 0)
    with wide(xp):
        return compare(binary64.ordered(_pattern(a)), binary64.ordered(_pattern(b)))
