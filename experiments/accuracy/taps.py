"""A depthwise convolution as a sum of shifted products: on a CPU its gradient takes a fraction of XLA's own.

The float networks train with it. A quantized model never sees it.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax


def depthwise(x: jax.Array, kernel: jax.Array, strides: Any, padding: Any, **unused: Any) -> jax.Array:
    """x: [n, height, width, c]; kernel: [kh, kw, 1, c]. The arguments are those of `lax.conv_general_dilated`."""
    del unused
    window, steps = kernel.shape[:2], tuple(strides)
    pads = lax.padtype_to_pads(x.shape[1:3], window, steps, padding) if isinstance(padding, str) else padding
    x = jnp.pad(x, ((0, 0), *pads, (0, 0)))
    sizes = [(size - side) // step + 1 for size, side, step in zip(x.shape[1:3], window, steps, strict=True)]
    total = jnp.zeros((x.shape[0], *sizes, x.shape[3]), x.dtype)
    for row in range(window[0]):
        for column in range(window[1]):
            stops = [
                start + (size - 1) * step + 1 for start, size, step in zip((row, column), sizes, steps, strict=True)
            ]
            total = (
                total + x[:, row : stops[0] : steps[0], column : stops[1] : steps[1]] * kernel[row, column][None, None]
            )
    return total


@contextlib.contextmanager
def depthwise_by_taps(model: Any) -> Iterator[None]:
    """Within it, the depthwise convolutions of a model are computed so."""
    changed = [
        (layer, layer.conv_general_dilated)
        for _, layer in nnx.iter_graph(model)
        if isinstance(layer, nnx.Conv) and 1 < layer.feature_group_count == layer.in_features == layer.out_features
    ]
    for layer, _ in changed:
        layer.conv_general_dilated = depthwise
    try:
        yield
    finally:
        for layer, former in changed:
            layer.conv_general_dilated = former
