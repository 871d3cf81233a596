"""Every way in which a graph is shipped: the file, what runs it, and whose rounding it computes."""

import dataclasses
import importlib.util
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

import qjax
from benchmarks.machines import MACHINES, Built, Machine
from benchmarks.networks import TARGET
from qjax.runtimes import RUNTIMES, prepare

STYLES = ("integer", "qdq", "qoperator")
"""Of .onnx files that ONNX Runtime computes exactly."""

Call = Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model in its runtime, for one size of the batch.

    call: codes to codes; None where only `outputs` runs it, or nothing. size: bytes of the file, or of C's code and
    constants. arena: bytes of working memory, where the artifact fixes them.
    """

    outputs: Callable[[Sequence[np.ndarray]], list[np.ndarray]] | None
    call: Call | None
    size: int
    arena: int | None = None


@dataclasses.dataclass(frozen=True)
class Way:
    """One artifact in one runtime.

    needs: commands and modules that are not installed. batches: for which it is made. timed: its time means something.
    """

    artifact: str
    runtime: str
    target: str
    load: Callable[[qjax.IntegerGraph, Path, int], Loaded]
    timed: bool = True
    batches: tuple[int, ...] = (1, 32)
    needs: tuple[str, ...] = ()


def by_runtime(name: str, **options: object) -> Callable[[qjax.IntegerGraph, Path, int], Loaded]:
    """As `qjax verify --runtime` loads it."""

    def load(graph: qjax.IntegerGraph, folder: Path, batch: int) -> Loaded:
        run = prepare(name, graph, str(folder), batch, dict(options))
        (file,) = (entry for entry in os.scandir(folder) if entry.name.startswith("model."))

        def call(codes: np.ndarray) -> np.ndarray:
            return run([codes])[0]

        return Loaded(lambda batches: [call(codes) for codes in batches], call, file.stat().st_size)

    return load


def _by_compiler(machine: Machine) -> Callable[[qjax.IntegerGraph, Path, int], Loaded]:
    def load(graph: qjax.IntegerGraph, folder: Path, batch: int) -> Loaded:
        built = Built(graph, folder, batch, machine)
        if machine.emulator is None:
            return Loaded(None, None, built.size, built.arena)
        if machine.emulator:
            return Loaded(built.emulated, None, built.size, built.arena)
        call = built.library()
        return Loaded(lambda batches: [call(codes).copy() for codes in batches], call, built.size, built.arena)

    return load


def target_of(runtime: str) -> str:
    """Whose rounding a runtime of .tflite files has on this machine."""
    own = RUNTIMES[runtime].targets
    arm = platform.machine().lower() in ("aarch64", "arm64")
    return next((name for name in own if name.endswith("_arm") == arm), own[0])


def _modules(*names: str) -> tuple[str, ...]:
    return tuple(name for name in names if importlib.util.find_spec(name) is None)


def ways() -> list[Way]:
    """All of them, in the order of the table."""
    found: list[Way] = []
    for runtime, shown in (
        ("tflite-micro", "TFLite Micro"),
        ("litert", "LiteRT, XNNPACK"),
        ("litert-optimized", "LiteRT, optimised kernels"),
        ("litert-reference", "LiteRT, reference kernels"),
    ):
        module = "tflite_micro" if runtime == "tflite-micro" else "ai_edge_litert"
        missing = _modules(module, "ai_edge_litert", "flatbuffers")
        found.append(Way("tflite", shown, target_of(runtime), by_runtime(runtime), needs=missing))
    missing = _modules("onnx", "onnxruntime")
    for style in STYLES:
        options = {"style": style} if style == "integer" else {"style": style, "codes": True}
        target = TARGET if style == "integer" else "onnxruntime"
        artifact = f"onnx, {style}"
        found.append(Way(artifact, "ONNX Runtime", target, by_runtime("onnxruntime", **options), needs=missing))
        if style != "qdq":
            # whose file is float operators without the optimizer
            plain = by_runtime("onnxruntime-plain", **options)
            found.append(
                Way(artifact, "ONNX Runtime, no optimizer", target, plain, timed=False, batches=(32,), needs=missing)
            )
        if style == "integer":
            reference = by_runtime("onnx-reference", **options)
            found.append(
                Way(artifact, "ONNX reference evaluator", target, reference, timed=False, batches=(32,), needs=missing)
            )
    found.append(Way("stablehlo", "XLA, all cores", TARGET, by_runtime("stablehlo")))
    for machine in MACHINES:
        here = machine.emulator == ""
        batches = (1, 32) if here else (1,)
        needs = tuple(machine.missing)
        found.append(Way("c", machine.name, TARGET, _by_compiler(machine), timed=here, batches=batches, needs=needs))
    return found
