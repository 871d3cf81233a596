"""When LiteRT delegates an operation to XNNPACK, and when its own optimised kernel runs it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qjax.numerics._namespace import host_or_trace, traced
from qjax.numerics.softfloat import Real
from qjax.ops.formulas.base import Array


def within(ratio: Any, least: float, below: float | None = None, *, most: float | None = None) -> Array:
    """int32 1 where least <= ratio < below (or <= most), 0 elsewhere; the bounds are powers of two."""
    value = Real.of(ratio)
    inside = value >= Real.of(np.float32(least))
    if below is not None:
        inside = inside & (value < Real.of(np.float32(below)))
    if most is not None:
        inside = inside & (value <= Real.of(np.float32(most)))
    return host_or_trace(inside).asarray(inside).astype(np.int32)


def either(delegated: Any, xnnpack: Callable[[], jax.Array], kept: Callable[[], jax.Array]) -> jax.Array:
    """XNNPACK's result where `delegated` is 1, the optimised kernel's where it is 0; only one is computed."""
    if not traced(delegated):
        return xnnpack() if int(delegated) else kept()
    return jax.lax.cond(jnp.asarray(delegated) != 0, xnnpack, kept)
