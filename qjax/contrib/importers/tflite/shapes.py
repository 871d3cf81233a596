"""Operators that only change the shape of codes, and shapes as known integers."""

import math
from collections.abc import Sequence

import numpy as np

from qjax.contrib.importers.tflite.values import Codes, axes_of, axis_of, bad, volume
from qjax.contrib.importers.tflite.walk import Walk, reads
from qjax.export.tflite_schema.model import Operator
from qjax.support.errors import Unsupported


@reads("SHAPE", ignores=("type",))
def shape_of(walk: Walk, operator: Operator) -> None:
    """The shape of a tensor of codes, a known vector."""
    walk.know(operator, np.asarray(walk.tensor_of(operator, 0).shape))


@reads("RESHAPE")
def reshape(walk: Walk, operator: Operator) -> None:
    """A reshape, whose shape is an operand or one of the options."""
    if walk.numbers_of(operator, 0) is not None:
        _number_reshape(walk, operator)
        return
    x = walk.tensor_of(operator, 0)
    shape = reshaped_as(walk, operator, x)
    walk.moved(operator, "reshape", x, shape, shape=shape)


def reshaped_as(walk: Walk, operator: Operator, x: Codes) -> list[int]:
    """The shape of x after a RESHAPE."""
    fixed = not walk.has(operator, 1) or walk.operand(operator, 1).span is not None
    return _resolve_shape(walk, operator, x, _requested_shape(walk, operator), fixed)


def _requested_shape(walk: Walk, operator: Operator) -> list[int]:
    """The operand if it is a vector of int32; otherwise the kernels use the option."""
    option: list[int] | None = operator.options["shape"]
    if walk.has(operator, 1):
        numbers = walk.numbers(operator, 1)
        if numbers.ndim == 1 and walk.operand(operator, 1).dtype == "int32":
            return [int(n) for n in numbers]
    if option is None:
        raise bad(operator, "no shape")
    # old files write a scalar in this way
    return [] if option == [0] else option


def _resolve_shape(walk: Walk, operator: Operator, x: Codes, asked: Sequence[int], fixed: bool) -> list[int]:
    """The shape without -1. fixed: whether it is the same for every batch, and contains that of the file."""
    shape = list(asked)
    stated = walk.stated(operator, 0)
    if fixed and stated is not None and x.shape != stated and shape and shape[0] != -1:
        # The examples remain separate only if the batch is the first axis before and after.
        if not stated or (x.shape[0], *x.shape[1:]) != (stated[0] * walk.scale, *stated[1:]):
            raise Unsupported("its shape is that of one batch", "Use -1 for the size of the batch")
        shape[0] *= walk.scale
    if shape.count(-1) > 1 or any(n < -1 for n in shape):
        raise bad(operator, f"a shape of {list(asked)}")
    if -1 in shape:
        rest = math.prod(n for n in shape if n != -1)
        if not rest or volume(x.shape) % rest:
            raise bad(operator, f"codes of shape {x.shape} as {list(asked)}")
        shape[shape.index(-1)] = volume(x.shape) // rest
    if volume(shape) != volume(x.shape):
        raise bad(operator, f"codes of shape {x.shape} as {list(asked)}")
    return shape


def _number_reshape(walk: Walk, operator: Operator) -> None:
    known = walk.numbers(operator, 0)
    shape = _requested_shape(walk, operator)
    if shape.count(-1) > 1 or min(shape, default=0) < -1 or (-1 not in shape and math.prod(shape) != known.size):
        raise bad(operator, f"{known.size} numbers as {shape}")
    rest = math.prod(n for n in shape if n != -1)
    if -1 in shape and (not rest or known.size % rest):
        raise bad(operator, f"{known.size} numbers as {shape}")
    walk.know(operator, known.reshape(shape))


@reads("SQUEEZE")
def squeeze(walk: Walk, operator: Operator) -> None:
    """Drop axes of size 1."""
    known = walk.numbers_of(operator, 0)
    shape = known.shape if known is not None else walk.tensor_of(operator, 0).shape
    listed = operator.options["axes"] or []
    axes = axes_of(np.asarray(listed), len(shape), operator) if listed else []
    if not listed:
        axes = [axis for axis, size in enumerate(walk.stated(operator, 0) or shape) if size == 1]
    if any(shape[axis] != 1 for axis in axes):
        raise bad(operator, f"axes {axes} of {shape}")
    _as_shape(walk, operator, [size for axis, size in enumerate(shape) if axis not in axes])


@reads("EXPAND_DIMS")
def expand_dims(walk: Walk, operator: Operator) -> None:
    """Add an axis of size 1."""
    known = walk.numbers_of(operator, 0)
    shape = known.shape if known is not None else walk.tensor_of(operator, 0).shape
    number = walk.numbers(operator, 1)
    if number.size != 1:
        raise bad(operator, "it needs one axis")
    axis = axis_of(int(number.reshape(())), len(shape) + 1, operator)
    _as_shape(walk, operator, [*shape[:axis], 1, *shape[axis:]])


def _as_shape(walk: Walk, operator: Operator, shape: list[int]) -> None:
    known = walk.numbers_of(operator, 0)
    if known is not None:
        walk.know(operator, known.reshape(shape))
        return
    walk.moved(operator, "reshape", walk.tensor_of(operator, 0), shape, shape=shape)
