"""Steps that PyTorch's formulas share: float32 constants as int32 roles, whole vectors and what is left over.

PyTorch's vectorised kernels (AVX2) go through a tensor in blocks and finish what is left one by one, in code that
rounds elsewhere: a block multiplies and adds in one step and adds the zero point to the integer, the scalar code
rounds every operation and adds the zero point before it rounds. So the bits of an element may depend on its place,
counted in the order of memory; here that is the row-major order of the array. These are the places of one thread;
several threads cut a tensor of more than 32,768 elements into pieces of their own.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qjax.numerics import float32
from qjax.numerics._namespace import host_or_trace
from qjax.numerics.float32 import Float32
from qjax.ops.formulas.base import Array

BLOCK = 64
"""Elements of a turn of the elementwise loops: two vectors of 32 codes."""

CHANNELS = 8
"""Channels of a turn of the pooling loops."""

_FAR = np.int32(2**30)
"""Beyond any code; a zero point added to it stays within int32."""


def roles(**numbers: Float32) -> dict[str, Array]:
    """Each number as two int32 roles, name_mantissa and name_exponent."""
    return {f"{name}_{field}": value for name, x in numbers.items() for field, value in x._asdict().items()}


def number(constants: Mapping[str, Any], name: str) -> Float32:
    """The number that `roles` took apart."""
    return Float32(jnp.asarray(constants[f"{name}_mantissa"]), jnp.asarray(constants[f"{name}_exponent"]))


def whole(constants: Mapping[str, Any], name: str) -> Float32:
    """An int32 constant (a zero point, a count) as float32."""
    return float32.from_int32(jnp.asarray(constants[name]))


def integer(value: Any) -> Array:
    """A zero point or a count as int32: numpy on the host, a JAX array in a trace."""
    return host_or_trace(value).asarray(value).astype(np.int32)


def reciprocal(x: Any) -> Float32:
    """float32(1 / x)."""
    return float32.divide(float32.of(1.0), x if isinstance(x, Float32) else float32.of(x))


def dequantize(codes: jax.Array, scale: Float32) -> Float32:
    """float32(code - zero point) * scale, given centred codes: what the scalar code computes."""
    return float32.multiply(float32.from_int32(codes), scale)


def round_outside(x: Float32, constants: Mapping[str, Any], overflow: float32.Overflow = "saturate") -> jax.Array:
    """rint(x) + y_zero_point: the zero point is added to the integer."""
    return jnp.clip(float32.to_int32(x, overflow=overflow), -_FAR, _FAR) + jnp.asarray(constants["y_zero_point"])


def round_inside(x: Float32, constants: Mapping[str, Any]) -> jax.Array:
    """rint(x + y_zero_point): the zero point is added in float32, so ties round by the parity of the code."""
    return float32.to_int32(float32.add(x, whole(constants, "y_zero_point")))


def in_blocks(shape: tuple[int, ...], block: Callable[[], jax.Array], rest: Callable[[], jax.Array]) -> jax.Array:
    """`block()` for the elements in whole blocks of `BLOCK`, `rest()` behind them."""
    size = int(np.prod(shape, dtype=np.int64))
    return _split(size, BLOCK, lambda: jax.lax.iota(jnp.int32, size).reshape(shape), block, rest)


def in_channel_blocks(
    shape: tuple[int, ...], block: Callable[[], jax.Array], rest: Callable[[], jax.Array]
) -> jax.Array:
    """`block()` for the channels, the last axis, in whole blocks of `CHANNELS`, `rest()` behind them."""
    channels = shape[-1] if shape else 1
    return _split(channels, CHANNELS, lambda: jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1), block, rest)


def _split(
    size: int,
    step: int,
    places: Callable[[], jax.Array],
    block: Callable[[], jax.Array],
    rest: Callable[[], jax.Array],
) -> jax.Array:
    """Only what some element needs is computed: shapes are static."""
    limit = size - size % step
    if limit == size:
        return block()
    if limit == 0:
        return rest()
    return jnp.where(places() < np.int32(limit), block(), rest())
