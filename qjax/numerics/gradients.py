"""How a quantizer passes gradients on: the slopes of `v = c * s` with respect to x, the scale and the zero point.

A gradient is a function of the rounded tensor that returns `Slopes`. Three have names:

| gradient | dv/dx | dv/ds inside | dv/ds clipped | dv/dzp inside; clipped | source |
| --- | --- | --- | --- | --- | --- |
| `ste` | 1 inside, 0 clipped | 0 | 0 | 0; 0 | Jacob et al. 2018, arXiv 1712.05877 |
| `lsq` | 1 inside, 0 clipped | c - x/s | c, the bound | 0; -s | Esser et al. 2020, arXiv 1902.08153 |
| `pact` | 1 inside, 0 clipped | 0 | c above, 0 below | 0; 0 | Choi et al. 2018, arXiv 1805.06085 |

Whether x is *inside* is decided by the rounded code, as in torch's fake_quantize, so x in [qmax s, (qmax + 1/2) s)
still passes its gradient. The column of zp is LSQ+ (Bhalgat et al. 2020, arXiv 2004.09576), which learns an offset beta
in v = c s + beta. Here the offset is `-s * zp`, on the grid, so dv/dzp = dv/dbeta * dbeta/dzp: 1 where clipped becomes
-s; and dv/ds uses the bounds qmin - zp and qmax - zp, which carry the chain rule through s.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Slopes:
    """Derivatives of the quantized real `v = c * s`, arrays of x's shape; None is 0 everywhere.

    A boolean array selects: where it is False the incoming gradient is dropped and not multiplied by 0, so a NaN in it
    has no effect.

    x: dv/dx. scale: dv/ds. zero_point: dv/dzp divided by -s.

    Examples:
      >>> import numpy as np
      >>> from qjax.numerics import gradients
      >>> steps = np.float32([0.4, 9.0])
      >>> slopes = gradients.ste(steps, np.round(steps), -8, 7)
      >>> print(slopes.x)  # 9 is beyond the greatest code
      [ True False]
    """

    x: jax.Array | None
    scale: jax.Array | None = None
    zero_point: jax.Array | None = None


Name: TypeAlias = Literal["ste", "lsq", "pact"]
Rule: TypeAlias = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], Slopes]
"""(steps, rounded, low, high) -> slopes.

steps: x / s, float32. rounded: the integers that it was rounded to, not clipped yet. low, high: the range of the codes
without their zero point, broadcastable to x; `c = clip(rounded, low, high)`. A rule is pure JAX.
"""
Gradient: TypeAlias = Name | Rule


def ste(steps: jax.Array, rounded: jax.Array, low: jax.Array, high: jax.Array) -> Slopes:
    """The straight-through estimator: slope 1 inside of the range, and no gradient for the scale."""
    return Slopes(x=rounded == jnp.clip(rounded, low, high))


def lsq(steps: jax.Array, rounded: jax.Array, low: jax.Array, high: jax.Array) -> Slopes:
    """LSQ, and LSQ+ if the zero point is learned."""
    codes = jnp.clip(rounded, low, high)
    inside = rounded == codes  # False for NaN
    slope = codes - jnp.where(inside, steps, jnp.zeros_like(steps))
    return Slopes(x=inside, scale=slope, zero_point=jnp.logical_not(inside))


def pact(steps: jax.Array, rounded: jax.Array, low: jax.Array, high: jax.Array) -> Slopes:
    """PACT: the range is learned from the values above it."""
    codes = jnp.clip(rounded, low, high)
    return Slopes(x=rounded == codes, scale=jnp.where(rounded > high, codes, jnp.zeros_like(codes)))


GRADIENTS: dict[str, Rule] = {"ste": ste, "lsq": lsq, "pact": pact}


def rule_of(gradient: Any) -> Rule:
    """The function that a gradient is or names.

    Raises:
      ValueError: neither a known name nor a function.
    """
    if callable(gradient):
        rule: Rule = gradient  # pyright: ignore[reportAssignmentType]
        return rule
    if gradient not in GRADIENTS:
        raise ValueError(
            f"gradient must be one of {', '.join(GRADIENTS)}. Got {gradient!r}. It may be a function too, see "
            "qjax.numerics.gradients."
        )
    return GRADIENTS[gradient]
