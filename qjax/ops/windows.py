"""Windows of convolutions and pools: their attributes, the elements that they cover, and reductions over them."""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, TypedDict

import jax
import numpy as np
from jax import lax
from numpy.typing import NDArray

from qjax.ops import accumulate
from qjax.ops.base import Attributes, Equation
from qjax.ops.fields import Natural

MOST_SLICES = 64
"""A larger window, or a sum over more positions, stays one reduction of XLA, because every slice is an instruction."""

Layouts = tuple[Sequence[int], Sequence[int], Sequence[int]]
"""The axes of the input, the kernel and the result, as in `lax.ConvDimensionNumbers`."""

NHWC: Layouts = ([0, 3, 1, 2], [3, 2, 0, 1], [0, 3, 1, 2])


def convolution(
    strides: Sequence[int],
    padding: Sequence[Sequence[int]],
    *,
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    groups: int = 1,
    layouts: Layouts = NHWC,
) -> dict[str, Any]:
    """The attributes of a convolution; None: no dilation."""
    lhs, rhs, out = layouts
    return {
        "strides": list(strides),
        "padding": [list(pair) for pair in padding],
        "lhs_dilation": list(lhs_dilation or [1] * len(strides)),
        "rhs_dilation": list(rhs_dilation or [1] * len(strides)),
        "groups": groups,
        "lhs_layout": list(lhs),
        "rhs_layout": list(rhs),
        "out_layout": list(out),
    }


def with_kernel(convolution: Attributes) -> dict[str, Any]:
    """The attributes of a convolution's node, including those that the lowering adds for a weight."""
    rhs, out = convolution["rhs_layout"], convolution["out_layout"]
    return {**convolution, "weight": 1, "channels": [[out[1], rhs[0]]], "rank": len(out), "permutation": None}


class Convolution(TypedDict):
    """One number, or [low, high], for each axis of the window. Layouts: batch, channels, then the window's axes."""

    strides: list[Natural]
    padding: list[list[int]]
    lhs_dilation: list[Natural]
    rhs_dilation: list[Natural]
    groups: Natural
    lhs_layout: list[Natural]
    rhs_layout: list[Natural]
    out_layout: list[Natural]


class Pool(TypedDict):
    """One number, or [low, high], for each axis of the input."""

    window: list[Natural]
    strides: list[Natural]
    padding: list[list[int]]
    base_dilation: list[Natural]
    window_dilation: list[Natural]


def pool(
    window: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[Sequence[int]],
    *,
    base_dilation: Sequence[int] | None = None,
    window_dilation: Sequence[int] | None = None,
) -> dict[str, Any]:
    """The attributes of a pool, one number for every axis of the input; None: no dilation."""
    return {
        "window": list(window),
        "strides": list(strides),
        "padding": [list(pair) for pair in padding],
        "base_dilation": list(base_dilation or [1] * len(window)),
        "window_dilation": list(window_dilation or [1] * len(window)),
    }


def of_pool(eqn: Equation) -> dict[str, Any]:
    """The attributes of `lax.reduce_window`."""
    names = ("window_dimensions", "window_strides", "padding")
    dilations = {name: eqn.params[name] for name in ("base_dilation", "window_dilation")}
    return pool(*(eqn.params[name] for name in names), **dilations)


def slid(attributes: Attributes) -> list[int]:
    """The axes that a window covers, moves along or pads."""
    steps = zip(*(attributes[key] for key in ("window", "strides", "padding", "base_dilation")), strict=True)
    still = [1, 1, [0, 0], 1]
    return [axis for axis, (n, stride, pair, d) in enumerate(steps) if [n, stride, list(pair), d] != still]


def covers(attributes: Attributes, shape: Sequence[int]) -> bool:
    """Whether a pool's window is the whole input along every axis that it covers, without padding."""
    plain = all(list(pair) == [0, 0] for pair in attributes["padding"])
    dilations = {*attributes["base_dilation"], *attributes["window_dilation"]}
    axes = zip(attributes["window"], attributes["strides"], shape, strict=True)
    return plain and dilations <= {1} and all((n == 1 and stride == 1) or n == size for n, stride, size in axes)


def inside(
    size: int, places: int, *, window: int, stride: int = 1, low: int = 0, dilation: int = 1
) -> NDArray[np.int64]:
    """How many elements that are no padding each window covers, along one axis.

    size: of the input. places: how many windows there are. low: the padding in front.
    """
    starts = np.arange(places, dtype=np.int64) * stride - low
    before = np.clip(-(starts // dilation), 0, window)
    within = np.clip(-((starts - size) // dilation), 0, window)
    return within - before


def product_of_axes(counts: Iterable[NDArray[np.int64]]) -> NDArray[np.int64]:
    """How many elements each window covers over several axes, from its counts along each."""
    return functools.reduce(np.multiply.outer, counts, np.ones((), np.int64))


def reduce_window(attributes: Attributes, x: jax.Array, initial: Any, reducer: Any) -> jax.Array:
    """`lax.reduce_window` with the attributes of a pool.

    On the CPU it reduces the slices that the positions of the window read, which is up to 100 times faster than XLA's
    own (`python -m benchmarks kernels`).
    """
    window, strides, dilation = (tuple(attributes[key]) for key in ("window", "strides", "window_dilation"))
    padding = tuple((low, high) for low, high in attributes["padding"])
    base = tuple(attributes["base_dilation"])

    def whole(x: jax.Array) -> jax.Array:
        return lax.reduce_window(
            x, initial, reducer, window, strides, padding, base_dilation=base, window_dilation=dilation
        )

    def in_slices(x: jax.Array) -> jax.Array:
        config = [(low, high, d - 1) for (low, high), d in zip(padding, base, strict=True)]
        padded = lax.pad(x, initial, config)
        return functools.reduce(reducer, accumulate.taps(padded, window, strides, dilation))

    if math.prod(window) > MOST_SLICES:
        return whole(x)
    return lax.platform_dependent(x, cpu=in_slices, default=whole)
