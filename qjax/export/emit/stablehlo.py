"""Writes the graph as StableHLO: the interpreter's own integer function, serialised by `jax.export`.

The file does not need qjax. Any process with JAX (0.10 or later) loads it, for every platform for which it was lowered:

    exported = jax.export.deserialize(open("model.stablehlo", "rb").read())
    codes = exported.call(codes)

`exported.mlir_module()` is its text, for other programs that read StableHLO. JAX promises to read a file for at least
six months after the release that wrote it (https://docs.jax.dev/en/latest/export/export.html).
"""

import contextlib
from collections.abc import Generator, Sequence
from typing import Any

import jax
import numpy as np
from jax import export

from qjax.export import files
from qjax.graph.ir import Graph
from qjax.graph.kernels import prepare
from qjax.run import loop_execution
from qjax.run.find_loops import over_iterations, repeats
from qjax.run.quantize_io import dequantize_outputs, quantize_inputs
from qjax.run.shared_constants import SharedConstants

PLATFORMS = ("cpu", "cuda", "tpu")


def emit(graph: Graph, path: files.StrPath, **options: Any) -> None:
    """Write `to_bytes(graph, **options)` to one file, atomically."""
    files.write(to_bytes(graph, **options), path)


@contextlib.contextmanager
def _without_source_locations() -> Generator[None]:
    """A context in which JAX omits the source lines, which would change with every edit of a file of qjax."""
    before = jax.config.jax_traceback_in_locations_limit
    jax.config.update("jax_traceback_in_locations_limit", 0)
    try:
        yield
    finally:
        jax.config.update("jax_traceback_in_locations_limit", before)


def to_bytes(
    graph: Graph,
    *,
    batch: int | None = None,
    platforms: Sequence[str] = PLATFORMS,
    reals: bool = False,
) -> bytes:
    """The serialised function: one argument per input of the graph, one array or a tuple of arrays as its value.

    Args:
      graph: a finished graph.
      batch: the batch size; None leaves it free.
      platforms: the platforms for which the function is lowered, by jax.export's names (cpu, cuda, rocm, tpu).
      reals: whether arguments and results are floats, and the function quantizes and dequantizes. Otherwise it contains
        only integers.

    Raises:
      ValueError: a batch below 1, or an unknown platform.
    """
    if batch is not None and (type(batch) is not int or batch < 1):
        raise ValueError(f"stablehlo: expected a batch of at least 1, got {batch!r}; None leaves it free.")
    # numpy arrays become constants of the module
    own = {name: {role: np.asarray(v) for role, v in roles.items()} for name, roles in prepare(graph).items()}
    loops = repeats(graph, own)
    constants = SharedConstants.of(own, over_iterations(graph, loops))

    def function(*inputs: Any) -> Any:
        codes = quantize_inputs(graph, inputs) if reals else list(inputs)
        env = loop_execution.outputs(graph, loops, constants, codes, graph.outputs)
        outputs = [env[name] for name in graph.outputs]
        if reals:
            return dequantize_outputs(graph, outputs)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    (free,) = export.symbolic_shape("batch") if batch is None else (batch,)
    arguments: list[Any] = []
    for name in graph.inputs:
        tensor = graph.tensors[name]
        shape = [free if size is None else size for size in tensor.shape]
        dtype = "float32" if reals and tensor.quantization is not None else tensor.dtype
        arguments.append(jax.ShapeDtypeStruct(shape, np.dtype(dtype)))
    with _without_source_locations():
        exported = export.export(jax.jit(function), platforms=tuple(platforms))(*arguments)
    return bytes(exported.serialize())
