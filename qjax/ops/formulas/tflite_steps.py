"""Steps that the formulas of the TFLite family share.

The optimised kernels process a tensor in blocks of vectors and the last elements one by one. The two halves round
differently: NEON's rounding shift moves ties up, gemmlowp's portable one away from zero. On x86 the NEON code is
translated to SSE, with the same bits. Therefore the bits of an element can depend on its position in the tensor.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qjax.numerics.fixed_point import Multiplier
from qjax.numerics.rules.classic import double_round, neon
from qjax.numerics.rules.multiplier import INT32_MAX, INT32_MIN
from qjax.numerics.rules.registry import Apply, Call
from qjax.ops.formulas.base import Array


def roles(suffix: str, m: Multiplier) -> dict[str, Array]:
    """A multiplier as the roles multiplier<suffix> and shift<suffix>."""
    return {f"multiplier{suffix}": m.multiplier, f"shift{suffix}": m.shift}


def constant(constants: Mapping[str, Any], name: str) -> jax.Array:
    """An int32 constant as a JAX array."""
    return jnp.asarray(constants[name]).astype(jnp.int32)


def scaled(x: jax.Array, constants: Mapping[str, Any], suffix: str = "") -> jax.Array:
    """gemmlowp's MultiplyByQuantizedMultiplier: the rule `double_round`, before any clamp."""
    return _under(double_round, x, constants, suffix)


def scaled_in_vectors(x: jax.Array, constants: Mapping[str, Any], vectors: Any, suffix: str = "") -> jax.Array:
    """MultiplyByQuantizedMultiplier4Rows (the rule `neon`) where `vectors` is true, the portable one elsewhere."""
    return jnp.where(vectors, _under(neon, x, constants, suffix), scaled(x, constants, suffix))


def _under(rule: Apply, x: jax.Array, constants: Mapping[str, Any], suffix: str) -> jax.Array:
    """Apply a rule with a multiplier that need not be normalized, because that of an average is divided by a count.

    Beyond 31 bits C's shift is undefined, and so is the runtime's result.
    """
    multiplier, shift = (constant(constants, f"{role}{suffix}") for role in ("multiplier", "shift"))
    m = Multiplier(jnp.broadcast_to(multiplier, x.shape), jnp.broadcast_to(shift, x.shape))
    with jax.enable_x64(True):
        return rule(x, m, Call(jnp.zeros((), jnp.int32), INT32_MIN, INT32_MAX))


def in_vectors(shape: tuple[int, ...], block: int = 16) -> jax.Array:
    """Boolean of that shape: which elements, in row-major order, belong to whole blocks."""
    size = math.prod(shape)  # symbolic for an exported batch
    return (jax.lax.iota(jnp.int32, size) < jnp.asarray(size - size % block, jnp.int32)).reshape(shape)


def channels_in_vectors(shape: tuple[int, ...], block: int = 16) -> jax.Array:
    """Boolean of that shape: which channels (the last axis) belong to whole blocks."""
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
    """Whether the inputs' codes have the output's dtype, as far as the node states it."""
    return all(dtype == attributes["dtype"] for dtype in attributes.get("input_dtypes", ()))
