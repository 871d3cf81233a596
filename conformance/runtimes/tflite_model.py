"""One operation as a .tflite file: the case's tensors and one operator, through `export.tflite_schema`.

Layouts of the file: activations NHWC, the kernel of a fully connected layer (out, in), of a convolution OHWI, of a
depthwise convolution (1, H, W, out). Codes of activations may be int8, uint8 or int16, those of kernels int8; with
int16 activations the bias has 64 bits.
"""

from typing import Any

import numpy as np

from conformance.case import Case, Grid
from conformance.case import output_shape as _output_shape
from qjax.export.tflite_schema.file import File, Scales

_OPERATORS = {
    "fully_connected": "FULLY_CONNECTED",
    "conv2d": "CONV_2D",
    "depthwise_conv2d": "DEPTHWISE_CONV_2D",
    "add": "ADD",
    "subtract": "SUB",
    "multiply": "MUL",
    "matmul": "BATCH_MATMUL",
    "rescale": "QUANTIZE",
    "quantize": "QUANTIZE",
    "average_pool": "AVERAGE_POOL_2D",
    "mean": "MEAN",
    "logistic": "LOGISTIC",
    "tanh": "TANH",
    "softmax": "SOFTMAX",
}

_WEIGHTED = ("fully_connected", "conv2d", "depthwise_conv2d")


def tflite_model(case: Case) -> bytes:
    """The case as a model of one operator, with the shapes of its inputs.

    Raises:
      ValueError: an operation that has no .tflite form here, or codes that its kernel does not take.
    """
    if case.op not in _OPERATORS:
        raise ValueError(f"a .tflite model is made of one of {', '.join(_OPERATORS)}. Got {case.op!r}.")
    file = File()
    inputs = [
        file.tensor(f"input{i}", x.shape, str(x.dtype), _scales(case.grids[i]) if case.grids else None)
        for i, x in enumerate(case.inputs)
    ]
    operands = inputs + _constants(file, case)
    output = file.tensor("output", output_shape(case), case.output.dtype, _scales(case.output))
    file.operator(_OPERATORS[case.op], operands, [output], **_options(case))
    return bytes(file.to_bytes(inputs, [output], description=case.op))


def output_shape(case: Case) -> tuple[int, ...]:
    """The shape of the file's output: that of the case's, but a mean keeps its axes."""
    if case.op == "mean":
        shape = case.inputs[0].shape
        axes = {axis % len(shape) for axis in case.attributes["axes"]}
        return tuple(1 if axis in axes else n for axis, n in enumerate(shape))
    return _output_shape(case)


def _constants(file: File, case: Case) -> list[int]:
    if case.op == "mean":
        axes = np.asarray(case.attributes["axes"], np.int32)
        return [file.tensor("axes", axes.shape, "int32", data=axes)]
    if case.op not in _WEIGHTED:
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
    operands = [file.tensor("kernel", stored.shape, grid.dtype, Scales(grid.scale, grid.zero_point, axis), stored)]
    if case.bias is not None:
        bias = np.asarray(case.bias).astype(np.int64 if case.output.dtype == "int16" else np.int32)
        scale = np.float32(case.grids[0].scale) * np.asarray(grid.scale, np.float32)
        operands.append(file.tensor("bias", bias.shape, str(bias.dtype), Scales(scale), bias))
    return operands


def _options(case: Case) -> dict[str, Any]:
    attributes = case.attributes
    options: dict[str, Any] = {}
    if case.op in ("conv2d", "depthwise_conv2d", "average_pool"):
        options["strideH"], options["strideW"] = (int(n) for n in attributes.get("strides", (1, 1)))
        options["padding"] = attributes.get("padding", "VALID")
    if case.op == "average_pool":
        options["filterHeight"], options["filterWidth"] = (int(n) for n in attributes["window"])
    if case.op == "depthwise_conv2d":
        options["depthMultiplier"] = _kernel(case).shape[3] // case.inputs[0].shape[3]
    if case.op == "mean":
        options["keepDims"] = True
    if case.op == "softmax":
        options["beta"] = 1.0
    if case.op == "matmul":
        options["adjX"] = options["adjY"] = False
    if case.op in ("add", "subtract"):
        # scales of int16 tensors need not be powers of two
        options["potScaleInt16"] = False
    return options


def _scales(grid: Grid) -> Scales:
    return Scales(grid.scale, grid.zero_point)


def _kernel(case: Case) -> np.ndarray:
    if case.kernel is None:
        raise ValueError(f"{case.op} needs a kernel; Case.kernel is None.")
    return case.kernel
