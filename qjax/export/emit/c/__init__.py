"""C99: writes a model as two files that need only a compiler.

`NAME.c` and `NAME.h` use only integers: no float, no allocation, no library beyond <stdint.h>. There are two
exceptions. Float islands are float32, and only those whose every step IEEE 754 rounds exactly can be written. With
`simd=True`, a rule that is one product in float32 is computed in float32. Constants are `static const` (flash).
Intermediate tensors share one arena, whose size is a macro of the header. The code equals the interpreter bit for bit
under every target, because it is translated from the kernels of `qjax.ops`, traced by JAX, or from a shorter form that
is proven to be the same. `NAME_test.c` checks this on the machine on which it runs.
"""

import os
import re

from qjax.export.emit.c import files, stepping
from qjax.export.emit.c.blocks import Source
from qjax.export.emit.c.program import Program, build
from qjax.export.emit.c.vectors import vectors_of
from qjax.export.emit.golden import golden
from qjax.export.files import write_folder
from qjax.graph.ir import Graph
from qjax.support.extensions import VECTORS
from qjax.support.progress import say

__all__ = ["emit", "to_files"]


def emit(
    graph: Graph,
    path: str | os.PathLike[str],
    *,
    name: str = "model",
    batch: int = 1,
    vectors: int = 4,
    simd: bool | str = False,
    threads: bool = False,
) -> None:
    """Write NAME.c, NAME.h, NAME_test.c and a Makefile into a folder, and print the size of the arena.

    Args:
      graph: a finished graph.
      path: the folder, which is created if necessary. Either all files are written, or none.
      name: of the files, the function `NAME_run` and the macros; a C identifier.
      batch: how many examples one call takes; it is fixed in the file.
      vectors: how many golden runs `NAME_test.c` contains; the first two use the lowest and the highest codes.
      simd: whether dense layers and convolutions of 8-bit codes are written for the vectors of x86-64 (AVX2, AVX-VNNI,
        AVX-512 VNNI) and AArch64 (NEON, with and without dot products). The compiler's flags choose; without any of
        them, plain loops compute the same codes. Weights of 4 and 2 bits then take a byte. "cortex_m": for the vectors
        of a Cortex-M (Helium, DSP extension), chosen in the same way. Weights then take no more than without vectors.
      threads: whether large loops are marked for OpenMP. The codes are the same with any number of threads. A compiler
        without `-fopenmp` ignores the marks; with it, `OMP_NUM_THREADS` sets the number of threads, or
        `-DQJAX_THREAD_COUNT=4` fixes it. "cortex_m" does not support threads.

    Raises:
      ValueError: a name that is no identifier, a batch below 1, fewer than 0 vectors, another `simd`, `threads` for a
        Cortex-M, or a node that contains something without a form in C; the message names it.
      GraphError: the graph is not finished.
      OSError: the folder cannot be written.
    """
    program, texts = _emitted(graph, name, batch, vectors, simd, threads)
    folder = os.fspath(path)
    write_folder(folder, {file: text.encode("ascii") for file, text in texts.items()}, (".c", ".h"))
    say(
        f"{os.path.join(folder, name)}.c: arena of {program.plan.size} bytes (at least {program.plan.bound} are alive "
        f"at once), local arrays of {program.stack} bytes, constants of {program.source.table_bytes} bytes (weights "
        f"{program.source.weight_bytes}), batch {batch}"
    )


def to_files(
    graph: Graph,
    *,
    name: str = "model",
    batch: int = 1,
    vectors: int = 4,
    simd: bool | str = False,
    threads: bool = False,
) -> dict[str, str]:
    """The texts that `emit` writes, by file name. Raises the same errors as `emit`."""
    return _emitted(graph, name, batch, vectors, simd, threads)[1]


def _emitted(
    graph: Graph, name: str, batch: int, vectors: int, simd: bool | str, threads: bool
) -> tuple[Program, dict[str, str]]:
    if re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name) is None:
        raise ValueError(f"C: expected a name of ASCII letters, digits and underscores, got {name!r}.")
    if vectors < 0:
        raise ValueError(f"C: expected at least 0 vectors, got {vectors}.")
    if type(simd) not in (bool, str) or simd not in VECTORS:
        raise ValueError(
            "C: expected simd=True for the vectors of x86-64 and AArch64, 'cortex_m' for those of a Cortex-M, or False."
            f" Got {simd!r}."
        )
    source = Source(simd=simd, threads=threads)
    form = vectors_of(source)
    if type(threads) is not bool or (threads and form is not None and not form.threads):
        raise ValueError(
            f"C: expected threads=True or False, and False for a Cortex-M. Got {threads!r}, simd={simd!r}."
        )
    for own in ("run", "arena", "init", "step", "state"):
        source.names.fresh(f"{name}_{own}")
    program = build(graph, batch, source, f"{name}_")
    cases = golden(program.graph, program.shapes, vectors)
    texts = {
        f"{name}.h": files.header(program, name),
        f"{name}.c": files.source(program, name),
        f"{name}_test.c": files.selftest(program, name, cases, stepping.golden(program, cases)),
        "Makefile": files.makefile(name),
    }
    return program, texts
