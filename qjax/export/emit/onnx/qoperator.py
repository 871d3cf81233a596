"""Style "qoperator": ONNX Runtime's operators on codes (QLinearConv, QGemm, QLinearAdd, ...), without its optimizer.

`qjax.export.onnx_ops` lists the operators and the roles of their inputs. Subtraction and requantization have no such
operator. They are written as the runtime computes them: DequantizeLinear, the operation in float32, QuantizeLinear.
"""

from typing import Any

import onnx

from qjax.export.emit.onnx import qdq
from qjax.export.emit.onnx.codes import Operation, Options, checked
from qjax.export.emit.onnx.codes_writer import CodesWriter
from qjax.export.emit.onnx.operations import ONNXRUNTIME
from qjax.export.onnx_ops import OF_REAL
from qjax.graph.ir import Graph

STYLE = "qoperator"


def to_model(graph: Graph, **options: Any) -> onnx.ModelProto:
    """The model; options: those of `codes.Options`."""
    made = Options(**options)
    return CodesWriter(checked(graph, STYLE, made), made, STYLE, write, ONNXRUNTIME).model()


def write(writer: CodesWriter, operation: Operation, title: str) -> None:
    """One operator on codes."""
    op = OF_REAL.get(operation.real or "")
    if op is None:
        qdq.write(writer, operation, title)
        return
    result = operation.result
    names = {"y_scale": result.scale, "y_zero_point": result.zero_point}
    for role, operand in zip(op.operands, operation.operands, strict=True):
        names |= {role: operand.codes, f"{role}_scale": operand.scale, f"{role}_zero_point": operand.zero_point}
    if operation.bias is not None:
        names["bias"] = operation.bias.codes
    inputs = [names.get(role, "") for role in op.roles]
    while not inputs[-1]:
        inputs.pop()
    attributes = {**operation.attributes, **op.attributes}
    writer.add(op.name, inputs, result.codes, domain=op.domain, name=title, **attributes)
