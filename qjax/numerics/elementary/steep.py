"""Derivatives of functions that are infinitely steep somewhere, where their argument has codes.

A float is hardly ever the one number where a root is infinitely steep. A code of 0 is common. Its derivative would be
infinite or NaN, and with it all gradients of the step. So training takes the derivative beside such a code.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.numerics.elementary.expression import Expression

_STEEP = frozenset(
    {"acos", "acosh", "asin", "atanh", "cbrt", "div", "erf_inv", "integer_pow", "log", "log1p", "pow", "rsqrt", "sqrt"}
)
"""Primitives with arguments where their derivative is not finite."""


def is_steep(expression: Expression) -> bool:
    """Whether the derivative of a function may be infinite or undefined at some number."""
    return any(primitive in _STEEP for primitive, _ in expression.steps)


def with_finite_slope(
    function: Callable[..., jax.Array], x: jax.Array, scale: jax.Array, parameters: Sequence[Any]
) -> jax.Array:
    """`function(x, *parameters)`. Where its derivative is not finite, it is the one half a step beside the code.

    Above the code, or below it where that is outside of the domain. Other derivatives keep their bits.

    Args:
      function: elementwise, and differentiable in both directions.
      x: float32, the values of codes. scale: the distance of two codes; it broadcasts to x.
      parameters: arrays of one element.
    """

    @jax.custom_jvp
    def steep(x: jax.Array, half: jax.Array, *parameters: Any) -> jax.Array:
        return function(x, *parameters)

    @steep.defjvp
    def _(primals: Any, tangents: Any) -> Any:  # pyright: ignore[reportUnusedFunction]
        def tangent(x: jax.Array, half: jax.Array, parameters: Any, moving: Any) -> jax.Array:
            def is_finite(at: jax.Array) -> jax.Array:
                return jnp.isfinite(jax.jvp(lambda x: function(x, *parameters), (at,), (jnp.ones_like(at),))[1])

            beside = jnp.where(is_finite(x + half), x + half, x - half)
            point = lax.stop_gradient(jnp.where(is_finite(x), x, beside))
            return jax.jvp(function, (point, *parameters), moving)[1]

        x, half, *rest = primals
        # The backward keeps x, not the arrays that follow from it.
        remat = jax.checkpoint(tangent, prevent_cse=False)
        return steep(*primals), remat(x, half, rest, (tangents[0], *tangents[2:]))

    return steep(x, lax.stop_gradient(scale) * np.float32(0.5), *parameters)
