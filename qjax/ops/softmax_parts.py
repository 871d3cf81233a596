"""A masked softmax as a chain around the runtime's own softmax, which takes no mask.

For int8 codes x of scale s and rows of n codes:

    a = x where the mask holds, else -128            SELECT_V2
    m = the greatest a of the row                    REDUCE_MAX
    t = a - m, scale max(s, ln(512 n) / 255), z 127  SUB
    b = t where the mask holds, else -128            SELECT_V2
    y = softmax(b)                                   SOFTMAX

The differences t are at most 0, so their codes end at 127, and -128 lies 255 steps below the greatest. A hidden element
therefore weighs at most exp(-255 s') <= 1 / (512 n) relative to the greatest: its own share rounds to 0, and all hidden
elements together change the sum by at most 1/512. If s is large enough, the codes t are exact; a smaller s is replaced,
because otherwise hidden elements would count. In a row that is hidden as a whole, all codes are equal.
"""

import dataclasses
import math

import numpy as np

from qjax.numerics.softfloat import Real
from qjax.ops.base import Operand, Preparation
from qjax.ops.composed import Part
from qjax.ops.masked_rows import FILL


def parts(given: Preparation) -> list[Part] | None:
    """The chain, or None if there are no masks, or rows that the runtime's own softmax does not support."""
    x, attributes = given.inputs[0], given.attributes
    last = len(x.shape) - 1
    length = x.shape[last]
    if len(given.inputs) < 2 or attributes["axes"] != [last] or length is None or attributes["empty"] != "uniform":
        return None
    kept = (*x.shape[:last], 1)
    made: list[Part] = []

    def add(part: Part) -> Part:
        made.append(part)
        return part

    masks = [add(part) for index in range(1, len(given.inputs)) for part in _in_rank(given, index)]
    masks = [part for part in masks if part.name.endswith("mask")]

    def hidden(name: str, of: Part | int) -> Part | int:
        for index, (mask, inverted) in enumerate(zip(masks, attributes["mask_inverted"], strict=True)):
            role = "on" if inverted else "off"
            of = add(Part(f"{name}{index}", "select", (mask, of), x.shape, None, {}, {role: np.float32(FILL)}))
        return of

    shown = hidden("shown", 0)
    greatest = add(Part("greatest", "max", (shown,), x.shape[:last], None, {"axes": [last]}))
    shape = {"shape": list(kept), "dimensions": list(range(last))}
    rows = add(Part("rows", "broadcast", (greatest,), kept, None, shape))
    below = add(Part("below", "add", (shown, rows), x.shape, _differences(x, length), {"subtract": True}))
    visible = hidden("visible", below)
    return [*made, Part("softmax", "softmax", (visible,), x.shape, None, {"axes": [last]}, finishes=True)]


def _differences(x: Operand, length: int) -> Operand:
    floor = np.float32(math.log(512 * length) / 255 * (1 + 2.0**-20))
    scale = Real.of(x.scale).maximum(Real.of(floor)).to_float32()
    return dataclasses.replace(x, shape=(), scale=scale, zero_point=np.asarray(127, np.int32), qmin=-128, qmax=127)


def _in_rank(given: Preparation, index: int) -> list[Part]:
    """A mask with the axes of the codes, in their order, with size 1 along axes on which it does not vary."""
    x, mask = given.inputs[0], given.inputs[index]
    axes = given.attributes["mask_axes"][index - 1]
    used = sorted(axis for axis in axes if axis is not None)
    found: list[Part] = []
    of: Part | int = index
    shape = tuple(mask.shape[axis] for axis in used)
    if len(used) < len(mask.shape):
        of = Part(f"{index}/squeezed", "reshape", (of,), shape, None, {"shape": list(shape)})
        found.append(of)
    order = [used.index(axis) for axis in axes if axis is not None]
    if order != sorted(order):
        shape = tuple(shape[axis] for axis in order)
        of = Part(f"{index}/turned", "transpose", (of,), shape, None, {"permutation": order})
        found.append(of)
    places = [place for place, axis in enumerate(axes) if axis is not None]
    full = tuple(shape[places.index(place)] if place in places else 1 for place in range(len(x.shape)))
    attributes = {"shape": list(full), "dimensions": places}
    return [*found, Part(f"{index}/mask", "broadcast", (of,), full, None, attributes)]
