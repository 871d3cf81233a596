"""Runtimes with which `qjax verify` compares: each loads what an emitter wrote, as a user's program would.

A runtime is one entry here (`register_runtime` adds others) and one function `prepare` in a module that is imported on
first use.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

Run = Callable[[Sequence[Any]], list[Any]]
"""A function from the codes of one batch, in the order of the graph's inputs, to the outputs in the graph's order."""


@dataclasses.dataclass(frozen=True)
class Runtime:
    """One runtime.

    module: its address; `prepare(graph, folder, batch, mode, options) -> Run` writes the model into the folder and
      loads it. mode: which of its engines. what: a description for the help.
    targets: the targets whose rounding it computes; of two, one is for AArch64 (NAME_arm). () means any target, because
      the file itself determines the rounding.
    packages: the Python packages that it needs. programs: of these it needs one. install: how to install it.
    """

    module: str
    mode: str
    what: str
    targets: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    install: str = ""


_litert = functools.partial(
    Runtime, "qjax.runtimes.litert", packages=("ai_edge_litert",), install='python -m pip install "qjax-quant[tflite]"'
)
_onnx = functools.partial(
    Runtime, "qjax.runtimes.onnx", packages=("onnxruntime",), install='python -m pip install "qjax-quant[onnx]"'
)

RUNTIMES: dict[str, Runtime] = {
    "c": Runtime(
        "qjax.runtimes.c",
        "",
        "C99 compiled for this machine",
        programs=("cc", "gcc", "clang"),
        install="gcc or clang from the system's packages",
    ),
    "litert": _litert("AUTO", "LiteRT's default, XNNPACK, on a .tflite", ("tflite_xnnpack", "tflite_xnnpack_arm")),
    "litert-optimized": _litert(
        "BUILTIN_WITHOUT_DEFAULT_DELEGATES",
        "LiteRT's optimised kernels on a .tflite",
        ("tflite_optimized_x86", "tflite_optimized_arm"),
    ),
    "litert-reference": _litert("BUILTIN_REF", "LiteRT's reference kernels on a .tflite", ("tflite_reference",)),
    "onnx-reference": _onnx("reference", "the interpreter of the ONNX specification"),
    "onnxruntime": _onnx("optimized", "ONNX Runtime's CPU provider, optimised as by default"),
    "onnxruntime-plain": _onnx("plain", "ONNX Runtime's CPU provider without its graph optimiser"),
    "stablehlo": Runtime("qjax.runtimes.stablehlo", "", "XLA on a file of jax.export", packages=("jax",)),
    "tflite-micro": Runtime(
        "qjax.runtimes.tflite_micro",
        "",
        "TFLite Micro on a .tflite",
        ("tflite_micro", "cmsis_nn"),
        packages=("tflite_micro",),
        install="python -m pip install --pre tflite-micro (Linux on x86-64; it has nightly builds only)",
    ),
}
"""The runtimes by the name that the command line takes."""


def register_runtime(name: str, runtime: Runtime) -> None:
    """Add a runtime under a name.

    Raises:
      ValueError: another runtime has that name.
    """
    if RUNTIMES.setdefault(name, runtime) != runtime:
        raise ValueError(f"register_runtime: expected a new name, got {name!r}, which {RUNTIMES[name].module} has.")
    ordered = sorted(RUNTIMES.items())
    RUNTIMES.clear()
    RUNTIMES.update(ordered)


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
    module = importlib.import_module(runtime.module)
    return module.prepare(graph, folder, batch, runtime.mode, options)


def load(module: str, what: str, install: str) -> Any:
    """Import a runtime's module; if it is missing, the error tells what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ModuleNotFoundError(f"{what} is not installed: pip install {install}", name=module) from error
