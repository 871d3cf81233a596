"""The codes of float constants: a bound, a threshold, a constant case of a choice.

    steps(v) = clip(round(v / s), qmin - z, qmax - z);  code(v) = steps(v) + z

The training forward, the conversion and the exact forward all call these functions. Scales can be tracers.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from qjax.numerics.affine import centered_bounds, reciprocal, round_to_grid
from qjax.numerics.softfloat import Real
from qjax.ops.base import Operand, Quantized

_FAR = 2**20
"""Beyond the codes of every grid, and exact in float32."""


def steps(value: Any, scale: ArrayLike, zero_point: ArrayLike, qmin: int, qmax: int) -> jax.Array:
    """The codes of real numbers minus the zero point, float32; a number beyond the grid becomes the grid's end."""
    value, scale = jnp.asarray(value).astype(jnp.float32), jnp.asarray(scale).reshape(())
    low, high = centered_bounds(jnp.asarray(zero_point).reshape(()), qmin, qmax)
    return jnp.clip(round_to_grid(value, scale, "nearest_even"), low, high)


def steps_on(value: Any, x: Quantized) -> jax.Array:
    """`steps` on the grid of a tensor of the training forward; a learned number gets the gradient of its real value."""
    spec, scale = x.qparams.spec, jax.lax.stop_gradient(x.scale).reshape(())
    zero_point = x.qparams.integer_zero_point().reshape(())
    value = jnp.asarray(value).astype(jnp.float32)
    exact = jnp.clip(value * reciprocal(scale), *centered_bounds(zero_point, spec.qmin, spec.qmax))
    return _straight_through(exact, steps(value, scale, zero_point, spec.qmin, spec.qmax))


@jax.custom_jvp
def _straight_through(exact: jax.Array, rounded: jax.Array) -> jax.Array:
    """`rounded`, with the derivative of `exact`."""
    return rounded


@_straight_through.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return _straight_through(*primals), tangents[0]


def code(value: Any, grid: Operand) -> Any:
    """The codes of real numbers, int32: NumPy on the host, a tracer under a trace."""
    assert grid.qmin is not None
    assert grid.qmax is not None
    zero_point = jnp.asarray(grid.zero_point).reshape(())
    found = steps(value, grid.scale, zero_point, grid.qmin, grid.qmax).astype(jnp.int32) + zero_point
    return found if isinstance(found, Tracer) else np.asarray(found)


def threshold(comparison: str, value: Any, scale: ArrayLike) -> Any:
    """The int32 t for which `steps <comparison> t` is equivalent to `steps * scale <comparison> value` on all integers.

    x > v is steps > floor(v / s), and x >= v is steps >= ceil(v / s). The quotient of two float32 is never so close to
    an integer below 2^20 that its 53 bits could reach it, so both are exact. If no code can be equal, t lies beyond all
    codes.
    """
    bounded = jnp.clip(jnp.asarray(value).astype(jnp.float32), np.float32(-(2.0**120)), np.float32(2.0**120))
    bounded = bounded if isinstance(bounded, Tracer) else np.asarray(bounded)
    ratio = Real.of(bounded) / Real.of(scale if isinstance(scale, Tracer) else np.asarray(scale)).reshape(())
    low, high = (jnp.clip(ratio.to_int32(way), -_FAR, _FAR) for way in ("floor", "ceil"))
    found = {"gt": low, "le": low, "lt": high, "ge": high}.get(comparison)
    if found is None:
        found = jnp.where(low == high, low, jnp.full_like(low, _FAR))
    return found if isinstance(found, Tracer) else np.asarray(found)
