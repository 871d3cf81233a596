"""A convolution of floats with int8 weights, as XNNPACK computes LiteRT's CONV_2D with float activations.

The activations are quantized at run time. A comparison with ai-edge-litert 2.3.0 on x86-64 showed that XNNPACK
multiplies a window of one pixel with stride 1 as rows of a matrix, with a scale for each pixel. In all other
convolutions each example has one scale.
"""

from collections.abc import Collection, Sequence
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
from jax import lax

from qjax.numerics.dynamic_formulas import DynamicFormula
from qjax.ops.base import Attributes, Constants, Shape, register
from qjax.ops.dynamic_dot import OfTarget, RunTimeCodes, codes_of, with_bias
from qjax.ops.dynamic_windows import centred_sums, is_pointwise, padded_pixels, whole
from qjax.ops.fields import Natural


class Fields(TypedDict):
    """symmetric: whether the codes of activations have the zero point 0. strides, rhs_dilation: for height and width.

    padding: zeros before and after, for height and width.
    """

    symmetric: bool
    strides: list[Natural]
    padding: list[list[int]]
    rhs_dilation: list[Natural]


@register
class DynamicConv(RunTimeCodes):
    """y = conv(x, w) + bias for tensors in NHWC, where the codes of x are computed at run time.

    constants: kernel holds int8 codes (out, height, width, in). kernel_scale, float32 (out,) or (), is a constant of
    its own in a program. bias, float32 (out,), is present if the convolution has one.
    """

    name = "dynamic_conv"
    fields = Fields
    prepared = OfTarget

    def summed(self, kernel: Shape) -> tuple[int, ...]:
        return (1, 2, 3)

    def works_along(self, attributes: Attributes, inputs: Sequence[Shape], output: Shape) -> Sequence[Collection[int]]:
        return [range(1, 4)]

    def in_target(self, attributes: Attributes, kernel: Any, formula: DynamicFormula) -> str | None:
        if formula == "tflite":
            return "a convolution of floats, whose bits in LiteRT's own kernels are not known: use 'tflite_xnnpack'"
        why = padded_pixels(whole(attributes), kernel.shape) if formula == "xnnpack" else None
        return why or super().in_target(attributes, kernel, formula)

    def runtime(self, attributes: Attributes, constants: Constants) -> Constants:
        kernel, scale = jnp.asarray(constants["kernel"]), jnp.asarray(constants["kernel_scale"])
        return {**constants, "kernel_scale": jnp.broadcast_to(scale, kernel.shape[:1])}

    def kernel(self, attributes: Attributes, constants: Constants, inputs: Sequence[jax.Array]) -> jax.Array:
        formula, w, own = attributes["dynamic"], constants["kernel"], whole(attributes)
        x = inputs[0].astype(jnp.float32)
        shared = (3,) if is_pointwise(own, w.shape) else (1, 2, 3)
        codes, scale, zero = codes_of(x, attributes["symmetric"], shared, formula)
        shape = jax.eval_shape(lambda: centred_sums(own, codes, w, None)).shape
        # the numbers of each example, or of each pixel, broadcast to every element of the result
        of_x, zeros = (lax.broadcast_in_dim(value, shape, range(value.ndim)) for value in (scale, zero))
        acc = centred_sums(own, codes, w, zeros)
        of_w = jnp.broadcast_to(constants["kernel_scale"], shape)
        return with_bias(acc, of_x, of_w, constants.get("bias"), formula)
