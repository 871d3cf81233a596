"""Runs the comparisons of `qjax verify`: the interpreter with a runtime, and both with expected outputs."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from qjax.cli import arrays, inputs
from qjax.cli.errors import Refused, refusing
from qjax.export.integer_graph import IntegerGraph
from qjax.run.quantize_io import quantize_inputs
from qjax.runtimes.batches import batch_axis, batches
from qjax.runtimes.comparing import Result, compared, computed, conclude, examples_text, run_on


def as_codes(graph: IntegerGraph, values: Sequence[np.ndarray], codes: bool) -> list[np.ndarray]:
    """Quantize the inputs, unless they are codes already."""
    return list(values) if codes else [np.asarray(value) for value in quantize_inputs(graph.ir, values)]


def verify(
    graph: IntegerGraph,
    values: Sequence[np.ndarray],
    runtime: str | None,
    expect: str | None,
    batch: int,
    options: dict[str, Any],
) -> list[Result]:
    """Compare the interpreter with a runtime, and both with expected outputs.

    Args:
      values: codes. expect: a file of outputs. batch: examples per call, for the interpreter too, because some runtimes
        round differently at another batch size. options: for the emitter.
    """
    ir = graph.ir
    expected = None if expect is None else _read_expected(graph, expect, values)
    done = list(batches(ir, values, batch, whole=True))
    mine = computed(graph, done)
    results: list[Result] = []
    sides = {"qjax's interpreter": mine}
    if runtime is not None:
        with refusing():
            sides[runtime] = run_on(graph, runtime, done, batch, options)
        results.append(conclude(graph, runtime, mine, sides[runtime], done))
    if expected is not None:
        for name, outputs in sides.items():
            joined = [
                [
                    inputs.joined(
                        ir.tensors[output],
                        [
                            batch.examples_of(ir.tensors[output], np.asarray(one[i]))
                            for one, batch in zip(outputs, done, strict=True)
                        ],
                    )
                    for i, output in enumerate(ir.outputs)
                ]
            ]
            with refusing():
                found = compared(graph, [expected], joined, [None])
            results.append(Result(f"{name} against {expect}, target {graph.target}", found, examples_text(done)))
    return results


def _read_expected(graph: IntegerGraph, path: str, values: Sequence[np.ndarray]) -> list[np.ndarray]:
    ir = graph.ir
    names = list(dict.fromkeys(ir.outputs))
    with refusing():
        found = dict(zip(names, arrays.read([path], names), strict=True))
    axes = [batch_axis(ir.tensors[name]) for name in ir.inputs]
    size = next((v.shape[a] for v, a in zip(values, axes, strict=True) if a is not None), None)
    for name, value in found.items():
        tensor = ir.tensors[name]
        shape = tuple(size if n is None else n for n in tensor.shape)
        if value.shape != shape:
            raise Refused(f"{path}: output {name!r}: expected shape {shape}, got {value.shape}.")
        if value.dtype.name not in (tensor.dtype, "float32"):
            raise Refused(
                f"{path}: output {name!r}: expected codes of dtype {tensor.dtype} or floats of dtype float32, "
                f"got {value.dtype}."
            )
    return [found[name] for name in ir.outputs]
