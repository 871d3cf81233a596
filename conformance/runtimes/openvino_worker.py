"""What the process that holds OpenVINO computes (`process`): an ONNX model on the CPU plugin.

The package forks when it is imported, which the threads of JAX do not survive.
"""

import importlib
from typing import Any

import numpy as np

_SETTINGS = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}


def start() -> str:
    """OpenVINO's version."""
    return str(importlib.import_module("openvino").get_version())


def run(request: dict[str, Any]) -> dict[str, Any]:
    """request: "model", the bytes of an ONNX model; "inputs", its arrays.

    Returns "outputs", and under "layers" the execution graph: the type and the precision of each layer.
    """
    core = importlib.import_module("openvino").Core()
    compiled = core.compile_model(core.read_model(request["model"]), "CPU", _SETTINGS)
    outputs = [np.asarray(value) for value in compiled(request["inputs"]).values()]
    facts = [node.get_rt_info() for node in compiled.get_runtime_model().get_ordered_ops()]
    layers = [(fact["layerType"].astype(str), fact["runtimePrecision"].astype(str)) for fact in facts]
    return {"outputs": outputs, "layers": layers}
