"""Operators that concatenate tensors along an axis, or split one."""

import numpy as np

from qjax.contrib.importers.tflite.run_kernel import Function
from qjax.contrib.importers.tflite.slices import box_attributes
from qjax.contrib.importers.tflite.values import NUMBERS, Codes, axis_of, bad
from qjax.contrib.importers.tflite.walk import Walk, reads
from qjax.export.tflite_schema.model import Operator
from qjax.graph.ir import Quantization
from qjax.numerics.elementary import Expression
from qjax.support.errors import Unsupported

_IDENTITY = Expression((("mul", (0, (1.0).hex())),))
"""Another scale and zero point for the same real numbers."""


@reads("CONCATENATION")
def concatenation(walk: Walk, operator: Operator) -> None:
    """Concatenated codes."""
    if operator.inputs and all(walk.numbers_of(operator, i) is not None for i in range(len(operator.inputs))):
        parts = [np.atleast_1d(walk.numbers(operator, i)) for i in range(len(operator.inputs))]
        if any(part.ndim != 1 for part in parts):
            raise Unsupported("it concatenates tables of whole numbers", NUMBERS)
        axis_of(operator.options["axis"], 1, operator)
        walk.know(operator, np.concatenate(parts))
        return
    if operator.options["activation"]:
        raise Unsupported("an activation", "Its kernels have none for codes")
    _join_parts(
        walk, operator, [_read_part(walk, operator, i) for i in range(len(operator.inputs))], operator.options["axis"]
    )


@reads("PACK")
def pack(walk: Walk, operator: Operator) -> None:
    """Tensors stacked along a new axis."""
    count = len(operator.inputs)
    if count != operator.options["count"] or not count:
        raise bad(operator, f"{operator.options['count']} values stated, {count} given")
    numbers = [walk.numbers_of(operator, i) for i in range(count)]
    if all(n is not None and n.size == 1 for n in numbers):
        if any(n is not None and n.ndim for n in numbers):
            raise Unsupported("it concatenates tables of whole numbers", NUMBERS)
        axis_of(operator.options["axis"], 1, operator)
        walk.know(operator, np.concatenate([np.reshape(n, (1,)) for n in numbers if n is not None]))
        return
    parts = [_read_part(walk, operator, i) for i in range(count)]
    axis = axis_of(operator.options["axis"], len(parts[0].shape) + 1, operator)
    name = walk.name_of(operator)
    wide = [walk.between(f"{name}/part", (*p.shape[:axis], 1, *p.shape[axis:]), p) for p in parts]
    for part, with_axis in zip(parts, wide, strict=True):
        walk.node("reshape", [part], with_axis.name, {"shape": list(with_axis.shape)})
    _join_parts(walk, operator, wide, axis)


def _read_part(walk: Walk, operator: Operator, place: int) -> Codes:
    """Codes, or whole numbers if the result is whole numbers."""
    return (walk.flowing if walk.output(operator).dtype == "int32" else walk.codes_of)(operator, place)


def _join_parts(walk: Walk, operator: Operator, parts: list[Codes], number: int) -> None:
    if not parts:
        raise bad(operator, "no inputs")
    shape = list(parts[0].shape)
    axis = axis_of(number, len(shape), operator)
    for part in parts:
        rest = [*part.shape[:axis], *part.shape[axis + 1 :]]
        if len(part.shape) != len(shape) or rest != [*shape[:axis], *shape[axis + 1 :]]:
            raise bad(operator, f"codes of shape {parts[0].shape} and {part.shape}")
    shape[axis] = sum(part.shape[axis] for part in parts)
    if all(part.grid is None for part in parts):
        reach = min(part.reach[0] for part in parts), max(part.reach[1] for part in parts)
        output = walk.integers(operator, shape, "int32", reach=reach)
        walk.node("concatenate", parts, output, {"axis": axis})
        return
    name, grid = walk.result(operator, shape)
    walk.node("concatenate", [_on_grid(walk, operator, part, name, grid) for part in parts], name, {"axis": axis})


def _on_grid(walk: Walk, operator: Operator, part: Codes, name: str, grid: Quantization) -> Codes:
    """The codes on the output's grid. Only the kernel of uint8 changes them, by a table that the runtime computes."""
    q = part.quantization
    same = q.scale == grid.scale and q.zero_point == grid.zero_point
    if same or operator.name != "CONCATENATION" or (part.dtype, walk.output(operator).dtype) != ("uint8", "uint8"):
        walk.same_grid(operator, part, grid)
        return part
    moved = walk.between(f"{name}/part", part.shape, Codes(name, (), part.dtype, grid))
    walk.functions[moved.name] = Function("CONCATENATION", {"axis": 1}, part.dtype, q, grid)
    walk.node("table", [part], moved.name, {"expression": _IDENTITY.to_json()})
    return moved


@reads("UNPACK")
def unpack(walk: Walk, operator: Operator) -> None:
    """Every index of an axis as a tensor without that axis."""
    x = walk.codes_of(operator, 0)
    axis = axis_of(operator.options["axis"], len(x.shape), operator)
    if not len(operator.outputs) == operator.options["count"] == x.shape[axis]:
        raise bad(operator, f"{len(operator.outputs)} outputs for {x.shape[axis]} indices")
    rest = [size for a, size in enumerate(x.shape) if a != axis]
    for index in range(x.shape[axis]):
        name, grid = walk.result(operator, rest, index)
        walk.same_grid(operator, x, grid)
        part = walk.between(f"{name}/part", [1 if a == axis else n for a, n in enumerate(x.shape)], x)
        walk.node("slice", [x], part.name, box_attributes(x, {axis: (index, index + 1)}))
        walk.node("reshape", [part], name, {"shape": rest})


@reads("SPLIT", "SPLIT_V")
def split(walk: Walk, operator: Operator) -> None:
    """Parts of an axis, equal or of stated sizes."""
    first = operator.name == "SPLIT"
    x = walk.codes_of(operator, 1 if first else 0)
    number = walk.numbers(operator, 0 if first else 2)
    if number.size != 1 or len(operator.outputs) != operator.options["parts"] or not operator.outputs:
        raise bad(operator, f"{operator.options['parts']} parts stated, {len(operator.outputs)} outputs")
    axis, parts = axis_of(int(number.reshape(())), len(x.shape), operator), len(operator.outputs)
    if first:
        if x.shape[axis] % parts:
            raise bad(operator, f"{parts} parts of {x.shape[axis]}")
        sizes = [x.shape[axis] // parts] * parts
    else:
        sizes = [int(n) for n in walk.numbers(operator, 1).reshape(-1)]
        if sizes.count(-1) == 1:
            sizes[sizes.index(-1)] = x.shape[axis] - sum(sizes) - 1
        if len(sizes) != parts or sum(sizes) != x.shape[axis] or min(sizes) < 0:
            raise bad(operator, f"parts of {sizes} of {x.shape[axis]}")
    for index, size in enumerate(sizes):
        name, grid = walk.result(operator, [size if a == axis else n for a, n in enumerate(x.shape)], index)
        walk.same_grid(operator, x, grid)
        extra = {"index": index} if parts > 1 else {}
        walk.node("split", [x], name, {"sizes": sizes, "axis": axis, **extra})
