"""Activations: fused into an operator, or as operators of their own."""

from typing import Any

import numpy as np

from qjax.contrib.importers.tflite.kernels import RELU, RELU6
from qjax.contrib.importers.tflite.values import Codes, bad
from qjax.contrib.importers.tflite.walk import Walk, reads
from qjax.export.tflite_schema.activations import BOUNDS, activation_codes
from qjax.export.tflite_schema.enums import ACTIVATIONS
from qjax.export.tflite_schema.model import Operator
from qjax.graph.ir import Quantization
from qjax.support.errors import Unsupported


def clamps(walk: Walk, operator: Operator, name: str, grid: Quantization) -> dict[str, str]:
    """The constants of a node for the activation that is fused into its operator."""
    number = operator.options["activation"]
    if not 0 <= number < len(ACTIVATIONS):
        raise bad(operator, f"activation number {number}")
    if not number:
        return {}
    if ACTIVATIONS[number] not in BOUNDS:
        raise Unsupported(f"the activation {ACTIVATIONS[number]}", "Its kernels have RELU, RELU6 and RELU_N1_TO_1 only")
    return _bounds(walk, name, grid, _codes(ACTIVATIONS[number], grid))


def _codes(activation: str, grid: Quantization) -> tuple[int, int]:
    found = activation_codes(activation, grid.scale, grid.zero_point, grid.qmin, grid.qmax)
    if found is None:
        raise Unsupported(
            f"a bound of its activation {activation} lies between two codes, and the runtimes round it differently",
            "Calibrate again: another scale has no such tie",
        )
    return found


def _bounds(walk: Walk, name: str, grid: Quantization, codes: tuple[int, int]) -> dict[str, str]:
    """Constants for the bounds that differ from those of the grid."""
    low, high = codes
    found: dict[str, int] = {}
    if low > grid.qmin:
        found["clamp_min"] = low
    if high < grid.qmax:
        found["clamp_max"] = high
    return {role: walk.constant(f"{name}/{role}", np.asarray(code, np.int32)) for role, code in found.items()}


@reads(*BOUNDS)
def activation(walk: Walk, operator: Operator) -> None:
    """A clamp; if the grid changes, the kernel that changes it clamps."""
    x = walk.codes_of(operator, 0)
    name, grid = walk.result(operator, x.shape)
    constants = _bounds(walk, name, grid, _codes(operator.name, grid))
    if _same(x, grid, walk.output(operator).dtype):
        walk.node("clamp", [x], name, {}, constants)
        return
    if x.dtype != walk.output(operator).dtype:
        raise Unsupported(
            f"codes of {x.dtype} become {walk.output(operator).dtype}",
            "Use the same number of bits for input and output",
        )
    if operator.name not in ("RELU", "RELU6", "RELU_N1_TO_1"):
        raise Unsupported("it changes the grid", "Give its input and output one quantizer")
    walk.marks[name] = RELU if operator.name == "RELU" else RELU6
    walk.node("rescale", [x], name, {}, constants)


@reads("MAXIMUM", "MINIMUM")
def limit(walk: Walk, operator: Operator) -> None:
    """A clamp if one operand is a single constant, else the maximum or minimum of two; on one grid."""
    sides = [walk.flowing(operator, place) for place in (0, 1)]
    if any(x.grid is None for x in sides):
        _of_integers(walk, operator, sides)
        return
    held = [walk.tensors[x.name].value if x.name in walk.tensors else None for x in sides]
    places = [i for i in (0, 1) if held[i] is not None and np.size(np.asarray(held[i])) == 1]
    if not places:
        _of_two(walk, operator, sides)
        return
    place = places[-1]
    x, value = sides[1 - place], int(np.asarray(held[place]).reshape(()))
    shape = _broadcast(operator, [x, sides[place]])
    walk.same_grid(operator, sides[place], x.quantization)
    name, grid = walk.result(operator, shape)
    walk.same_grid(operator, x, grid)
    x = walk.reshaped(x, shape, f"{name}/input")
    pair = (max(value, grid.qmin), grid.qmax) if operator.name == "MAXIMUM" else (grid.qmin, min(value, grid.qmax))
    walk.node("clamp", [x], name, {}, _bounds(walk, name, grid, pair))


def _broadcast(operator: Operator, sides: list[Codes]) -> tuple[int, ...]:
    try:
        return np.broadcast_shapes(*(x.shape for x in sides))
    except ValueError:
        raise bad(operator, "shapes of its sides") from None


def _of_integers(walk: Walk, operator: Operator, sides: list[Codes]) -> None:
    if any(x.dtype != "int32" for x in sides):
        raise Unsupported("sides of different types", "Give both sides the same type")
    name = walk.integers(operator, _broadcast(operator, sides), "int32")
    walk.node("logic", sides, name, {"function": operator.name[:3].lower()})


def _of_two(walk: Walk, operator: Operator, sides: list[Codes]) -> None:
    name, grid = walk.result(operator, _broadcast(operator, sides))
    for x in sides:
        walk.same_grid(operator, x, grid)
    walk.node("extremum", sides, name, {"function": operator.name[:3].lower()})


def clamped(walk: Walk, operator: Operator, x: Codes, constants: dict[str, Any]) -> None:
    """Bound x by separate nodes to get the operator's output, for an operation that cannot have bounds."""
    name = walk.name_of(operator)
    walk.node("clamp", [x], name, {}, constants)


def _same(x: Codes, grid: Quantization, dtype: str) -> bool:
    q = x.quantization
    return bool(q.scale == grid.scale and q.zero_point == grid.zero_point and x.dtype == dtype)
