"""Operators that move elements: shapes, transpositions, slices, joins."""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from qjax.contrib.float_models.graph import Call, Last, is_known, operator, shape_of


def ints(values: Any) -> list[int]:
    """The numbers of a known array."""
    return [int(v) for v in np.asarray(values).reshape(-1)]


# ---------------------------------------------------------------------- shapes


@operator("Shape", layout="axes", in_numpy=True)
def _shape(call: Call, x: Any) -> Any:
    sizes = [x.shape[call.axis(axis, x.ndim)] for axis in range(x.ndim)]
    return np.array(sizes, np.int64)[slice(call.get("start", 0), call.get("end"))]


@operator("Size", layout="axes", in_numpy=True)
def _size(call: Call, x: Any) -> Any:
    return np.array(math.prod(x.shape), np.int64)


def _wanted(call: Call, own: Sequence[int], shape: Any) -> list[int]:
    """The new shape of a reshape: -1 is what remains, 0 the size that the input has at this place."""
    wanted = ints(call.get("shape") if shape is None else shape)
    if not call.get("allowzero", 0):
        before = call.exported[0] if call.exported else own
        wanted = [before[i] if n == 0 else n for i, n in enumerate(wanted)]
    return scaled_for_batch(call, own, wanted)


def _split_or_join(call: Call, x: Last, shape: Any = None) -> Last | None:
    """A reshape that splits the channels of an image in two, or joins them again."""
    own = shape_of(x)
    if not is_known(shape) and shape is not None:
        return None
    wanted, spatial, channels = _wanted(call, own, shape), list(x.array.shape[1:-1]), x.array.shape[-1]
    if -1 in wanted and 0 not in wanted:
        rest = -math.prod(wanted)
        wanted = [math.prod(own) // rest if n == -1 else n for n in wanted]
    if wanted == [own[0], channels, *spatial]:
        return Last(x.array)
    if len(wanted) == len(spatial) + 3 and [wanted[0], *wanted[3:]] == [own[0], *spatial] and not x.parts:
        parts = (wanted[1], wanted[2])
        return Last(x.array, parts) if math.prod(parts) == channels else None
    return None


def _transpose_last(call: Call, x: Last) -> Any:
    """A transposition of the two parts of the channels, or one that moves the channels to where they are kept."""
    order = list(call.get("perm") or ())
    if order == [0, *range(2, x.array.ndim), 1] and not x.parts:
        return x.array
    if order != [0, 2, 1, *range(3, x.array.ndim + 1)] or len(x.parts) != 2:
        return None
    split = jnp.reshape(x.array, (*x.array.shape[:-1], *x.parts))
    return Last(jnp.reshape(jnp.swapaxes(split, -1, -2), x.array.shape), x.parts[::-1])


@operator("Reshape", static=(1,), in_numpy=True, on_last=_split_or_join)
def _reshape(call: Call, x: Any, shape: Any = None) -> Any:
    return call.xp.reshape(x, _wanted(call, x.shape, shape))


def scaled_for_batch(call: Call, shape: Sequence[int], wanted: list[int]) -> list[int]:
    """The shape for this call's batch, where the file states numbers for the batch that it was exported with.

    At the file's batch the input has the shape `before`. The axis where `shape` differs contains the batch as its
    slowest part. Elements keep their order in a reshape, so the batch is in the axis of the result that starts at the
    same place; if that axis holds all features that follow the batch, it is in the one before it, as in
    (time, batch, features) -> (time * batch, features).
    """
    before = call.exported[0] if call.exported else tuple(shape)
    grown = [axis for axis, (old, new) in enumerate(zip(before, shape, strict=True)) if old != new]
    if len(grown) != 1 or 0 in before:
        return wanted
    (axis,) = grown
    ahead, features = math.prod(before[:axis]), math.prod(before[axis + 1 :])
    for place, size in enumerate(wanted):
        if ahead == 1:
            if place and place == len(wanted) - 1 and size == features > 1 and before[axis] == 1:
                place, size = place - 1, wanted[place - 1]
            return [*wanted[:place], _scaled(size, shape[axis], before[axis]), *wanted[place + 1 :]]
        if size == -1 or ahead % size:
            break
        ahead //= size
    return wanted


def _scaled(size: int, new: int, old: int) -> int:
    return size if size == -1 or size * new % old else size * new // old


@operator("Flatten", in_numpy=True)
def _flatten(call: Call, x: Any) -> Any:
    axis = call.get("axis", 1)
    axis += x.ndim if axis < 0 else 0
    return call.xp.reshape(x, (math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))


@operator("Squeeze", static=(1,), in_numpy=True)
def _squeeze(call: Call, x: Any, axes: Any = None) -> Any:
    axes = call.get("axes") if axes is None else ints(axes)
    return call.xp.squeeze(x, None if axes is None else call.axes(axes, x.ndim))


@operator("Unsqueeze", static=(1,), in_numpy=True)
def _unsqueeze(call: Call, x: Any, axes: Any = None) -> Any:
    axes = ints(call.get("axes") if axes is None else axes)
    return call.xp.expand_dims(x, call.axes(axes, x.ndim + len(axes)))


@operator("Transpose", in_numpy=True, on_last=_transpose_last)
def _transpose(call: Call, x: Any) -> Any:
    """Moving the last axis to axis 1 costs nothing: the result is an image whose channels are the last axis."""
    if call.xp is jnp and x.ndim > 2 and call.get("perm") == [0, x.ndim - 1, *range(1, x.ndim - 1)]:
        call.last = True
        return x
    return call.xp.transpose(x, call.get("perm"))


@operator("Expand", static=(1,), in_numpy=True)
def _expand(call: Call, x: Any, shape: Any) -> Any:
    return call.xp.broadcast_to(x, call.sized(np.broadcast_shapes(x.shape, tuple(ints(shape)))))


@operator("Tile", static=(1,), in_numpy=True)
def _tile(call: Call, x: Any, repeats: Any) -> Any:
    call.sized([n * m for n, m in zip(x.shape, ints(repeats), strict=True)])
    return call.xp.tile(x, ints(repeats))


# ---------------------------------------------------------------------- joins and slices


@operator("Concat", layout="axes", in_numpy=True)
def _concat(call: Call, *arrays: Any) -> Any:
    """An array with a batch of 1 that the file fixes, such as a class token, is repeated for this call's batch."""
    axis = call.axis(call.get("axis"), arrays[0].ndim)
    if call.exported:
        most = [max(sizes) for sizes in zip(*(array.shape for array in arrays), strict=True)]
        arrays = tuple(
            jnp.broadcast_to(
                array, [n if i == axis else m for i, (n, m) in enumerate(zip(array.shape, most, strict=True))]
            )
            for array in arrays
        )
    kinds = {array.dtype for array in arrays}
    if len(kinds) > 1:
        raise call.refuse(f"arrays of several types, {', '.join(sorted(k.name for k in kinds))}", "Export it again")
    return call.xp.concatenate(arrays, axis)


@operator("Split", static=(1,), layout="axes", in_numpy=True)
def _split(call: Call, x: Any, sizes: Any = None) -> Any:
    axis = call.axis(call.get("axis", 0), x.ndim)
    given = call.get("split") if sizes is None else ints(sizes)
    if given is None:
        count = call.get("num_outputs", len(call.node.outputs))
        each = -(-x.shape[axis] // count)
        given = [each] * (count - 1) + [x.shape[axis] - each * (count - 1)]
    if sum(given) != x.shape[axis]:
        raise call.refuse(f"parts of {given} along an axis of {x.shape[axis]}", "The file is damaged: export it again")
    return tuple(call.xp.split(x, np.cumsum(given)[:-1].tolist(), axis))


@operator("Slice", static=(1, 2, 3, 4), layout="axes", in_numpy=True)
def _slice_(call: Call, x: Any, starts: Any = None, ends: Any = None, axes: Any = None, steps: Any = None) -> Any:
    starts, ends = (
        ints(call.get("starts") if starts is None else starts),
        ints(call.get("ends") if ends is None else ends),
    )
    axes = call.get("axes") if axes is None else ints(axes)
    steps = [1] * len(starts) if steps is None else ints(steps)
    where = [slice(None)] * x.ndim
    for axis, start, end, step in zip(range(len(starts)) if axes is None else axes, starts, ends, steps, strict=True):
        place = call.axis(axis, x.ndim)
        where[place] = whole_slice(start, end, step, x.shape[place])
    return x[tuple(where)]


def whole_slice(start: int, end: int, step: int, size: int) -> slice:
    """A slice of ONNX, whose bounds are clamped; a step below 0 may go past the first element."""
    least, most = (0, size) if step > 0 else (-1, size - 1)
    start, end = (min(max(n + size if n < 0 else n, least), most) for n in (start, end))
    return slice(start if start >= 0 else 0, end if end >= 0 else None, step) if start != -1 else slice(0, 0, step)


@operator("Pad", static=(1, 2, 3), layout="axes", in_numpy=True)
def _pad(call: Call, x: Any, pads: Any = None, value: Any = None, axes: Any = None) -> Any:
    """The two numbers of each axis; a number below 0 cuts."""
    given = ints((call.get("pads") or call.get("paddings")) if pads is None else pads)
    half = len(given) // 2
    chosen = range(x.ndim) if axes is None else [a % x.ndim for a in ints(axes)]
    pairs = dict(zip(chosen, zip(given[:half], given[half:], strict=True), strict=True))
    widths = call.per_axis([pairs.get(axis, (0, 0)) for axis in range(x.ndim)])
    mode = call.get("mode", "constant")
    if mode == "constant":
        filler = call.get("value", 0.0) if value is None or not np.size(value) else np.asarray(value).reshape(())
        return pad_with(call, x, widths, np.asarray(filler).astype(x.dtype))
    x = pad_with(call, x, [(min(a, 0), min(b, 0)) for a, b in widths], np.zeros((), x.dtype))
    return call.xp.pad(x, [(max(a, 0), max(b, 0)) for a, b in widths], mode=mode)


def pad_with(call: Call, x: Any, widths: Sequence[tuple[int, int]], value: Any) -> Any:
    """Pad with one number; widths below 0 cut."""
    if not any(a or b for a, b in widths):
        return x
    if call.xp is np:
        cut = x[tuple(slice(max(-a, 0), n - max(-b, 0)) for (a, b), n in zip(widths, x.shape, strict=True))]
        return np.pad(cut, [(max(a, 0), max(b, 0)) for a, b in widths], constant_values=value)
    return lax.pad(x, value, [(a, b, 0) for a, b in widths])


@operator("CenterCropPad", static=(1,), layout="axes", in_numpy=True)
def _center_crop_pad(call: Call, x: Any, sizes: Any) -> Any:
    axes = call.get("axes", list(range(x.ndim)))
    widths = [(0, 0)] * x.ndim
    for axis, new in zip(axes, ints(sizes), strict=True):
        place = call.axis(axis, x.ndim)
        missing = new - x.shape[place]
        before = missing // 2 if missing >= 0 else -(-missing // 2)
        widths[place] = (before, missing - before)
    return pad_with(call, x, widths, np.zeros((), x.dtype))


@operator("DepthToSpace", layout="last")
def _depth_to_space(call: Call, x: Any) -> Any:
    n, h, w, c = x.shape
    b = call.get("blocksize")
    if call.get("mode", "DCR") == "DCR":
        y = jnp.reshape(x, (n, h, w, b, b, c // b**2)).transpose(0, 1, 3, 2, 4, 5)
    else:
        y = jnp.reshape(x, (n, h, w, c // b**2, b, b)).transpose(0, 1, 4, 2, 5, 3)
    return jnp.reshape(y, (n, h * b, w * b, c // b**2))


@operator("SpaceToDepth", layout="last")
def _space_to_depth(call: Call, x: Any) -> Any:
    n, h, w, c = x.shape
    b = call.get("blocksize")
    y = jnp.reshape(x, (n, h // b, b, w // b, b, c))
    if call.get("mode", "DCR") == "DCR":
        return jnp.reshape(y.transpose(0, 1, 3, 2, 4, 5), (n, h // b, w // b, c * b**2))
    return jnp.reshape(y.transpose(0, 1, 3, 5, 2, 4), (n, h // b, w // b, c * b**2))


@operator("ReverseSequence", static=(1,), in_numpy=True)
def _reverse_sequence(call: Call, x: Any, lengths: Any) -> Any:
    batch, time = call.get("batch_axis", 1), call.get("time_axis", 0)
    steps = np.arange(x.shape[time])
    order = np.stack([np.where(steps < n, n - 1 - steps, steps) for n in ints(lengths)])
    index = np.expand_dims(order if batch < time else order.T, tuple(range(2, x.ndim)))
    return call.xp.take_along_axis(x, index.astype(np.int32), axis=time)


@operator("Trilu", static=(1,), in_numpy=True)
def _trilu(call: Call, x: Any, k: Any = None) -> Any:
    k = 0 if k is None else int(np.reshape(k, ()))
    kept = (np.triu if call.get("upper", 1) else np.tril)(np.ones(x.shape[-2:], bool), k)
    return call.xp.where(np.broadcast_to(kept, x.shape), x, call.xp.zeros_like(x))


# ---------------------------------------------------------------------- constants


@operator("Constant", in_numpy=True)
def _constant(call: Call) -> Any:
    value = call.get("value")
    if value is not None:
        return value
    for key, kind in (
        ("value_float", np.float32),
        ("value_floats", np.float32),
        ("value_int", np.int64),
        ("value_ints", np.int64),
    ):
        if call.get(key) is not None:
            return np.array(call.get(key), kind)
    raise call.refuse("a constant of strings or a sparse one", "Store it as a dense tensor of numbers")


@operator("ConstantOfShape", static=(0,), in_numpy=True)
def _constant_of_shape(call: Call, shape: Any) -> Any:
    value = call.get("value")
    value = np.zeros(1, np.float32) if value is None else value
    return np.full(call.sized(ints(shape)), value.reshape(()), value.dtype)


@operator("EyeLike", in_numpy=True)
def _eye_like(call: Call, x: Any) -> Any:
    from qjax.contrib.float_models.operators.elementwise import cast_to, type_of

    name = type_of(call, call.get("dtype")) if call.get("dtype") else x.dtype.name
    return cast_to(call, np.eye(x.shape[0], x.shape[1], call.get("k", 0)), name)


@operator("Range", static=(0, 1, 2), in_numpy=True)
def _range_(call: Call, start: Any, limit: Any, delta: Any) -> Any:
    start, limit, delta = (np.reshape(v, ()) for v in (start, limit, delta))
    count = max(math.ceil((float(limit) - float(start)) / float(delta)), 0)
    call.sized([count])
    return (start + np.arange(count).astype(start.dtype) * delta).astype(start.dtype)
