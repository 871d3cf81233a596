"""Float parts of a model: FULLY_CONNECTED and CONV_2D with integer weights ("dynamic range"), and the steps between.

Only steps whose bits are certain are read: sums, products and bounds of floats, and what only moves them.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qjax.contrib.importers.tflite.kernels import BLOCKS, INT4_ROWS, ODD_INT4_ROWS, ROWS, WINDOWS
from qjax.contrib.importers.tflite.products import dilation_of, strides_of, windows
from qjax.contrib.importers.tflite.shapes import reshaped_as
from qjax.contrib.importers.tflite.values import FLOATS, Codes, bad, code_range, volume
from qjax.contrib.importers.tflite.walk import Walk, reads_floats
from qjax.export.tflite_schema.activations import BOUNDS
from qjax.export.tflite_schema.enums import ACTIVATIONS
from qjax.export.tflite_schema.model import FileTensor, Operator
from qjax.graph.ir import Quantization
from qjax.support.errors import Unsupported

_BINARY = {"ADD": "add", "SUB": "sub", "MUL": "mul", "MAXIMUM": "max", "MINIMUM": "min"}


@reads_floats("FULLY_CONNECTED", ignores=("bias_type",))
def fully_connected(walk: Walk, operator: Operator) -> None:
    """Rows of floats, which are quantized at run time, times a matrix (out, in)."""
    if operator.options["format"]:
        raise Unsupported("its weights are shuffled", "Convert the model again without that option")
    x, stored = walk.floats_of(operator, 0), walk.operand(operator, 1)
    if stored.span is None or stored.dtype not in ("int8", "int4"):
        raise Unsupported(
            f"its weights {stored.name!r} are no constant of 8 or 4 bits",
            "Quantize them: to integers as a whole, or the weights alone (dynamic range)",
        )
    if len(stored.shape) != 2 or not volume(stored.shape) or volume(x.shape) % stored.shape[1]:
        raise bad(operator, f"an input of {x.shape}, weights of {stored.shape}")
    n, depth = stored.shape
    keep = bool(operator.options["keep_dims"])
    if keep and (not x.shape or x.shape[-1] != depth):
        raise bad(operator, f"an input of {x.shape}, weights of {stored.shape}")
    rows = x.shape[:-1] if keep else (volume(x.shape) // depth,)
    x = _reshaped(walk, x, (*rows, depth), f"{walk.name_of(operator)}/input")
    kernel, grid = _kernel(walk, stored)
    constants = {"kernel": walk.held(operator, 1, kernel, grid)}
    constants |= _bias(walk, operator, n)
    attributes = {"symmetric": not operator.options["asymmetric"], "summed": 1, "features": [n]}
    y = _before_activation(walk, operator, (*rows, n))
    walk.marks[y.name] = _mark(stored)
    walk.node("dynamic_dot", [x], y.name, attributes, constants)
    _activated(walk, operator, y)


@reads_floats("CONV_2D", ignores=("bias_type",))
def conv(walk: Walk, operator: Operator) -> None:
    """A convolution of floats, which are quantized at run time, with a kernel (out, height, width, in)."""
    x, stored = walk.floats_of(operator, 0), walk.operand(operator, 1)
    if stored.span is None or stored.dtype != "int8":
        raise Unsupported(
            f"its weights {stored.name!r} are no constant of 8 bits",
            "Quantize them: to integers as a whole, or the weights alone (dynamic range)",
        )
    if len(x.shape) != 4 or len(stored.shape) != 4 or not volume(stored.shape):
        raise bad(operator, f"an input of {x.shape}, weights of {stored.shape}")
    if x.shape[3] != stored.shape[3]:
        raise Unsupported(f"an input of {x.shape} and weights of {stored.shape}, so groups", FLOATS)
    strides, dilation = strides_of(operator), dilation_of(operator)
    padding, sizes = windows(operator, x.shape[1:3], stored.shape[1:3], strides, dilation)
    kernel, grid = _kernel(walk, stored)
    constants = {"kernel": walk.held(operator, 1, kernel, grid), **_bias(walk, operator, stored.shape[0])}
    attributes = {"symmetric": False, "strides": strides, "padding": padding, "rhs_dilation": dilation}
    y = _before_activation(walk, operator, (x.shape[0], *sizes, stored.shape[0]))
    walk.marks[y.name] = WINDOWS
    walk.node("dynamic_conv", [x], y.name, attributes, constants)
    _activated(walk, operator, y)


def _bias(walk: Walk, operator: Operator, n: int) -> dict[str, str]:
    if not walk.has(operator, 2):
        return {}
    bias = walk.operand(operator, 2)
    if bias.span is None or bias.dtype != "float32" or bias.size != n:
        raise Unsupported(f"its bias {bias.name!r} is no constant of {n} floats", FLOATS)
    return {"bias": walk.held(operator, 2, walk.array(bias).reshape(-1))}


@reads_floats(*_BINARY, ignores=("powers_of_two",))
def binary(walk: Walk, operator: Operator) -> None:
    """A sum, a product or a bound of floats, element by element."""
    sides = [_side(walk, operator, place) for place in (0, 1)]
    try:
        shape = np.broadcast_shapes(*(side.shape for side in sides))
    except ValueError:
        raise bad(operator, "shapes of its sides") from None
    flowing = [side for side in sides if isinstance(side, Codes)]
    constants: dict[str, str] = {}
    program: list[Any] = []
    operands: list[Any] = []
    for side in sides:
        if isinstance(side, Codes):
            operand: list[Any] = ["value", flowing.index(side)]
        else:
            role = f"constant{len(constants)}"
            constants[role] = walk.constant(f"{walk.name_of(operator)}/{role}", side)
            operand = ["constant", role, "float32"]
        if side.shape != shape:
            axes = list(range(len(shape) - len(side.shape), len(shape)))
            program.append(["broadcast_in_dim", [operand], [["shape", list(shape)], ["broadcast_dimensions", axes]]])
            operand = ["step", len(program) - 1]
        operands.append(operand)
    program.append([_BINARY[operator.name], operands, []])
    fused = operator.name not in ("MAXIMUM", "MINIMUM")
    y = _before_activation(walk, operator, shape) if fused else _result(walk, operator, shape)
    _island(walk, y.name, flowing, program, constants)
    if fused:
        _activated(walk, operator, y)


@reads_floats(*BOUNDS)
def activation(walk: Walk, operator: Operator) -> None:
    """Bounds of floats."""
    x = walk.floats_of(operator, 0)
    _island(walk, _result(walk, operator, x.shape).name, [x], _bounds(operator.name), {})


@reads_floats("RESHAPE")
def reshape(walk: Walk, operator: Operator) -> None:
    """The shape of floats."""
    x = walk.floats_of(operator, 0)
    shape = reshaped_as(walk, operator, x)
    _island(walk, _result(walk, operator, shape).name, [x], [_reshape(shape)], {})


def _kernel(walk: Walk, stored: FileTensor) -> tuple[NDArray[Any], Quantization]:
    """The codes and their scales; those of groups as (out, groups, size)."""
    codes = walk.array(stored)
    low, high = code_range(stored)
    low += not (codes == low).any()
    zero_point = np.zeros((), np.int32)
    if stored.blocks is not None:
        scale = walk.model.block_scales(stored)
        grouped = codes.reshape(stored.shape[0], scale.shape[1], stored.blocks[1])
        _check(stored, scale)
        return grouped, Quantization(scale, zero_point, low, high, (0, 1))
    if stored.zero_point.any() or (stored.scale.size > 1 and stored.axis != 0):
        raise Unsupported(
            f"its weights {stored.name!r} have a zero point, or scales along axis {stored.axis}",
            "Its kernel has symmetric weights with one scale, or one for each output channel",
        )
    if stored.scale.size not in (1, stored.shape[0]):
        raise Unsupported(f"its weights {stored.name!r} have {stored.scale.size} scales", FLOATS)
    _check(stored, stored.scale)
    one = stored.scale.size == 1
    scale = stored.scale.reshape(()) if one else stored.scale
    return codes, Quantization(scale, zero_point, low, high, () if one else (0,))


def _check(stored: FileTensor, scale: NDArray[Any]) -> None:
    if not (np.isfinite(scale).all() and (scale > 0).all()):
        raise Unsupported(f"its weights {stored.name!r} have a scale that is no positive number", FLOATS)


def _mark(stored: FileTensor) -> str:
    if stored.blocks is not None:
        return BLOCKS
    if stored.dtype == "int4":
        return ODD_INT4_ROWS if stored.shape[1] % 2 else INT4_ROWS
    return ROWS


def _side(walk: Walk, operator: Operator, place: int) -> Any:
    """A float tensor, or the numbers of a constant."""
    tensor = walk.operand(operator, place)
    if tensor.span is not None and tensor.dtype == "float32":
        return walk.array(tensor)
    return walk.floats_of(operator, place)


def _result(walk: Walk, operator: Operator, shape: Sequence[int]) -> Codes:
    tensor = walk.output(operator)
    if tensor.dtype != "float32":
        raise Unsupported(f"its output {tensor.name!r} is {tensor.dtype}", FLOATS)
    walk.add(tensor, tuple(shape), None)
    return walk.codes[tensor.index]


def _before_activation(walk: Walk, operator: Operator, shape: Sequence[int]) -> Codes:
    """The result of an operator before the activation that is fused into it."""
    if not operator.options["activation"]:
        return _result(walk, operator, shape)
    return walk.between(f"{walk.name_of(operator)}/sum", shape, Codes("", (), "float32", None))


def _activated(walk: Walk, operator: Operator, y: Codes) -> None:
    number = operator.options["activation"]
    if not number:
        return
    if not 0 < number < len(ACTIVATIONS) or ACTIVATIONS[number] not in BOUNDS:
        raise Unsupported(f"the activation number {number}", "Its kernels have RELU, RELU6 and RELU_N1_TO_1 only")
    _island(walk, _result(walk, operator, y.shape).name, [y], _bounds(ACTIVATIONS[number]), {})


def _bounds(name: str) -> list[Any]:
    low, high = BOUNDS[name]
    program: list[Any] = [["max", [["value", 0], ["literal", low, "float32"]], []]]
    if high is not None:
        program.append(["min", [["step", 0], ["literal", high, "float32"]], []])
    return program


def _reshaped(walk: Walk, x: Codes, shape: Sequence[int], name: str) -> Codes:
    if tuple(shape) == x.shape:
        return x
    flat = walk.between(name, shape, x)
    _island(walk, flat.name, [x], [_reshape(shape)], {})
    return flat


def _reshape(shape: Sequence[int]) -> list[Any]:
    return ["reshape", [["value", 0]], [["new_sizes", list(shape)]]]


def _island(walk: Walk, name: str, inputs: Sequence[Codes], program: list[Any], constants: dict[str, str]) -> None:
    """A node of float steps; ["step", i] is the result of step i, and the last one is the output."""
    count = len(inputs)

    def placed(operand: list[Any]) -> list[Any]:
        return ["value", count + operand[1]] if operand[0] == "step" else operand

    steps = [[primitive, [placed(item) for item in operands], params] for primitive, operands, params in program]
    attributes = {
        "program": steps,
        "results": [count + len(steps) - 1],
        "dtypes": ["float32"] * count,
        "batch": None,
    }
    walk.node("island", inputs, name, attributes, constants)
