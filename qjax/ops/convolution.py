"""Exact integer convolutions: int8 or wider codes in, int32 accumulators out, in the fastest form for each shape.

On the CPU, XLA's int8 convolution is fast with two spatial axes and enough channels. With one or three axes it is 25 to
60 times slower than a matrix product, and with few channels and features up to 15 times. `conv` chooses by this table,
measured with `python -m benchmarks kernels`:

| shape | form |
| --- | --- |
| a window of one position | a matrix product |
| depthwise | a sum of shifted products |
| two axes, at least 8 channels, more than 16 channels or features | XLA's convolution |
| two axes, fewer, no dilation in the last axis | XLA's convolution of neighbouring pixels packed into channels |
| two axes, at most 64 positions in all; one channel | patches |
| one axis | the same with a spatial axis of size 1 in front |
| three axes and more, int16 | patches |

Other platforms use patches and one matrix product, because they may have no integer convolution. Every form computes
the same integers.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from qjax.ops import products
from qjax.ops.accumulate import dot, taps

FEW = 8
"""Channels below which XLA's int8 convolution is slow on the CPU."""

NARROW = 16
"""The same limit if neither channels nor features are more."""

MOST_PACKED = 4
"""Pixels in one packed pixel, at most; with each of them the packed kernel has more zeros to multiply."""

FEW_PLACES = 64
"""Up to this many positions in the result, over the whole batch, patches are faster than the convolution."""

Layout = tuple[Sequence[int], Sequence[int], Sequence[int]]


def conv(
    x: jax.Array,
    w: jax.Array,
    *,
    strides: Sequence[int],
    rhs_dilation: Sequence[int],
    groups: int,
    layout: Layout,
) -> jax.Array:
    """A convolution without padding (the caller pads with the zero point), int32 out.

    layout: axes of (batch, feature, *spatial) in x, (out feature, in feature, *spatial) in w and
    (batch, feature, *spatial) in the result, as in `lax.ConvDimensionNumbers`.
    """
    if is_depthwise(x.shape, w.shape, groups, layout):
        return depthwise(x, w, strides=strides, rhs_dilation=rhs_dilation, layout=layout, dtype=jnp.int32)
    x, w = channels_last(x, w, layout)
    if groups > 1:
        acc = grouped(x, w, strides, rhs_dilation, groups)
    elif x.dtype != jnp.int8 or w.dtype != jnp.int8 or math.prod(w.shape[:-2]) == 1 or x.ndim > 4:
        acc = patches(x, w, strides, rhs_dilation)
    else:
        acc = lax.platform_dependent(
            x,
            w,
            cpu=lambda a, b: _on_cpu(a, b, strides, rhs_dilation),
            default=lambda a, b: patches(a, b, strides, rhs_dilation),
        )
    return in_layout(acc, layout)


def _on_cpu(x: jax.Array, w: jax.Array, strides: Sequence[int], dilation: Sequence[int]) -> jax.Array:
    if x.ndim == 3:
        return jnp.squeeze(_on_cpu(x[:, None], w[None], (1, *strides), (1, *dilation)), 1)
    channels, features = w.shape[-2:]
    if channels >= FEW and max(channels, features) > NARROW:
        return (patches if _few_places(x, w, strides, dilation) else xla_conv)(x, w, strides, dilation)
    pixels = _pixels_to_pack(channels, features, strides[-1])
    if pixels is None or dilation[-1] != 1:
        return patches(x, w, strides, dilation)
    return packed(x, w, strides, dilation, pixels)


def _few_places(x: jax.Array, w: jax.Array, strides: Sequence[int], dilation: Sequence[int]) -> bool:
    sizes = zip(x.shape[1:-1], w.shape[:-2], strides, dilation, strict=True)
    places = math.prod((size - (n - 1) * d - 1) // stride + 1 for size, n, stride, d in sizes)
    # the batch size of an exported function is symbolic
    batch: Any = x.shape[0]
    return isinstance(batch, int) and batch * places <= FEW_PLACES


def _pixels_to_pack(channels: int, features: int, stride: int) -> int | None:
    """How many neighbouring results are computed as one, or None if this combines too few channels."""
    pixels = 1
    while pixels < MOST_PACKED and (pixels * stride * channels < FEW or pixels * features <= NARROW):
        pixels *= 2
    return pixels if pixels * stride * channels >= FEW else None


def packed(x: jax.Array, w: jax.Array, strides: Sequence[int], dilation: Sequence[int], pixels: int) -> jax.Array:
    """XLA's convolution on x whose last spatial axis is cut into blocks: a block's pixels are its channels.

    One position of the result then holds the features of `pixels` positions, and moves by one block of `pixels *
    stride` positions of x. The kernel repeats w at the offset of each of them, with zeros around.
    """
    stride, width, taken = strides[-1], x.shape[-2], w.shape[-3]
    places = (width - taken) // stride + 1
    block = pixels * stride
    reach = -(-(taken + stride * (pixels - 1)) // block)
    blocks = -(-places // pixels)
    size = (blocks - 1 + reach) * block
    none = [(0, 0, 0)]
    if size > width:
        x = lax.pad(x, np.int8(0), none * (x.ndim - 2) + [(0, size - width, 0), (0, 0, 0)])
    # the loop over blocks is not vectorized, so the barrier prevents XLA from computing x inside it
    x = lax.optimization_barrier(lax.slice_in_dim(x, 0, size, axis=x.ndim - 2))
    x = x.reshape(*x.shape[:-2], size // block, block * x.shape[-1])
    shifted = [
        lax.pad(w, np.int8(0), none * (w.ndim - 3) + [(i * stride, reach * block - taken - i * stride, 0)] + none * 2)
        for i in range(pixels)
    ]
    kernel = jnp.stack(shifted, axis=-2).reshape(*w.shape[:-3], reach, x.shape[-1], pixels * w.shape[-1])
    acc = xla_conv(x, kernel, (*strides[:-1], 1), dilation)
    acc = acc.reshape(*acc.shape[:-2], blocks * pixels, w.shape[-1])
    return lax.slice_in_dim(acc, 0, places, axis=acc.ndim - 2)


def is_depthwise(x: Sequence[int], w: Sequence[int], groups: int, layout: Layout) -> bool:
    """Whether every input channel has its own filters; x and w are shapes."""
    return groups > 1 and groups == x[layout[0][1]] and w[layout[1][1]] == 1


def depthwise(
    x: jax.Array, w: jax.Array, *, strides: Sequence[int], rhs_dilation: Sequence[int], layout: Layout, dtype: DTypeLike
) -> jax.Array:
    """A depthwise convolution without padding, in `dtype` (int32, or float32 for integer-valued operands).

    It is a sum of shifted products, because XLA's own depthwise convolution on the CPU is tens of times slower, and
    hundreds of times in int8.
    """
    x, w = channels_last(x, w, layout)
    channels, features = x.shape[-1], w.shape[-1]
    if features > channels:
        x = jnp.repeat(x, features // channels, axis=-1)
    acc = None
    rows = w.reshape(-1, features).astype(dtype)
    for row, tap in zip(range(rows.shape[0]), spatial_taps(x, w.shape[:-2], strides, rhs_dilation), strict=True):
        product = tap.astype(dtype) * jnp.broadcast_to(rows[row], tap.shape)
        acc = product if acc is None else acc + product
    assert acc is not None
    return in_layout(acc, layout)


def channels_last(x: jax.Array, w: jax.Array, layout: Layout) -> tuple[jax.Array, jax.Array]:
    """x as (batch, *spatial, channels) and w as (*spatial, channels, features)."""
    lhs, rhs, _ = layout
    return jnp.transpose(x, (lhs[0], *lhs[2:], lhs[1])), jnp.transpose(w, (*rhs[2:], rhs[1], rhs[0]))


def in_layout(acc: jax.Array, layout: Layout) -> jax.Array:
    """A result of shape (batch, *spatial, features) with the axes that `layout` asks for."""
    out = layout[2]
    inverse = [0] * acc.ndim
    for source, target in enumerate((out[0], *out[2:], out[1])):
        inverse[target] = source
    return jnp.transpose(acc, inverse)


def spatial_taps(
    x: jax.Array, window: Sequence[int], strides: Sequence[int], dilation: Sequence[int]
) -> list[jax.Array]:
    """`taps` of a window over the axes between batch and channels."""
    return taps(x, (1, *window, 1), (1, *strides, 1), (1, *dilation, 1))


def xla_conv(x: jax.Array, w: jax.Array, strides: Sequence[int], dilation: Sequence[int], groups: int = 1) -> jax.Array:
    """XLA's own convolution, with the channels last."""
    rank = x.ndim
    spatial = tuple(range(1, rank - 1))
    numbers = lax.ConvDimensionNumbers(
        (0, rank - 1, *spatial), (rank - 1, rank - 2, *range(rank - 2)), (0, rank - 1, *spatial)
    )
    return products.convolution(
        x,
        w,
        jnp.int32,
        window_strides=tuple(strides),
        padding=[(0, 0)] * (rank - 2),
        rhs_dilation=tuple(dilation),
        dimension_numbers=numbers,
        feature_group_count=groups,
    )


def patches(x: jax.Array, w: jax.Array, strides: Sequence[int], dilation: Sequence[int]) -> jax.Array:
    """Lay out all positions of the window side by side, one axis after the other, and multiply them as one matrix."""
    rank = x.ndim - 2
    for axis in reversed(range(1, rank + 1)):
        window, stride, step = ([1] * rank for _ in range(3))
        window[axis - 1], stride[axis - 1], step[axis - 1] = w.shape[axis - 1], strides[axis - 1], dilation[axis - 1]
        slices = spatial_taps(x, window, stride, step)
        x = slices[0] if len(slices) == 1 else jnp.concatenate(slices, axis=-1)
    return dot(x, w.reshape(-1, w.shape[-1]), (((x.ndim - 1,), (0,)), ((), ())))


def grouped(x: jax.Array, w: jax.Array, strides: Sequence[int], dilation: Sequence[int], groups: int) -> jax.Array:
    """Multiplies patches group by group."""
    width, features = x.shape[-1] // groups, w.shape[-1] // groups
    parts = [
        patches(
            lax.slice_in_dim(x, g * width, (g + 1) * width, axis=x.ndim - 1),
            lax.slice_in_dim(w, g * features, (g + 1) * features, axis=w.ndim - 1),
            strides,
            dilation,
        )
        for g in range(groups)
    ]
    return jnp.concatenate(parts, axis=-1)


def count_products(attributes: Mapping[str, Any], x: Sequence[int], kernel: Sequence[int]) -> int:
    """How many products a convolution adds up for one result, see `ProductFacts.products`."""
    features, per_group = (kernel[axis] for axis in attributes["rhs_layout"][:2])
    count = x[attributes["lhs_layout"][0]] * features * per_group
    fields = ("strides", "padding", "lhs_dilation", "rhs_dilation")
    axes = zip(
        attributes["lhs_layout"][2:],
        attributes["rhs_layout"][2:],
        *(attributes[field] for field in fields),
        strict=True,
    )
    for x_axis, w_axis, stride, (low, high), spread, dilation in axes:
        length = (x[x_axis] - 1) * spread + 1
        outputs = (low + length + high - (kernel[w_axis] - 1) * dilation - 1) // stride + 1
        if spread == 1:
            count *= outputs * kernel[w_axis]
            continue
        places = np.arange(outputs)[:, None] * stride + np.arange(kernel[w_axis])[None, :] * dilation - low
        between = (places >= 0) & (places < length) & (places % spread != 0)
        count *= int(np.sum(~between))
    return count
