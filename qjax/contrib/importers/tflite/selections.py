"""Comparisons, masks, choices, indices of extremes, and operators that repeat or reverse codes."""

from collections.abc import Mapping, Sequence

import numpy as np

from qjax.contrib.importers.tflite.values import Codes, axis_of, bad
from qjax.contrib.importers.tflite.walk import Walk, reads
from qjax.export.tflite_schema.model import Operator
from qjax.numerics.fixed_point import (
    quantize_multiplier,
    rounding_divide_by_power_of_two,
    saturating_rounding_doubling_high_mul,
)
from qjax.support.errors import Unsupported

_COMPARISONS = {
    "GREATER": "gt",
    "GREATER_EQUAL": "ge",
    "LESS": "lt",
    "LESS_EQUAL": "le",
    "EQUAL": "eq",
    "NOT_EQUAL": "ne",
}
_LOGIC = {"LOGICAL_AND": "and", "LOGICAL_OR": "or", "LOGICAL_NOT": "not"}


def _shape(operator: Operator, *operands: Codes) -> tuple[int, ...]:
    try:
        return np.broadcast_shapes(*(x.shape for x in operands))
    except ValueError:
        raise bad(operator, f"shapes {', '.join(str(x.shape) for x in operands)}") from None


@reads(*_COMPARISONS)
def compare(walk: Walk, operator: Operator) -> None:
    """Codes on one grid, or integers; the kernels of codes requantize both sides first."""
    x, y = (walk.flowing(operator, place) for place in (0, 1))
    if x.dtype != y.dtype:
        raise Unsupported(f"it compares {x.dtype} with {y.dtype}", "Give both sides the same type")
    if x.grid is not None or y.grid is not None:
        a, b = x.quantization, y.quantization
        same = a.scale == b.scale and a.zero_point == b.zero_point
        if not same or not _keeps_apart(x.dtype, float(a.scale), int(a.zero_point)):
            raise Unsupported(
                "its kernel requantizes both sides to a grid on which different codes become equal",
                "Give both sides one quantizer, with a scale above 1/128 and below 1",
            )
    name = walk.integers(operator, _shape(operator, x, y), "bool")
    walk.node("compare", [x, y], name, {"function": _COMPARISONS[operator.name]})


def _keeps_apart(dtype: str, scale: float, zero_point: int) -> bool:
    """Whether the kernel's numbers, (q - z) 2^8 s in 32-bit fixed point, differ whenever the codes do."""
    if dtype == "int16" or not scale < 1:
        return False
    info = np.iinfo(dtype)
    steps = (np.arange(info.min, info.max + 1, dtype=np.int32) - np.int32(zero_point)) << np.int32(8)
    multiplier, shift = quantize_multiplier(np.float32(scale))
    high = saturating_rounding_doubling_high_mul(steps, np.asarray(multiplier))
    numbers = np.asarray(rounding_divide_by_power_of_two(high, -np.asarray(shift)))
    return bool((np.diff(numbers) > 0).all())


@reads(*_LOGIC)
def logic(walk: Walk, operator: Operator) -> None:
    """Booleans."""
    operands = [walk.flowing(operator, place) for place in range(1 if operator.name == "LOGICAL_NOT" else 2)]
    if any(x.dtype != "bool" for x in operands):
        raise bad(operator, "operands that are no booleans")
    name = walk.integers(operator, _shape(operator, *operands), "bool")
    walk.node("logic", operands, name, {"function": _LOGIC[operator.name]})


@reads("SELECT", "SELECT_V2")
def select(walk: Walk, operator: Operator) -> None:
    """One tensor where the mask is true, else the other."""
    mask, on, off = (walk.flowing(operator, place) for place in range(3))
    if mask.dtype != "bool" or on.dtype != off.dtype:
        raise bad(operator, f"a choice of {on.dtype} and {off.dtype} by {mask.dtype}")
    if operator.name == "SELECT" and not mask.shape == on.shape == off.shape:
        raise Unsupported("sides of different shapes", "Use SELECT_V2")
    shape = _shape(operator, mask, on, off)
    if on.grid is None:
        name = walk.integers(operator, shape, on.dtype)
    else:
        name, grid = walk.result(operator, shape)
        for x in (on, off):
            walk.same_grid(operator, x, grid)
    walk.node("select", [mask, off, on], name)


@reads("ARG_MAX", "ARG_MIN", ignores=("type",))
def argument(walk: Walk, operator: Operator) -> None:
    """The first index of the greatest or lowest code, int32."""
    x = walk.codes_of(operator, 0)
    axis = _axis(walk, operator, 1, len(x.shape))
    assert x.quantization
    if not x.shape[axis]:
        raise bad(operator, "nothing to compare")
    rest = [size for a, size in enumerate(x.shape) if a != axis]
    name = walk.integers(operator, rest, "int32", reach=(0, x.shape[axis] - 1))
    function = "argmax" if operator.name == "ARG_MAX" else "argmin"
    walk.node("argument", [x], name, {"function": function, "axis": axis})


def _axis(walk: Walk, operator: Operator, place: int, rank: int) -> int:
    number = walk.numbers(operator, place)
    if number.size != 1:
        raise bad(operator, "it needs one axis")
    return axis_of(int(number.reshape(())), rank, operator)


@reads("TOPK_V2")
def top_k(walk: Walk, operator: Operator) -> None:
    """The greatest codes of the last axis in order, and their indices."""
    x, number = walk.codes_of(operator, 0), walk.numbers(operator, 1)
    if number.size != 1 or not x.shape or not 1 <= int(number.reshape(())) <= min(x.shape[-1], 64):
        raise Unsupported(
            f"the {number.reshape(-1)[:4]} greatest of {x.shape}", "Ask for 1 to 64, and no more than there are"
        )
    k, axis = int(number.reshape(())), len(x.shape) - 1
    shape = (*x.shape[:-1], k)
    name, grid = walk.result(operator, shape)
    walk.same_grid(operator, x, grid)
    walk.node("top_k", [x], name, {"k": k, "axis": axis, "index": 0})
    walk.node(
        "top_k",
        [x],
        walk.integers(operator, shape, "int32", 1, (0, x.shape[-1] - 1)),
        {"k": k, "axis": axis, "index": 1},
    )


# ---------------------------------------------------------------------------- codes at other places


def picked(walk: Walk, operator: Operator, x: Codes, rows: Mapping[int, Sequence[int]]) -> None:
    """Select indices along axes, one axis after the other."""
    name, places = walk.name_of(operator), sorted(rows)
    for axis in places:
        index = np.asarray(rows[axis], np.int32).reshape(-1, 1)
        shape = [len(index) if a == axis else n for a, n in enumerate(x.shape)]
        constant = walk.constant(f"{name}/rows", index)
        indices = Codes(constant, index.shape, "int32", None)
        attributes = {"axis": axis, "places": [axis]}
        if axis == places[-1]:
            output, grid = walk.result(operator, shape)
            walk.same_grid(operator, x, grid)
            walk.node("take", [x, indices], output, attributes)
        else:
            moved = walk.between(f"{name}/part", shape, x)
            walk.node("take", [x, indices], moved.name, attributes)
            x = moved


@reads("RESIZE_NEAREST_NEIGHBOR")
def resize(walk: Walk, operator: Operator) -> None:
    """Select rows and columns of the image, by indices that the kernels compute in float32."""
    x, sizes = _image(walk, operator)
    rows = {axis: _nearest(operator, x.shape[axis], size) for axis, size in zip((1, 2), sizes, strict=True)}
    picked(walk, operator, x, rows)


def _image(walk: Walk, operator: Operator) -> tuple[Codes, list[int]]:
    """An image of codes, and the height and width of the result."""
    x = walk.codes_of(operator, 0)
    sizes = [int(n) for n in walk.numbers(operator, 1).reshape(-1)]
    if len(x.shape) != 4 or len(sizes) != 2 or min(sizes) < 1 or min(x.shape[1:3]) < 1 or max(sizes) > 2**16:
        raise bad(operator, f"an image of {x.shape} as {sizes}")
    walk.bounded(operator, (x.shape[0], *sizes, x.shape[3]))
    return x, sizes


@reads("RESIZE_BILINEAR", ignores=("new_height", "new_width"))
def resize_bilinear(walk: Walk, operator: Operator) -> None:
    """A weighted sum of four codes, whose weights the target's kernel decides."""
    x, sizes = _image(walk, operator)
    name, grid = walk.result(operator, (x.shape[0], *sizes, x.shape[3]))
    walk.same_grid(operator, x, grid)
    corners, half = operator.options["align_corners"], operator.options["half_pixel_centers"]
    if corners and half:
        raise bad(operator, "both corners and pixel centers that coincide")
    attributes = {"axes": [1, 2], "size": sizes, "align_corners": bool(corners), "half_pixel_centers": bool(half)}
    walk.node("resize_bilinear", [x], name, attributes)


def _nearest(operator: Operator, size: int, wanted: int) -> list[int]:
    """GetNearestNeighbor of TFLite's reference kernels."""
    corners, half = operator.options["align_corners"], operator.options["half_pixel_centers"]
    corners_apart = corners and wanted > 1
    ratio = np.float32(size - 1) / np.float32(wanted - 1) if corners_apart else np.float32(size) / np.float32(wanted)
    place = (np.arange(wanted).astype(np.float32) + np.float32(0.5 if half else 0)) * ratio
    # C's round: ties away from zero, and these are not negative
    index = np.floor(place.astype(np.float64) + 0.5) if corners else np.floor(place)
    return [int(i) for i in np.clip(index, 0, size - 1)]


@reads("MIRROR_PAD")
def mirror(walk: Walk, operator: Operator) -> None:
    """Codes mirrored around the edge: with the edge itself (SYMMETRIC) or without (REFLECT)."""
    x, pairs = walk.codes_of(operator, 0), walk.numbers(operator, 1)
    if operator.options["mode"] not in (0, 1):
        raise bad(operator, f"mode number {operator.options['mode']}")
    without = 1 - operator.options["mode"]
    if pairs.shape != (len(x.shape), 2) or (pairs < 0).any() or (pairs > np.array(x.shape)[:, None] - without).any():
        raise bad(operator, f"a padding of {pairs.reshape(-1)[:8]} around {x.shape}")
    rows: dict[int, Sequence[int]] = {}
    for axis, (low, high) in enumerate(pairs):
        if low or high:
            rows[axis] = [
                int(i) for i in np.pad(np.arange(x.shape[axis]), (low, high), ("symmetric", "reflect")[without])
            ]
    if not rows:
        raise Unsupported("it pads nothing", "Leave it out")
    picked(walk, operator, x, rows)


@reads("TILE")
def tile(walk: Walk, operator: Operator) -> None:
    """The codes repeated along axes."""
    x, times = walk.tensor_of(operator, 0), [int(n) for n in walk.numbers(operator, 1).reshape(-1)]
    if len(times) != len(x.shape) or min(times, default=1) < 1:
        raise bad(operator, f"codes of {x.shape} {times} times")
    shape = [n * m for n, m in zip(x.shape, times, strict=True)]
    walk.bounded(operator, shape)
    wide = [size for pair in zip(times, x.shape, strict=True) for size in pair]
    name = walk.name_of(operator)
    many = walk.between(f"{name}/many", wide, x)
    walk.node("broadcast", [x], many.name, {"shape": wide, "dimensions": list(range(1, len(wide), 2))})
    walk.moved(operator, "reshape", many, shape, shape=shape)


@reads("SPACE_TO_DEPTH", "DEPTH_TO_SPACE")
def blocks(walk: Walk, operator: Operator) -> None:
    """Blocks of the image as channels, or back."""
    x, block = walk.tensor_of(operator, 0), operator.options["block"]
    if len(x.shape) != 4 or not 1 <= block <= 2**12:
        raise bad(operator, f"blocks of {block} in {x.shape}")
    n, h, w, c = x.shape
    to_depth = operator.name == "SPACE_TO_DEPTH"
    if (h % block or w % block) if to_depth else c % (block * block):
        raise bad(operator, f"blocks of {block} in {x.shape}")
    if to_depth:
        split, order = [n, h // block, block, w // block, block, c], [0, 1, 3, 2, 4, 5]
        shape = [n, h // block, w // block, block * block * c]
    else:
        split, order = [n, h, w, block, block, c // block**2], [0, 1, 3, 2, 4, 5]
        shape = [n, h * block, w * block, c // block**2]
    name = walk.name_of(operator)
    parts = walk.between(f"{name}/blocks", split, x)
    walk.node("reshape", [x], parts.name, {"shape": split})
    turned = walk.between(f"{name}/turned", [split[a] for a in order], x)
    walk.node("transpose", [parts], turned.name, {"permutation": order})
    walk.moved(operator, "reshape", turned, shape, shape=shape)
