"""Resize to the nearest element, DepthToSpace and SpaceToDepth, as moves of codes on the axes of an image."""

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qjax.contrib.importers.onnx.model import OnnxNode
from qjax.contrib.importers.onnx.moves import first, known_ints, moved
from qjax.contrib.importers.onnx.selections import picked
from qjax.contrib.importers.onnx.values import Known, Value
from qjax.contrib.importers.onnx.walk import Walk, handles
from qjax.export.read_errors import ReadError
from qjax.support.errors import Unsupported

Inputs = list[Value | None]

_MOST_PLACES = 2**16


def _steps(walk: Walk, node: OnnxNode, x: Value, steps: list[tuple[str, dict[str, Any], list[int]]]) -> Value:
    """Apply moves one after the other; the last one has the node's name."""
    for index, (op, attributes, shape) in enumerate(steps):
        own = node.outputs[0] if index == len(steps) - 1 else walk.draft.fresh(f"{node.outputs[0]}/{op}{index}")
        x = moved(walk, dataclasses.replace(node, outputs=(own,)), x, op, attributes, shape)
    return x


def _shuffled(walk: Walk, node: OnnxNode, x: Value, split: list[int], order: list[int], after: list[int]) -> Value:
    turned = [split[axis] for axis in order]
    return _steps(
        walk, node, x,
        [
            ("reshape", {"shape": split}, split),
            ("transpose", {"permutation": order}, turned),
            ("reshape", {"shape": after}, after),
        ],
    )  # fmt: skip


@handles("DepthToSpace", "SpaceToDepth")
def _depth(walk: Walk, node: OnnxNode, inputs: Inputs) -> list[Value]:
    x, block = first(node, inputs), node.get("blocksize", 0)
    shape = walk.shape(x)
    mode = node.get("mode", "DCR", str)
    if len(shape) != 4 or block < 1 or mode not in ("DCR", "CRD"):
        raise ReadError(f"{node.title}: expected four axes and a blocksize.")
    n, c, h, w = shape
    if node.op == "SpaceToDepth":
        if h % block or w % block:
            raise ReadError(f"{node.title}: {list(shape)} has no blocks of {block}.")
        split, order = [n, c, h // block, block, w // block, block], [0, 3, 5, 1, 2, 4]
        return [_shuffled(walk, node, x, split, order, [n, c * block * block, h // block, w // block])]
    if c % (block * block):
        raise ReadError(f"{node.title}: {c} channels have no blocks of {block}.")
    few = c // (block * block)
    split = [n, block, block, few, h, w] if mode == "DCR" else [n, few, block, block, h, w]
    order = [0, 3, 4, 1, 5, 2] if mode == "DCR" else [0, 1, 4, 2, 5, 3]
    return [_shuffled(walk, node, x, split, order, [n, few, h * block, w * block])]


@handles("Resize", "Upsample")
def _resize(walk: Walk, node: OnnxNode, inputs: Inputs) -> list[Value]:
    x = first(node, inputs)
    shape = walk.shape(x)
    if node.get("mode", "nearest", str) != "nearest":
        raise Unsupported("interpolates in floats; only the nearest element is read")
    axes = node.ints("axes") or list(range(len(shape)))
    scales, sizes = _read_sizes(node, inputs, shape, axes)
    for axis in range(len(shape)):
        if sizes[axis] == shape[axis] and scales[axis] == 1:
            continue
        places = _nearest(node, shape[axis], sizes[axis], scales[axis])
        name = walk.draft.fresh(f"{node.outputs[0]}/axis{axis}")
        x = _repeated(walk, dataclasses.replace(node, outputs=(name,)), x, axis, places)
    return [x]


def _read_sizes(
    node: OnnxNode, inputs: Inputs, shape: tuple[int, ...], axes: list[int]
) -> tuple[list[np.float32], list[int]]:
    """For each axis the scale and the size of the result."""
    if node.get("keep_aspect_ratio_policy", "stretch", str) != "stretch":
        raise Unsupported("chooses sizes by the aspect ratio")
    scales, sizes = [np.float32(1)] * len(shape), list(shape)
    wanted = known_ints(node, inputs, 3) if len(inputs) > 3 else None
    # Upsample and the first version of Resize have no input for the region of interest.
    place = 1 if node.op == "Upsample" or len(inputs) == 2 else 2
    given = inputs[place] if len(inputs) > place else None
    if wanted is None and not isinstance(given, Known):
        raise Unsupported("its scales or sizes are not constant")
    numbers = wanted if wanted is not None else [float(f) for f in given.value.reshape(-1)]  # pyright: ignore[reportOptionalMemberAccess,reportAttributeAccessIssue,reportUnknownVariableType,reportUnknownArgumentType,reportUnknownMemberType]
    if len(numbers) != len(axes) or any(not -len(shape) <= axis < len(shape) for axis in axes):
        raise ReadError(f"{node.title}: expected one scale or size per axis.")
    for axis, number in zip(axes, numbers, strict=True):
        if not 0 < number < 2**31:
            raise ReadError(f"{node.title}: expected scales and sizes greater than 0, got {number}.")
        if wanted is not None:
            sizes[axis] = int(number)
            scales[axis] = np.float32(number) / np.float32(shape[axis])
        else:
            scales[axis] = np.float32(number)
            sizes[axis] = int(np.float32(shape[axis]) * np.float32(number))
    if max(sizes, default=0) > _MOST_PLACES:
        raise Unsupported(f"resizes to {sizes}; at most {_MOST_PLACES} places along an axis are read")
    return scales, sizes


def _nearest(node: OnnxNode, before: int, after: int, scale: np.float32) -> NDArray[np.int64]:
    """For each element of the result, the element of the input, with each step in float32 as in ONNX Runtime."""
    kind = node.get("coordinate_transformation_mode", "half_pixel", str)
    if node.op == "Upsample":
        kind = "asymmetric"
    how = node.get("nearest_mode", "round_prefer_floor", str)
    if node.op == "Upsample":
        how = "floor"
    x, half = np.arange(after).astype(np.float32), np.float32(0.5)
    with np.errstate(divide="ignore", invalid="ignore"):
        if kind == "asymmetric":
            place = x / scale
        elif kind == "half_pixel" or (kind == "pytorch_half_pixel" and after > 1):
            place = (x + half) / scale - half
        elif kind == "pytorch_half_pixel":
            place = x * np.float32(0)
        elif kind == "align_corners":
            place = x * np.float32(before - 1) / np.float32(after - 1) if after > 1 else x * np.float32(0)
        else:
            raise Unsupported(f"has coordinates of mode {kind!r}")
    if how == "floor":
        found = np.floor(place)
    elif how == "ceil":
        found = np.ceil(place)
    elif how == "round_prefer_floor":
        found = np.ceil(place - half)
    elif how == "round_prefer_ceil":
        found = np.floor(place + half)
    else:
        raise ReadError(f"{node.title}: unknown nearest_mode {how!r}.")
    return np.clip(found.astype(np.int64), 0, before - 1)


def _repeated(walk: Walk, node: OnnxNode, x: Value, axis: int, places: NDArray[np.int64]) -> Value:
    """Repeat every element several times if that is what the indices mean; otherwise select elements."""
    shape = list(walk.shape(x))
    times = places.size // max(shape[axis], 1)
    if times < 1 or not np.array_equal(places, np.repeat(np.arange(shape[axis]), times)):
        return picked(walk, node, walk.real(x), axis, Known(places))
    apart = [*shape[: axis + 1], 1, *shape[axis + 1 :]]
    spread = [*shape[: axis + 1], times, *shape[axis + 1 :]]
    after = [n * times if a == axis else n for a, n in enumerate(shape)]
    dimensions = list(range(len(spread)))
    return _steps(
        walk, node, x,
        [
            ("reshape", {"shape": apart}, apart),
            ("broadcast", {"shape": spread, "dimensions": dimensions}, spread),
            ("reshape", {"shape": after}, after),
        ],
    )  # fmt: skip
