"""Runs a graph as machine code in this process: the emitted C, compiled for this machine by its own compiler."""

import ctypes
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
from typing import Any

import numpy as np

from qjax.export.emit.c import to_files
from qjax.graph.batch_shapes import shapes_at
from qjax.graph.ir import Graph
from qjax.run.interpreter import Interpreter, check_shape, each

FLAGS = ("-std=c99", "-O3", "-march=native", "-shared", "-fPIC")
_NAME = "model"


def compiler() -> list[str]:
    """The command of the C compiler: the variable CC, or the first of cc, gcc and clang that is installed.

    Raises:
      FileNotFoundError: there is none.
    """
    if os.environ.get("CC"):
        return shlex.split(os.environ["CC"])
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    raise FileNotFoundError("no C compiler (cc, gcc, clang) was found: install one, or name it in the variable CC.")


class Native:
    """The integer part of a graph for one batch size. Calls from several threads may overlap.

    Args:
      graph: a finished graph. batch: the number of examples in one call.
      interpreter: of the graph; it checks the inputs.
      threads: how many threads share the work of one call.

    Raises:
      FileNotFoundError: no compiler. RuntimeError: the compiler fails; the message contains its output.
      ValueError: the graph contains what has no form in C.
    """

    def __init__(self, graph: Graph, batch: int, interpreter: Interpreter, threads: int = 1) -> None:
        if type(threads) is not int or threads < 1:
            raise ValueError(f"native: expected threads to be a whole number of at least 1, got {threads!r}.")
        if platform.system() == "Windows":
            raise OSError("native: compiled graphs need a POSIX system; graph.emit('c', folder) writes the same code.")
        self.graph, self.batch, self.threads, self._interpreter = graph, batch, threads, interpreter
        self._process: int | None = None
        texts = to_files(graph, name=_NAME, batch=batch, vectors=0, simd=True, threads=threads > 1)
        source = texts[f"{_NAME}.c"].replace(f'#include "{_NAME}.h"', texts[f"{_NAME}.h"])
        with tempfile.TemporaryDirectory(prefix="qjax-native-") as folder:
            several = ["-fopenmp", f"-DQJAX_THREAD_COUNT={threads}"] if threads > 1 else []
            command = [*compiler(), *FLAGS, *several, "-o", f"{_NAME}.so", "-x", "c", "-"]
            done = subprocess.run(command, input=source, cwd=folder, capture_output=True, text=True, check=False)
            if done.returncode:
                cure = "\nSeveral threads need a compiler with OpenMP: gcc, or clang with libomp." if several else ""
                raise RuntimeError(f"{shlex.join(command)} failed:\n{done.stderr.strip()}{cure}")
            # a loaded library remains usable after its file is deleted
            self._function: Any = ctypes.CDLL(os.path.join(folder, f"{_NAME}.so"))[f"{_NAME}_run"]
        self._function.restype = None
        lines = texts[f"{_NAME}.h"].splitlines()
        self._arena_size = int(next(line.split()[2] for line in lines if line.startswith("#define MODEL_ARENA_SIZE ")))
        self._own = threading.local()
        shapes = shapes_at(graph, batch)
        self._inputs = [(name, shapes[name]) for name in graph.inputs]
        self._outputs = [(shapes[name], np.dtype(graph.tensors[name].dtype)) for name in graph.outputs]

    def run(self, *codes: Any) -> Any:
        """Codes to codes, as `IntegerGraph.run`, for the batch of this object. Arrays of numpy.

        Raises:
          TypeError, ValueError: other dtypes, shapes or batches than the graph's, and codes that the bits do not have.
          RuntimeError: several threads, in a process that was forked after a call.
        """
        if self.threads > 1:
            self._check_process()
        arrays = self._interpreter.checked([np.asarray(x) for x in each(codes)])
        for (name, shape), array in zip(self._inputs, arrays, strict=True):
            check_shape(name, shape, tuple(array.shape))
        given = [np.ascontiguousarray(array) for array in arrays]
        found = [np.empty(shape, dtype) for shape, dtype in self._outputs]
        arena = getattr(self._own, "arena", None)
        if arena is None:
            arena = self._own.arena = np.empty(self._arena_size // 8 + 1, np.int64)
        self._function(*(ctypes.c_void_p(array.ctypes.data) for array in (*given, *found, arena)))
        return found[0] if len(found) == 1 else tuple(found)

    def _check_process(self) -> None:
        """OpenMP's threads do not exist in a forked process, where a call would wait for them forever."""
        if self._process is None:
            self._process = os.getpid()
        if self._process != os.getpid():
            raise RuntimeError(
                "native: this process was forked after a call on several threads, which do not exist here. Start "
                "processes with multiprocessing.get_context('spawn'), or make graph.native(batch) with one thread."
            )

    def __repr__(self) -> str:
        return f"<Native: {len(self.graph.nodes)} nodes, batch {self.batch}, threads {self.threads}>"


__all__ = ["FLAGS", "Native", "compiler"]
