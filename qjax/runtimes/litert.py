"""Runs a .tflite file on LiteRT, with one of its three sets of kernels."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from qjax.runtimes import Run, load


def prepare(graph: Any, folder: str, batch: int, mode: str, options: dict[str, Any]) -> Run:
    """Load the file in LiteRT. mode: a name of LiteRT's OpResolverType."""
    module = load("ai_edge_litert.interpreter", "LiteRT", "ai-edge-litert")
    path = os.path.join(folder, "model.tflite")
    graph.emit("tflite", path, batch=batch, **options)
    interpreter = module.Interpreter(
        model_path=path, experimental_op_resolver_type=getattr(module.OpResolverType, mode), num_threads=1
    )
    interpreter.allocate_tensors()
    inputs = [details["index"] for details in interpreter.get_input_details()]
    outputs = [details["index"] for details in interpreter.get_output_details()]

    def run(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        for index, array in zip(inputs, arrays, strict=True):
            interpreter.set_tensor(index, np.ascontiguousarray(array))
        interpreter.invoke()
        return [np.array(interpreter.get_tensor(index)) for index in outputs]

    return run
