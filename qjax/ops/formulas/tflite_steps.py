"""Steps that the formulas of the TFLite family share.

The optimised kernels work through a tensor in blocks of vectors and finish what is left one by one. The two halves
round differently: NEON's rounding shift moves ties up, gemmlowp's portable one away from zero. On x86 the NEON code
runs translated to SSE, with the same bits. So the bits of an element may depend on its place in the tensor.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qjax.numerics._namespace import host_or_trace
from qjax.numerics.fixed_point import (
    Multiplier,
    rounding_divide_by_power_of_two,
    saturating_rounding_doubling_high_mul,
)
from qjax.numerics.rounding import Rounding, rounding_right_shift
from qjax.ops.formulas.base import Array


def roles(suffix: str, m: Multiplier) -> dict[str, Array]:
    """A multiplier as the roles multiplier<suffix> and shift<suffix>."""
    return {f"multiplier{suffix}": m.multiplier, f"shift{suffix}": m.shift}


def whole(value: Any) -> Array:
    """A zero point or a count as int32: numpy on the host, a JAX array in a trace."""
    return host_or_trace(value).asarray(value).astype(np.int32)


def constant(constants: Mapping[str, Any], name: str) -> jax.Array:
    """An int32 constant as a JAX array."""
    return jnp.asarray(constants[name]).astype(jnp.int32)


def scaled(x: jax.Array, constants: Mapping[str, Any], suffix: str = "") -> jax.Array:
    """gemmlowp's MultiplyByQuantizedMultiplier: the rule `double_round`."""
    high, right = _high(x, constants, suffix)
    return rounding_divide_by_power_of_two(high, right)


def scaled_in_vectors(x: jax.Array, constants: Mapping[str, Any], vectors: Any, suffix: str = "") -> jax.Array:
    """MultiplyByQuantizedMultiplier4Rows (the rule `neon`) where `vectors` holds, the portable one elsewhere."""
    high, right = _high(x, constants, suffix)
    up = rounding_right_shift(high, right, Rounding.NEAREST_UP)
    return jnp.where(vectors, up, rounding_divide_by_power_of_two(high, right))


def _high(x: jax.Array, constants: Mapping[str, Any], suffix: str) -> tuple[jax.Array, jax.Array]:
    """SaturatingRoundingDoublingHighMul(x << left, multiplier), and the right shift that is still due."""
    multiplier, shift = constant(constants, f"multiplier{suffix}"), constant(constants, f"shift{suffix}")
    left, right = jnp.maximum(shift, np.int32(0)), jnp.maximum(-shift, np.int32(0))
    # beyond 31 places C's shift is undefined, and so is the runtime's result
    high = saturating_rounding_doubling_high_mul(x << jnp.broadcast_to(left, x.shape), multiplier)
    return high, right


def in_vectors(shape: tuple[int, ...], block: int = 16) -> jax.Array:
    """Boolean of that shape: which elements, in row-major order, belong to whole blocks."""
    size = int(np.prod(shape, dtype=np.int64))
    return (jax.lax.iota(jnp.int32, size) < np.int32(size - size % block)).reshape(shape)


def channels_in_vectors(shape: tuple[int, ...], block: int = 16) -> jax.Array:
    """Boolean of that shape: which channels, the last axis, belong to whole blocks."""
    channels = shape[-1]
    limit = np.int32(channels - channels % block)
    return jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1) < limit


def wrap16(x: jax.Array) -> jax.Array:
    """The int16 with the low 16 bits of x, as int32: VMOVN, and additions of int16 vectors."""
    return x.astype(jnp.int16).astype(jnp.int32)


def is_wide(attributes: Mapping[str, Any]) -> bool:
    """Whether the output's codes have 16 bits."""
    return attributes["dtype"] in ("int16", "uint16")


def same_types(attributes: Mapping[str, Any]) -> bool:
    """Whether the inputs' codes have the output's dtype, as far as the node says."""
    return all(dtype == attributes["dtype"] for dtype in attributes.get("input_dtypes", ()))
