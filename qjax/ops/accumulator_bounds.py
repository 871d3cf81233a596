"""Bounds on how large sums of codes can become, from which `Op.accumulator` is built."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from qjax.numerics.accumulator import Accumulator
from qjax.ops.base import Bounds, Operand, Shape, Site
from qjax.ops.channels import weight_to_result
from qjax.support.errors import Unsupported


def count(shape: Shape, axes: Iterable[int]) -> int:
    """How many elements lie along some axes. Raises Unsupported if one of them is the batch."""
    sizes = [shape[axis] for axis in axes]
    if None in sizes:
        raise Unsupported("sums over the batch, which has no fixed size, so its accumulator has no bound")
    return math.prod(size for size in sizes if size is not None)


def reach(x: Operand) -> int:
    """The greatest |code - zero point|."""
    low, high = span(x)
    return max(high, -low)


def within(most: int) -> Bounds:
    """The bounds of sums of either sign, up to a magnitude."""
    return -most, most


def weighted(site: Site) -> Bounds | None:
    """The bounds of a product with a constant kernel, including bias and register; None while the kernel is traced."""
    (x,), kernel, bias = site.inputs, site.constants["kernel"], site.constants["bias"]
    accumulator = Accumulator.of_json(site.attributes.get("accumulator")).on(x.dtype, str(kernel.dtype))
    stored = accumulator.pairs or accumulator.operands == "codes"
    products = product_bounds(site, stored=stored)
    if products is None or isinstance(bias, Tracer):
        return None
    low, high = products
    if accumulator.overflow == "wrap" and (low.min() < accumulator.low or high.max() > accumulator.high):
        low, high = np.full_like(low, accumulator.low), np.full_like(high, accumulator.high)
    elif accumulator.overflow == "saturate":
        low, high = (np.clip(b, accumulator.low, accumulator.high) for b in products)
    offset = np.asarray(bias).astype(np.int64)
    if stored:
        z = _zero_point(x)
        if z is None:
            return None
        offset = offset - z * _per_channel(site, lambda kernel: kernel)
    return int((low + offset).min(initial=0)), int((high + offset).max(initial=0))


def product_bounds(site: Site, *, stored: bool = False) -> tuple[np.ndarray, np.ndarray] | None:
    """The lowest and the highest sum of products with a kernel, per channel; None while the kernel is traced.

    Both are reached if every weight meets the code that is worst for it. They bound all partial sums in any order as
    well, because a product may be zero.

    Args:
      stored: whether to bound sums of codes as they are stored, instead of codes minus the zero point.

    Returns:
      int64 vectors in the shape that broadcasts against the result's trailing axes.
    """
    if isinstance(site.constants["kernel"], Tracer):
        return None
    return reached(site, *span(site.inputs[0], stored=stored))


def reached(site: Site, low: ArrayLike, high: ArrayLike) -> tuple[Any, Any]:
    """The lowest and highest sum of products with factors in [low, high], per channel; the kernel may be traced."""
    # low <= 0 <= high, so a positive weight times the lowest code is its smallest product
    positive = _per_channel(site, lambda kernel: kernel.clip(min=0))
    negative = _per_channel(site, lambda kernel: kernel.clip(max=0))
    return positive * low + negative * high, positive * high + negative * low


def span(x: Operand, *, stored: bool = False) -> tuple[int, int]:
    """The lowest and the highest factor that a tensor's codes can be, with zero between them."""
    assert x.qmin is not None
    assert x.qmax is not None
    if stored:
        return min(x.qmin, 0), max(x.qmax, 0)
    z = _zero_point(x)
    return (x.qmin - x.qmax, x.qmax - x.qmin) if z is None else (x.qmin - z, x.qmax - z)


def _per_channel(site: Site, function: Callable[[Any], Any]) -> Any:
    """The int64 sum of `function(kernel)` over the axes that the accumulator sums."""
    kernel = site.constants["kernel"]
    kernel = (kernel if isinstance(kernel, Tracer) else np.asarray(kernel)).astype(np.int64)
    kept = [w for _, w in site.attributes["channels"]]
    summed = tuple(axis for axis in range(kernel.ndim) if axis not in kept)
    sums = function(kernel).sum(axis=summed, keepdims=True)
    return weight_to_result(sums, site.attributes["channels"], site.attributes["rank"])


def _zero_point(x: Operand) -> int | None:
    """The zero point of an activation, None while it is traced."""
    return None if isinstance(x.zero_point, Tracer) else int(np.max(np.asarray(x.zero_point)))
