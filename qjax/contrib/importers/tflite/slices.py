"""SLICE and STRIDED_SLICE: boxes of codes or of known integers."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from qjax.contrib.importers.tflite.values import Codes, bad
from qjax.contrib.importers.tflite.walk import Walk, reads
from qjax.export.tflite_schema.model import Operator
from qjax.support.errors import Unsupported


@reads("SLICE")
def slice_(walk: Walk, operator: Operator) -> None:
    """A box of the codes."""
    x = walk.tensor_of(operator, 0)
    starts, sizes = ([int(n) for n in walk.numbers(operator, place).reshape(-1)] for place in (1, 2))
    if not len(starts) == len(sizes) == len(x.shape):
        raise bad(operator, f"a box of {sizes} at {starts} in {x.shape}")
    stated = walk.stated(operator, 0) or x.shape
    box: dict[int, tuple[int, int]] = {}
    for axis, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        whole = start == 0 and size in (-1, stated[axis])
        end = x.shape[axis] if whole or size == -1 else start + size
        if not 0 <= start <= end <= x.shape[axis]:
            raise bad(operator, f"a box of {sizes} at {starts} in {x.shape}")
        box[axis] = (start, end)
    walk.moved(operator, "slice", x, [b - a for a, b in box.values()], **box_attributes(x, box))


def box_attributes(x: Codes, box: dict[int, tuple[int, int]], strides: Sequence[int] | None = None) -> dict[str, Any]:
    """The attributes of a slice; an axis that is not in the box is complete."""
    ends = [box.get(axis, (0, size)) for axis, size in enumerate(x.shape)]
    return {
        "start": [start for start, _ in ends],
        "limit": [end for _, end in ends],
        "strides": list(strides or [1] * len(x.shape)),
    }


@reads("STRIDED_SLICE")
def strided_slice(walk: Walk, operator: Operator) -> None:
    """A slice like Python's, with masks for ends that are left out and for axes that are dropped."""
    if operator.options["ellipsis_mask"] or operator.options["new_axis_mask"]:
        raise Unsupported("it has an ellipsis or new axes", "State every axis")
    known = walk.numbers_of(operator, 0)
    shape = known.shape if known is not None else walk.tensor_of(operator, 0).shape
    vectors = [[int(n) for n in walk.numbers(operator, place).reshape(-1)] for place in (1, 2, 3)]
    if len({len(v) for v in vectors}) != 1 or len(vectors[0]) > len(shape) or 0 in vectors[2]:
        raise bad(operator, f"a slice of {vectors} in {shape}")
    stated = (walk.stated(operator, 0) if known is None else None) or shape
    ranges = [
        _range(operator, axis, size, stated[axis], [v[axis] if axis < len(v) else None for v in vectors])
        for axis, size in enumerate(shape)
    ]
    dropped = [a for a in range(len(vectors[0])) if operator.options["shrink_axis_mask"] >> a & 1]
    if any(len(ranges[axis]) != 1 for axis in dropped):
        raise bad(operator, f"an index out of {shape}")
    if known is not None:
        picked: np.ndarray = known
        for axis, found in enumerate(ranges):
            picked = picked.take(list(found), axis)
        walk.know(operator, picked.reshape([len(r) for a, r in enumerate(ranges) if a not in dropped]))
        return
    _sliced(walk, operator, walk.tensor_of(operator, 0), ranges, dropped)


def _range(operator: Operator, axis: int, size: int, stated: int, numbers: list[int | None]) -> range:
    """The selected indices of one axis."""
    begin, end, step = numbers
    dropped, open_begin, open_end = (
        operator.options[mask] >> axis & 1 for mask in ("shrink_axis_mask", "begin_mask", "end_mask")
    )
    offset = operator.options["offset"]
    if step is None or begin is None or end is None:
        return range(size)
    index = begin + size if begin < 0 else begin
    if open_begin:
        # also if the axis is dropped, unlike in TensorFlow
        index = 0 if step > 0 else size - 1
    if dropped:
        return range(index, index + 1) if 0 <= index < size else range(0)
    if offset:
        end += min(max(index, 0), size)
    if begin == 0 and end == stated and step == 1:
        # The slice selects the whole batch that the file states.
        return range(size)
    first = None if open_begin else begin
    last = None if open_end else end
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
    # If an axis is selected to its end, set the limit to its size, so that it can depend on the batch.
    box = {a: (s, x.shape[a] if e > s and x.shape[a] - e < strides[a] else e) for a, (s, e) in box.items()}
    shape = [len(r) for r in ordered]
    rest = [n for axis, n in enumerate(shape) if axis not in dropped]
    steps: list[tuple[str, list[int], dict[str, Any]]] = []
    if backwards:
        steps.append(("reverse", list(x.shape), {"axes": backwards}))
    if shape != list(x.shape) or not (steps or dropped):
        steps.append(("slice", shape, box_attributes(x, box, strides)))
    if dropped:
        steps.append(("reshape", rest, {"shape": rest}))
    for op, size, attributes in steps[:-1]:
        moved = walk.between(f"{name}/{op}", size, x)
        walk.node(op, [x], moved.name, attributes)
        x = moved
    op, size, attributes = steps[-1]
    walk.moved(operator, op, x, size, **attributes)
