"""Combines the value of one array with the gradient of another."""

from typing import Any

import jax


@jax.custom_jvp
def with_gradient_of(surrogate: jax.Array, value: jax.Array) -> jax.Array:
    """`value`, with the derivative of `surrogate`."""
    return value


@with_gradient_of.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return with_gradient_of(*primals), tangents[0]
