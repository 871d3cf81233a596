"""ONNX Runtime on the CPU, and the interpreter of the ONNX specification."""

import dataclasses
import importlib
import importlib.metadata
from typing import Any, get_args

import numpy as np

from conformance.case import Case
from conformance.runtimes.onnx_model import Form, case_output, model_inputs, onnx_model


@dataclasses.dataclass(frozen=True)
class OnnxRuntime:
    """The CPU provider of the package onnxruntime, on one thread.

    optimized: run the graph optimizer at its default level; without it a "qdq" model computes in float32.
    precise: session.x64quantprecision. An x86 CPU without VNNI multiplies uint8 activations and int8 weights in pairs
      whose sum saturates to int16; under this option the optimizer stores such weights as uint8, whose products are
      exact. Weights must be constants, which those of a case are. It is the optimizer's work, so it needs `optimized`.
      It says nothing about int8 activations, which are exact, and is not set for them: the runtime would look for
      kernels of int8 activations and uint8 weights, of which it has none.
    form: which operators the model is made of, see `onnx_model`.
    fuse_int8: session.qdqisint8allowed. On x86 the optimizer leaves Conv and MatMul without bias of "qdq" models in
      float32 where the activations are int8; with this option (on ARM by itself) it fuses them as it does for uint8.
    """

    optimized: bool = True
    precise: bool = False
    form: Form = "operators"
    fuse_int8: bool = False

    def __post_init__(self) -> None:
        if self.precise and not self.optimized:
            raise ValueError("precise=True is the optimizer's work and needs optimized=True. Got optimized=False.")
        if self.form not in get_args(Form):
            raise ValueError(f"form must be one of {', '.join(get_args(Form))}. Got {self.form!r}.")

    @property
    def name(self) -> str:
        """How the matrix calls it."""
        parts = ["onnxruntime", self.form]
        flags = {"precise": self.precise, "fuse_int8": self.fuse_int8, "unoptimized": not self.optimized}
        return "-".join(parts + [name for name, present in flags.items() if present])

    def version(self) -> str:
        """The package and its version."""
        _module()
        return f"onnxruntime {importlib.metadata.version('onnxruntime')}"

    def run(self, case: Case) -> np.ndarray:
        """The output's codes, in the layout of the case."""
        runtime = _module()
        options = runtime.SessionOptions()
        options.intra_op_num_threads = 1
        # Errors are raised. Warnings about the hardware do not concern this case.
        options.log_severity_level = 3
        levels = runtime.GraphOptimizationLevel
        options.graph_optimization_level = levels.ORT_ENABLE_ALL if self.optimized else levels.ORT_DISABLE_ALL
        if self.precise and all(grid.dtype == "uint8" for grid in case.grids):
            options.add_session_config_entry("session.x64quantprecision", "1")
        if self.fuse_int8:
            options.add_session_config_entry("session.qdqisint8allowed", "1")
        model = onnx_model(case, self.form)
        session = runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        feeds = {f"x{i}": x for i, x in enumerate(model_inputs(case))}
        return case_output(case, session.run(["y"], feeds)[0])


@dataclasses.dataclass(frozen=True)
class OnnxReference:
    """The ReferenceEvaluator of the package onnx: numpy, operator by operator as the specification writes them.

    form: "qdq" for every operation; "operators" for those of ONNX itself (QLinearMatMul, QLinearConv), as it does not
      know Microsoft's.
    """

    form: Form = "qdq"

    def __post_init__(self) -> None:
        if self.form not in get_args(Form):
            raise ValueError(f"form must be one of {', '.join(get_args(Form))}. Got {self.form!r}.")

    @property
    def name(self) -> str:
        """How the matrix calls it."""
        return f"onnx-reference-{self.form}"

    def version(self) -> str:
        """The package and its version."""
        _module("onnx.reference", "The specification's interpreter", "onnx")
        return f"onnx {importlib.metadata.version('onnx')}"

    def run(self, case: Case) -> np.ndarray:
        """The output's codes, in the layout of the case."""
        model = onnx_model(case, self.form)
        reference = _module("onnx.reference", "The specification's interpreter", "onnx")
        evaluator: Any = reference.ReferenceEvaluator(_module("onnx", "A model", "onnx").load_from_string(model))
        feeds = {f"x{i}": x for i, x in enumerate(model_inputs(case))}
        return case_output(case, np.asarray(evaluator.run(["y"], feeds)[0]))


def _module(name: str = "onnxruntime", what: str = "ONNX Runtime", package: str = "onnxruntime") -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{what} needs the package {package}: pip install {package}") from error
