"""Finite derivatives for functions that are infinitely steep at some number that a code can represent.

A float is hardly ever the one number at which a root is infinitely steep, but a code of 0 is common. The derivative
there would be infinite or NaN, and with it all gradients of the step. So training uses the derivative next to such a
code.
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
"""Primitives whose derivative is not finite for some arguments."""


def is_steep(expression: Expression) -> bool:
    """Whether the derivative of a function may be infinite or undefined at some number."""
    return any(primitive in _STEEP for primitive, _ in expression.steps)


def with_finite_slope(
    function: Callable[..., jax.Array], x: jax.Array, scale: jax.Array, parameters: Sequence[Any]
) -> jax.Array:
    """`function(x, *parameters)`, with the derivative taken half a step next to a code where it is not finite.

    It is taken above the code, or below it if that is outside of the domain. Other derivatives have the same bits as
    before.

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
        # The backward stores x, and not the arrays computed from it.
        remat = jax.checkpoint(tangent, prevent_cse=False)
        return steep(*primals), remat(x, half, rest, (tangents[0], *tangents[2:]))

    return steep(x, lax.stop_gradient(scale) * np.float32(0.5), *parameters)
