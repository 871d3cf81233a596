"""LiteRT's kernels for AArch64, run by an AArch64 Python: native on such a machine, under QEMU's user mode elsewhere.

`tools/aarch64-litert.sh` makes such a Python; QJAX_AARCH64_PYTHON holds the command that starts it. The process lives
as long as this one and answers one case after the other (`litert_worker`); models are written on this side.
"""

import atexit
import dataclasses
import functools
import importlib.util
import os
import pickle
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qjax.conformance.case import Case
from qjax.conformance.runtimes.litert import RESOLVERS, Mode
from qjax.conformance.runtimes.tflite_model import tflite_model

PYTHON = "QJAX_AARCH64_PYTHON"
"""The environment variable with the command of an AArch64 Python that has ai-edge-litert."""

_WORKER = Path(__file__).with_name("litert_worker.py")


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
        return _worker().version

    def run(self, case: Case) -> np.ndarray:
        """The output's codes, in the layout of the case.

        Raises:
          ModuleNotFoundError: there is no AArch64 Python with ai-edge-litert.
          RuntimeError: LiteRT refused the model, or its process ended.
        """
        return _worker().ask((RESOLVERS[self.mode], tflite_model(case), case.inputs), case.op)


class _Worker:
    """The process, from its first use to the end of this one."""

    def __init__(self, command: Sequence[str]) -> None:
        try:
            self._process = subprocess.Popen(
                [*command, str(_WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        except OSError as error:
            raise ModuleNotFoundError(_missing(f"{command[0]} does not start ({error})")) from None
        atexit.register(self.close)
        try:
            machine, package, emulator = self._read()
        except EOFError:
            self.close()
            raise ModuleNotFoundError(_missing(f"{shlex.join(command)} cannot import it")) from None
        if machine not in ("aarch64", "arm64"):
            self.close()
            raise ModuleNotFoundError(_missing(f"{shlex.join(command)} is a Python for {machine}"))
        self.version = ", ".join(part for part in (f"{package} for AArch64", emulator) if part)

    def ask(self, request: tuple[Any, ...], op: str) -> np.ndarray:
        assert self._process.stdin is not None
        try:
            pickle.dump(request, self._process.stdin)
            self._process.stdin.flush()
            kind, answer = self._read()
        except (EOFError, BrokenPipeError):
            raise RuntimeError(
                f"LiteRT's process ended with status {self._process.wait()} while it computed {op!r}."
            ) from None
        if kind == "error":
            raise RuntimeError(answer)
        return answer

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._process.wait()

    def _read(self) -> tuple[Any, ...]:
        assert self._process.stdout is not None
        return pickle.load(self._process.stdout)


@functools.cache
def _worker() -> _Worker:
    if PYTHON in os.environ:
        return _Worker(shlex.split(os.environ[PYTHON]))
    if platform.machine() in ("aarch64", "arm64") and importlib.util.find_spec("ai_edge_litert") is not None:
        return _Worker([sys.executable])
    raise ModuleNotFoundError(_missing(f"{PYTHON} is not set"))


def _missing(why: str) -> str:
    return (
        f"LiteRT for AArch64 needs a Python of that machine with the package ai-edge-litert, but {why}. On Debian: "
        f"tools/aarch64-litert.sh DIR, then {PYTHON}=DIR/python; on such a machine: pip install ai-edge-litert"
    )
