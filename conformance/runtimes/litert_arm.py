"""LiteRT's kernels for AArch64, run by an AArch64 Python: native on such a machine, under QEMU's user mode elsewhere.

`tools/aarch64-litert.sh` makes such a Python; QJAX_AARCH64_PYTHON holds the command that starts it. The process lives
as long as this one and answers one case after the other (`process`, `litert_worker`); models are written on this side.
"""

import dataclasses
import functools
import importlib.util
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from conformance.case import Case
from conformance.runtimes import litert_worker
from conformance.runtimes.litert import RESOLVERS, Mode
from conformance.runtimes.process import Process
from conformance.runtimes.tflite_model import tflite_model

PYTHON = "QJAX_AARCH64_PYTHON"
"""The environment variable with the command of an AArch64 Python that has ai-edge-litert."""

_MACHINES = ("aarch64", "arm64")


@dataclasses.dataclass(frozen=True)
class LiteRTArm:
    """The interpreter of the AArch64 package ai-edge-litert, on one thread.

    mode: as for `litert.LiteRT`.
    """

    mode: Mode = "xnnpack"

    def __post_init__(self) -> None:
        if self.mode not in RESOLVERS:
            raise ValueError(f"mode must be one of {', '.join(RESOLVERS)}. Got {self.mode!r}.")

    @property
    def name(self) -> str:
        """How the matrix calls it."""
        return f"litert-{self.mode}-arm"

    def version(self) -> str:
        """The package with its version, and the emulator if there is one."""
        _, package, emulator = _worker().greeting
        return ", ".join(part for part in (f"{package} for AArch64", emulator) if part)

    def run(self, case: Case) -> np.ndarray:
        """The output's codes, in the layout of the case.

        Raises:
          ModuleNotFoundError: there is no AArch64 Python with ai-edge-litert.
          ValueError, RuntimeError: LiteRT refused the model or its inputs, or its process ended.
        """
        return self.run_model(tflite_model(case), case.inputs, case.op)

    def run_model(self, model: bytes, inputs: Sequence[np.ndarray], what: str = "model") -> np.ndarray:
        """The output of a .tflite of one output; what: its name in errors, which are those of `run`."""
        return _worker().ask((RESOLVERS[self.mode], model, tuple(inputs)), what)


@functools.cache
def _worker() -> Process:
    if PYTHON in os.environ:
        command = shlex.split(os.environ[PYTHON])
    elif platform.machine() in _MACHINES and importlib.util.find_spec("ai_edge_litert") is not None:
        command = [sys.executable]
    else:
        raise _missing(f"{PYTHON} is not set")
    process = Process("LiteRT", command, Path(litert_worker.__file__), _missing)
    machine = process.greeting[0]
    if machine not in _MACHINES:
        process.close()
        raise _missing(f"{shlex.join(command)} is a Python for {machine}")
    return process


def _missing(why: str) -> ModuleNotFoundError:
    return ModuleNotFoundError(
        f"LiteRT for AArch64 needs a Python of that machine with the package ai-edge-litert, but {why}. On Debian: "
        f"tools/aarch64-litert.sh DIR, then {PYTHON}=DIR/python; on such a machine: pip install ai-edge-litert"
    )
