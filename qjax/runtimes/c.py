"""Runs the emitted C, compiled for this machine, in a separate process."""

import importlib
import math
import os
import shlex
import subprocess
from collections.abc import Sequence
from typing import Any

import numpy as np

from qjax.export import native
from qjax.graph.batch_shapes import bytes_at, shapes_at
from qjax.runtimes import Run

_MAIN = """#include <stdint.h>
#include <stdio.h>
#include "model.h"

static int64_t arena[MODEL_ARENA_SIZE / 8 + 1];
{arrays}
int main(void)
{{
{reads}
    model_run({arguments}, arena);
{writes}
    return 0;
}}
"""


def prepare(graph: Any, folder: str, batch: int, mode: str, options: dict[str, Any]) -> Run:
    """Compile a program that reads the codes of one batch from standard input, and writes those of the outputs."""
    compiler = native.compiler()
    emitter: Any = importlib.import_module("qjax.export.emit.c")
    texts = emitter.to_files(graph.ir, name="model", batch=batch, vectors=0, **options)
    for name, text in {
        "model.h": texts["model.h"],
        "model.c": texts["model.c"],
        "main.c": _main(graph.ir, batch),
    }.items():
        with open(os.path.join(folder, name), "w", encoding="ascii") as file:
            file.write(text)
    program = os.path.join(folder, "model")
    # The compiler's flags select vector instructions.
    here = ["-march=native"] if options.get("simd") else []
    built = subprocess.run(
        [*compiler, "-std=c99", "-O2", *here, "-o", program, "model.c", "main.c"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    if built.returncode:
        raise RuntimeError(f"{shlex.join(compiler)} cannot compile the emitted C:\n{built.stderr}")
    tensors = [graph.ir.tensors[name] for name in graph.ir.outputs]
    sizes = shapes_at(graph.ir, batch)
    shapes = [sizes[name] for name in graph.ir.outputs]

    def run(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        given = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)
        data = subprocess.run([program], input=given, stdout=subprocess.PIPE, check=True).stdout
        found: list[np.ndarray] = []
        for tensor, shape in zip(tensors, shapes, strict=True):
            size = math.prod(shape) * np.dtype(tensor.dtype).itemsize
            found.append(np.frombuffer(data[:size], tensor.dtype).reshape(shape))
            data = data[size:]
        return found

    return run


def _main(ir: Any, batch: int) -> str:
    inputs = [(f"x{i}", ir.tensors[name]) for i, name in enumerate(ir.inputs)]
    outputs = [(f"y{i}", ir.tensors[name]) for i, name in enumerate(ir.outputs)]
    known = bytes_at(ir, batch)
    sizes = {name: known[tensor.name] for name, tensor in inputs + outputs}

    def array(name: str, tensor: Any) -> str:
        kind = "float" if tensor.dtype == "float32" else f"{tensor.dtype}_t"
        return f"static {kind} {name}[{max(sizes[name] // np.dtype(tensor.dtype).itemsize, 1)}];"

    return _MAIN.format(
        arrays="\n".join(array(name, tensor) for name, tensor in inputs + outputs),
        reads="\n".join(f"    if (fread({n}, 1, {sizes[n]}, stdin) != {sizes[n]}) return 2;" for n, _ in inputs),
        arguments=", ".join(name for name, _ in inputs + outputs),
        writes="\n".join(f"    if (fwrite({n}, 1, {sizes[n]}, stdout) != {sizes[n]}) return 3;" for n, _ in outputs),
    )
