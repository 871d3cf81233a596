"""Operators that move or select codes, and whole numbers that are known at reading (shapes made of shapes)."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qjax.export.read.tflite.flatbuffer import damaged
from qjax.export.read.tflite.model import Operator
from qjax.export.read.tflite.walk import (
    NUMBERS,
    Codes,
    Unsupported,
    Walk,
    axes_of,
    axis_of,
    reads,
    volume,
)

_CONSTANT = "Give it as a constant when you make the file"


def _bad(operator: Operator, what: str) -> Exception:
    return damaged(f"operator {operator.index} ({operator.name}): {what}")


# ---------------------------------------------------------------------------- shapes


@reads("RESHAPE")
def reshape(walk: Walk, operator: Operator) -> None:
    """The shape is an operand, or stands in the options."""
    if walk.numbers_of(operator, 0) is not None:
        _number_reshape(walk, operator)
        return
    x = walk.codes_of(operator, 0)
    asked: Sequence[int] | None = operator.options["shape"]
    fixed = True
    if walk.has(operator, 1):
        tensor = walk.operand(operator, 1)
        fixed = tensor.span is not None
        asked = [int(n) for n in walk.numbers(operator, 1).reshape(-1)]
    if asked is None:
        raise _bad(operator, "no shape")
    shape = _resolved(walk, operator, x, asked, fixed)
    walk.moved(operator, "reshape", x, shape, shape=shape)


def _resolved(walk: Walk, operator: Operator, x: Codes, asked: Sequence[int], fixed: bool) -> list[int]:
    """The shape without -1. fixed: it is the same for every batch, and states that of the file."""
    shape = list(asked)
    stated = walk.stated(operator, 0)
    if fixed and stated is not None and x.shape != stated and shape and shape[0] != -1:
        # examples stay apart only where the batch is the first axis on both sides
        if not stated or (x.shape[0], *x.shape[1:]) != (stated[0] * walk.scale, *stated[1:]):
            raise Unsupported("its shape is that of one batch", "Use -1 for the size of the batch")
        shape[0] *= walk.scale
    if shape.count(-1) > 1 or any(n < -1 for n in shape):
        raise _bad(operator, f"a shape of {list(asked)}")
    if -1 in shape:
        rest = math.prod(n for n in shape if n != -1)
        if not rest or volume(x.shape) % rest:
            raise _bad(operator, f"codes of shape {x.shape} as {list(asked)}")
        shape[shape.index(-1)] = volume(x.shape) // rest
    if volume(shape) != volume(x.shape):
        raise _bad(operator, f"codes of shape {x.shape} as {list(asked)}")
    return shape


@reads("SQUEEZE")
def squeeze(walk: Walk, operator: Operator) -> None:
    """Axes of size 1 are dropped."""
    known = walk.numbers_of(operator, 0)
    shape = known.shape if known is not None else walk.codes_of(operator, 0).shape
    listed = operator.options["axes"] or []
    axes = axes_of(np.asarray(listed), len(shape), operator) if listed else []
    if not listed:
        axes = [axis for axis, size in enumerate(walk.stated(operator, 0) or shape) if size == 1]
    if any(shape[axis] != 1 for axis in axes):
        raise _bad(operator, f"axes {axes} of {shape}")
    _as_shape(walk, operator, [size for axis, size in enumerate(shape) if axis not in axes])


@reads("EXPAND_DIMS")
def expand_dims(walk: Walk, operator: Operator) -> None:
    """An axis of size 1 is added."""
    known = walk.numbers_of(operator, 0)
    shape = known.shape if known is not None else walk.codes_of(operator, 0).shape
    number = walk.numbers(operator, 1)
    if number.size != 1:
        raise _bad(operator, "it needs one axis")
    axis = axis_of(int(number.reshape(())), len(shape) + 1, operator)
    _as_shape(walk, operator, [*shape[:axis], 1, *shape[axis:]])


def _as_shape(walk: Walk, operator: Operator, shape: list[int]) -> None:
    known = walk.numbers_of(operator, 0)
    if known is not None:
        walk.know(operator, known.reshape(shape))
        return
    walk.moved(operator, "reshape", walk.codes_of(operator, 0), shape, shape=shape)


@reads("TRANSPOSE")
def transpose(walk: Walk, operator: Operator) -> None:
    """The axes in another order."""
    x = walk.codes_of(operator, 0)
    numbers = walk.numbers(operator, 1).reshape(-1)
    order = [axis_of(int(n), len(x.shape), operator) for n in numbers]
    if sorted(order) != list(range(len(x.shape))):
        raise _bad(operator, f"an order of {order} for {len(x.shape)} axes")
    walk.moved(operator, "transpose", x, [x.shape[axis] for axis in order], permutation=order)


@reads("BROADCAST_TO")
def broadcast(walk: Walk, operator: Operator) -> None:
    """Axes of size 1 repeat."""
    x = walk.codes_of(operator, 0)
    shape = [int(n) for n in walk.numbers(operator, 1).reshape(-1)]
    first = len(shape) - len(x.shape)
    stated = walk.stated(operator, 0)
    if not first and stated and x.shape[0] != stated[0] and shape[0] == stated[0]:
        # the batch of the file
        shape[0] = x.shape[0]
    if (
        first < 0
        or any(n not in (1, size) for n, size in zip(x.shape, shape[first:], strict=True))
        or min(shape, default=1) < 0
    ):
        raise _bad(operator, f"codes of shape {x.shape} as {shape}")
    walk.bounded(operator, shape)
    walk.moved(operator, "broadcast", x, shape, shape=shape, dimensions=list(range(first, len(shape))))


# ---------------------------------------------------------------------------- parts and neighbours


@reads("CONCATENATION")
def concatenation(walk: Walk, operator: Operator) -> None:
    """Codes side by side."""
    if operator.inputs and all(walk.numbers_of(operator, i) is not None for i in range(len(operator.inputs))):
        parts = [np.atleast_1d(walk.numbers(operator, i)) for i in range(len(operator.inputs))]
        if any(part.ndim != 1 for part in parts):
            raise Unsupported("it joins tables of whole numbers", NUMBERS)
        walk.know(operator, np.concatenate(parts))
        return
    if operator.options["activation"]:
        raise Unsupported("an activation", "Its kernels have none for codes")
    _joined(walk, operator, [walk.codes_of(operator, i) for i in range(len(operator.inputs))], operator.options["axis"])


def _joined(walk: Walk, operator: Operator, parts: list[Codes], number: int) -> None:
    if not parts:
        raise _bad(operator, "no inputs")
    shape = list(parts[0].shape)
    axis = axis_of(number, len(shape), operator)
    for part in parts:
        if [*part.shape[:axis], *part.shape[axis + 1 :]] != [*shape[:axis], *shape[axis + 1 :]]:
            raise _bad(operator, f"codes of shape {parts[0].shape} and {part.shape}")
    shape[axis] = sum(part.shape[axis] for part in parts)
    name, grid = walk.result(operator, shape)
    for part in parts:
        walk.same_grid(operator, part, grid)
    walk.node("concatenate", parts, name, {"axis": axis})


@reads("PACK")
def pack(walk: Walk, operator: Operator) -> None:
    """Tensors along a new axis."""
    count = len(operator.inputs)
    if count != operator.options["count"] or not count:
        raise _bad(operator, f"{operator.options['count']} values stated, {count} given")
    numbers = [walk.numbers_of(operator, i) for i in range(count)]
    if all(n is not None and n.size == 1 for n in numbers):
        walk.know(operator, np.concatenate([np.reshape(n, (1,)) for n in numbers if n is not None]))
        return
    parts = [walk.codes_of(operator, i) for i in range(count)]
    axis = axis_of(operator.options["axis"], len(parts[0].shape) + 1, operator)
    name = walk.name_of(operator)
    wide = [walk.between(f"{name}/part", (*p.shape[:axis], 1, *p.shape[axis:]), p) for p in parts]
    for part, with_axis in zip(parts, wide, strict=True):
        walk.node("reshape", [part], with_axis.name, {"shape": list(with_axis.shape)})
    _joined(walk, operator, wide, axis)


@reads("UNPACK")
def unpack(walk: Walk, operator: Operator) -> None:
    """Every index of an axis as a tensor without it."""
    x = walk.codes_of(operator, 0)
    axis = axis_of(operator.options["axis"], len(x.shape), operator)
    if not len(operator.outputs) == operator.options["count"] == x.shape[axis]:
        raise _bad(operator, f"{len(operator.outputs)} outputs for {x.shape[axis]} indices")
    rest = [size for a, size in enumerate(x.shape) if a != axis]
    for index in range(x.shape[axis]):
        name, grid = walk.result(operator, rest, index)
        walk.same_grid(operator, x, grid)
        part = walk.between(f"{name}/part", [1 if a == axis else n for a, n in enumerate(x.shape)], x)
        walk.node("slice", [x], part.name, _slice(x, {axis: (index, index + 1)}))
        walk.node("reshape", [part], name, {"shape": rest})


@reads("SPLIT", "SPLIT_V")
def split(walk: Walk, operator: Operator) -> None:
    """Parts of an axis, equal or of stated sizes."""
    first = operator.name == "SPLIT"
    x = walk.codes_of(operator, 1 if first else 0)
    number = walk.numbers(operator, 0 if first else 2)
    if number.size != 1 or len(operator.outputs) != operator.options["parts"] or not operator.outputs:
        raise _bad(operator, f"{operator.options['parts']} parts stated, {len(operator.outputs)} outputs")
    axis, parts = axis_of(int(number.reshape(())), len(x.shape), operator), len(operator.outputs)
    if first:
        if x.shape[axis] % parts:
            raise _bad(operator, f"{parts} parts of {x.shape[axis]}")
        sizes = [x.shape[axis] // parts] * parts
    else:
        sizes = [int(n) for n in walk.numbers(operator, 1).reshape(-1)]
        if sizes.count(-1) == 1:
            sizes[sizes.index(-1)] = x.shape[axis] - sum(sizes) - 1
        if len(sizes) != parts or sum(sizes) != x.shape[axis] or min(sizes) < 0:
            raise _bad(operator, f"parts of {sizes} of {x.shape[axis]}")
    for index, size in enumerate(sizes):
        name, grid = walk.result(operator, [size if a == axis else n for a, n in enumerate(x.shape)], index)
        walk.same_grid(operator, x, grid)
        extra = {"index": index} if parts > 1 else {}
        walk.node("split", [x], name, {"sizes": sizes, "axis": axis, **extra})


@reads("SLICE")
def slice_(walk: Walk, operator: Operator) -> None:
    """A box out of the codes."""
    x = walk.codes_of(operator, 0)
    starts, sizes = ([int(n) for n in walk.numbers(operator, place).reshape(-1)] for place in (1, 2))
    if not len(starts) == len(sizes) == len(x.shape):
        raise _bad(operator, f"a box of {sizes} at {starts} in {x.shape}")
    stated = walk.stated(operator, 0) or x.shape
    box: dict[int, tuple[int, int]] = {}
    for axis, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        whole = start == 0 and size in (-1, stated[axis])
        end = x.shape[axis] if whole or size == -1 else start + size
        if not 0 <= start <= end <= x.shape[axis]:
            raise _bad(operator, f"a box of {sizes} at {starts} in {x.shape}")
        box[axis] = (start, end)
    walk.moved(operator, "slice", x, [b - a for a, b in box.values()], **_slice(x, box))


def _slice(x: Codes, box: dict[int, tuple[int, int]], strides: Sequence[int] | None = None) -> dict[str, Any]:
    ends = [box.get(axis, (0, size)) for axis, size in enumerate(x.shape)]
    return {
        "start": [start for start, _ in ends],
        "limit": [end for _, end in ends],
        "strides": list(strides or [1] * len(x.shape)),
    }


@reads("STRIDED_SLICE")
def strided_slice(walk: Walk, operator: Operator) -> None:
    """A slice as Python's, with masks for ends that are left out and for axes that are dropped."""
    if operator.options["ellipsis_mask"] or operator.options["new_axis_mask"]:
        raise Unsupported("it has an ellipsis or new axes", "State every axis")
    known = walk.numbers_of(operator, 0)
    shape = known.shape if known is not None else walk.codes_of(operator, 0).shape
    vectors = [[int(n) for n in walk.numbers(operator, place).reshape(-1)] for place in (1, 2, 3)]
    if len({len(v) for v in vectors}) != 1 or len(vectors[0]) > len(shape) or 0 in vectors[2]:
        raise _bad(operator, f"a slice of {vectors} in {shape}")
    stated = (walk.stated(operator, 0) if known is None else None) or shape
    ranges = [
        _range(operator, axis, size, stated[axis], [v[axis] if axis < len(v) else None for v in vectors])
        for axis, size in enumerate(shape)
    ]
    dropped = [a for a in range(len(vectors[0])) if operator.options["shrink_axis_mask"] >> a & 1]
    if any(len(ranges[axis]) != 1 for axis in dropped):
        raise _bad(operator, f"an index out of {shape}")
    if known is not None:
        picked: NDArray[Any] = known
        for axis, found in enumerate(ranges):
            picked = picked.take(list(found), axis)
        walk.know(operator, picked.reshape([len(r) for a, r in enumerate(ranges) if a not in dropped]))
        return
    _sliced(walk, operator, walk.codes_of(operator, 0), ranges, dropped)


def _range(operator: Operator, axis: int, size: int, stated: int, numbers: list[int | None]) -> range:
    """The indices of one axis that are taken."""
    begin, end, step = numbers
    options = operator.options
    if step is None or begin is None or end is None:
        return range(size)
    if options["shrink_axis_mask"] >> axis & 1:
        index = begin + size if begin < 0 else begin
        return range(index, index + 1) if 0 <= index < size else range(0)
    if options["offset"]:
        end = begin + end
    if begin == 0 and end == stated and step == 1:
        # all of the batch that the file states
        return range(size)
    first = None if options["begin_mask"] >> axis & 1 else begin
    last = None if options["end_mask"] >> axis & 1 else end
    return range(size)[first:last:step]


def _sliced(walk: Walk, operator: Operator, x: Codes, ranges: list[range], dropped: list[int]) -> None:
    name = walk.name_of(operator)
    backwards = [axis for axis, found in enumerate(ranges) if found.step < 0 and len(found) > 1]
    ordered: list[range] = []
    for axis, found in enumerate(ranges):
        if axis in backwards:
            last = x.shape[axis] - 1
            found = range(last - found[0], last - found[-1] + 1, -found.step)
        ordered.append(found)
    box = {axis: (r[0], r[-1] + 1) if len(r) else (0, 0) for axis, r in enumerate(ordered)}
    strides = [r.step if len(r) > 1 else 1 for r in ordered]
    # an axis that is taken to its end says so, whatever its size
    box = {a: (s, x.shape[a] if e > s and x.shape[a] - e < strides[a] else e) for a, (s, e) in box.items()}
    shape = [len(r) for r in ordered]
    rest = [n for axis, n in enumerate(shape) if axis not in dropped]
    steps: list[tuple[str, list[int], dict[str, Any]]] = []
    if backwards:
        steps.append(("reverse", list(x.shape), {"axes": backwards}))
    if shape != list(x.shape) or not (steps or dropped):
        steps.append(("slice", shape, _slice(x, box, strides)))
    if dropped:
        steps.append(("reshape", rest, {"shape": rest}))
    for op, size, attributes in steps[:-1]:
        moved = walk.between(f"{name}/{op}", size, x)
        walk.node(op, [x], moved.name, attributes)
        x = moved
    op, size, attributes = steps[-1]
    walk.moved(operator, op, x, size, **attributes)


@reads("REVERSE_V2")
def reverse(walk: Walk, operator: Operator) -> None:
    """Axes backwards."""
    x = walk.codes_of(operator, 0)
    axes = axes_of(walk.numbers(operator, 1), len(x.shape), operator)
    walk.moved(operator, "reverse", x, x.shape, axes=axes)


# ---------------------------------------------------------------------------- maxima, padding, rows of a table


@reads("REDUCE_MAX", "REDUCE_MIN")
def extreme(walk: Walk, operator: Operator) -> None:
    """The greatest or the least code along axes."""
    op = "max" if operator.name == "REDUCE_MAX" else "min"
    x = walk.codes_of(operator, 0)
    axes = axes_of(walk.numbers(operator, 1), len(x.shape), operator)
    if not all(x.shape[axis] for axis in axes):
        raise Unsupported("an extreme of nothing", "Take it over axes with elements")
    rest = [size for axis, size in enumerate(x.shape) if axis not in axes]
    if not operator.options["keep_dims"]:
        walk.moved(operator, op, x, rest, axes=axes)
        return
    flat = walk.between(f"{walk.name_of(operator)}/flat", rest, x)
    walk.node(op, [x], flat.name, {"axes": axes})
    shape = [1 if axis in axes else size for axis, size in enumerate(x.shape)]
    walk.moved(operator, "reshape", flat, shape, shape=shape)


@reads("PAD", "PADV2")
def pad(walk: Walk, operator: Operator) -> None:
    """Codes around the codes."""
    x = walk.codes_of(operator, 0)
    pairs = walk.numbers(operator, 1)
    if pairs.shape != (len(x.shape), 2) or (pairs < 0).any():
        raise _bad(operator, f"a padding of shape {pairs.shape} around {x.shape}")
    padding = [[int(low), int(high), 0] for low, high in pairs]
    lowest, code = False, None
    if walk.has(operator, 2):
        value = walk.codes_of(operator, 2)
        walk.same_grid(operator, value, x.quantization)
        held = walk.tensors[value.name].value
        code = None if held is None or np.size(held) != 1 else int(np.asarray(held).reshape(()))
        lowest = code == x.quantization.qmin
        if code is None:
            raise Unsupported("it pads with codes that are computed", "Give one constant")
        lowest = lowest and code != x.zero_point
    shape = [low + size + high for size, (low, high, _) in zip(x.shape, padding, strict=True)]
    walk.bounded(operator, shape)
    if code is not None and code != x.zero_point and not lowest:
        name, grid = walk.result(operator, shape)
        walk.same_grid(operator, x, grid)
        value = walk.constant(f"{name}/value", np.asarray(code, np.int32))
        walk.node("pad_value", [x], name, {"padding": padding}, {"value": value})
        return
    walk.moved(operator, "pad", x, shape, padding=padding, lowest=lowest)


@reads("GATHER", "EMBEDDING_LOOKUP")
def rows(walk: Walk, operator: Operator) -> None:
    """Rows of a constant table, by indices that flow."""
    table, indices = (0, 1) if operator.name == "GATHER" else (1, 0)
    if operator.name == "GATHER" and operator.options["batch_dims"]:
        raise Unsupported("it gathers rows of its own for every example", "Gather along one axis for all of them")
    if operator.name == "GATHER" and walk.numbers_of(operator, 0) is not None:
        raise Unsupported("it gathers whole numbers", NUMBERS)
    held, index = walk.operand(operator, table), walk.operand(operator, indices)
    if held.span is None or index.index not in walk.codes or (operator.name == "GATHER" and operator.options["axis"]):
        _taken(walk, operator, table, indices)
        return
    x = walk.codes[index.index]
    if x.grid is not None or not held.shape or not held.size:
        raise _bad(operator, f"indices of {x.dtype} in a table of {held.shape}")
    grid = walk.grid(held)
    name, own = walk.result(operator, (*x.shape, *held.shape[1:]))
    walk.same_grid(operator, Codes(held.name, held.shape, held.dtype, grid), own)
    walk.node("embed", [x], name, {}, {"kernel": walk.held(operator, table, walk.array(held), grid)})


def _taken(walk: Walk, operator: Operator, table: int, indices: int) -> None:
    """Slices of a tensor that flows, or along another axis."""
    x, index = walk.flowing(operator, table), walk.operand(operator, indices)
    axis = axis_of(operator.options["axis"] if operator.name == "GATHER" else 0, len(x.shape), operator)
    count = x.shape[axis]
    if index.index in walk.codes:
        chosen = walk.flowing(operator, indices)
        if chosen.grid is not None or chosen.dtype != "int32" or not count:
            raise _bad(operator, f"indices of {chosen.dtype} in {x.shape}")
    else:
        known = walk.numbers(operator, indices)
        if ((known < 0) | (known >= count)).any():
            raise _bad(operator, f"indices out of an axis of {count}")
        name = walk.constant(f"{walk.name_of(operator)}/rows", known.astype(np.int32))
        chosen = Codes(name, known.shape, "int32", None)
    wide = (*chosen.shape, 1)
    name = f"{walk.name_of(operator)}/indices"
    value = walk.tensors[chosen.name].value
    if value is None:
        chosen = walk.reshaped(chosen, wide, name)
    else:
        chosen = Codes(walk.constant(name, np.asarray(value).reshape(wide)), wide, "int32", None)
    shape = [*x.shape[:axis], *wide[:-1], *x.shape[axis + 1 :]]
    walk.bounded(operator, shape)
    attributes = {"axis": axis, "places": list(range(axis, axis + len(wide) - 1))}
    if x.grid is None:
        output = walk.integers(operator, shape, x.dtype)
    else:
        output, grid = walk.result(operator, shape)
        walk.same_grid(operator, x, grid)
    walk.node("take", [x, chosen], output, attributes)


# ---------------------------------------------------------------------------- whole numbers


@reads("SHAPE")
def shape_of(walk: Walk, operator: Operator) -> None:
    """The shape of a tensor of codes, a known vector."""
    walk.know(operator, np.asarray(walk.codes_of(operator, 0).shape))


def _number_reshape(walk: Walk, operator: Operator) -> None:
    known = walk.numbers(operator, 0)
    asked = walk.numbers(operator, 1).reshape(-1) if walk.has(operator, 1) else operator.options["shape"]
    shape = [int(n) for n in (asked if asked is not None else [])]
    if shape.count(-1) > 1 or min(shape, default=0) < -1 or (-1 not in shape and math.prod(shape) != known.size):
        raise _bad(operator, f"{known.size} numbers as {shape}")
    rest = math.prod(n for n in shape if n != -1)
    if -1 in shape and (not rest or known.size % rest):
        raise _bad(operator, f"{known.size} numbers as {shape}")
    walk.know(operator, known.reshape(shape))
