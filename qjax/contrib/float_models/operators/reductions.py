"""Sums and extremes along axes, softmax, cumulative sums."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.contrib.float_models.graph import Call, operator
from qjax.contrib.float_models.operators.moves import ints


def reduction(name: str, function: Callable[[Any, Any, tuple[int, ...], bool], Any]) -> None:
    """Register a reduction; function: (numpy or jax.numpy, x, axes, keepdims) -> the result."""

    @operator(name, static=(1,), layout="axes", in_numpy=True)
    def apply(call: Call, x: Any, axes: Any = None) -> Any:
        given = call.get("axes") if axes is None else ints(axes)
        keep = bool(call.get("keepdims", 1))
        if not given and call.get("noop_with_empty_axes", 0):
            return function(call.xp, x, (), keep)
        return reduce_along(call, x, given or list(range(x.ndim)), keep, function)


def reduce_along(call: Call, x: Any, axes: list[int], keep: bool, function: Callable[..., Any]) -> Any:
    """Reduce along axes of the file, and return what remains in the order of the file or with the channels last."""
    places = call.axes(axes, x.ndim)
    y = function(call.xp, x, places, keep)
    if call.last and not keep:
        # Without these axes the array is no image any more.
        call.last = False
        order = [call.axis_of_file(place, x.ndim) for place in range(x.ndim) if place not in places]
        y = jnp.transpose(y, np.argsort(order).tolist()) if order != sorted(order) else y
    return y


reduction("ReduceSum", lambda xp, x, axes, keep: xp.sum(x, axes, keepdims=keep, dtype=x.dtype))
reduction("ReduceMean", lambda xp, x, axes, keep: xp.mean(x, axes, keepdims=keep).astype(x.dtype))
reduction("ReduceMax", lambda xp, x, axes, keep: _extreme(xp, x, axes, keep, "max"))
reduction("ReduceMin", lambda xp, x, axes, keep: _extreme(xp, x, axes, keep, "min"))
reduction("ReduceProd", lambda xp, x, axes, keep: xp.prod(x, axes, keepdims=keep, dtype=x.dtype))
reduction("ReduceL1", lambda xp, x, axes, keep: xp.sum(xp.abs(x), axes, keepdims=keep, dtype=x.dtype))
reduction("ReduceL2", lambda xp, x, axes, keep: xp.sqrt(xp.sum(x * x, axes, keepdims=keep)).astype(x.dtype))
reduction("ReduceSumSquare", lambda xp, x, axes, keep: xp.sum(x * x, axes, keepdims=keep, dtype=x.dtype))
reduction("ReduceLogSum", lambda xp, x, axes, keep: xp.log(xp.sum(x, axes, keepdims=keep)).astype(x.dtype))


def _extreme(xp: Any, x: Any, axes: tuple[int, ...], keep: bool, which: str) -> Any:
    """Of no element: the least or the greatest number of the type."""
    if x.dtype == bool:
        return getattr(xp, "any" if which == "max" else "all")(x, axes, keepdims=keep)
    if jnp.issubdtype(x.dtype, jnp.floating):
        start: Any = -np.inf if which == "max" else np.inf
    else:
        start = getattr(np.iinfo(x.dtype), "min" if which == "max" else "max")
    return getattr(xp, which)(x, axes, keepdims=keep, **({} if x.size else {"initial": start}))


@operator("ReduceLogSumExp", static=(1,), layout="axes")
def _reduce_log_sum_exp(call: Call, x: Any, axes: Any = None) -> Any:
    given = call.get("axes") if axes is None else ints(axes)
    keep = bool(call.get("keepdims", 1))
    if not given and call.get("noop_with_empty_axes", 0):
        return x
    return reduce_along(
        call,
        x,
        given or list(range(x.ndim)),
        keep,
        lambda xp, x, axes, keep: jax.nn.logsumexp(x, axes, keepdims=keep),
    )


def _argument(name: str, function: str) -> None:
    @operator(name, layout="axes", in_numpy=True)
    def apply(call: Call, x: Any) -> Any:
        def reduce(xp: Any, x: Any, axes: tuple[int, ...], keep: bool) -> Any:
            (axis,) = axes
            if call.get("select_last_index", 0):
                found = x.shape[axis] - 1 - getattr(xp, function)(xp.flip(x, axis), axis=axis)
            else:
                found = getattr(xp, function)(x, axis=axis)
            found = found.astype(np.int64 if xp is np else jnp.asarray(0).dtype)
            return xp.expand_dims(found, axis) if keep else found

        return reduce_along(call, x, [call.get("axis", 0)], bool(call.get("keepdims", 1)), reduce)


_argument("ArgMax", "argmax")
_argument("ArgMin", "argmin")


def _softmax(name: str, function: Callable[[Any, int], Any]) -> None:
    @operator(name, layout="axes")
    def apply(call: Call, x: Any) -> Any:
        """Before the operator set 13 the axes from `axis` on are one."""
        if call.version >= 13:
            return function(x, call.axis(call.get("axis", -1), x.ndim))
        axis = call.get("axis", 1) % x.ndim
        if all(n == 1 for n in x.shape[axis + 1 :]) and not call.last:
            return function(x, axis)
        if call.last:
            if axis == 1 and all(n == 1 for n in x.shape[1:-1]):
                return function(x, x.ndim - 1)
            raise call.refuse("a softmax over all axes of an image", "Export the model with operator set 13 or later")
        flat = jnp.reshape(x, (int(np.prod(x.shape[:axis])), -1))
        return jnp.reshape(function(flat, 1), x.shape)


def _hardmax(x: Any, axis: int) -> Any:
    return jax.nn.one_hot(jnp.argmax(x, axis), x.shape[axis], axis=axis, dtype=x.dtype)


_softmax("Softmax", lambda x, axis: jax.nn.softmax(x, axis))
_softmax("LogSoftmax", lambda x, axis: jax.nn.log_softmax(x, axis))
_softmax("Hardmax", _hardmax)


def _cumulative(name: str, function: Callable[..., Any], start: int) -> None:
    @operator(name, static=(1,))
    def apply(call: Call, x: Any, axis: Any) -> Any:
        axis = int(np.reshape(axis, ())) % x.ndim
        y = function(x, axis, reverse=bool(call.get("reverse", 0)))
        if not call.get("exclusive", 0):
            return y
        back = bool(call.get("reverse", 0))
        kept = lax.slice_in_dim(y, 1, None, axis=axis) if back else lax.slice_in_dim(y, 0, x.shape[axis] - 1, axis=axis)
        widths = [(0, 0, 0)] * x.ndim
        widths[axis] = (0, 1, 0) if back else (1, 0, 0)
        return lax.pad(kept, call.like(start, x), widths)


_cumulative("CumSum", lax.cumsum, 0)
_cumulative("CumProd", lax.cumprod, 1)
