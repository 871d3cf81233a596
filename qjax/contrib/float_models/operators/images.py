"""Resizing and sampling of images. Along an axis a resize is a choice of rows, or a product with a constant matrix."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from qjax.contrib.float_models.graph import Call, operator
from qjax.contrib.float_models.operators.moves import ints
from qjax.ops import products

# ---------------------------------------------------------------------- resize


@operator("Resize", "Upsample", static=(1, 2, 3), layout="axes")
def _resize(call: Call, x: Any, *given: Any) -> Any:
    """https://onnx.ai/onnx/operators/onnx__Resize.html; Upsample and the operator set 10 have scales only."""
    roi, scales, sizes = [*given, None, None, None][:3] if call.version >= 11 else (None, (*given, None)[0], None)
    mode, old = call.get("mode", "nearest"), call.version < 11
    chosen = [a % x.ndim for a in call.get("axes", list(range(x.ndim)))]
    shape = [x.shape[call.axis(a, x.ndim)] for a in range(x.ndim)]
    if call.get("scales") is not None:
        scales = np.array(call.get("scales"), np.float32)
    factors = [1.0] * x.ndim
    wanted = list(shape)
    if sizes is not None and np.size(sizes):
        asked = dict(zip(chosen, ints(sizes), strict=True))
        ratios = [n / shape[a] for a, n in asked.items()]
        policy = call.get("keep_aspect_ratio_policy", "stretch")
        if policy != "stretch":
            ratio = min(ratios) if policy == "not_larger" else max(ratios)
            asked = {a: math.floor(ratio * shape[a] + 0.5) for a in asked}
            ratios = [ratio] * len(asked)
        for (a, n), ratio in zip(asked.items(), ratios, strict=True):
            wanted[a], factors[a] = n, ratio
            if a == 0 and call.exported:
                wanted[a], factors[a] = shape[a], 1.0
    else:
        for a, factor in zip(chosen, np.reshape(scales, -1).tolist(), strict=True):
            wanted[a], factors[a] = math.floor(shape[a] * factor), factor
    call.sized(wanted)
    crop = call.get("coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize"
    bounds = dict(zip(chosen, np.reshape(roi, (2, -1)).T.tolist(), strict=True)) if crop else {}
    for a in range(x.ndim):
        if wanted[a] == shape[a] and factors[a] == 1.0 and a not in bounds:
            continue
        positions = _positions(call, wanted[a], shape[a], factors[a], bounds.get(a), old)
        place = call.axis(a, x.ndim)
        outside = (positions < 0) | (positions > shape[a] - 1) if crop else np.zeros(0, bool)
        if mode == "nearest":
            x = pick(x, np.clip(_nearest(call, positions, factors[a], old), 0, shape[a] - 1), place)
        else:
            x = mix(x, _matrix(call, mode, positions, factors[a], shape[a]), place)
        if outside.any():
            filler = call.like(call.get("extrapolation_value", 0.0), x)
            x = jnp.where(np.reshape(outside, [-1 if i == place else 1 for i in range(x.ndim)]), filler, x)
    return x


def pick(x: Any, places: np.ndarray, axis: int) -> Any:
    """Rows of an axis; every row the same number of times is a repetition."""
    size = x.shape[axis]
    if len(places) % size == 0 and (places == np.repeat(np.arange(size), len(places) // size)).all():
        return jnp.repeat(x, len(places) // size, axis=axis)
    return jnp.take(x, places.astype(np.int32), axis)


def mix(x: Any, matrix: np.ndarray, axis: int) -> Any:
    """matrix (out, in) times an axis."""
    y = products.dot_general(x, call_dtype(matrix, x), (((axis,), (1,)), ((), ())), x.dtype)
    return jnp.moveaxis(y, -1, axis)


def call_dtype(matrix: np.ndarray, x: Any) -> Any:
    """The matrix in the dtype of the array."""
    return jnp.asarray(matrix, x.dtype)


def _positions(call: Call, out: int, size: int, factor: float, roi: list[float] | None, old: bool) -> np.ndarray:
    """Where each element of the result lies among those of the input."""
    mode = "asymmetric" if old else call.get("coordinate_transformation_mode", "half_pixel")
    x, whole = np.arange(out, dtype=np.float64), factor * size
    if mode == "align_corners":
        return x * (size - 1) / (whole - 1) if whole != 1 else np.zeros(out)
    if mode == "asymmetric":
        return x / factor
    if mode == "tf_crop_and_resize" and roi is not None:
        start, end = roi
        inner = x * (end - start) * (size - 1) / (out - 1) if out != 1 else np.full(out, (end - start) * (size - 1) / 2)
        return inner + start * (size - 1)
    if mode == "pytorch_half_pixel" and out == 1:
        return np.full(out, -0.5)
    if mode == "half_pixel_symmetric":
        return size / 2 * (1 - out / whole) + (x + 0.5) / factor - 0.5
    if mode in ("half_pixel", "pytorch_half_pixel"):
        return (x + 0.5) / factor - 0.5
    raise call.refuse(f"the coordinates {mode!r}", "Export the model with the coordinates half_pixel")


def _nearest(call: Call, positions: np.ndarray, factor: float, old: bool) -> np.ndarray:
    how = call.get("nearest_mode", "round_prefer_floor")
    if old:
        # Before the operator set 11 the way to round was not stated; ONNX Runtime rounds down.
        how = "floor"
    return {
        "round_prefer_floor": lambda p: np.ceil(p - 0.5),
        "round_prefer_ceil": lambda p: np.floor(p + 0.5),
        "floor": np.floor,
        "ceil": np.ceil,
    }[how](positions).astype(np.int64)


def _matrix(call: Call, mode: str, positions: np.ndarray, factor: float, size: int) -> np.ndarray:
    """The weights of the inputs (columns) in each output (rows)."""
    shrink = min(factor, 1.0) if call.get("antialias", 0) else 1.0
    reach = 1.0 if mode == "linear" else 2.0
    a = call.get("cubic_coeff_a", -0.75)
    matrix = np.zeros((len(positions), size))
    for row, place in enumerate(positions):
        base = math.ceil(place) - 1
        around = np.arange(base + math.floor(-reach / shrink) + 1, base + 2 - math.floor(-reach / shrink))
        far = np.abs(around - place) * shrink
        if mode == "linear":
            weights = np.clip(1 - far, 0, 1)
        else:
            near = ((a + 2) * far - (a + 3)) * far * far + 1
            outer = ((far - 5) * far + 8) * far * a - 4 * a
            weights = np.where(far <= 1, near, np.where(far < 2, outer, 0.0))
        if call.get("exclude_outside", 0):
            weights = np.where((around < 0) | (around >= size), 0.0, weights)
        np.add.at(matrix[row], np.clip(around, 0, size - 1), weights / weights.sum())
    return matrix


# ---------------------------------------------------------------------- sampling


@operator("AffineGrid", static=(1,))
def _affine_grid(call: Call, theta: Any, size: Any) -> Any:
    spatial = ints(size)[2:]
    corners = call.get("align_corners", 0)
    lines = [
        np.linspace(-1, 1, n) if corners and n > 1 else (np.zeros(n) if corners else (2 * np.arange(n) + 1) / n - 1)
        for n in spatial
    ]
    grids = np.meshgrid(*lines, indexing="ij")[::-1]
    points = np.stack([*grids, np.ones(spatial)], -1).reshape(-1, len(spatial) + 1)
    y = products.dot_general(theta, jnp.asarray(points, theta.dtype), (((2,), (1,)), ((), ())), theta.dtype)
    return jnp.reshape(jnp.swapaxes(y, 1, 2), (theta.shape[0], *spatial, len(spatial)))


@operator("GridSample")
def _grid_sample(call: Call, x: Any, grid: Any) -> Any:
    """Elements at computed places between those of the input (batch, channels, *spatial)."""
    mode = {"bilinear": "linear", "bicubic": "cubic"}.get(call.get("mode", "linear"), call.get("mode", "linear"))
    spatial, corners = x.shape[2:], bool(call.get("align_corners", 0))
    places = []
    for axis, size in enumerate(spatial):
        p = grid[..., len(spatial) - 1 - axis]
        place = (p + 1) * call.like((size - 1) / 2, x) if corners else ((p + 1) * call.like(size, x) - 1) / 2
        places.append(place if mode == "cubic" else _inside(call, place, size, corners))
    if mode == "nearest":
        return _sampled(call, x, [jnp.round(p) for p in places], corners)
    if mode == "cubic":
        steps, weigh = (-1, 0, 1, 2), lambda t: _cubic(call, t)
    else:
        steps, weigh = (0, 1), lambda t: [1 - t, t]
    bases = [jnp.floor(p) for p in places]
    factors = [weigh(p - b) for p, b in zip(places, bases, strict=True)]
    total: Any = 0.0
    for offsets in np.ndindex(*([len(steps)] * len(spatial))):
        weight = jnp.ones_like(places[0])
        for axis, offset in enumerate(offsets):
            weight = weight * factors[axis][offset]
        corner = [b + steps[o] for b, o in zip(bases, offsets, strict=True)]
        total = total + _sampled(call, x, corner, corners) * jnp.expand_dims(weight, 1)
    return total


def _cubic(call: Call, t: Any) -> list[Any]:
    a = -0.75
    far = [t + 1, t, 1 - t, 2 - t]
    outer = [((d - 5) * d + 8) * d * a - 4 * a for d in far]
    near = [((a + 2) * d - (a + 3)) * d * d + 1 for d in far]
    return [outer[0], near[1], near[2], outer[3]]


def _inside(call: Call, place: Any, size: int, corners: bool) -> Any:
    """A place under the padding mode; zeros are put in where elements are read."""
    mode = call.get("padding_mode", "zeros")
    if mode == "border":
        return jnp.clip(place, 0.0, size - 1.0)
    if mode == "reflection":
        low, high = (0.0, size - 1.0) if corners else (-0.5, size - 0.5)
        span = high - low
        if span == 0:
            return jnp.zeros_like(place)
        turned = jnp.mod(place - low, 2 * span)
        return jnp.clip(jnp.where(turned > span, 2 * span - turned, turned) + low, 0.0, size - 1.0)
    return place


def _sampled(call: Call, x: Any, places: list[Any], corners: bool) -> Any:
    """Elements at whole places (batch, ...) of an array (batch, channels, *spatial)."""
    spatial = x.shape[2:]
    if call.get("padding_mode", "zeros") == "reflection" or call.get("padding_mode") == "border":
        places = [_inside(call, p, n, corners) for p, n in zip(places, spatial, strict=True)]
    there = jnp.ones(places[0].shape, bool)
    whole = []
    for place, size in zip(places, spatial, strict=True):
        there = there & (place >= 0) & (place <= size - 1)
        whole.append(jnp.clip(place, 0, size - 1).astype(jnp.int32))
    batch = np.arange(x.shape[0], dtype=np.int32).reshape(-1, *([1] * (places[0].ndim - 1)))
    found = x[(batch, slice(None), *whole)]
    found = jnp.moveaxis(found, -1, 1)
    return jnp.where(jnp.expand_dims(there, 1), found, jnp.zeros_like(found))
