"""Runs a .pte on ExecuTorch's runtime, which takes and returns floats."""

import importlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from qjax.run.quantize_io import dequantize_output
from qjax.runtimes import Run, load


def prepare(graph: Any, folder: str, batch: int, mode: str, options: dict[str, Any]) -> Run:
    """Load the .pte. mode: not used, because the .pte names its delegate."""
    runtime = load("executorch.runtime", "ExecuTorch", "executorch torch==2.13.0").Runtime.get()
    path = os.path.join(folder, "model.pte")
    graph.emit("pte", path, batch=batch, **options)
    forward, torch = runtime.load_program(path).load_method("forward"), importlib.import_module("torch")

    def run(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        given = [dequantize_output(graph.ir, name, x) for name, x in zip(graph.ir.inputs, arrays, strict=True)]
        return [y.numpy().copy() for y in forward.execute([torch.from_numpy(np.array(x)) for x in given])]

    return run
