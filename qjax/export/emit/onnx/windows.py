"""Sums and maxima over windows.

    a 2 x 2 sum of x    ->    r = x[:-1] + x[1:];  r[:, :-1] + r[:, 1:]

MaxPool works on codes of 8 bits. ONNX has no sum over windows of integers, so rows and then columns are added as
slices. This is exact, and takes n + m additions instead of n m.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from qjax.export.emit.onnx.elementwise import widened
from qjax.export.emit.onnx.structure import pad, sliced
from qjax.export.emit.onnx.views import View, Views


def reduce_window_sum(t: Views, params: Any, x: Sequence[View]) -> View:
    """Sums over windows; padding adds 0."""
    padded = _padded(t, x[0], params, t.literal(np.zeros((), x[0].dtype)))
    return _separately(t, padded, params, "Add")


def reduce_window_max(t: Views, params: Any, x: Sequence[View]) -> View:
    """Maxima over windows; padding is the lowest number of the dtype."""
    (view,) = x
    native = _max_pool(t, view, params)
    if native is not None:
        return native
    padded = _padded(t, view, params, t.literal(np.asarray(np.iinfo(view.dtype).min, view.dtype)))
    return _separately(t, padded, params, "Max")


def _padded(t: Views, view: View, params: Any, fill: View) -> View:
    amounts = zip(params["padding"], params["base_dilation"], strict=True)
    return pad(t, {"padding_config": [(low, high, between - 1) for (low, high), between in amounts]}, (view, fill))


def _separately(t: Views, view: View, params: Any, op: str) -> View:
    """One axis after the other."""
    for axis, n in enumerate(params["window_dimensions"]):
        stride, dilation = params["window_strides"][axis], params["window_dilation"][axis]
        if n == 1 and stride == 1:
            continue
        view = t.expanded(view, [axis])
        size = view.shape[axis]
        span = (size - (n - 1) * dilation - 1) // stride * stride + 1
        taps: list[View] = []
        for position in range(n):
            start = [position * dilation if a == axis else 0 for a in range(len(view.shape))]
            limit = [start[a] + span if a == axis else length for a, length in enumerate(view.shape)]
            taps.append(sliced(t, view, start, limit, [stride if a == axis else 1 for a in range(len(view.shape))]))

        def joined(first: str, *others: str) -> str:
            for other in others:
                first = t.builder.op(op, first, other)
            return first

        name = widened(t.builder, view.dtype, [tap.name for tap in taps], joined)
        view = dataclasses.replace(taps[0], name=name)
    return view


def _max_pool(t: Views, view: View, params: Any) -> View | None:
    """MaxPool, for 8 bits and windows over one to three axes after or between two others."""
    window, strides = params["window_dimensions"], params["window_strides"]
    padding, dilation = params["padding"], params["window_dilation"]
    rank = len(view.shape)
    slid = [a for a in range(rank) if (window[a], strides[a], tuple(padding[a])) != (1, 1, (0, 0))]
    fits = view.dtype in ("int8", "uint8") and all(n == 1 for n in params["base_dilation"])
    fits = fits and all(0 <= n < window[a] for a in slid for n in padding[a])
    outer = [a for a in t.common_order([view]) if a not in slid]
    if not fits or not 1 <= len(slid) <= 3 or len(outer) > 2:
        return None
    # ONNX needs two outer axes, so add axes with window 1 and stride 1
    while len(outer) < 2 and len(slid) > 1:
        still = next((a for a in slid if window[a] == 1 and strides[a] == 1), None)
        if still is None:
            return None
        slid.remove(still)
        outer.append(still)
    if len(outer) != 2:
        return None
    order = (*outer, *slid)
    name = t.builder.op(
        "MaxPool",
        t.materialized(view, order),
        kernel_shape=[window[a] for a in slid],
        strides=[strides[a] for a in slid],
        dilations=[dilation[a] for a in slid],
        pads=[padding[a][side] for side in (0, 1) for a in slid],
    )
    sizes = list(view.shape)
    for a in slid:
        sizes[a] = (view.shape[a] + sum(padding[a]) - (window[a] - 1) * dilation[a] - 1) // strides[a] + 1
    return View.full(name, view.dtype, tuple(sizes), order)
