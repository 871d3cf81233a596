"""Convolutions of `qjax.Dynamic`: which activations share a scale, and which of them are one operator in LiteRT."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from qjax.ops.base import Attributes, Equation
from qjax.ops.conv import Conv, convolved
from qjax.ops.windows import convolution

_LAST = [0, 3, 1, 2]
"""The axes of NHWC, and those of a kernel (out, height, width, in)."""


def through(eqn: Equation) -> list[tuple[int, int]]:
    """The axes of x that no window runs over, the batch first: (the result's, x's)."""
    attributes = Conv().attributes(eqn)
    lhs, out = attributes["lhs_layout"], attributes["out_layout"]
    pairs = [(int(b), int(a)) for a, b in zip(lhs, out, strict=True)]
    return [pairs[0], *(pairs[2:] if is_pointwise(attributes, eqn.in_shapes[1]) else ())]


def is_pointwise(attributes: Attributes, kernel: Sequence[int]) -> bool:
    """Whether each window is one pixel, without strides, padding or dilation; kernel: its shape."""
    return _of_one_pixel(attributes, kernel) and not any(map(any, attributes["padding"]))


def _of_one_pixel(attributes: Attributes, kernel: Sequence[int]) -> bool:
    sizes = {kernel[axis] for axis in attributes["rhs_layout"][2:]}
    return sizes | {*attributes["strides"], *attributes["lhs_dilation"]} == {1}


def centred_sums(attributes: Attributes, x: jax.Array, w: jax.Array, zero: jax.Array | None) -> jax.Array:
    """int32 sums of codes minus their zero points, which differ, so that no single number could pad the codes.

    zero: in the result's shape.
    """
    acc = convolved(x, w, 0, attributes)
    if zero is None:
        return acc
    # Padding adds nothing to the sums, so near an edge a zero point counts for fewer weights.
    axis, out = attributes["lhs_layout"][0], attributes["out_layout"][0]
    one = jnp.ones([1 if a == axis else n for a, n in enumerate(x.shape)], jnp.int8)
    weights = lax.squeeze(convolved(one, w, 0, attributes), (out,))
    return acc - zero * lax.broadcast_in_dim(weights, acc.shape, [a for a in range(acc.ndim) if a != out])


def problem(eqn: Equation, per: str) -> str | None:
    """Why XNNPACK does not support a convolution that is quantized at run time, with a cure."""
    attributes, kernel = Conv().attributes(eqn), eqn.in_shapes[1]
    if any(attributes[name] != _LAST for name in ("lhs_layout", "out_layout")):
        return "a convolution that is not over height and width of NHWC, the only one in LiteRT"
    if attributes["groups"] > 1:
        return "a convolution in groups, whose arithmetic in LiteRT is not known: quantize it statically"
    if set(attributes["lhs_dilation"]) != {1} or any(n < 0 for pair in attributes["padding"] for n in pair):
        return "a transposed or cropping convolution, which LiteRT does not have: quantize it statically"
    why = padded_pixels(attributes, kernel)
    if why is not None:
        return why
    wanted = "row" if is_pointwise(attributes, kernel) else "example"
    if per != wanted:
        what = "a window of one pixel" if wanted == "row" else "a larger window, or strides"
        return f'per="{per}" on a convolution with {what}, where XNNPACK shares scales differently: use per="{wanted}"'
    return None


def padded_pixels(attributes: Attributes, kernel: Sequence[int]) -> str | None:
    """The problem of a one-pixel window with padding: a file pads by another operator."""
    if _of_one_pixel(attributes, kernel) and not is_pointwise(attributes, kernel):
        return "a window of one pixel with padding, which becomes two operators in a file: pad in front of the layer"
    return None


def whole(attributes: Attributes) -> dict[str, Any]:
    """The attributes of a convolution that correspond to those of a `dynamic_conv` node."""
    own = {name: attributes[name] for name in ("strides", "padding", "rhs_dilation")}
    return convolution(**own, layouts=(_LAST, _LAST, _LAST))


def attributes_of(eqn: Equation, *, symmetric: bool) -> dict[str, Any]:
    """The attributes of a `dynamic_conv` node."""
    whole = Conv().attributes(eqn)
    return {"symmetric": symmetric, **{name: whole[name] for name in ("strides", "padding", "rhs_dilation")}}


def kernel(eqn: Equation, codes: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The weight's codes as (out, height, width, in), and its scales as () or (out,)."""
    rhs = Conv().attributes(eqn)["rhs_layout"]
    moved = jnp.transpose(codes, [rhs[0], *rhs[2:], rhs[1]])
    return moved, scale.reshape(()) if scale.size == 1 else scale.reshape(moved.shape[0])
