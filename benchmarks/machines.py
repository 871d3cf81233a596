"""Emitted C, compiled for this machine and others, whose programs QEMU runs; for machines without one, only built."""

import ctypes
import dataclasses
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import qjax
from qjax.export.emit.c import to_files

WARNINGS = ("-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-Wconversion", "-Wsign-conversion", "-Wshadow")

_MAIN = """#include <stdint.h>
#include <stdio.h>
#include "model.h"

static {x}_t x[MODEL_X_SIZE];
static {y}_t y[MODEL_Y_SIZE];
static int64_t arena[MODEL_ARENA_SIZE / 8 + 1];

int main(void)
{{
    while (fread(x, sizeof x, 1, stdin) == 1) {{
        model_run(x, y, arena);
        if (fwrite(y, sizeof y, 1, stdout) != 1) return 1;
    }}
    return 0;
}}
"""


@dataclasses.dataclass(frozen=True)
class Machine:
    """A compiler, with its flags, and what runs its programs.

    emulator: a command; "" runs them here, None nowhere. big: it stores the high byte of an integer first.
    simd: whether the code is emitted for vectors.
    """

    name: str
    compiler: str
    flags: tuple[str, ...] = ("-O3",)
    emulator: str | None = ""
    big: bool = False
    simd: bool = False

    @property
    def tools(self) -> list[str]:
        """The commands that it needs."""
        return [tool for tool in (self.compiler, self.size, self.emulator) if tool]

    @property
    def size(self) -> str:
        """What says how large the code is."""
        return self.compiler.removesuffix("gcc") + "size"

    @property
    def missing(self) -> list[str]:
        """The commands that are not installed."""
        return [tool for tool in self.tools if shutil.which(tool) is None]


MACHINES = (
    Machine("gcc -O3", "gcc"),
    Machine("gcc -O3 -march=native", "gcc", ("-O3", "-march=native")),
    Machine("gcc -O3 -march=native, simd", "gcc", ("-O3", "-march=native"), simd=True),
    Machine("gcc -O3 -mavx2, simd", "gcc", ("-O3", "-mavx2"), simd=True),
    Machine("AArch64, QEMU", "aarch64-linux-gnu-gcc", emulator="qemu-aarch64"),
    Machine("AArch64, simd, QEMU", "aarch64-linux-gnu-gcc", emulator="qemu-aarch64", simd=True),
    Machine("32-bit ARM, QEMU", "arm-linux-gnueabihf-gcc", emulator="qemu-arm"),
    Machine("s390x (big-endian), QEMU", "s390x-linux-gnu-gcc", emulator="qemu-s390x", big=True),
    Machine("Cortex-M4, -Os, built only", "arm-none-eabi-gcc", ("-Os", "-mcpu=cortex-m4", "-mthumb"), emulator=None),
)


class Built:
    """A model compiled for a machine, in a folder of its own: one input, one output.

    size: bytes of code and constants. arena: bytes of working memory.
    """

    def __init__(self, graph: qjax.IntegerGraph, folder: Path, batch: int, machine: Machine) -> None:
        self.folder, self.machine = folder, machine
        texts = to_files(graph.ir, batch=batch, vectors=0, simd=machine.simd)
        (x,), (y,) = graph.ir.inputs, graph.ir.outputs
        tensor = graph.ir.tensors[y]
        self.input = np.dtype(graph.ir.tensors[x].dtype)
        self.output = np.dtype(tensor.dtype)
        self.shape = tuple(batch if n is None else n for n in tensor.shape)
        texts["main.c"] = _MAIN.format(x=self.input.name, y=self.output.name)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="ascii")
        position = ("-fPIC",) if machine.emulator == "" else ()
        self._command(machine.compiler, *WARNINGS, *machine.flags, *position, "-c", "model.c", "-o", "model.o")
        sizes = self._command(machine.size, "model.o").splitlines()[1].split()
        self.size = int(sizes[0]) + int(sizes[1])
        found = re.search(r"^#define MODEL_ARENA_SIZE (\d+)$", texts["model.h"], flags=re.M)
        assert found is not None
        self.arena = int(found[1])

    def _command(self, *command: str) -> str:
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{self.machine.name}: {' '.join(command)}: {done.stderr[-2000:]}")
        return done.stdout

    def library(self) -> Any:
        """A function of codes to codes in this process; the array that it returns is its own."""
        self._command(self.machine.compiler, "-shared", "-o", "model.so", "model.o")
        run = ctypes.CDLL(str(self.folder / "model.so")).model_run
        run.restype, run.argtypes = None, [ctypes.c_void_p] * 3
        y, arena = np.empty(self.shape, self.output), np.empty(self.arena // 8 + 1, np.int64)
        places = y.ctypes.data, arena.ctypes.data

        def call(codes: np.ndarray, kept: tuple[np.ndarray, ...] = (y, arena)) -> np.ndarray:
            run(codes.ctypes.data, *places)
            return kept[0]

        return call

    def emulated(self, batches: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The outputs of a program of its own, which gets all batches in one run."""
        assert self.machine.emulator
        self._command(self.machine.compiler, *WARNINGS, "-O2", "-static", "-o", "model", "main.c", "model.o")
        order = ">" if self.machine.big else "<"
        stored = self.input.newbyteorder(order)
        data = b"".join(np.ascontiguousarray(codes, stored).tobytes() for codes in batches)
        command = [self.machine.emulator, "./model"]
        done = subprocess.run(command, cwd=self.folder, input=data, capture_output=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{self.machine.name}: the program ended with {done.returncode}: {done.stderr[-2000:]}")
        values = np.frombuffer(done.stdout, self.output.newbyteorder(order)).astype(self.output)
        return list(values.reshape(len(batches), *self.shape))
