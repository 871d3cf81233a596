"""Formulations of an int8 convolution against XLA's float32 one: what `qjax.ops.convolution` chooses between.

`python -m benchmarks.kernels`. The chosen one is `convolution.conv`; the others are written out here.
"""

import argparse
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.report import show
from benchmarks.timing import Paired, paired
from qjax.ops import convolution

NUMBERS = ("NHWC", "HWIO", "NHWC")
LAYOUT = ((0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2))
"""NHWC, HWIO, NHWC as `convolution.conv` wants them."""

# name: (input shape, kernel shape, stride, groups)
SHAPES: dict[str, tuple[tuple[int, int, int, int], tuple[int, int, int, int], int, int]] = {
    "3x3, 8x32x32x64 -> 64": ((8, 32, 32, 64), (3, 3, 64, 64), 1, 1),
    "7x7 stem, 1x224x224x3 -> 64, stride 2": ((1, 224, 224, 3), (7, 7, 3, 64), 2, 1),
    "3x3, 8x32x32x8 -> 32": ((8, 32, 32, 8), (3, 3, 8, 32), 1, 1),
    "3x3, 8x32x32x16 -> 16": ((8, 32, 32, 16), (3, 3, 16, 16), 1, 1),
    "3x3, 8x32x32x4 -> 32": ((8, 32, 32, 4), (3, 3, 4, 32), 1, 1),
    "depthwise 3x3, 1x56x56x128": ((1, 56, 56, 128), (3, 3, 1, 128), 1, 128),
    "1x1, 1x56x56x64 -> 256": ((1, 56, 56, 64), (1, 1, 64, 256), 1, 1),
}


def direct(x: jax.Array, w: jax.Array, *, stride: int, groups: int, kind: Any) -> jax.Array:
    """XLA's own convolution."""
    return lax.conv_general_dilated(
        x,
        w,
        (stride, stride),
        "VALID",
        dimension_numbers=NUMBERS,
        feature_group_count=groups,
        preferred_element_type=kind,
    )


def taps(x: jax.Array, window: tuple[int, ...], stride: int) -> list[jax.Array]:
    """The strided slice of x that each position of the window meets."""
    height, width = ((x.shape[1 + d] - window[d]) // stride + 1 for d in (0, 1))
    return [
        x[:, i : i + (height - 1) * stride + 1 : stride, j : j + (width - 1) * stride + 1 : stride]
        for i in range(window[0])
        for j in range(window[1])
    ]


def patches(x: jax.Array, w: jax.Array, *, stride: int, kind: Any) -> jax.Array:
    """All taps side by side, and one matrix product."""
    columns = jnp.concatenate(taps(x, w.shape[:2], stride), axis=-1)
    return lax.dot_general(columns, w.reshape(-1, w.shape[-1]), (((3,), (0,)), ((), ())), preferred_element_type=kind)


def shifted_products(x: jax.Array, w: jax.Array, *, stride: int, kind: Any) -> jax.Array:
    """Depthwise: the sum over taps of products with one row of the kernel."""
    rows = w.reshape(-1, w.shape[-1]).astype(kind)
    parts = [
        tap.astype(kind) * jnp.broadcast_to(rows[i], tap.shape) for i, tap in enumerate(taps(x, w.shape[:2], stride))
    ]
    return functools.reduce(jnp.add, parts)


def chosen(x: jax.Array, w: jax.Array, *, stride: int, groups: int) -> jax.Array:
    """What the library runs."""
    return convolution.conv(x, w, strides=(stride, stride), rhs_dilation=(1, 1), groups=groups, layout=LAYOUT)


def kernels(seconds: float) -> list[Paired]:
    """Each formulation in int8, and the same without XLA's convolution in float32, against XLA's float32."""
    rng, found = np.random.default_rng(0), []
    for name, (x_shape, w_shape, stride, groups) in SHAPES.items():
        x, w = (jnp.asarray(rng.integers(-127, 128, shape, np.int8)) for shape in (x_shape, w_shape))
        real = [a.astype(jnp.float32) for a in (x, w)]
        reference = functools.partial(
            jax.jit(functools.partial(direct, stride=stride, groups=groups, kind=jnp.float32)), *real
        )
        forms: dict[str, Any] = {
            "int8 library's choice": functools.partial(chosen, stride=stride, groups=groups),
            "int8 direct": functools.partial(direct, stride=stride, groups=groups, kind=jnp.int32),
        }
        if groups == 1:
            forms["int8 patches"] = functools.partial(patches, stride=stride, kind=jnp.int32)
        else:
            forms["int8 shifted products"] = functools.partial(shifted_products, stride=stride, kind=jnp.int32)
            forms["float32 shifted products"] = functools.partial(shifted_products, stride=stride, kind=jnp.float32)
        wanted = np.asarray(jax.jit(forms["int8 library's choice"])(x, w))
        for form, function in forms.items():
            arguments = real if form.startswith("float32") else [x, w]
            call = functools.partial(jax.jit(function), *arguments)
            if not np.array_equal(np.asarray(call()).astype(np.int64), wanted):
                raise AssertionError(f"{name}: {form} computes something else")
            found.append(paired(f"{name}: {form} / float32", call, reference, seconds=seconds))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="per comparison")
    show("convolutions", kernels(parser.parse_args().seconds))
