"""Arithmetic of int32 that computes positions: quotients, products and sums of indices, and GATHER_ND.

Every tensor of whole numbers has the lowest and the highest number that it can contain (`Codes.reach`). So it is known
that nothing here exceeds int32, and whether an index can be outside of its tensor.
"""

import math
from collections.abc import Callable, Mapping

import numpy as np

from qjax.contrib.importers.tflite.values import Codes, bad
from qjax.contrib.importers.tflite.walk import Walk, reads, reads_whole_numbers
from qjax.export.tflite_schema.model import Operator
from qjax.support.errors import Unsupported

_LEAST, _MOST = -(2**31), 2**31 - 1
_BOUND = "Its numbers must be known to stay within int32, as the indices of ARG_MAX are: compute it outside"

_KNOWN: Mapping[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "ADD": np.add,
    "SUB": np.subtract,
    "MUL": np.multiply,
    "FLOOR_DIV": np.floor_divide,
    "FLOOR_MOD": np.remainder,
}
_SUMS = {"ADD": "add", "SUB": "sub", "MUL": "mul"}


@reads_whole_numbers(*_KNOWN, ignores=("powers_of_two",))
def arithmetic(walk: Walk, operator: Operator) -> None:
    """Arithmetic of whole numbers, known or computed."""
    if operator.options.get("activation"):
        raise Unsupported("an activation of whole numbers", _BOUND)
    known = [walk.numbers_of(operator, place) for place in (0, 1)]
    if known[0] is not None and known[1] is not None:
        walk.know(operator, _of_known(operator, known[0], known[1]))
        return
    x, y = (walk.flowing(operator, place) for place in (0, 1))
    try:
        shape = np.broadcast_shapes(x.shape, y.shape)
    except ValueError:
        raise bad(operator, f"shapes {x.shape} and {y.shape}") from None
    if x.dtype != "int32" or y.dtype != "int32":
        raise bad(operator, f"{x.dtype} and {y.dtype}")
    if operator.name in _SUMS:
        _sum(walk, operator, x, y, shape)
    else:
        _division(walk, operator, x, y, shape)


def _of_known(operator: Operator, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    if operator.name.startswith("FLOOR") and not np.all(y):
        raise bad(operator, "a division by 0")
    try:
        exact = _KNOWN[operator.name](x.astype(object), y.astype(object))
    except ValueError:
        raise bad(operator, f"shapes {x.shape} and {y.shape}") from None
    value = np.asarray(exact, object)
    if value.size and (min(value.flat) < _LEAST or max(value.flat) > _MOST):
        raise Unsupported("its result exceeds int32", _BOUND)
    return value.astype(np.int64)


def _sum(walk: Walk, operator: Operator, x: Codes, y: Codes, shape: tuple[int, ...]) -> None:
    function = _SUMS[operator.name]
    (a, b), (c, d) = x.reach, y.reach
    ends = {"add": [a + c, b + d], "sub": [a - d, b - c], "mul": [a * c, a * d, b * c, b * d]}[function]
    low, high = min(ends), max(ends)
    rest = walk.multiples.get(y.name)
    if function == "sub" and rest is not None and rest[0] == x.name:
        # x - (x / d) d is the remainder of the division, for which a tighter bound is known
        _, divisor, held = rest
        name = walk.integers(operator, shape, "int32", reach=(0, int(divisor.max()) - 1))
        walk.node("logic", [x, held], name, {"function": "rem"})
        return
    if low < _LEAST or high > _MOST:
        raise Unsupported(f"its result may be from {low} to {high}, beyond int32", _BOUND)
    name = walk.integers(operator, shape, "int32", reach=(low, high))
    walk.node("logic", [x, y], name, {"function": function})
    for one, other in ((x, y), (y, x)):
        quotient, value = walk.quotients.get(one.name), walk.tensors[other.name].value
        if function == "mul" and quotient is not None and value is not None:
            dividend, divisor, held = quotient
            if np.array_equal(np.asarray(value), divisor):
                walk.multiples[name] = dividend, divisor, held


def _division(walk: Walk, operator: Operator, x: Codes, y: Codes, shape: tuple[int, ...]) -> None:
    """A quotient rounded down; the graph's is rounded towards zero, which is the same for numbers from 0 up."""
    value = walk.tensors[y.name].value
    if value is None or not np.size(value) or np.any(np.asarray(value) < 1):
        raise Unsupported("its divisor is no constant above 0", "Divide by such a constant, or compute it outside")
    divisor = np.asarray(value)
    if x.reach[0] < 0:
        raise Unsupported(f"its dividend may be {x.reach[0]}", "Divide numbers from 0 up, or compute it outside")
    if operator.name == "FLOOR_MOD":
        name = walk.integers(operator, shape, "int32", reach=(0, min(x.reach[1], int(divisor.max()) - 1)))
        walk.node("logic", [x, y], name, {"function": "rem"})
        return
    reach = x.reach[0] // int(divisor.max()), x.reach[1] // int(divisor.min())
    name = walk.integers(operator, shape, "int32", reach=reach)
    walk.node("logic", [x, y], name, {"function": "div"})
    walk.quotients[name] = x.name, divisor, y


@reads("GATHER_ND")
def gather_nd(walk: Walk, operator: Operator) -> None:
    """Slices at positions given by several indices: the axes are flattened to one, and so are the indices."""
    x, places = walk.flowing(operator, 0), walk.flowing(operator, 1)
    if places.grid is not None or places.dtype != "int32" or not places.shape:
        raise bad(operator, f"places of {places.dtype} with the shape {places.shape}")
    *batch, count = places.shape
    if not 1 <= count <= len(x.shape) or not all(x.shape):
        raise bad(operator, f"places of {count} numbers in {x.shape}")
    sizes, rest = x.shape[:count], x.shape[count:]
    shape = [*batch, *rest]
    walk.bounded(operator, shape)
    name = walk.name_of(operator)
    value = walk.tensors[places.name].value
    if value is not None:
        held = np.asarray(value)
        if ((held < 0) | (held >= sizes)).any():
            raise bad(operator, f"places out of {sizes}")
        flat = np.asarray(np.ravel_multi_index(tuple(np.moveaxis(held, -1, 0)), sizes), np.int32)
        flat = flat.reshape(*batch, 1)
        index = Codes(walk.constant(f"{name}/places", flat), flat.shape, "int32", None)
    else:
        index = _flat(walk, name, places, sizes)
    table = walk.reshaped(x, (math.prod(sizes), *rest), f"{name}/table")
    attributes = {"axis": 0, "places": list(range(len(batch)))}
    if x.grid is None:
        output = walk.integers(operator, shape, x.dtype, reach=x.reach)
    else:
        output, grid = walk.result(operator, shape)
        walk.same_grid(operator, x, grid)
    walk.node("take", [table, index], output, attributes)


def _flat(walk: Walk, name: str, places: Codes, sizes: tuple[int, ...]) -> Codes:
    """Indices (..., axes) as numbers (..., 1); the runtime refuses those outside, here they are clipped."""
    last = [size - 1 for size in sizes]
    if places.reach[0] < 0 or places.reach[1] > min(last):
        ends = [np.zeros(len(sizes), np.int32), np.asarray(last, np.int32)]
        low, high = (Codes(walk.constant(f"{name}/ends", end), end.shape, "int32", None) for end in ends)
        inside = walk.between(f"{name}/inside", places.shape, places)
        walk.node("logic", [low, places, high], inside.name, {"function": "clamp"})
        places = inside
    if len(sizes) == 1:
        return places
    steps = np.asarray([math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))], np.int32)
    factors = Codes(walk.constant(f"{name}/steps", steps), steps.shape, "int32", None)
    parts = walk.between(f"{name}/parts", places.shape, places)
    walk.node("logic", [places, factors], parts.name, {"function": "mul"})
    axis = len(places.shape) - 1
    summed = walk.between(f"{name}/sum", places.shape[:-1], places)
    walk.node("logic", [parts], summed.name, {"function": "reduce_sum", "axes": [axis]})
    return walk.reshaped(summed, (*places.shape[:-1], 1), f"{name}/places")
