"""Targets: named descriptions of the arithmetic of runtimes, whose rounding a graph can match."""

from qjax.targets import embedded, executorch, fpga, generic, onnx, openvino, tflite, torch, tvm
from qjax.targets.base import Target, Weighted, get, names, register

__all__ = [
    "Target",
    "Weighted",
    "embedded",
    "executorch",
    "fpga",
    "generic",
    "get",
    "names",
    "onnx",
    "openvino",
    "register",
    "tflite",
    "torch",
    "tvm",
]
