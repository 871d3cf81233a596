"""The ways to round, by name, for floats and for the right shift of an integer.

A rounding is always a value with a name, never implied by where the code runs. The functions here are the only places
that turn a fraction into an integer; every fixed-point rule is built from them.
"""

import enum
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from qjax.numerics._namespace import like_inputs, traced
from qjax.numerics.calls import named

_FLOATS = ("float16", "bfloat16", "float32")


class Rounding(enum.StrEnum):
    """How a real number becomes an integer.

    The names are those of IEEE 754 and of the ap_fixed types: `nearest_even` is roundTiesToEven (RND_CONV),
    `nearest_away` is roundTiesToAway, C's `round` (RND_INF), `nearest_up` is floor(x + 1/2) in exact
    arithmetic (RND), `toward_zero` is C's cast (TRN_ZERO), `floor` is the arithmetic shift (TRN).
    `stochastic` rounds up with a probability equal to the fraction, and needs a random key.

    Examples:
      >>> import numpy as np
      >>> from qjax import numerics
      >>> print(
      ...     numerics.round_float(np.float32([0.5, 1.5, -2.5]), numerics.Rounding.NEAREST_AWAY)
      ... )
      [ 1.  2. -3.]
    """

    NEAREST_EVEN = "nearest_even"
    NEAREST_AWAY = "nearest_away"
    NEAREST_UP = "nearest_up"
    TOWARD_ZERO = "toward_zero"
    FLOOR = "floor"
    CEIL = "ceil"
    STOCHASTIC = "stochastic"

    @classmethod
    def of(cls, name: "Rounding | str") -> "Rounding":
        """The rounding called `name`; a ValueError that lists the valid names otherwise."""
        try:
            return cls(name)
        except ValueError:
            valid = ", ".join(r.value for r in cls)
            raise ValueError(f"rounding must be one of {valid}. Got {name!r}.") from None


def check_key(rounding: str, needs_key: bool, key: jax.Array | None) -> None:
    """Raise ValueError unless a key is given exactly where `rounding` draws random numbers."""
    if needs_key and key is None:
        raise ValueError(f"rounding {rounding!r} needs a random key. Got None; pass key=jax.random.key(seed).")
    if not needs_key and key is not None:
        raise ValueError(
            f"rounding {rounding!r} is deterministic and takes no key. Got one; drop it or use 'stochastic'."
        )


def round_float(
    x: ArrayLike, rounding: Rounding | str = Rounding.NEAREST_EVEN, *, key: jax.Array | None = None
) -> jax.Array:
    """Round a float array to integer values of the same dtype.

    Every deterministic rounding is exact for every finite input: no rule adds 1/2 to its operand, because
    that sum rounds (0.49999997 + 0.5 is 1 in float32, and 2^23 + 1 + 0.5 is 2^23 + 2). NaN and infinities
    pass through.

    Args:
      x: float16, bfloat16 or float32, any shape. A Python float counts as float32.
      rounding: a `Rounding` or its name.
      key: a random key, for `stochastic` only. The probability of rounding up is the fraction of x, rounded
        up to a multiple of 2^-24.

    Returns:
      An array of the shape and dtype of x.

    Raises:
      TypeError: x has another dtype.
      ValueError: unknown rounding, a missing key, or a key that would not be used.

    Examples:
      >>> import numpy as np
      >>> from qjax import numerics
      >>> print(numerics.round_float(np.float32([0.5, 1.5, -2.5]), "nearest_even"))
      [ 0.  2. -2.]
    """
    rounding = Rounding.of(rounding)
    check_key(rounding, rounding is Rounding.STOCHASTIC, key)
    x = _as_float(x)
    dtype = x.dtype
    # Both 16-bit formats convert to float32 and back exactly here: an integer next to x needs no more bits
    # than x.
    x = x.astype(jnp.float32)
    match rounding:
        case Rounding.NEAREST_EVEN:
            y = jax.lax.round(x, jax.lax.RoundingMethod.TO_NEAREST_EVEN)
        case Rounding.NEAREST_AWAY:
            # x - trunc(x) is exact, being a multiple of the last place of x below 1.
            t = jnp.trunc(x)
            y = jnp.where(jnp.abs(x - t) >= 0.5, t + jnp.sign(x), t)
        case Rounding.NEAREST_UP:
            # x - floor(x) rounds only for x in (-1/2, 0), where it stays at or above 1/2 as the exact value
            # does.
            f = jnp.floor(x)
            y = jnp.where(x - f >= 0.5, f + 1.0, f)
        case Rounding.TOWARD_ZERO:
            y = jnp.trunc(x)
        case Rounding.FLOOR:
            y = jnp.floor(_keep_subnormals(x))
        case Rounding.CEIL:
            y = jnp.ceil(_keep_subnormals(x))
        case Rounding.STOCHASTIC:
            f = jnp.floor(x)
            draw = jax.random.bits(_key(key), x.shape, jnp.uint32) >> jnp.uint32(8)
            y = jnp.where(draw.astype(jnp.float32) < (x - f) * 2.0**24, f + 1.0, f)
    return y.astype(dtype)


def rounding_right_shift(x: Any, shift: Any, rounding: Rounding | str, *, key: jax.Array | None = None) -> Any:
    """Divide x by 2^shift and round: exact for every x and shift, without intermediate overflow.

    Every rounding is a floor after adding a bias b in [0, 2^s), see `_bias`. With q = floor(x / 2^s) and
    r = x - q 2^s, floor((x + b) / 2^s) = q + floor((r + b) / 2^s), and r + b < 2^(s+1) always fits the
    unsigned type, where x + b may overflow.

    Args:
      x: int32, or int64 (as a JAX array only where 64-bit types are enabled), any shape.
      shift: integers in [0, 31] for int32, in [0, 63] for int64; broadcast with x by numpy's rules. Not
        checked where traced.
      rounding: a `Rounding` or its name. `stochastic` is floor((x + U) / 2^s) with U uniform on the integers
        [0, 2^s): the probability of rounding up is the fraction, exactly.
      key: a random key, for `stochastic` only.

    Returns:
      Integers of the dtype of x and the broadcast shape: a numpy array where all inputs are numpy or Python
      values, a JAX array otherwise.

    Raises:
      TypeError: x is not int32 or int64, or shift is not an integer.
      ValueError: a shift out of range, an unknown rounding, a missing or unused key.

    Examples:
      >>> import numpy as np
      >>> from qjax import numerics
      >>> print(numerics.rounding_right_shift(np.int32([5, 6, -6]), 2, "nearest_even"))
      [ 1  2 -2]
    """
    rounding = Rounding.of(rounding)
    check_key(rounding, rounding is Rounding.STOCHASTIC, key)
    xp = like_inputs(x, shift, key)
    x, shift = _as_shift_operands(xp, x, shift)
    q = x >> shift
    rest = x & _mask(x, shift)
    unsigned = np.uint32 if x.dtype.itemsize == 4 else np.uint64
    total = rest.astype(unsigned) + _bias(xp, x, shift, rounding, key).astype(unsigned)
    return q + (total >> shift.astype(unsigned)).astype(x.dtype)


def right_shift_with_headroom(
    xp: ModuleType, x: ArrayLike, shift: ArrayLike, rounding: Rounding, key: jax.Array | None = None
) -> Any:
    """`rounding_right_shift` for kernels: (x + b) >> shift, fewer operations, and nothing is checked.

    x and shift are arrays of namespace xp, of one signed dtype and of shapes that broadcast under the
    strictest promotion. The caller guarantees that |x| + 2^shift fits the dtype.
    """
    if key is None:
        return rounded_shift(xp, x, shift, rounding)
    return (x + _bias(xp, x, shift, rounding, key)) >> shift


@named(0, 3)
def rounded_shift(xp: ModuleType, x: Any, shift: Any, rounding: Rounding) -> Any:
    """`right_shift_with_headroom` without random numbers, which a trace may keep as one call."""
    return (x + _bias(xp, x, shift, rounding, None)) >> shift


def _bias(xp: ModuleType, x: Any, shift: Any, rounding: Rounding, key: jax.Array | None) -> Any:
    """What to add to x so that the floor of x / 2^shift rounds as asked; in [0, 2^shift), so 0 for shift 0.

    With half = 2^(shift - 1): half rounds ties up; half - 1 down; half - 1 + (q odd) to the even of q and q +
    1; half - (x < 0) away from zero. 2^shift - 1 rounds every fraction up, 0 none.
    """
    zero, one = x.dtype.type(0), x.dtype.type(1)
    # 0 for a shift of 0, where there is no tie to break and `half` is 0
    some = xp.minimum(shift, one)
    half = (one << (shift - some)) & -some
    match rounding:
        case Rounding.NEAREST_EVEN:
            return (half - some) + ((x >> shift) & some)
        case Rounding.NEAREST_AWAY:
            return half - ((x < zero).astype(x.dtype) & some)
        case Rounding.NEAREST_UP:
            return half
        case Rounding.TOWARD_ZERO:
            return xp.where(x < zero, _mask(x, shift), zero)
        case Rounding.FLOOR:
            return zero & shift
        case Rounding.CEIL:
            return _mask(x, shift)
        case Rounding.STOCHASTIC:
            return _draw(_key(key), x) & _mask(x, shift)


def _mask(x: Any, shift: Any) -> Any:
    """2^shift - 1 in the dtype of x, all ones below the sign for the greatest shift."""
    return ~(~x.dtype.type(0) << shift)


def _key(key: jax.Array | None) -> jax.Array:
    assert key is not None
    return key


def _as_float(x: ArrayLike) -> jax.Array:
    if type(x) is float:
        return jnp.float32(x)
    dtype = str(getattr(x, "dtype", type(x).__name__))
    if dtype not in _FLOATS:
        raise TypeError(f"x must be a float16, bfloat16 or float32 array. Got {dtype}; convert it with astype first.")
    return jnp.asarray(x)


def _keep_subnormals(x: jax.Array) -> jax.Array:
    """Move subnormal numbers to the smallest normal one of their sign.

    XLA may flush subnormal numbers to zero, whose floor and ceiling differ; any rounding of the two is alike.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    magnitude = bits & np.int32(0x7FFFFFFF)
    subnormal = (magnitude > 0) & (magnitude < np.int32(0x00800000))
    tiny = (bits ^ magnitude) | np.int32(0x00800000)
    return jax.lax.bitcast_convert_type(jnp.where(subnormal, tiny, bits), jnp.float32)


def _as_shift_operands(xp: ModuleType, x: Any, shift: Any) -> tuple[Any, Any]:
    if isinstance(x, int) and not isinstance(x, bool):
        x = np.int32(x)
    dtype = str(getattr(x, "dtype", type(x).__name__))
    if dtype not in ("int32", "int64"):
        raise TypeError(f"x must be an int32 or int64 array. Got {dtype}.")
    shift_dtype = getattr(shift, "dtype", np.asarray(shift).dtype if not traced(shift) else None)
    if not np.issubdtype(shift_dtype, np.integer):
        raise TypeError(f"shift must be an integer or an array of integers. Got {shift_dtype}.")
    x = xp.asarray(x)
    if str(x.dtype) != dtype:
        raise TypeError(
            "x is int64, but 64-bit types are disabled here. Pass a numpy array, or call inside "
            "`with jax.enable_x64(True):`."
        )
    limit = 8 * x.dtype.itemsize - 1
    if not traced(shift):
        host = np.asarray(shift)
        if host.size and (host.min() < 0 or host.max() > limit):
            raise ValueError(
                f"shift must lie in [0, {limit}] for {dtype}. Got values from {host.min()} to {host.max()}."
            )
    shift = xp.asarray(shift).astype(x.dtype)
    shape = jnp.broadcast_shapes(x.shape, shift.shape)
    return xp.broadcast_to(x, shape), xp.broadcast_to(shift, shape)


def _draw(key: jax.Array, x: Any) -> Any:
    """Random bits of the shape and the signed dtype of x.

    64 bits are made of two draws of 32: JAX lowers random bits later, where 64-bit types may be off again.
    """
    if x.dtype.itemsize == 4:
        return jax.lax.bitcast_convert_type(jax.random.bits(key, x.shape, jnp.uint32), jnp.int32)
    words = jax.random.bits(key, (2, *x.shape), jnp.uint32).astype(jnp.int64)
    return (words[0] << np.int64(32)) | words[1]
