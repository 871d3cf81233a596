"""Convolutions and pooling. Images have their channels last here: (batch, *spatial, channels)."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.contrib.float_models.graph import Call, operator
from qjax.ops import products

Pads = list[tuple[int, int]]
_SPATIAL = "DHW"


def window_of(call: Call, spatial: Sequence[int], kernel: Sequence[int]) -> tuple[list[int], list[int], Pads]:
    """Strides, dilations and padding of a node, for these spatial sizes."""
    rank = len(spatial)
    strides, dilations = (list(call.get(key, [1] * rank)) for key in ("strides", "dilations"))
    mode = call.get("auto_pad", "NOTSET")
    if mode in ("SAME_UPPER", "SAME_LOWER"):
        pads: Pads = []
        for size, window, stride, dilation in zip(spatial, kernel, strides, dilations, strict=True):
            total = max((-(-size // stride) - 1) * stride + (window - 1) * dilation + 1 - size, 0)
            small, large = total // 2, total - total // 2
            pads.append((small, large) if mode == "SAME_UPPER" else (large, small))
        return strides, dilations, pads
    given = call.get("pads", [0] * 2 * rank) if mode == "NOTSET" else [0] * 2 * rank
    return strides, dilations, list(zip(given[:rank], given[rank:], strict=True))


def numbers(rank: int, weight: str) -> tuple[str, str, str]:
    """Dimension numbers of a convolution; weight: "OI" or "IO", the order of the first axes of the weight."""
    letters = _SPATIAL[3 - rank :] if rank <= 3 else "".join(chr(ord("a") + i) for i in range(rank))
    return f"N{letters}C", f"{weight}{letters}", f"N{letters}C"


def add_bias(call: Call, y: Any, bias: Any) -> Any:
    """Add a vector along the last axis."""
    return y if bias is None else y + jnp.reshape(bias, (1,) * (y.ndim - 1) + (-1,))


@operator("Conv", layout="last", weights=(1, 2))
def _conv(call: Call, x: Any, w: Any, bias: Any = None) -> Any:
    rank = x.ndim - 2
    strides, dilations, pads = window_of(call, x.shape[1:-1], w.shape[2:])
    y = products.convolution(
        x,
        w,
        x.dtype,
        window_strides=strides,
        padding=pads,
        rhs_dilation=dilations,
        dimension_numbers=numbers(rank, "OI"),
        feature_group_count=call.get("group", 1),
    )
    return add_bias(call, y, bias)


@operator("ConvTranspose", layout="last", weights=(1, 2))
def _conv_transpose(call: Call, x: Any, w: Any, bias: Any = None) -> Any:
    """The gradient of a convolution: the input is spread by the strides, and the kernel turned around."""
    rank, groups = x.ndim - 2, call.get("group", 1)
    strides, dilations = (call.get(key, [1] * rank) for key in ("strides", "dilations"))
    extra = call.get("output_padding", [0] * rank)
    spans = [(k - 1) * d + 1 for k, d in zip(w.shape[2:], dilations, strict=True)]
    full = [(n - 1) * s + span + e for n, s, span, e in zip(x.shape[1:-1], strides, spans, extra, strict=True)]
    mode, wanted = call.get("auto_pad", "NOTSET"), call.get("output_shape")
    if wanted is None and mode in ("SAME_UPPER", "SAME_LOWER"):
        wanted = [n * s for n, s in zip(x.shape[1:-1], strides, strict=True)]
    if wanted is not None:
        totals = [size - n for size, n in zip(full, wanted[-rank:], strict=True)]
        # Onnx's formula: the larger half comes first, except under SAME_UPPER.
        halves = [(t // 2, t - t // 2) if mode == "SAME_UPPER" else (t - t // 2, t // 2) for t in totals]
    else:
        given = call.get("pads", [0] * 2 * rank) if mode == "NOTSET" else [0] * 2 * rank
        halves = list(zip(given[:rank], given[rank:], strict=True))
    if groups > 1:
        parts = jnp.reshape(w, (groups, w.shape[0] // groups, *w.shape[1:]))
        w = jnp.reshape(jnp.moveaxis(parts, 0, 1), (w.shape[0] // groups, groups * w.shape[1], *w.shape[2:]))
    y = products.convolution(
        x,
        lax.rev(w, tuple(range(2, w.ndim))),
        x.dtype,
        window_strides=[1] * rank,
        padding=[(span - 1 - a, span - 1 - b + e) for span, (a, b), e in zip(spans, halves, extra, strict=True)],
        lhs_dilation=strides,
        rhs_dilation=dilations,
        dimension_numbers=numbers(rank, "IO"),
        feature_group_count=groups,
    )
    return add_bias(call, y, bias)


# ---------------------------------------------------------------------- pooling


def pool_window(call: Call, x: Any) -> tuple[list[int], list[int], list[int], Pads, Pads]:
    """Kernel, strides, dilations, padding, and the padding with what `ceil_mode` adds behind it."""
    kernel = list(call.get("kernel_shape"))
    strides, dilations, pads = window_of(call, x.shape[1:-1], kernel)
    if not call.get("ceil_mode", 0):
        return kernel, strides, dilations, pads, pads
    wider: Pads = []
    for size, k, s, d, (a, b) in zip(x.shape[1:-1], kernel, strides, dilations, pads, strict=True):
        span = (k - 1) * d + 1
        count = -(-(size + a + b - span) // s) + 1
        if (count - 1) * s >= size + a:
            count -= 1  # a window that starts behind the input is left out
        wider.append((a, max((count - 1) * s + span - size - a, b)))
    return kernel, strides, dilations, pads, wider


def _reduce_window(x: Any, start: Any, function: Any, kernel: Any, strides: Any, dilations: Any, pads: Pads) -> Any:
    return lax.reduce_window(
        x,
        start,
        function,
        (1, *kernel, 1),
        (1, *strides, 1),
        [(0, 0), *pads, (0, 0)],
        window_dilation=(1, *dilations, 1),
    )


def lowest(x: Any) -> Any:
    """The least number of the array's type."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        return np.array(-np.inf, x.dtype)
    return np.array(np.iinfo(x.dtype).min, x.dtype)


@operator("MaxPool", layout="last")
def _max_pool(call: Call, x: Any) -> Any:
    kernel, strides, dilations, _, pads = pool_window(call, x)
    y = _reduce_window(x, lowest(x), lax.max, kernel, strides, dilations, pads)
    if not call.wants(1):
        return y
    return y, _max_places(call, x, y.shape, kernel, strides, dilations, pads)


def _max_places(call: Call, x: Any, shape: Sequence[int], kernel: Any, strides: Any, dilations: Any, pads: Pads) -> Any:
    """Where each maximum is in the file's order (batch, channel, *spatial), counted through the whole array."""
    n, *spatial, c = x.shape
    inside = np.arange(math.prod(spatial)).reshape(spatial)
    if call.get("storage_order", 0):
        inside = np.arange(math.prod(spatial)).reshape(spatial[::-1]).transpose()
    places = (np.arange(n)[:, None] * c + np.arange(c)).reshape(n, *([1] * len(spatial)), c) * inside.size
    places = jnp.asarray(np.broadcast_to(places + inside[None, ..., None], x.shape).astype(np.int32))
    wide = lax.pad(x, lowest(x), [(0, 0, 0), *((a, b, 0) for a, b in pads), (0, 0, 0)])
    places = lax.pad(places, np.int32(0), [(0, 0, 0), *((a, b, 0) for a, b in pads), (0, 0, 0)])
    best, found = None, None
    for offset in itertools.product(*map(range, kernel)):
        starts = [o * d for o, d in zip(offset, dilations, strict=True)]
        ends = [a + (m - 1) * s + 1 for a, m, s in zip(starts, shape[1:-1], strides, strict=True)]
        cut = [lax.slice(v, (0, *starts, 0), (n, *ends, c), (1, *strides, 1)) for v in (wide, places)]
        if best is None or found is None:
            best, found = cut
        else:
            better = cut[0] > best
            best, found = jnp.where(better, cut[0], best), jnp.where(better, cut[1], found)
    return found


@operator("AveragePool", layout="last")
def _average_pool(call: Call, x: Any) -> Any:
    kernel, strides, dilations, pads, wider = pool_window(call, x)
    total = _reduce_window(x, np.zeros((), x.dtype), lax.add, kernel, strides, dilations, wider)
    counts = np.ones((1,) * x.ndim, np.int64)
    for axis, (k, s, d) in enumerate(zip(kernel, strides, dilations, strict=True)):
        size, (a, b), (_, far) = x.shape[axis + 1], pads[axis], wider[axis]
        inside = np.ones(size + a + far, np.int64)
        if not call.get("count_include_pad", 0):
            inside[:a] = 0
            inside[a + size :] = 0
        inside[a + size + b :] = 0
        starts = np.arange(total.shape[axis + 1]) * s
        along = inside[starts[:, None] + np.arange(k) * d].sum(1)
        counts = counts * along.reshape([-1 if i == axis + 1 else 1 for i in range(x.ndim)])
    if (counts == counts.flat[0]).all():
        return total / call.like(counts.flat[0], x)
    return total * call.like(1.0 / np.maximum(counts, 1), x)


@operator("LpPool", layout="last")
def _lp_pool(call: Call, x: Any) -> Any:
    kernel, strides, dilations, _, pads = pool_window(call, x)
    p = call.get("p", 2)
    powers = jnp.abs(x) if p == 1 else lax.integer_pow(jnp.abs(x), p)
    total = _reduce_window(powers, np.zeros((), x.dtype), lax.add, kernel, strides, dilations, pads)
    return total if p == 1 else jnp.sqrt(total) if p == 2 else jnp.power(total, call.like(1 / p, x))


@operator("GlobalAveragePool", layout="last")
def _global_average_pool(call: Call, x: Any) -> Any:
    return jnp.mean(x, tuple(range(1, x.ndim - 1)), keepdims=True)


@operator("GlobalMaxPool", layout="last")
def _global_max_pool(call: Call, x: Any) -> Any:
    return jnp.max(x, tuple(range(1, x.ndim - 1)), keepdims=True)


@operator("GlobalLpPool", layout="last")
def _global_lp_pool(call: Call, x: Any) -> Any:
    p = call.get("p", 2)
    total = jnp.sum(lax.integer_pow(jnp.abs(x), p), tuple(range(1, x.ndim - 1)), keepdims=True)
    return jnp.power(total, call.like(1 / p, x))


@operator("MaxUnpool", static=(2,))
def _max_unpool(call: Call, x: Any, places: Any, shape: Any = None) -> Any:
    spatial = x.shape[2:]
    kernel = call.get("kernel_shape")
    strides = call.get("strides", [1] * len(kernel))
    pads = call.get("pads", [0] * 2 * len(kernel))
    half = len(kernel)
    natural = [
        (n - 1) * s + k - a - b
        for n, s, k, a, b in zip(spatial, strides, kernel, pads[:half], pads[half:], strict=True)
    ]
    made = [*x.shape[:2], *natural]
    flat = jnp.zeros(math.prod(made), x.dtype).at[jnp.reshape(places, -1)].set(jnp.reshape(x, -1))
    y = jnp.reshape(flat, made)
    if shape is None:
        return y
    wanted = [int(n) for n in shape]
    return lax.pad(y, np.zeros((), x.dtype), [(0, n - m, 0) for m, n in zip(made, wanted, strict=True)])


@operator("Col2Im", static=(1, 2))
def _col2im(call: Call, x: Any, image: Any, block: Any) -> Any:
    """Adds the columns of blocks (batch, channels * block, blocks) to images."""
    image, block = [int(n) for n in image], [int(n) for n in block]
    rank = len(image)
    strides, dilations = (call.get(key, [1] * rank) for key in ("strides", "dilations"))
    pads = call.get("pads", [0] * 2 * rank)
    wide = [n + pads[i] + pads[rank + i] for i, n in enumerate(image)]
    counts = [(n - (k - 1) * d - 1) // s + 1 for n, k, d, s in zip(wide, block, dilations, strides, strict=True)]
    n, c = x.shape[0], x.shape[1] // math.prod(block)
    columns = jnp.reshape(x, (n, c, *block, *counts))
    y = jnp.zeros((n, c, *wide), x.dtype)
    for offset in itertools.product(*map(range, block)):
        where = tuple(
            slice(o * d, o * d + (m - 1) * s + 1, s)
            for o, d, m, s in zip(offset, dilations, counts, strides, strict=True)
        )
        y = y.at[(slice(None), slice(None), *where)].add(columns[(slice(None), slice(None), *offset)])
    inner = tuple(slice(pads[i], pads[i] + size) for i, size in enumerate(image))
    return y[(slice(None), slice(None), *inner)]
