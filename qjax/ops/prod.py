"""Products of the elements along axes: areas from widths and heights, joint gates."""

import functools
import math
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from qjax.ops import accumulator_bounds
from qjax.ops.base import (
    Attributes,
    Bounds,
    Constants,
    Equation,
    Op,
    Quantized,
    Role,
    Shape,
    Site,
    centered,
    real,
    register,
)
from qjax.ops.epilogue import finish
from qjax.ops.facts import always, no_formula
from qjax.ops.fields import Axes, Natural
from qjax.ops.float_accumulator import Pending

MOST = 3
"""Factors of 8 bits whose product fits int32: 255^3 < 2^24 is exact in float32 too, 255^4 exceeds int32."""


class Fields(Axes):
    """factors: how many elements are multiplied."""

    factors: Natural


@register
class Prod(Op):
    """`lax.reduce_prod` of up to three elements; the accumulator is the exact product of the centred codes.

    attributes: axes, and factors, the number of elements that are multiplied. To multiply more elements, a model splits
    the product into several, each with its own quantization parameters.
    """

    name = "prod"
    fields = Fields
    role = Role.PRODUCER
    primitives = ("reduce_prod",)
    keeps_batch = always
    takes_steps = True
    operation = no_formula

    def reads(self, eqn: Equation, constant: Sequence[bool]) -> bool:
        return not constant[0] and 1 <= _factors(eqn) <= MOST

    def attributes(self, eqn: Equation) -> dict[str, Any]:
        return {"axes": list(eqn.params["axes"]), "factors": _factors(eqn)}

    def training(self, eqn: Equation, inputs: Sequence[Any]) -> list[Any]:
        (x,) = inputs
        if not isinstance(x, Quantized):
            return eqn.bind(real(x))
        acc = eqn.bind(x.codes.astype(jnp.float32))[0]
        scale = lax.stop_gradient(functools.reduce(lax.mul, [x.scale.reshape(())] * _factors(eqn)))
        return [Pending.start(acc, scale, eqn.out_dtypes[0], rounded=False)]

    def scales(self, attributes: Attributes, inputs: Sequence[Any]) -> list[Any]:
        return [functools.reduce(lambda a, b: a * b, inputs * attributes["factors"])]

    def accumulator(self, site: Site) -> Bounds | None:
        (x,) = site.inputs
        return accumulator_bounds.within(
            accumulator_bounds.reach(x) ** accumulator_bounds.count(x.shape, site.attributes["axes"])
        )

    def works_along(self, attributes: Attributes, inputs: Sequence[Shape], output: Shape) -> Sequence[Collection[int]]:
        return [attributes["axes"]]

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        parts = [centered(inputs[0], constants, 0)]
        for axis in sorted(attributes["axes"], reverse=True):
            parts = [
                lax.index_in_dim(part, index, axis, keepdims=False)
                for part in parts
                for index in range(part.shape[axis])
            ]
        return finish([functools.reduce(lax.mul, parts)], constants, attributes)


def _factors(eqn: Equation) -> int:
    return math.prod(eqn.in_shapes[0][axis] for axis in eqn.params["axes"])
