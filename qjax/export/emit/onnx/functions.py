"""Functions that ONNX Runtime computes on 8-bit codes: QLinearSigmoid, QLinearLeakyRelu, QLinearSoftmax.

The runtime computes its own table when it loads the model: DequantizeLinear, the function and QuantizeLinear of every
code, in float32. The steps of LeakyRelu are exact IEEE operations, so its table is computed here and compared. The last
bits of a sigmoid depend on the machine. If no result is closer to a tie than their error, they do not matter, and the
table is known. Any other table is looked up in unsigned codes if these exist, and otherwise becomes a function of
integers.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qjax.export.emit.onnx.builder import element_type
from qjax.export.emit.onnx.codes import fits, limits
from qjax.export.emit.onnx.codes_writer import CodesWriter
from qjax.export.emit.onnx.views import View
from qjax.graph.ir import Node, Quantization, Tensor
from qjax.numerics.elementary import Expression
from qjax.numerics.qlinear_softmax import overflows

_SIGMOID_ERROR = 2.0**-21
"""Above 2^-22.4, the greatest error of ONNX Runtime's float32 sigmoid on 27 million numbers within 200 of 0."""
_QUOTIENT_ERROR = 2.0**-15
"""The error of a float32 quotient below 256, in steps of the result."""


def table(w: CodesWriter, node: Node) -> bool:
    """Writes a table as a function of the runtime, if the runtime computes exactly this table."""
    tensors = w.graph.tensors
    x, y = tensors[node.inputs[0]].quantization, tensors[node.output].quantization
    info = np.iinfo(tensors[node.inputs[0]].dtype)
    if not fits(w.graph, node) or list(node.attributes["range"]) != [info.min, info.max] or x is None or y is None:
        return False
    expression = Expression.from_json(node.attributes["expression"])
    codes = np.arange(info.min, info.max + 1)
    reals = (codes - int(np.asarray(x.zero_point).reshape(()))).astype(np.float32)
    reals = reals * np.asarray(x.scale, np.float32).reshape(())
    name, attributes, steps = "", dict[str, Any](), None
    slope = leaky_slope(expression)
    if expression.bare == "logistic":
        name, steps = "Sigmoid", _sigmoid(reals, y)
    elif slope is not None:
        name, attributes["alpha"] = "LeakyRelu", slope
        values = np.where(reals >= 0, reals, reals * np.float32(slope))
        steps = np.rint(values / np.asarray(y.scale, np.float32).reshape(()))
    held = np.asarray(w.graph.constant(node, "table")).astype(np.int64)
    view = w.value(node.inputs[0])
    if steps is None or not np.array_equal(np.clip(steps + np.asarray(y.zero_point).reshape(()), y.qmin, y.qmax), held):
        return _look_up_unsigned(w, node, view, held)
    return w.write(node, view.axes, name, [w.operand(node.inputs[0], view)], None, None, **attributes)


def _look_up_unsigned(w: CodesWriter, node: Node, view: View, held: NDArray[np.int64]) -> bool:
    """Write a table that is indexed by codes that exist as uint8."""
    codes = w.unsigned_of(view.name)
    dims = w.dims(view.stored)
    if codes is None or dims is None or 0 in dims or w.graph.tensors[node.output].dtype != "int8":
        return False
    steps = [w.fresh(f"{node.output}/{step}") for step in ("index", "flat", "entries", "unsigned")]
    within = np.clip(held, *limits(w.graph, node))
    entries = w.stored(f"{node.output}/table", (within + 128).astype(np.uint8))
    w.add("Cast", [codes], steps[0], to=element_type("int32"))
    w.add("Reshape", [steps[0], w.shape([-1])], steps[1])
    # GatherElements is five times as fast as Gather
    w.add("GatherElements", [entries, steps[1]], steps[2], name=node.name, axis=0)
    w.add("Reshape", [steps[2], w.shape(dims)], steps[3])
    name = w.place(node.output, view.axes)
    w.lower(steps[3], name)
    w.placed(node.output, View.full(name, "int8", w.sizes(node.output), view.axes))
    return True


def softmax(w: CodesWriter, node: Node) -> bool:
    """Write a softmax by the runtime's method if its product stays within float32; see `numerics.qlinear_softmax`.

    It is always computed on uint8, because versions before 1.31 wrap a share of 1 in int8.
    """
    if node.attributes["method"] != "onnx" or not fits(w.graph, node):
        return False
    (name,) = node.inputs
    tensors = w.graph.tensors
    length = w.sizes(name)[-1]
    x, y = (np.float32(np.asarray(q.scale).reshape(())) for q in _grids(tensors[name], tensors[node.output]))
    if overflows(x, length, y):
        return False
    view = w.value(name)
    last = len(view.shape) - 1
    order = view.axes if view.axes[-1:] == (last,) else tuple(range(last + 1))
    operand = w.factor(name, w.operand(name, w.in_order(view, order)))
    unsigned = tensors[name].dtype == "int8"
    return w.write(node, order, "Softmax", [operand], unsigned=unsigned, axis=-1)


def _grids(*tensors: Tensor) -> list[Quantization]:
    return [tensor.quantization for tensor in tensors if tensor.quantization is not None]


def _sigmoid(reals: NDArray[np.float32], y: Quantization) -> NDArray[np.float64] | None:
    """The rounded steps of the result, or None if an error of the runtime's sigmoid might change one."""
    scale = float(np.asarray(y.scale, np.float32).reshape(()))
    with np.errstate(over="ignore"):
        exact = 1 / (1 + np.exp(-reals.astype(np.float64))) / scale
    away = np.abs(exact - np.floor(exact) - 0.5)
    return np.rint(exact) if (away > _SIGMOID_ERROR / scale + _QUOTIENT_ERROR).all() else None


def leaky_slope(expression: Expression) -> float | None:
    """The slope of the function that is x if x > 0 (or >= 0), else slope x; None for another function."""
    if len(expression.steps) != 3 or expression.parameters:
        return None
    compared, scaled = None, None
    for index, (primitive, operands) in enumerate(expression.steps[:2], 1):
        if primitive == "mul" and 0 in operands:
            (number,) = [o for o in operands if isinstance(o, str)] or [""]
            scaled = (index, number) if number else None
        elif primitive in ("ge", "gt") and operands[0] == 0 and isinstance(operands[1], str):
            compared = index if float.fromhex(operands[1]) == 0 else None
    if compared is None or scaled is None or expression.steps[2] != ("select", (compared, scaled[0], 0)):
        return None
    slope = float.fromhex(scaled[1])
    return slope if math.isfinite(slope) and float(np.float32(slope)) == slope else None
