"""Emitted C, compiled and called: many models in one file, since compiling is what costs."""

import ctypes
import functools
import math
import pathlib
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from qjax.export.emit.c import files
from qjax.export.emit.c.blocks import Source
from qjax.export.emit.c.program import Program, build
from qjax.export.emit.c.text import STORED
from qjax.graph.ir import Graph
from qjax.run.interpreter import Interpreter

WARNINGS = ["-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-Wconversion", "-Wsign-conversion", "-Wshadow"]
SANITIZERS = ["-O0", "-fsanitize=undefined,address", "-fno-sanitize-recover=all"]
FASTEST = ["-O3", "-fstrict-aliasing", "-Wstrict-aliasing=2"]

Named = Mapping[str, tuple[Graph, Sequence[np.ndarray]]]


class Compiled:
    """Many graphs in one C file, what they are fed, and what the interpreter makes of it."""

    def __init__(
        self,
        given: Named,
        folder: pathlib.Path,
        batch: int = 1,
        *,
        simd: bool | str = False,
        threads: bool = False,
    ) -> None:
        self.graphs = {name: graph for name, (graph, _) in given.items()}
        self.inputs = {name: list(inputs) for name, (_, inputs) in given.items()}
        self.folder = folder
        self.programs, self.text = programs(self.graphs, batch, simd=simd, threads=threads)

    @functools.cached_property
    def expected(self) -> dict[str, list[np.ndarray]]:
        interpreters = {name: Interpreter(graph) for name, graph in self.graphs.items()}
        constants = {name: interpreter.constants for name, interpreter in interpreters.items()}

        def every(constants, inputs):
            return {name: each.outputs(constants[name], inputs[name]) for name, each in interpreters.items()}

        # integers are the same at every level, and most of the time here would be XLA's
        fast = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
        found = jax.jit(every, compiler_options=fast)(constants, self.inputs)
        return {name: [np.asarray(y) for y in outputs] for name, outputs in found.items()}

    def called(self, *flags: str) -> dict[str, list[np.ndarray]]:
        """What a library of all of them gives."""
        return next(self.calls(*flags))

    def calls(self, *flags: str) -> Iterator[dict[str, list[np.ndarray]]]:
        """The same, as often as it is asked for."""
        library = ctypes.CDLL(str(compiled(self.text, self.folder, *flags)))
        while True:
            yield {name: call(library, program, name, self.inputs[name]) for name, program in self.programs.items()}

    def run(self, *flags: str, **machine: Any) -> dict[str, list[np.ndarray]]:
        """What a program of all of them gives."""
        return run_program(self.programs, self.text, self.folder, self.inputs, flags, **machine)

    def assert_equal(self, found: Mapping[str, Sequence[np.ndarray]]) -> None:
        wrong: list[str] = []
        for name, expected in self.expected.items():
            for got, want in zip(found[name], expected, strict=True):
                assert got.dtype == want.dtype
                if not np.array_equal(got, want):
                    wrong.append(f"{name}: {np.count_nonzero(got != want)} of {want.size}")
        assert not wrong, wrong


def programs(
    graphs: Mapping[str, Graph], batch: int = 1, *, simd: bool | str = False, threads: bool = False
) -> tuple[dict[str, Program], str]:
    """The models by name, and one C file that holds all of them."""
    source = Source(simd=simd, threads=threads)
    built = {name: build(graph, batch, source, f"{name}_") for name, graph in graphs.items()}
    text = "\n\n".join(["#include <stdint.h>", *_prototypes(built), *_definitions(built, source)])
    return built, text + "\n"


def _prototypes(built: Mapping[str, Program]) -> list[str]:
    return [f"{files.prototype(program, name)};" for name, program in built.items()]


def _definitions(built: Mapping[str, Program], source: Source) -> list[str]:
    return files.definitions(list(built.values()), source, list(built))


def compiled(text: str, folder: pathlib.Path, *flags: str, compiler: Sequence[str] = ("gcc",)) -> pathlib.Path:
    """A shared library, under every warning as an error."""
    source, library = folder / "models.c", folder / "models.so"
    source.write_text(text)
    check([*compiler, *WARNINGS, *(flags or ("-O1",)), "-shared", "-fPIC", "-o", str(library), str(source)])
    return library


def call(library: ctypes.CDLL, program: Program, name: str, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """One call of NAME_run. Arena and outputs begin as garbage."""
    graph = program.graph
    outputs = [np.full(program.shapes[o], 85, graph.tensors[o].dtype) for o in graph.outputs]
    arena = np.full(program.plan.size // 8 + 1, 0x5A5A5A5A5A5A5A5A, np.int64)
    arrays = [*(np.ascontiguousarray(x) for x in inputs), *outputs, arena]
    function = getattr(library, f"{name}_run")
    function.restype = None
    function(*(ctypes.c_void_p(array.ctypes.data) for array in arrays))
    return outputs


def driver(built: Mapping[str, Program]) -> str:
    """A main() that reads the inputs of every model in turn from stdin and writes the outputs to stdout."""
    lines = ["#include <stdint.h>", "#include <stdio.h>", *_prototypes(built), "int main(void)", "{"]
    for name, program in built.items():
        graph = program.graph
        inputs, outputs = files.parameters(graph)
        lines.append("    {")
        for parameter, tensor in (*zip(inputs, graph.inputs, strict=True), *zip(outputs, graph.outputs, strict=True)):
            size = math.prod(program.shapes[tensor])
            lines.append(f"        static {STORED[graph.tensors[tensor].dtype]} {parameter}[{size}];")
        lines.append(f"        static int64_t arena[{program.plan.size // 8 + 1}];")
        for parameter in inputs:
            lines.append(f"        if (fread({parameter}, sizeof {parameter}, 1, stdin) != 1) return 1;")
        lines.append(f"        {name}_run({', '.join([*inputs, *outputs, 'arena'])});")
        for parameter in outputs:
            lines.append(f"        if (fwrite({parameter}, sizeof {parameter}, 1, stdout) != 1) return 1;")
        lines.append("    }")
    return "\n".join([*lines, "    return 0;", "}"]) + "\n"


def run_program(
    built: Mapping[str, Program],
    text: str,
    folder: pathlib.Path,
    inputs: Mapping[str, Sequence[np.ndarray]],
    flags: Sequence[str],
    *,
    compiler: str = "gcc",
    emulator: Sequence[str] = (),
    big_endian: bool = False,
) -> dict[str, list[np.ndarray]]:
    """The outputs of a program of its own, perhaps of another machine."""
    source, program = folder / "program.c", folder / "program"
    source.write_text(text + driver(built))
    check([compiler, *WARNINGS, *flags, "-o", str(program), str(source)])
    order = ">" if big_endian else "<"

    def as_stored(array: np.ndarray) -> bytes:
        return array.astype(array.dtype.newbyteorder(order)).tobytes()

    data = b"".join(as_stored(array) for name in built for array in inputs[name])
    done = subprocess.run([*emulator, str(program)], input=data, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    found: dict[str, list[np.ndarray]] = {}
    at = 0
    for name, model in built.items():
        found[name] = []
        for output in model.graph.outputs:
            dtype, shape = np.dtype(model.graph.tensors[output].dtype), model.shapes[output]
            count = math.prod(shape)
            values = np.frombuffer(done.stdout, dtype.newbyteorder(order), count, at)
            at += count * dtype.itemsize
            found[name].append(values.astype(dtype).reshape(shape))
    assert at == len(done.stdout)
    return found


def has(flags: Sequence[str]) -> bool:
    """Whether this processor has all of these, as Linux names them."""
    info = pathlib.Path("/proc/cpuinfo")
    return set(flags) <= (set(info.read_text().split()) if info.exists() else set())


def check(command: Sequence[str]) -> None:
    done = subprocess.run(list(command), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
