"""Runs a graph on arrays, batch by batch, and summarises its outputs."""

from collections.abc import Mapping, Sequence

import jax
import numpy as np

from qjax.cli import inputs
from qjax.cli.errors import Refused
from qjax.export.integer_graph import IntegerGraph
from qjax.graph.ir import Graph
from qjax.run.quantize_io import dequantize_outputs, quantize_inputs
from qjax.runtimes.batches import batches

_SHOWN = 8


def check_outputs(graph: Graph, codes: bool) -> None:
    """Refuse to dequantize an output that has no scale."""
    bare = [name for name in graph.outputs if graph.tensors[name].quantization is None]
    if bare and not codes:
        raise Refused(f"output {', '.join(bare)} has no scale, so its codes cannot be dequantized: use --codes.")


def run(
    graph: IntegerGraph, values: Sequence[np.ndarray], *, codes: bool, batch_size: int | None
) -> dict[str, np.ndarray]:
    """Run the graph; returns the outputs by name.

    Args:
      values: the checked inputs: floats, or codes.
      codes: whether inputs and outputs are codes. batch_size: None runs all examples at once.
    """
    ir = graph.ir
    size = batch_size or max((len(value) if value.ndim else 1 for value in values), default=1)
    parts: list[list[np.ndarray]] = []
    for batch in batches(ir, values, size):
        given = batch.arrays if codes else quantize_inputs(ir, batch.arrays)
        parts.append(outputs(graph, given, codes=codes))
    columns = zip(ir.outputs, zip(*parts, strict=True), strict=True)
    return {name: inputs.joined(ir.tensors[name], column) for name, column in columns}


def outputs(graph: IntegerGraph, given: Sequence[np.ndarray | jax.Array], *, codes: bool) -> list[np.ndarray]:
    """The outputs for one batch of codes: codes, or floats."""
    found = graph.interpreter(*given)
    if not codes:
        # Return one array per output, without the structure of the model's own result.
        reals = dequantize_outputs(graph.ir.replace(metadata={}), found)
        found = list(reals) if isinstance(reals, tuple) else [reals]
    return [np.asarray(value) for value in found]


def signature(name: str, value: np.ndarray) -> str:
    """Describe an array briefly."""
    return f"{name} {value.dtype} {'x'.join(map(str, value.shape)) or 'scalar'}"


def summary(found: Mapping[str, np.ndarray]) -> str:
    """Describe each output: its type, its range, the first example, and the positions of the greatest values."""
    lines: list[str] = []
    for name, value in found.items():
        lines.append(f"{signature(name, value)}, from {value.min():.6g} to {value.max():.6g}")
        first = value[0] if value.ndim > 1 else value
        text = " ".join(f"{element:.6g}" for element in first.reshape(-1)[:_SHOWN])
        lines.append(f"  first example: {text}{' ...' if first.size > _SHOWN else ''}")
        if value.ndim == 2:
            best = value.argmax(axis=-1)
            more = " ..." if len(best) > 2 * _SHOWN else ""
            lines.append(f"  argmax: {' '.join(map(str, best[: 2 * _SHOWN]))}{more}")
    return "\n".join(lines)
