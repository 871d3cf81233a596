"""The rounding instructions of AArch64 NEON, executed: SQRDMULH, SQDMULH, SRSHL, FCVTNS and what kernels make of them.

`neon.c` beside this file is compiled on first use and reads records of (accumulator, multiplier, shift). On an AArch64
host the program runs as it is; elsewhere a cross compiler builds it and QEMU's user mode executes it, whose
instructions follow the architecture's pseudocode.
"""

import functools
import platform
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

FIXED_POINT_RULES = (
    "neon",
    "double_round",
    "ruy",
    "single_round",
    "xnnpack_rndnu",
    "proposed_fix",
    "sqrdmulh",
    "sqdmulh",
    "srshl",
)
"""Rules that read a multiplier and a shift; the last three are single instructions."""

FLOAT_RULES = ("float32", "float32_zero_point_inside", "float32_zero_point_fma")
"""Rules that read a float32 scale and a zero point."""

_SOURCE = Path(__file__).with_name("neon.c")
_FLAGS = ("-O2", "-static", "-ffp-contract=off", "-Wall", "-Werror")
_DEBIAN = {"aarch64-linux-gnu-gcc": "gcc-aarch64-linux-gnu libc6-dev-arm64-cross", "qemu-aarch64": "qemu-user"}


class Neon:
    """Runs records through the instructions of AArch64.

    Raises:
      ModuleNotFoundError: at the first use, where the compiler or the emulator is missing.
    """

    name = "neon"

    def version(self) -> str:
        """The emulator, if there is one, and the compiler: "qemu-aarch64 7.2.22, gcc 12.2.0"."""
        found: list[str] = []
        for tool in reversed(aarch64_tools()):
            answer = subprocess.run([tool, "--version"], check=True, capture_output=True, text=True).stdout
            number = re.search(r"\d+(\.\d+)+", re.sub(r"\([^)]*\)", "", answer))
            name = "gcc" if Path(tool).name.endswith("cc") else Path(tool).name
            found.append(f"{name} {number[0] if number else answer.splitlines()[0]}")
        return ", ".join(found)

    def requantize(self, rule: str, acc: Any, multiplier: Any, shift: Any) -> np.ndarray:
        """acc * multiplier * 2^(shift - 31) under one of `FIXED_POINT_RULES`, not clamped, without a zero point.

        Args:
          rule: which sequence of instructions; "srshl" alone reads no multiplier: it shifts acc by `shift`.
          acc: int32, any shape.
          multiplier: int32, broadcasts to acc.
          shift: int32, broadcasts to acc; in [-31, 30].

        Returns:
          int32 of the shape of acc.
        """
        _check(rule, FIXED_POINT_RULES)
        return _run(rule, acc, _as_int32("multiplier", multiplier), _as_int32("shift", shift))

    def requantize_float(self, rule: str, acc: Any, scale: Any, zero_point: Any = 0) -> np.ndarray:
        """Rounded acc * scale in float32 under one of `FLOAT_RULES`, saturated to int32.

        Args:
          rule: "float32" rounds the product (and reads no zero point); "float32_zero_point_inside" adds the zero point
            with FADD before it rounds; "float32_zero_point_fma" with FMLA.
          acc: int32, any shape.
          scale: float32, broadcasts to acc.
          zero_point: int32, broadcasts to acc.

        Returns:
          int32 of the shape of acc.
        """
        _check(rule, FLOAT_RULES)
        scale = np.asarray(scale)
        if scale.dtype != np.float32:
            raise TypeError(f"scale must be float32. Got {scale.dtype}; say the cast.")
        return _run(rule, acc, scale.view(np.int32), _as_int32("zero_point", zero_point))

    def disassembly(self) -> str:
        """What the compiler made of neon.c, to check that the instructions are those meant."""
        compiler = aarch64_tools()[0]
        tool = compiler.removesuffix("gcc").removesuffix("cc") + "objdump"
        return subprocess.run([tool, "-d", _program()[-1]], check=True, capture_output=True, text=True).stdout


def _check(rule: str, known: tuple[str, ...]) -> None:
    if rule not in known:
        raise ValueError(f"rule must be one of {', '.join(known)}. Got {rule!r}.")


def _as_int32(name: str, value: Any) -> np.ndarray:
    value = np.int32(value) if isinstance(value, int) else np.asarray(value)
    if value.dtype != np.int32:
        raise TypeError(f"{name} must be int32. Got {value.dtype}.")
    return np.asarray(value)


def _run(rule: str, acc: Any, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    acc = _as_int32("acc", acc)
    records = np.stack([acc, np.broadcast_to(a, acc.shape), np.broadcast_to(b, acc.shape)], axis=-1)
    done = subprocess.run([*_program(), rule], input=records.astype("<i4").tobytes(), check=True, capture_output=True)
    return np.frombuffer(done.stdout, "<i4").astype(np.int32).reshape(acc.shape)


def aarch64_tools() -> tuple[str, ...]:
    """Paths of the compiler for AArch64 and, where this machine is another, of the emulator.

    Raises:
      ModuleNotFoundError: one is missing; the message names the Debian packages.
    """
    native = platform.machine() in ("aarch64", "arm64") and platform.system() == "Linux"
    wanted = ("cc",) if native else tuple(_DEBIAN)
    found = [shutil.which(tool) for tool in wanted]
    missing = [tool for tool, path in zip(wanted, found, strict=True) if path is None]
    if missing:
        packages = " ".join(_DEBIAN.get(tool, "gcc") for tool in missing)
        raise ModuleNotFoundError(
            f"running NEON instructions needs {' and '.join(wanted)}. Got no {' and no '.join(missing)}; on Debian or "
            f"Ubuntu: apt-get install --no-install-recommends {packages}"
        )
    return tuple(path for path in found if path is not None)


@functools.cache
def _build() -> tuple[tempfile.TemporaryDirectory[str], tuple[str, ...]]:
    """The folder of the program, which lives as long as this process, and the command that runs it."""
    compiler, *emulator = aarch64_tools()
    folder = tempfile.TemporaryDirectory(prefix="qjax-neon-")
    program = str(Path(folder.name) / "neon")
    done = subprocess.run([compiler, *_FLAGS, "-o", program, str(_SOURCE)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{compiler} could not build {_SOURCE.name}:\n{done.stderr}")
    return folder, (*emulator, program)


def _program() -> tuple[str, ...]:
    return _build()[1]
