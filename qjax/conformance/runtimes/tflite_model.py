"""One operation as a .tflite file, written with the schema's object API: no TensorFlow takes part.

Layouts of the file: activations NHWC, the kernel of a fully connected layer (out, in), of a convolution OHWI, of a
depthwise convolution (1, H, W, out). Codes of activations may be int8, uint8 or int16, those of kernels int8; with
int16 activations the bias has 64 bits.
"""

from typing import Any

import numpy as np

from qjax.conformance.case import Case, Grid

_TYPES = {"float32": "FLOAT32", "int8": "INT8", "uint8": "UINT8", "int16": "INT16", "int32": "INT32", "int64": "INT64"}

# op -> (operator, its options' class, version for 8-bit codes, version for int16 codes): tflite's op_version.cc
_OPERATORS = {
    "fully_connected": ("FULLY_CONNECTED", "FullyConnectedOptions", 4, 7),
    "conv2d": ("CONV_2D", "Conv2DOptions", 3, 4),
    "depthwise_conv2d": ("DEPTHWISE_CONV_2D", "DepthwiseConv2DOptions", 3, 5),
    "add": ("ADD", "AddOptions", 2, 3),
    "subtract": ("SUB", "SubOptions", 2, 5),
    "multiply": ("MUL", "MulOptions", 3, 4),
    "rescale": ("QUANTIZE", "QuantizeOptions", 2, 2),
    "quantize": ("QUANTIZE", "QuantizeOptions", 2, 2),
    "average_pool": ("AVERAGE_POOL_2D", "Pool2DOptions", 2, 3),
    "mean": ("MEAN", "ReducerOptions", 2, 3),
    "logistic": ("LOGISTIC", "", 2, 3),
    "tanh": ("TANH", "", 2, 3),
    "softmax": ("SOFTMAX", "SoftmaxOptions", 2, 3),
}


def tflite_model(case: Case) -> bytes:
    """The case as a model of one operator, with the shapes of its inputs.

    Raises:
      ValueError: an operation that has no .tflite form here, or codes that its kernel does not take.
    """
    import flatbuffers
    from ai_edge_litert import schema_py_generated as schema

    if case.op not in _OPERATORS:
        raise ValueError(f"a .tflite model is made of one of {', '.join(_OPERATORS)}. Got {case.op!r}.")
    operator, options_name, version8, version16 = _OPERATORS[case.op]
    file = _File(schema)
    inputs = [
        file.tensor(f"input{i}", x.shape, str(x.dtype), case.grids[i] if case.grids else None)
        for i, x in enumerate(case.inputs)
    ]
    operands = inputs + _constants(file, case)
    output = file.tensor("output", output_shape(case), case.output.dtype, case.output)

    version = version16 if case.output.dtype == "int16" else version8
    if case.op == "fully_connected" and case.kernel_grid is not None and np.ndim(case.kernel_grid.scale):
        version = 11 if case.output.dtype == "int16" else 12
    code = schema.OperatorCodeT()
    number = getattr(schema.BuiltinOperator, operator)
    code.builtinCode, code.deprecatedBuiltinCode, code.version = number, min(number, 127), version
    node = schema.OperatorT()
    node.opcodeIndex, node.inputs, node.outputs = 0, operands, [output]
    if options_name:
        node.builtinOptionsType = getattr(schema.BuiltinOptions, options_name)
        node.builtinOptions = _options(getattr(schema, options_name + "T")(), case, schema)

    graph = schema.SubGraphT()
    graph.tensors, graph.inputs, graph.outputs, graph.operators, graph.name = (
        file.tensors,
        inputs,
        [output],
        [node],
        "main",
    )
    model = schema.ModelT()
    model.version, model.operatorCodes, model.subgraphs, model.buffers = 3, [code], [graph], file.buffers
    model.description = case.op
    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


def output_shape(case: Case) -> tuple[int, ...]:
    """The shape of the case's output."""
    shape = case.inputs[0].shape
    attributes = case.attributes
    match case.op:
        case "fully_connected":
            return (shape[0], _kernel(case).shape[1])
        case "conv2d" | "depthwise_conv2d":
            height, width, _, channels = _kernel(case).shape
            return (shape[0], *_spatial(shape, (height, width), attributes), channels)
        case "average_pool":
            return (shape[0], *_spatial(shape, tuple(attributes["window"]), attributes), shape[3])
        case "mean":
            axes = {axis % len(shape) for axis in attributes["axes"]}
            return tuple(1 if axis in axes else n for axis, n in enumerate(shape))
        case _:
            return tuple(np.broadcast_shapes(*(x.shape for x in case.inputs)))


class _File:
    """Tensors and buffers under construction; buffer 0 is empty by the format's convention."""

    def __init__(self, schema: Any) -> None:
        self.schema = schema
        self.tensors: list[Any] = []
        self.buffers: list[Any] = [schema.BufferT()]

    def tensor(
        self, name: str, shape: tuple[int, ...], dtype: str, grid: Grid | None = None, data: Any = None, axis: int = 0
    ) -> int:
        tensor = self.schema.TensorT()
        tensor.name, tensor.shape = name, [int(n) for n in shape]
        tensor.type = getattr(self.schema.TensorType, _TYPES[dtype])
        if grid is not None:
            tensor.quantization = self.schema.QuantizationParametersT()
            scales = np.atleast_1d(np.asarray(grid.scale, np.float32))
            tensor.quantization.scale = scales
            tensor.quantization.zeroPoint = np.full(scales.shape, grid.zero_point, np.int64)
            tensor.quantization.quantizedDimension = axis
        if data is not None:
            buffer = self.schema.BufferT()
            buffer.data = np.frombuffer(np.ascontiguousarray(data).tobytes(), np.uint8)
            self.buffers.append(buffer)
            tensor.buffer = len(self.buffers) - 1
        self.tensors.append(tensor)
        return len(self.tensors) - 1


def _constants(file: _File, case: Case) -> list[int]:
    if case.op == "mean":
        axes = np.asarray(case.attributes["axes"], np.int32)
        return [file.tensor("axes", axes.shape, "int32", data=axes)]
    if case.op not in ("fully_connected", "conv2d", "depthwise_conv2d"):
        return []
    kernel = _kernel(case)
    if case.kernel_grid is None:
        raise ValueError(f"{case.op} needs the grid of its kernel; Case.kernel_grid is None.")
    grid = case.kernel_grid
    if case.op == "fully_connected":
        stored, axis = kernel.T, 0
    elif case.op == "conv2d":
        stored, axis = kernel.transpose(3, 0, 1, 2), 0
    else:
        # HW1O, which is 1HWO in memory
        stored, axis = kernel.transpose(2, 0, 1, 3), 3
    operands = [file.tensor("kernel", stored.shape, grid.dtype, grid, stored, axis)]
    if case.bias is not None:
        wide = case.output.dtype == "int16"
        bias = np.asarray(case.bias).astype(np.int64 if wide else np.int32)
        scale = np.float32(case.grids[0].scale) * np.asarray(grid.scale, np.float32)
        bias_grid = Grid(scale, 0, str(bias.dtype))
        operands.append(file.tensor("bias", bias.shape, str(bias.dtype), bias_grid, bias))
    return operands


def _options(options: Any, case: Case, schema: Any) -> Any:
    attributes = case.attributes
    if hasattr(options, "strideH"):
        options.strideH, options.strideW = (int(n) for n in attributes.get("strides", (1, 1)))
        options.padding = getattr(schema.Padding, attributes.get("padding", "VALID"))
    if case.op == "average_pool":
        options.filterHeight, options.filterWidth = (int(n) for n in attributes["window"])
    if case.op == "depthwise_conv2d":
        options.depthMultiplier = _kernel(case).shape[3] // case.inputs[0].shape[3]
    if case.op == "mean":
        options.keepDims = True
    if case.op == "softmax":
        options.beta = 1.0
    if case.op in ("add", "subtract"):
        # scales of int16 tensors need not be powers of two
        options.potScaleInt16 = False
    return options


def _kernel(case: Case) -> np.ndarray:
    if case.kernel is None:
        raise ValueError(f"{case.op} needs a kernel; Case.kernel is None.")
    return case.kernel


def _spatial(shape: tuple[int, ...], window: tuple[int, ...], attributes: Any) -> tuple[int, int]:
    strides = attributes.get("strides", (1, 1))
    if attributes.get("padding", "VALID") == "SAME":
        height, width = (-(-n // s) for n, s in zip(shape[1:3], strides, strict=True))
    else:
        height, width = ((n - k) // s + 1 for n, k, s in zip(shape[1:3], window, strides, strict=True))
    return height, width
