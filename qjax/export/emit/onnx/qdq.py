"""Style "qdq": standard float operators between DequantizeLinear and QuantizeLinear, which ONNX Runtime fuses.

    DequantizeLinear(x), DequantizeLinear(w) -> Conv -> QuantizeLinear    runs as    QLinearConv(x, w)

The session's optimizer turns each such group into one operator on codes, with the graph's bits. Without the optimizer
the file is computed in float32, with sums in an order that the runtime chooses, and codes can differ.

Activations of uint8 have uint8 weights (with the zero point 128), those of int8 have int8 weights. Such products are
exact on every CPU. Weights of at most 4 bits are stored as INT4 or UINT4, followed by a Cast that the optimizer folds,
because ONNX Runtime has no 4-bit kernel with integer sums.
"""

from typing import Any

import onnx

from qjax.export.emit.onnx.codes import INT8_OPTION, RESCALE_OPTION, Operation, Options, checked
from qjax.export.emit.onnx.codes_writer import CodesWriter
from qjax.export.emit.onnx.operations import ONNXRUNTIME
from qjax.graph.ir import Graph

STYLE = "qdq"

_LEFT_IN_FLOATS = "Sub"
"""An operation for which the optimizer has no operator on codes."""


def to_model(graph: Graph, **options: Any) -> onnx.ModelProto:
    """The model; options: those of `codes.Options`."""
    made = Options(**options)
    return CodesWriter(checked(graph, STYLE, made), made, STYLE, write, ONNXRUNTIME).model()


def write(writer: CodesWriter, operation: Operation, title: str) -> None:
    """Write DequantizeLinear of the operands, the float operator, and QuantizeLinear."""
    reals = [writer.real(operand) for operand in operation.operands]
    if operation.bias is not None:
        bias = operation.bias
        axis: dict[str, Any] = {} if bias.axis is None else {"axis": bias.axis}
        output = writer.fresh(f"{bias.codes}/real")
        reals.append(writer.add("DequantizeLinear", [bias.codes, bias.scale], output, **axis))
    result, real = operation.result, reals[0]
    if operation.real is not None:
        real = writer.fresh(f"{result.codes}/real")
        writer.add(operation.real, reals, real, name=title, **operation.attributes)
    name = f"{title}/quantize" if operation.real is not None else title
    writer.add("QuantizeLinear", [real, result.scale, result.zero_point], result.codes, name=name)
    if operation.real is None:
        writer.options[RESCALE_OPTION] = "1"
    elif operation.real != _LEFT_IN_FLOATS and writer.dtype(operation.operands[0]) == "int8":
        writer.options[INT8_OPTION] = "1"
