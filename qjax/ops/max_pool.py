"""Maxima over windows and axes. Codes are ordered like their float values, so the maximum code is the maximum."""

from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.ops.base import Attributes, Constants, Equation, Shape, register
from qjax.ops.facts import Filling, always, hides_low, no_filling
from qjax.ops.fields import Axes
from qjax.ops.grid import GridOp
from qjax.ops.windows import Pool, of_pool, reduce_window, slid


@register
class MaxPool(GridOp):
    """`lax.reduce_window` with the maximum; padding counts as less than every code."""

    name = "max_pool"
    fields = Pool
    primitives = ("reduce_window_max",)
    keeps_batch = always
    hides = hides_low

    def implied(self, inputs: Sequence[str]) -> str | None:
        return "padding is below every code; a window that holds only padding becomes the least code"

    def attributes(self, eqn: Equation) -> dict[str, Any]:
        return of_pool(eqn)

    def works_along(self, attributes: Attributes, inputs: Sequence[Shape], output: Shape) -> Sequence[Collection[int]]:
        return [slid(attributes)]

    def filling(self, attributes: Attributes) -> Filling:
        return "lowest"

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        (x,) = inputs
        # Must be a Python number: with a tracer, JAX would trace another primitive, which the emitters do not know.
        lowest = np.asarray(np.iinfo(x.dtype).min, x.dtype)
        pooled = reduce_window(attributes, x, lowest, lax.max)
        # a window that is all padding has no code, so it becomes the lowest
        return jnp.maximum(pooled, jnp.asarray(attributes["qmin"], x.dtype))


@register
class Max(GridOp):
    """`lax.reduce_max` over any axes."""

    name = "max"
    fields = Axes
    primitives = ("reduce_max",)
    keeps_batch = always
    hides = hides_low
    filling = no_filling

    def attributes(self, eqn: Equation) -> dict[str, Any]:
        return {"axes": list(eqn.params["axes"])}

    def works_along(self, attributes: Attributes, inputs: Sequence[Shape], output: Shape) -> Sequence[Collection[int]]:
        return [attributes["axes"]]

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        return jnp.max(inputs[0], axis=tuple(attributes["axes"]))
