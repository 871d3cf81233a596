"""Operators that choose elements by indices or by their order."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.contrib.float_models.evaluator import evaluate
from qjax.contrib.float_models.graph import FREE_BATCH, Call, operator
from qjax.layers.nnx_layers import look_up_rows


def _from_front(xp: Any, indices: Any, size: int) -> Any:
    """Indices counted from the front; those below 0 count from the back."""
    if isinstance(indices, np.ndarray):
        return np.where(indices < 0, indices + size, indices)
    return jnp.where(indices < 0, indices + jnp.asarray(size, indices.dtype), indices)


@operator("Gather", in_numpy=True, weights=(0,))
def _gather(call: Call, x: Any, indices: Any) -> Any:
    """A table of weights and computed indices are an embedding; constant indices become slices where they can."""
    axis = call.get("axis", 0) % x.ndim
    if call.xp is np:
        return np.take(x, indices, axis)
    if isinstance(indices, np.ndarray):
        if call.exported and call.exported[0][axis] != x.shape[axis] and indices.size > 1:
            raise call.refuse(
                f"it takes elements at places that belong to the batch {call.exported[0][axis]} of the file",
                FREE_BATCH,
            )
        places = _from_front(np, indices, x.shape[axis])
        if places.ndim == 0:
            return lax.index_in_dim(x, int(places), axis, keepdims=False)
        steps = np.diff(places) if places.ndim == 1 else np.zeros(0)
        if places.ndim == 1 and places.size and (steps > 0).all() and len(set(steps.tolist())) <= 1:
            first, step = int(places[0]), int(steps[0]) if steps.size else 1
            return lax.slice_in_dim(x, first, int(places[-1]) + 1, step, axis)
        return jnp.take(x, places.astype(np.int32), axis)
    indices = _from_front(jnp, indices, x.shape[axis])
    return look_up_rows(indices, x) if axis == 0 and x.ndim == 2 else jnp.take(x, indices, axis)


@operator("GatherElements", in_numpy=True)
def _gather_elements(call: Call, x: Any, indices: Any) -> Any:
    axis = call.get("axis", 0) % x.ndim
    places = _from_front(call.xp, indices, x.shape[axis])
    cut = x[tuple(slice(None) if i == axis else slice(n) for i, n in enumerate(indices.shape))]
    return call.xp.take_along_axis(cut, places, axis)


@operator("GatherND", in_numpy=True)
def _gather_nd(call: Call, x: Any, indices: Any) -> Any:
    batch = call.get("batch_dims", 0)
    depth = indices.shape[-1]
    parts = [_from_front(call.xp, indices[..., i], x.shape[batch + i]) for i in range(depth)]
    grids = []
    for axis in range(batch):
        shape = [x.shape[axis] if i == axis else 1 for i in range(indices.ndim - 1)]
        grids.append(np.arange(x.shape[axis], dtype=parts[0].dtype).reshape(shape))
    return x[(*grids, *parts)]


def _scatter_how(call: Call, at: Any, updates: Any, how: str) -> Any:
    names = {"none": "set", "add": "add", "mul": "multiply", "max": "max", "min": "min"}
    return getattr(at, names[how])(updates)


@operator("ScatterElements", "Scatter")
def _scatter_elements(call: Call, x: Any, indices: Any, updates: Any) -> Any:
    axis = call.get("axis", 0) % x.ndim
    places = _from_front(jnp, indices, x.shape[axis])
    where = [
        places if i == axis else np.arange(n).reshape([-1 if k == i else 1 for k in range(x.ndim)])
        for i, n in enumerate(indices.shape)
    ]
    return _scatter_how(call, jnp.asarray(x).at[tuple(where)], updates, call.get("reduction", "none"))


@operator("ScatterND")
def _scatter_nd(call: Call, x: Any, indices: Any, updates: Any) -> Any:
    parts = tuple(_from_front(jnp, indices[..., i], x.shape[i]) for i in range(indices.shape[-1]))
    return _scatter_how(call, jnp.asarray(x).at[parts], updates, call.get("reduction", "none"))


@operator("TensorScatter")
def _tensor_scatter(call: Call, cache: Any, update: Any, starts: Any = None) -> Any:
    """Writes new rows into a cache at each example's own place."""
    axis = call.get("axis", -2) % cache.ndim
    size, rows = cache.shape[axis], update.shape[axis]
    first = jnp.zeros(cache.shape[0], jnp.int32) if starts is None else starts
    places = jnp.reshape(first, (-1, 1)) + jnp.arange(rows, dtype=first.dtype)[None]
    if call.get("mode", "linear") == "circular":
        places = places % size
    rows_last = [jnp.moveaxis(v, axis, 1) for v in (cache, update)]
    written = rows_last[0].at[np.arange(cache.shape[0])[:, None], places].set(rows_last[1])
    return jnp.moveaxis(written, 1, axis)


@operator("Compress", static=(1,), in_numpy=True)
def _compress(call: Call, x: Any, condition: Any) -> Any:
    axis = call.get("axis")
    source = call.xp.reshape(x, -1) if axis is None else x
    return call.xp.take(source, np.flatnonzero(condition).astype(np.int32), 0 if axis is None else axis)


@operator("OneHot", static=(1,))
def _one_hot(call: Call, indices: Any, depth: Any, values: Any) -> Any:
    depth = int(np.reshape(depth, ()))
    call.sized([*indices.shape, depth])
    axis = call.get("axis", -1)
    axis = axis + indices.ndim + 1 if axis < 0 else axis
    if jnp.issubdtype(indices.dtype, jnp.floating):
        indices = indices.astype(jnp.int32)
    chosen = jnp.expand_dims(_from_front(jnp, indices, depth), axis) == jnp.reshape(
        jnp.arange(depth, dtype=indices.dtype), [-1 if i == axis else 1 for i in range(indices.ndim + 1)]
    )
    return jnp.where(chosen, values[1], values[0])


@operator("TopK", static=(1,))
def _top_k(call: Call, x: Any, k: Any = None) -> Any:
    count = call.get("k") if k is None else int(np.reshape(k, ()))
    axis = call.get("axis", -1) % x.ndim
    largest = call.get("largest", 1)
    moved = jnp.moveaxis(x, axis, -1)
    if jnp.issubdtype(x.dtype, jnp.unsignedinteger) and not largest:
        order = jnp.argsort(moved, -1, stable=True)[..., :count]
        values = jnp.take_along_axis(moved, order, -1)
    else:
        values, order = lax.top_k(moved if largest else -moved, count)
        values = values if largest else -values
    return jnp.moveaxis(values, -1, axis), jnp.moveaxis(order, -1, axis)


@operator("NonZero", static=(0,), in_numpy=True)
def _non_zero(call: Call, x: Any) -> Any:
    return np.array(np.nonzero(x), np.int64)


@operator("Unique", static=(0,), in_numpy=True)
def _unique(call: Call, x: Any) -> Any:
    axis = call.get("axis")
    values, first, inverse, counts = np.unique(x, True, True, True, axis=axis)
    inverse = inverse.reshape(-1)
    if not call.get("sorted", 1):
        order = np.argsort(first)
        values, first, counts = np.take(values, order, axis or 0), first[order], counts[order]
        inverse = np.argsort(order)[inverse]
    return values, *(v.astype(np.int64) for v in (first, inverse, counts))


@operator("NonMaxSuppression", static=(-1,), in_numpy=True)
def _non_max_suppression(
    call: Call, boxes: Any, scores: Any, most: Any = None, overlap: Any = None, least: Any = None
) -> Any:
    """How many boxes remain depends on their numbers, so only known boxes can be chosen."""
    limit = 0 if most is None else int(np.reshape(most, ()))
    threshold = 0.0 if overlap is None else float(np.reshape(overlap, ()))
    found = []
    for batch, kind in np.ndindex(*scores.shape[:2]):
        chosen: list[int] = []
        for place in np.argsort(-scores[batch, kind], kind="stable"):
            if len(chosen) >= limit or (
                least is not None and scores[batch, kind, place] <= float(np.reshape(least, ()))
            ):
                break
            one = _corners(boxes[batch, place], call.get("center_point_box", 0))
            if all(
                _overlap(one, _corners(boxes[batch, k], call.get("center_point_box", 0))) <= threshold for k in chosen
            ):
                chosen.append(int(place))
        found += [(batch, kind, place) for place in chosen]
    return np.array(found, np.int64).reshape(-1, 3)


def _corners(box: Any, centered: int) -> tuple[float, float, float, float]:
    a, b, c, d = (float(v) for v in box)
    if centered:
        return b - d / 2, a - c / 2, b + d / 2, a + c / 2
    return min(a, c), min(b, d), max(a, c), max(b, d)


def _overlap(a: Any, b: Any) -> float:
    height, width = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    if height <= 0 or width <= 0:
        return 0.0
    areas = [(one[2] - one[0]) * (one[3] - one[1]) for one in (a, b)]
    return height * width / (sum(areas) - height * width)


@operator("If", static=(0,))
def _if_(call: Call, condition: Any, *captured: Any) -> Any:
    """The branch that the condition selects when the model is traced."""
    branch = call.get("then_branch" if bool(np.reshape(condition, ())) else "else_branch")
    outer = dict(zip(call.node.inputs, (condition, *captured), strict=True))
    return tuple(evaluate(branch, {port.name: outer[port.name] for port in branch.inputs if port.name in outer}))
