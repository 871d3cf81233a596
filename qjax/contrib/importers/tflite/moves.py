"""Operators on whole axes: their order and direction, repeats, padding, extremes."""

import numpy as np

from qjax.contrib.importers.tflite.values import axes_of, axis_of, bad
from qjax.contrib.importers.tflite.walk import Walk, reads
from qjax.export.tflite_schema.model import Operator
from qjax.support.errors import Unsupported


@reads("TRANSPOSE")
def transpose(walk: Walk, operator: Operator) -> None:
    """The axes in another order."""
    x = walk.tensor_of(operator, 0)
    numbers = walk.numbers(operator, 1).reshape(-1)
    order = [axis_of(int(n), len(x.shape), operator) for n in numbers]
    if sorted(order) != list(range(len(x.shape))):
        raise bad(operator, f"an order of {order} for {len(x.shape)} axes")
    walk.moved(operator, "transpose", x, [x.shape[axis] for axis in order], permutation=order)


@reads("BROADCAST_TO")
def broadcast(walk: Walk, operator: Operator) -> None:
    """Repeat axes of size 1."""
    x = walk.tensor_of(operator, 0)
    shape = [int(n) for n in walk.numbers(operator, 1).reshape(-1)]
    first = len(shape) - len(x.shape)
    stated = walk.stated(operator, 0)
    if not first and stated and x.shape[0] != stated[0] and shape[0] == stated[0]:
        # The file's own batch size becomes the size of this reading.
        shape[0] = x.shape[0]
    if (
        first < 0
        or any(n not in (1, size) for n, size in zip(x.shape, shape[first:], strict=True))
        or min(shape, default=1) < 0
    ):
        raise bad(operator, f"codes of shape {x.shape} as {shape}")
    walk.bounded(operator, shape)
    walk.moved(operator, "broadcast", x, shape, shape=shape, dimensions=list(range(first, len(shape))))


@reads("REVERSE_V2")
def reverse(walk: Walk, operator: Operator) -> None:
    """Axes backwards."""
    x = walk.tensor_of(operator, 0)
    axes = axes_of(walk.numbers(operator, 1), len(x.shape), operator)
    walk.moved(operator, "reverse", x, x.shape, axes=axes)


@reads("PAD", "PADV2")
def pad(walk: Walk, operator: Operator) -> None:
    """Padding around the codes."""
    x = walk.tensor_of(operator, 0)
    pairs = walk.numbers(operator, 1)
    if pairs.shape != (len(x.shape), 2) or (pairs < 0).any():
        raise bad(operator, f"a padding of shape {pairs.shape} around {x.shape}")
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


@reads("REDUCE_MAX", "REDUCE_MIN")
def extreme(walk: Walk, operator: Operator) -> None:
    """The greatest or the lowest code along axes."""
    op = "max" if operator.name == "REDUCE_MAX" else "min"
    x = walk.tensor_of(operator, 0)
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
