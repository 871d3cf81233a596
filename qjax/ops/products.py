"""`lax.dot_general`, `lax.conv_general_dilated` and their like, with the precision of every product stated.

Without one, `jax_default_matmul_precision` applies. Some of its settings round the operands to bfloat16, which cannot
represent codes of 12 bits or large integers. All of qjax therefore calls these functions, and a test checks it.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

FAST = lax.Precision.DEFAULT
"""The platform's fastest precision: exact for integers of up to 8 bits and for float32 that contains such integers."""

FULL = lax.Precision.HIGHEST
"""All bits of float32, and of integers."""


def dot_general(a: jax.Array, b: jax.Array, numbers: Any, kind: Any, precision: Any = FULL) -> jax.Array:
    """`lax.dot_general` with an accumulator of dtype `kind`.

    precision: for floats. None, which an equation has if its precision is not set, means `FAST`.
    """
    return lax.dot_general(a, b, numbers, preferred_element_type=kind, precision=_stated(a, b, precision))


def conv_general_dilated(
    a: jax.Array, b: jax.Array, kind: Any, params: Mapping[str, Any], precision: Any = FULL
) -> jax.Array:
    """The same for a convolution with the parameters of an equation."""
    stated = {"preferred_element_type": kind, "precision": _stated(a, b, precision)}
    return lax.conv_general_dilated_p.bind(a, b, **{**params, **stated})


def convolution(a: jax.Array, b: jax.Array, kind: Any, **arguments: Any) -> jax.Array:
    """`lax.conv_general_dilated` with these arguments; floats use `FULL`."""
    return lax.conv_general_dilated(a, b, preferred_element_type=kind, precision=_stated(a, b, FULL), **arguments)


def ragged_dot(a: jax.Array, b: jax.Array, kind: Any, precision: Any, sizes: jax.Array) -> jax.Array:
    """`lax.ragged_dot` of (rows, k), whose rows are in groups of these sizes, with one matrix (k, n) for each group."""
    return lax.ragged_dot(a, b, sizes, preferred_element_type=kind, precision=_stated(a, b, precision))


def einsum(equation: str, *arrays: jax.Array) -> jax.Array:
    """`jnp.einsum` with `FULL`."""
    return jnp.einsum(equation, *arrays, precision=FULL)


def _stated(a: jax.Array, b: jax.Array, precision: Any) -> Any:
    if jnp.issubdtype(a.dtype, jnp.integer):
        return FAST if a.dtype == b.dtype == jnp.int8 else FULL
    return FAST if precision is None else precision
