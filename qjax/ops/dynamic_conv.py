"""A convolution of floats with int8 weights, as XNNPACK computes LiteRT's CONV_2D with float activations.

The activations get codes at run time. Found by comparison with ai-edge-litert 2.3.0 on x86-64: XNNPACK multiplies a
window of one pixel with stride 1 as rows of a matrix, with a scale for each pixel. In all other convolutions each
example has one scale.
"""

from collections.abc import Collection, Sequence
from typing import Any, TypedDict

import jax
import jax.numpy as jnp

from qjax.ops.base import Attributes, Constants, Shape, register
from qjax.ops.conv import convolved
from qjax.ops.dynamic_dot import OfTarget, RunTimeCodes, codes_of, with_bias
from qjax.ops.windows import convolution

_LAST = [0, 3, 1, 2]


class Fields(TypedDict):
    """symmetric: whether the codes of activations have the zero point 0. strides, rhs_dilation: of height and width.

    padding: zeros before and after, for height and width.
    """

    symmetric: bool
    strides: list[int]
    padding: list[list[int]]
    rhs_dilation: list[int]


@register
class DynamicConv(RunTimeCodes):
    """y = conv(x, w) + bias, NHWC, with codes of x that are found at run time.

    constants: kernel, int8 codes (out, height, width, in); kernel_scale, float32 (out,) or (), which a program has
    beside; bias, float32 (out,), where there is one.
    """

    name = "dynamic_conv"
    fields = Fields
    prepared = OfTarget

    def summed(self, kernel: Shape) -> tuple[int, ...]:
        return (1, 2, 3)

    def works_along(self, attributes: Attributes, inputs: Sequence[Shape], output: Shape) -> Sequence[Collection[int]]:
        return [range(1, 4)]

    def runtime(self, attributes: Attributes, constants: Constants) -> Constants:
        kernel, scale = jnp.asarray(constants["kernel"]), jnp.asarray(constants["kernel_scale"])
        return {**constants, "kernel_scale": jnp.broadcast_to(scale, kernel.shape[:1])}

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        formula, w = attributes["dynamic"], constants["kernel"]
        x = inputs[0].astype(jnp.float32)
        shared = (3,) if is_pointwise(w.shape, attributes) else (1, 2, 3)
        codes, scale, zero = codes_of(x, attributes["symmetric"], shared, formula)

        window = {name: attributes[name] for name in ("strides", "padding", "rhs_dilation")}
        whole = convolution(**window, layouts=(_LAST, _LAST, _LAST))
        acc = convolved(codes, w, 0, whole)
        # Padding adds nothing to the sums, so near an edge a zero point counts for fewer weights.
        weights = convolved(jnp.ones((1, *x.shape[1:]), jnp.int8), w, 0, whole)
        of_x, zeros = (_spread(value, acc.shape) for value in (scale, zero))
        acc = acc - zeros * jnp.broadcast_to(weights, acc.shape)
        of_w = jnp.broadcast_to(constants["kernel_scale"], acc.shape)
        return with_bias(acc, of_x, of_w, constants.get("bias"), formula)


def is_pointwise(kernel: Sequence[int], attributes: Attributes) -> bool:
    """Whether XNNPACK multiplies rows of a matrix, one for each pixel; kernel: its shape (out, height, width, in)."""
    one = tuple(kernel[1:3]) == (1, 1) and list(attributes["strides"]) == [1, 1]
    return one and not any(map(any, attributes["padding"]))


def _spread(value: Any, shape: Sequence[int]) -> jax.Array:
    """Numbers of examples, or of pixels, for each element of the result."""
    return jax.lax.broadcast_in_dim(value, tuple(shape), tuple(range(value.ndim)))
