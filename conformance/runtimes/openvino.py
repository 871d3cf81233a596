"""OpenVINO's CPU plugin, on the files that qjax writes for it.

The other runtimes of the matrix are given models that are written here. OpenVINO rewrites a quantized model, and its
codes depend on how the model is written. So it is given what `graph.emit` writes.
"""

import dataclasses
import functools
import sys
from pathlib import Path
from typing import Any

import numpy as np

from conformance import single
from conformance.case import Case
from conformance.runtimes.process import Process
from qjax import targets
from qjax.export.emit.onnx import to_model
from qjax.graph.ir import Graph, Quantization, Tensor

_WORKER = Path(__file__).with_name("openvino_worker.py")


@dataclasses.dataclass(frozen=True)
class Openvino:
    """The CPU plugin on one thread, with the precision f32 for what has no kernel of 8 bits."""

    @property
    def name(self) -> str:
        """How the matrix calls it."""
        return "openvino"

    def version(self) -> str:
        """The package and its version."""
        return f"openvino {_process().greeting.partition('-')[0]}"

    def run(self, case: Case) -> np.ndarray:
        """The output's codes, in the layout of the case."""
        target = targets.get("openvino_cpu")
        graph = _inputs_of(case) if case.op == "quantize" else single.graph_of(case, target)
        (output,) = answer(graph, case.inputs, codes=case.op != "quantize")["outputs"]
        if case.op != "quantize":
            return output
        # the model's output is a float again
        grid = case.output
        return (np.rint(output / grid.scale) + grid.zero_point).astype(grid.dtype)


def answer(graph: Graph, inputs: Any, *, codes: bool) -> dict[str, Any]:
    """What the worker answers to a graph's file. codes: whether inputs and outputs are codes."""
    model = to_model(graph, style="openvino", codes=codes, batch=np.shape(inputs[0])[0])
    request = {"model": model.SerializeToString(), "inputs": [np.asarray(x) for x in inputs]}
    return _process().ask(request, "a model")


def _inputs_of(case: Case) -> Graph:
    """A graph that quantizes its input, and returns it."""
    grid = case.output
    known = Quantization(
        np.asarray(grid.scale, np.float32), np.asarray(grid.zero_point, np.int32), grid.qmin, grid.qmax
    )
    tensors = {"x": Tensor("x", np.shape(case.inputs[0]), grid.dtype, known)}
    return Graph(tensors, (), ("x",), ("x",), "openvino_cpu")


@functools.cache
def _process() -> Process:
    return Process(
        "OpenVINO",
        [sys.executable],
        _WORKER,
        lambda reason: ModuleNotFoundError(
            f"OpenVINO needs the package openvino: pip install openvino. Here {reason}."
        ),
    )
