"""Runtimes with which `qjax verify` compares: each loads what an emitter wrote, as a user's program would.

A runtime is one entry here and one function `prepare` in a module of this package, which is imported on first use.
"""

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import Any

Run = Callable[[Sequence[Any]], list[Any]]
"""A function from the codes of one batch, in the order of the graph's inputs, to the outputs in the graph's order."""


@dataclasses.dataclass(frozen=True)
class Runtime:
    """One runtime.

    module: of this package; `prepare(graph, folder, batch, mode, options) -> Run` writes the model into the folder and
      loads it. mode: which of its engines. what: a description for the help.
    targets: the targets whose rounding it computes; of two, one is for AArch64 (NAME_arm). () means any target, because
      the file itself determines the rounding.
    """

    module: str
    mode: str
    what: str
    targets: tuple[str, ...] = ()


RUNTIMES = {
    "c": Runtime("c", "", "C99 compiled for this machine"),
    "executorch": Runtime("executorch", "", "ExecuTorch's XNNPACK delegate on a .pte", ("executorch_xnnpack",)),
    "litert": Runtime(
        "litert", "AUTO", "LiteRT's default, XNNPACK, on a .tflite", ("tflite_xnnpack", "tflite_xnnpack_arm")
    ),
    "litert-optimized": Runtime(
        "litert",
        "BUILTIN_WITHOUT_DEFAULT_DELEGATES",
        "LiteRT's optimised kernels on a .tflite",
        ("tflite_optimized_x86", "tflite_optimized_arm"),
    ),
    "litert-reference": Runtime(
        "litert", "BUILTIN_REF", "LiteRT's reference kernels on a .tflite", ("tflite_reference",)
    ),
    "onnx-reference": Runtime("onnx", "reference", "the interpreter of the ONNX specification"),
    "onnxruntime": Runtime("onnx", "optimized", "ONNX Runtime's CPU provider, optimised as by default"),
    "onnxruntime-plain": Runtime("onnx", "plain", "ONNX Runtime's CPU provider without its graph optimiser"),
    "stablehlo": Runtime("stablehlo", "", "XLA on a file of jax.export"),
    "tflite-micro": Runtime("tflite_micro", "", "TFLite Micro on a .tflite", ("tflite_micro", "cmsis_nn")),
    "verilog": Runtime("verilog", "", "Icarus Verilog on the emitted Verilog"),
}
"""The runtimes by the name that the command line takes."""


def prepare(name: str, graph: Any, folder: str, batch: int, options: dict[str, Any]) -> Run:
    """Write a graph for a runtime and load it there.

    Args:
      graph: an `IntegerGraph`. folder: an empty one. batch: the number of examples per call.
      options: for the emitter.

    Raises:
      ValueError: the format cannot hold the graph. ImportError: the runtime is not installed; the message tells how to
        install it.
    """
    runtime = RUNTIMES[name]
    module = importlib.import_module(f"qjax.runtimes.{runtime.module}")
    return module.prepare(graph, folder, batch, runtime.mode, options)


def load(module: str, what: str, install: str) -> Any:
    """Import a runtime's module; if it is missing, the error tells what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ModuleNotFoundError(f"{what} is not installed: pip install {install}", name=module) from error
