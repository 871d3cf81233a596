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

from qjax.ops import convolution

NHWC = ((0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2))
"""Flax's layout of images, kernels and results: axes of (batch, channels, height, width)."""


def depthwise(x: jax.Array, kernel: jax.Array, strides: Any, padding: Any, **unused: Any) -> jax.Array:
    """x: [n, height, width, c]; kernel: [kh, kw, 1, c]. The arguments are those of `lax.conv_general_dilated`."""
    del unused
    pads = (
        lax.padtype_to_pads(x.shape[1:3], kernel.shape[:2], strides, padding) if isinstance(padding, str) else padding
    )
    x = jnp.pad(x, ((0, 0), *pads, (0, 0)))
    return convolution.depthwise(x, kernel, strides=strides, rhs_dilation=(1, 1), layout=NHWC, dtype=x.dtype)


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
