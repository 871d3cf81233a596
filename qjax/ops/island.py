"""Float islands: parts of the model that the recipe leaves in float, between a dequantizer and a quantizer.

    codes -> (codes - z_x) s_x -> program in floats -> round(y / s_y) + z_y

The node dequantizes its codes (other integers and floats pass unchanged), runs a program of `float_programs`, and
quantizes the result. An output of the model, or an integer, is not quantized. The floats are those of the machine that
runs the program. If two machines differ in a last bit, a code can differ by one.
"""

from collections.abc import Collection, Sequence
from typing import Any, TypedDict

import jax
import jax.numpy as jnp

from qjax.numerics.affine import centered_bounds, round_to_grid
from qjax.numerics.unfused import unfused
from qjax.ops import float_programs
from qjax.ops.base import Attributes, Bounds, Constants, Op, Role, Shape, Site, register
from qjax.ops.facts import always
from qjax.ops.fields import Natural

NAME = "island"


class Fields(TypedDict):
    """The program and its inputs, as `Island` documents them."""

    program: list[Any]
    results: list[Natural]
    dtypes: list[str]
    batch: list[Natural] | None


@register
class Island(Op):
    """codes -> floats -> program -> floats -> codes.

    attributes: program; results, the number of the value that is the output; dtypes, those of the program's inputs;
    batch, [input, axis, multiple], or None if no size follows the batch. constants: those of the program; x_scale0, ...
    for the inputs that are codes; y_scale if the output is quantized.
    """

    name = NAME
    fields = Fields
    role = Role.INTEGER
    reals = True
    keeps_batch = always

    def accumulator(self, site: Site) -> Bounds | None:
        # its sums are floats; `DynamicProduct` bounds its int32 sums itself
        return None

    def works_along(self, attributes: Attributes, inputs: Sequence[Shape], output: Shape) -> Sequence[Collection[int]]:
        if all(_is_elementwise(*step) for step in attributes["program"]):
            return [()] * len(inputs)
        # any other program can mix elements along any axis
        return [range(len(shape)) for shape in inputs]

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        values: list[Any] = []
        for index, (x, dtype) in enumerate(zip(inputs, attributes["dtypes"], strict=True)):
            if f"x_scale{index}" in constants:
                steps = x.astype(jnp.int32) - jnp.asarray(constants[f"zero_point{index}"])
                scale = jnp.broadcast_to(jnp.asarray(constants[f"x_scale{index}"]), x.shape)
                # round the product before the program adds to it, like `Quantized.real32`
                values.append(unfused(steps.astype(jnp.float32) * scale).astype(dtype))
            else:
                values.append(x.astype(dtype))
        batch = 1
        if attributes["batch"] is not None:
            source, axis, multiple = attributes["batch"]
            batch = inputs[source].shape[axis] // multiple
        (result,) = float_programs.run(attributes["program"], attributes["results"], values, constants, batch)
        if "y_scale" not in constants:
            return result.astype(attributes["dtype"])
        zero_point = jnp.asarray(constants["y_zero_point"])
        steps = round_to_grid(result.astype(jnp.float32), jnp.asarray(constants["y_scale"]), "nearest_even")
        # NaN becomes the code of 0, as in the training forward
        steps = jnp.where(jnp.isnan(steps), jnp.zeros_like(steps), steps)
        bounds = centered_bounds(zero_point, attributes["qmin"], attributes["qmax"])
        codes = jnp.clip(steps, *bounds).astype(jnp.int32) + zero_point
        return codes.astype(attributes["dtype"])


def _is_elementwise(name: str, operands: Sequence[Any], params: Any) -> bool:
    """Whether a step computes each element only from those at the same position; constants may be repeated."""
    repeats = name == "broadcast_in_dim" and all(kind != "value" for kind, *_ in operands)
    return repeats or name in float_programs.ELEMENTWISE
