"""Decides when LiteRT delegates an operation to XNNPACK, and when its own optimised kernel runs it."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qjax.numerics._namespace import host_or_trace, traced
from qjax.numerics.softfloat import Real
from qjax.ops.formulas.base import Array
from qjax.ops.formulas.tflite_steps import is_wide, same_types


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


def has_kernel(attributes: Mapping[str, Any]) -> bool:
    """Whether XNNPACK has a kernel for these dtypes: codes of 8 bits, of one type."""
    return not is_wide(attributes) and same_types(attributes)


def is_delegated(attributes: Mapping[str, Any], constants: Mapping[str, Any]) -> bool:
    """Whether XNNPACK runs a node, as far as its attributes and constants determine it. Its kernels are pointwise."""
    delegated = constants.get("delegated")
    return has_kernel(attributes) and not traced(delegated) and bool(np.all(np.asarray(delegated) == 1))
