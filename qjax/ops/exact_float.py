"""Products of integer-valued floats that are exact, and differentiable, on any backend.

The training forward multiplies codes, not scaled reals: as long as every partial sum stays below 2^24, float32
holds the integer accumulator itself, also under TF32 and bfloat16 passes (codes of 8 bits fit their mantissas).
Beyond that bound the weight's codes are split into digits, and beyond digits the product runs in int32.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from qjax.ops.base import Quantized

EXACT = 2**24
"""float32 represents every integer up to here."""

Product = Callable[[jax.Array, jax.Array, Any], jax.Array]


def largest_code(value: Quantized) -> int:
    """An upper bound of |code - zero_point| from the spec alone."""
    spec = value.qparams.spec
    return max(abs(spec.qmin), spec.qmax) if spec.symmetric else spec.qmax - spec.qmin


def precision(*values: Quantized) -> lax.Precision | None:
    """Codes beyond 8 bits need all of float32's mantissa; for others the backend's default is exact."""
    return lax.Precision.HIGHEST if any(largest_code(v) > 256 for v in values) else None


def matmul_codes(x: Quantized, w: Quantized, summed: int, product: Product) -> jax.Array:
    """The accumulator of two tensors of codes as float32 (rounded once where it exceeds 2^24).

    Args:
      summed: how many products make one accumulator.
      product: `(a, b, accumulator dtype) -> array`, bilinear; called with float32 or int32 operands.
    """
    reach = largest_code(x) * summed
    if reach * largest_code(w) < EXACT:
        return product(x.codes.astype(jnp.float32), w.codes.astype(jnp.float32), jnp.float32)
    digits, top = 1, largest_code(w)
    while reach * 8 < EXACT and top > 8:
        digits, top = digits + 1, -(-top // 16)
    exact = _in_digits(digits, product) if reach * top < EXACT else _in_int32(product)

    @jax.custom_jvp
    def multiply(a: jax.Array, b: jax.Array) -> jax.Array:
        return exact(a, b).astype(jnp.float32)

    @multiply.defjvp
    def _(primals: Any, tangents: Any) -> Any:  # pyright: ignore[reportUnusedFunction]
        (a, b), (da, db) = primals, tangents
        return multiply(a, b), product(da, b, jnp.float32) + product(a, db, jnp.float32)

    return multiply(x.codes.astype(jnp.float32), w.codes.astype(jnp.float32))


def _in_digits(digits: int, product: Product) -> Callable[[jax.Array, jax.Array], jax.Array]:
    def exact(a: jax.Array, b: jax.Array) -> jax.Array:
        total, weight = None, 1
        for position in range(digits):
            high = jnp.round(b * (1 / 16)) if position + 1 < digits else jnp.zeros_like(b)
            part = product(a, b - high * 16, jnp.float32).astype(jnp.int32) * weight
            total = part if total is None else total + part
            b, weight = high, weight * 16
        assert total is not None
        return total

    return exact


def _in_int32(product: Product) -> Callable[[jax.Array, jax.Array], jax.Array]:
    def exact(a: jax.Array, b: jax.Array) -> jax.Array:
        return product(a.astype(jnp.int32), b.astype(jnp.int32), jnp.int32)

    return exact
