"""TensorFlow Lite Micro: the kernels for microcontrollers, built for this machine by the package tflite-micro."""

import dataclasses
import importlib
import importlib.metadata
from typing import Any

import numpy as np

from conformance.case import Case
from conformance.runtimes.tflite_model import output_shape, tflite_model


@dataclasses.dataclass(frozen=True)
class TFLiteMicro:
    """The reference kernels of TFLite Micro, through the interpreter of the package tflite-micro."""

    @property
    def name(self) -> str:
        """How the matrix calls it."""
        return "tflite-micro"

    def version(self) -> str:
        """The package and its version."""
        _module()
        return f"tflite-micro {importlib.metadata.version('tflite-micro')}"

    def run(self, case: Case) -> np.ndarray:
        """The output's codes, in the layout of the case."""
        model = tflite_model(case)
        # The arena holds the activations and the constants of every operator. Some kernels also keep 32-bit scratch per
        # element.
        elements = sum(x.size for x in case.inputs) + int(np.prod(output_shape(case)))
        channels = 0 if case.kernel is None else case.kernel.shape[-1]
        arena = (1 << 16) + 16 * elements + 64 * channels
        interpreter = _module().Interpreter.from_bytes(model, arena_size=arena)
        for i, x in enumerate(case.inputs):
            interpreter.set_input(np.ascontiguousarray(x), i)
        interpreter.invoke()
        return np.array(interpreter.get_output(0))


def _module() -> Any:
    try:
        return importlib.import_module("tflite_micro").runtime
    except ImportError as error:
        raise ImportError("TFLite Micro needs the package tflite-micro: pip install tflite-micro") from error
