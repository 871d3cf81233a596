"""Runs a .tflite file on TFLite Micro, built for this machine by the package tflite-micro."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from qjax.graph.batch_shapes import bytes_at
from qjax.runtimes import Run, load

_SPARE = 1 << 20


def prepare(graph: Any, folder: str, batch: int, mode: str, options: dict[str, Any]) -> Run:
    """Create one interpreter for all batches."""
    runtime = load("tflite_micro", "TFLite Micro", "tflite-micro").runtime
    path = os.path.join(folder, "model.tflite")
    graph.emit("tflite", path, batch=batch, **options)
    # Activations, 32-bit scratch per element of the largest one, and the constants that every operator stores.
    elements = sum(bytes_at(graph.ir, batch).values())
    interpreter = runtime.Interpreter.from_file(path, arena_size=_SPARE + 8 * elements)

    def run(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        for index, array in enumerate(arrays):
            interpreter.set_input(np.ascontiguousarray(array), index)
        interpreter.invoke()
        return [np.array(interpreter.get_output(index)) for index in range(len(graph.ir.outputs))]

    return run
