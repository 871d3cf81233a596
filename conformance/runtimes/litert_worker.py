"""A model through LiteRT's interpreter: in this process (`litert`), or in one of another machine (`process`).

It imports numpy and ai_edge_litert only, so that an emulated Python needs nothing else.
"""

import importlib
import importlib.metadata
import os
import platform
from collections.abc import Sequence
from typing import Any

import numpy as np


def start() -> tuple[str, str, str]:
    """The machine, the package with its version, and the emulator or ""."""
    load()
    version = importlib.metadata.version("ai-edge-litert")
    return platform.machine(), f"ai-edge-litert {version}", os.environ.get("QJAX_EMULATOR", "")


def run(request: tuple[str, bytes, Sequence[np.ndarray]]) -> np.ndarray:
    """The output of a model of one output, on one thread; request: name of the resolver, the model, its inputs."""
    resolver, model, inputs = request
    module = load()
    interpreter = module.Interpreter(
        model_content=model,
        experimental_op_resolver_type=getattr(module.OpResolverType, resolver),
        num_threads=1,
    )
    interpreter.allocate_tensors()
    for details, x in zip(interpreter.get_input_details(), inputs, strict=True):
        interpreter.set_tensor(details["index"], np.ascontiguousarray(x))
    interpreter.invoke()
    return interpreter.get_tensor(interpreter.get_output_details()[0]["index"])


def load() -> Any:
    """The module of LiteRT's interpreter."""
    return importlib.import_module("ai_edge_litert.interpreter")
