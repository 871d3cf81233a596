"""Float islands: a part of the model that the recipe leaves in reals, between a dequantizer and a quantizer.

The node reads codes (and whatever integers or reals flow in), makes real numbers of them, runs a program of `reals`,
and puts its result back on the output's grid; a result that leaves the model, or that is an integer, stays as it is.
Its floats are those of the machine that runs it: where two machines differ in a last bit, a code may differ by one.
"""

from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from qjax.numerics.affine import centered_bounds, round_to_grid
from qjax.numerics.unfused import unfused
from qjax.ops import reals
from qjax.ops.base import Attributes, Bounds, Constants, Op, Role, Shape, Site, register

NAME = "island"


@register
class Island(Op):
    """codes -> reals -> program -> reals -> codes.

    attributes: program, results (one number: the step's value that is the output), dtypes (of the program's inputs),
    batch ([input, axis, multiple], or None where no size follows the batch).
    constants: those of the program; x_scale0, ... of the inputs that are codes; y_scale where the output is.
    """

    name = NAME
    role = Role.INTEGER

    def accumulator(self, site: Site) -> Bounds | None:
        # floats; `DynamicProduct` bounds its int32 sums itself
        return None

    def works_along(self, attributes: Attributes, inputs: Sequence[Shape], output: Shape) -> Sequence[Collection[int]]:
        # a program may do anything
        return [range(len(shape)) for shape in inputs]

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        values: list[Any] = []
        for index, (x, dtype) in enumerate(zip(inputs, attributes["dtypes"], strict=True)):
            if f"x_scale{index}" in constants:
                steps = x.astype(jnp.int32) - jnp.asarray(constants[f"zero_point{index}"])
                scale = jnp.broadcast_to(jnp.asarray(constants[f"x_scale{index}"]), x.shape)
                # rounded before the program adds to it, as `Quantized.real32` is
                values.append(unfused(steps.astype(jnp.float32) * scale).astype(dtype))
            else:
                values.append(x.astype(dtype))
        batch = 1
        if attributes["batch"] is not None:
            source, axis, multiple = attributes["batch"]
            batch = inputs[source].shape[axis] // multiple
        (result,) = reals.run(attributes["program"], attributes["results"], values, constants, batch)
        if "y_scale" not in constants:
            return result.astype(attributes["dtype"])
        zero_point = jnp.asarray(constants["y_zero_point"])
        steps = round_to_grid(result.astype(jnp.float32), jnp.asarray(constants["y_scale"]), "nearest_even")
        # NaN is the code of 0, as in the training forward
        steps = jnp.where(jnp.isnan(steps), jnp.zeros_like(steps), steps)
        bounds = centered_bounds(zero_point, attributes["qmin"], attributes["qmax"])
        codes = jnp.clip(steps, *bounds).astype(jnp.int32) + zero_point
        return codes.astype(attributes["dtype"])
