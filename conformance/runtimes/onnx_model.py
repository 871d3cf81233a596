"""A Case as an ONNX model of one operation, in either of the two ways to write a quantized operation.

"operators": those that compute on codes (QLinearMatMul, QLinearConv and Microsoft's own QGemm, QLinearAdd, ...).
"qdq": the float operator between DequantizeLinear and QuantizeLinear, which the runtime's optimizer fuses into the
former. Images of the model have their channels first, as ONNX has them; those of the case have them last.
"""

import importlib
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from conformance.case import Case, Grid, padding, strides, window

Form = Literal["operators", "qdq"]

# The last opset under which ONNX Runtime 1.31 turns int8 weights of QLinearMatMul into uint8 on request
# (session.x64quantprecision); int16 codes came with 21.
_OPSET, _OPSET_INT16 = 19, 21
_IR_VERSION = 10

_MICROSOFT = "com.microsoft"
_IMAGES = ("conv2d", "depthwise_conv2d", "average_pool")
_FLOAT_OPERATORS = {
    "conv2d": "Conv",
    "depthwise_conv2d": "Conv",
    "add": "Add",
    "multiply": "Mul",
    "matmul": "MatMul",
    "average_pool": "AveragePool",
    "logistic": "Sigmoid",
    "tanh": "Tanh",
    "softmax": "Softmax",
}
_CODE_OPERATORS = {
    "add": "QLinearAdd",
    "multiply": "QLinearMul",
    "average_pool": "QLinearAveragePool",
    "logistic": "QLinearSigmoid",
    "softmax": "QLinearSoftmax",
}


def onnx_model(case: Case, form: Form = "operators") -> bytes:
    """The serialized model: inputs x0, x1, ... of the shapes of `model_inputs`, output y.

    "rescale" is DequantizeLinear and QuantizeLinear in either form, "quantize" QuantizeLinear; "tanh" has no operator
    on codes. A mean over the axes 1 and 2 of an image is a global average pool, any other mean ReduceMean between
    DequantizeLinear and QuantizeLinear.

    Raises:
      ModuleNotFoundError: onnx is not installed.
      ValueError: the case lacks a kernel that its operation needs.
    """
    onnx = _onnx()
    graph = _Graph(onnx)
    inputs = model_inputs(case)
    names = [f"x{i}" for i in range(len(inputs))]
    if case.op == "quantize":
        graph.node("QuantizeLinear", [names[0], *graph.grid("y", case.output)], ["y"])
    elif form == "operators" and case.op not in ("rescale", "tanh") and not _reduces(case):
        _on_codes(graph, case, names)
    else:
        _on_floats(graph, case, names)
    wide = "int16" in (case.output.dtype, *(grid.dtype for grid in case.grids))
    helper = onnx.helper
    infos = [
        helper.make_tensor_value_info(n, _dtype(onnx, x.dtype), x.shape) for n, x in zip(names, inputs, strict=True)
    ]
    output = helper.make_tensor_value_info("y", _dtype(onnx, case.output.dtype), None)
    model = helper.make_model(
        helper.make_graph(graph.nodes, case.op, infos, [output], graph.constants),
        opset_imports=[
            helper.make_opsetid("", _OPSET_INT16 if wide else _OPSET),
            helper.make_opsetid(_MICROSOFT, 1),
        ],
        ir_version=_IR_VERSION,
    )
    return model.SerializeToString()


def model_inputs(case: Case) -> list[np.ndarray]:
    """What to feed: the inputs of the case, images with their channels first."""
    return [np.ascontiguousarray(x.transpose(0, 3, 1, 2)) if _is_image(case) else x for x in case.inputs]


def case_output(case: Case, y: np.ndarray) -> np.ndarray:
    """The model's output in the layout of the case."""
    return np.ascontiguousarray(y.transpose(0, 2, 3, 1)) if _is_image(case) else y


class _Graph:
    """Nodes and constants under construction."""

    def __init__(self, onnx: Any) -> None:
        self.onnx = onnx
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def node(self, op: str, inputs: Sequence[str], outputs: Sequence[str], domain: str = "", **attributes: Any) -> str:
        self.nodes.append(self.onnx.helper.make_node(op, inputs, outputs, domain=domain, **attributes))
        return outputs[0]

    def constant(self, name: str, value: Any) -> str:
        self.constants.append(self.onnx.numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    def grid(self, name: str, grid: Grid) -> list[str]:
        """The names of the constants scale and zero point; both are per channel where the scale is."""
        scale = np.asarray(grid.scale, np.float32)
        zero_point = np.full(scale.shape, grid.zero_point, grid.dtype)
        # ascontiguousarray would turn a scalar into a vector
        scale, zero_point = (
            self.onnx.numpy_helper.from_array(v, f"{name}_{k}") for v, k in ((scale, "s"), (zero_point, "z"))
        )
        self.constants += [scale, zero_point]
        return [f"{name}_s", f"{name}_z"]


def _on_codes(graph: _Graph, case: Case, names: list[str]) -> None:
    operands = [part for i, grid in enumerate(case.grids) for part in (names[i], *graph.grid(names[i], grid))]
    y = graph.grid("y", case.output)
    if case.op in ("fully_connected", "conv2d", "depthwise_conv2d"):
        kernel, grid = _kernel(case)
        operands += [graph.constant("w", kernel), *graph.grid("w", grid)]
        bias = [] if case.bias is None else [graph.constant("b", np.asarray(case.bias, np.int32))]
        if case.op != "fully_connected":
            graph.node("QLinearConv", [*operands, *y, *bias], ["y"], **_attributes(case))
        elif bias:
            graph.node("QGemm", [*operands, *bias, *y], ["y"], _MICROSOFT)
        else:
            graph.node("QLinearMatMul", [*operands, *y], ["y"])
    elif case.op == "matmul":
        graph.node("QLinearMatMul", [*operands, *y], ["y"])
    elif case.op == "mean":
        graph.node("QLinearGlobalAveragePool", [*operands, *y], ["y"], _MICROSOFT, channels_last=1)
    else:
        extra = {"opset": 13, "axis": -1} if case.op == "softmax" else _attributes(case)
        graph.node(_CODE_OPERATORS[case.op], [*operands, *y], ["y"], _MICROSOFT, **extra)


def _on_floats(graph: _Graph, case: Case, names: list[str]) -> None:
    reals = [
        graph.node("DequantizeLinear", [name, *graph.grid(name, grid)], [f"{name}_real"])
        for name, grid in zip(names, case.grids, strict=True)
    ]
    if case.op in ("fully_connected", "conv2d", "depthwise_conv2d"):
        kernel, grid = _kernel(case)
        axis = 1 if case.op == "fully_connected" else 0
        parts = [graph.constant("w", kernel), *graph.grid("w", grid)]
        reals.append(graph.node("DequantizeLinear", parts, ["w_real"], axis=axis))
        if case.bias is not None:
            # float32, as the quantizers of models form it
            scale = np.asarray(case.grids[0].scale, np.float32) * np.asarray(grid.scale, np.float32)
            bias = graph.constant("b", np.asarray(case.bias, np.int32))
            parts = [bias, *graph.grid("b", Grid(scale, 0, "int32"))]
            reals.append(graph.node("DequantizeLinear", parts, ["b_real"], axis=0))
    if case.op == "rescale":
        real = reals[0]
    elif case.op == "fully_connected":
        real = graph.node("MatMul" if case.bias is None else "Gemm", reals, ["real"])
    elif case.op == "mean" and _reduces(case):
        axes = graph.constant("axes", np.asarray(case.attributes["axes"], np.int64))
        real = graph.node("ReduceMean", [*reals, axes], ["real"], keepdims=1)
    elif case.op == "mean":
        first = graph.node("Transpose", reals, ["real_first"], perm=[0, 3, 1, 2])
        pooled = graph.node("GlobalAveragePool", [first], ["real_pooled"])
        real = graph.node("Transpose", [pooled], ["real"], perm=[0, 2, 3, 1])
    else:
        real = graph.node(_FLOAT_OPERATORS[case.op], reals, ["real"], **_attributes(case))
    graph.node("QuantizeLinear", [real, *graph.grid("y", case.output)], ["y"])


def _attributes(case: Case) -> dict[str, Any]:
    if case.op not in _IMAGES:
        return {}
    pads = padding(case)
    found: dict[str, Any] = {
        "kernel_shape": [int(k) for k in window(case)],
        "strides": [int(s) for s in strides(case)],
        "pads": [low for low, _ in pads] + [high for _, high in pads],
    }
    if case.op == "depthwise_conv2d":
        found["group"] = case.inputs[0].shape[3]
    return found


def _kernel(case: Case) -> tuple[np.ndarray, Grid]:
    if case.kernel is None or case.kernel_grid is None:
        raise ValueError(f"{case.op} needs a kernel and its grid; Case.kernel or Case.kernel_grid is None.")
    # HWIO -> OIHW; the outputs of one input channel of a depthwise kernel are neighbours in both
    return (case.kernel if case.kernel.ndim == 2 else case.kernel.transpose(3, 2, 0, 1)), case.kernel_grid


def _reduces(case: Case) -> bool:
    """Whether the case is a mean that is not a global average pool."""
    if case.op != "mean":
        return False
    ndim = case.inputs[0].ndim
    return ndim != 4 or sorted(axis % ndim for axis in case.attributes["axes"]) != [1, 2]


def _is_image(case: Case) -> bool:
    return case.op in _IMAGES


def _dtype(onnx: Any, dtype: Any) -> int:
    return onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))


def _onnx() -> Any:
    try:
        onnx = importlib.import_module("onnx")
        importlib.import_module("onnx.numpy_helper")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("ONNX models need the package onnx: pip install onnx") from error
    return onnx
