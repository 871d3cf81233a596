"""Runs an .onnx file on ONNX Runtime, or on the interpreter of the ONNX specification."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from qjax.export import strict_json
from qjax.run.quantize_io import dequantize_output
from qjax.runtimes import Run, load


def prepare(graph: Any, folder: str, batch: int, mode: str, options: dict[str, Any]) -> Run:
    """Load the file. mode: "optimized", "plain" for ONNX Runtime, "reference" for the specification's interpreter."""
    path = os.path.join(folder, "model.onnx")
    graph.emit("onnx", path, batch=batch, **options)
    if mode == "reference":
        evaluator = load("onnx.reference", "The package onnx", "onnx").ReferenceEvaluator(path)
        names, floats = list(evaluator.input_names), [False] * len(evaluator.input_names)
        execute = evaluator.run
    else:
        session = session_of(path, optimized=mode == "optimized")
        names = [node.name for node in session.get_inputs()]
        floats = [node.type == "tensor(float)" for node in session.get_inputs()]
        execute = session.run

    def run(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        given = [
            _reals(graph, name, array) if real else array
            for name, array, real in zip(graph.ir.inputs, arrays, floats, strict=True)
        ]
        return [np.asarray(value) for value in execute(None, dict(zip(names, given, strict=True)))]

    return run


def session_of(path: str, *, optimized: bool = True, threads: int = 1) -> Any:
    """A session of ONNX Runtime's CPU provider with the options that an emitted file needs for its bits."""
    runtime = load("onnxruntime", "ONNX Runtime", "onnxruntime")
    settings = runtime.SessionOptions()
    settings.intra_op_num_threads = threads
    # Errors are raised; warnings would only concern the hardware.
    settings.log_severity_level = 3
    levels = runtime.GraphOptimizationLevel
    settings.graph_optimization_level = levels.ORT_ENABLE_ALL if optimized else levels.ORT_DISABLE_ALL
    for key, value in _needed_options(path).items():
        settings.add_session_config_entry(key, value)
    return runtime.InferenceSession(path, settings, providers=["CPUExecutionProvider"])


def _needed_options(path: str) -> dict[str, str]:
    """The session options that the file declares as necessary."""
    onnx = load("onnx", "The package onnx", "onnx")
    facts = {entry.key: entry.value for entry in onnx.load(path).metadata_props}
    return strict_json.loads(facts.get("qjax", "{}"), "The metadata 'qjax'").get("onnxruntime_session", {})


def _reals(graph: Any, name: str, codes: np.ndarray) -> np.ndarray:
    """An input's codes, dequantized, for a model that quantizes its inputs itself."""
    return np.asarray(dequantize_output(graph.ir, name, codes))
