"""Runs a graph here and elsewhere on the same codes, and compares the outputs."""

import dataclasses
import platform
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np

from qjax.cli import arrays, inputs
from qjax.cli.differences import Differing, report
from qjax.cli.errors import Refused, refusing
from qjax.cli.runtimes import RUNTIMES, prepare
from qjax.export.integer_graph import IntegerGraph, dequantize_output, quantize_inputs


@dataclasses.dataclass(frozen=True)
class Result:
    """One comparison; `str()` is a table and a conclusion.

    title: what was compared with what. hint: where it differs, what may be the reason.
    """

    title: str
    outputs: tuple[Differing, ...]
    examples: str
    hint: str = ""

    @property
    def equal(self) -> bool:
        """Nothing differs."""
        return all(output.count == 0 for output in self.outputs)

    def __str__(self) -> str:
        compared, count = (sum(getattr(o, field) for o in self.outputs) for field in ("compared", "count"))
        end = "no code differs" if self.equal else f"{count:,} differ"
        lines = [self.title, report(self.outputs), f"{self.examples}, {compared:,} codes: {end}."]
        return "\n".join(lines + ([self.hint] if self.hint and not self.equal else []))


def as_codes(graph: IntegerGraph, values: Sequence[np.ndarray], codes: bool) -> list[np.ndarray]:
    """The codes of inputs that may be reals."""
    return list(values) if codes else [np.asarray(value) for value in quantize_inputs(graph.ir, values)]


def verify(
    graph: IntegerGraph,
    values: Sequence[np.ndarray],
    runtime: str | None,
    expect: str | None,
    batch: int,
    options: dict[str, Any],
) -> list[Result]:
    """The interpreter against a runtime, and both against expected outputs.

    Args:
      values: codes. expect: a file of outputs. batch: examples per call, of the interpreter too, because some runtimes
        round otherwise at another batch. options: for the emitter.
    """
    ir = graph.ir
    expected = None if expect is None else _expected(graph, expect, values)
    done = list(inputs.batches(ir, values, batch, whole=True))
    mine = [[np.asarray(value) for value in graph.interpreter(*one.arrays)] for one in done]
    kept = [one.count for one in done]
    counted = sum(count or 0 for count in kept)
    examples = f"{counted:,} examples" if counted else "one run"
    results: list[Result] = []
    theirs: list[list[np.ndarray]] | None = None
    if runtime is not None:
        with tempfile.TemporaryDirectory(prefix="qjax-") as folder:
            with refusing():
                run = prepare(runtime, graph, folder, batch, options)
            theirs = [run(one.arrays) for one in done]
        title = f"{runtime} against qjax's interpreter, target {graph.target}"
        results.append(Result(title, _compared(graph, mine, theirs, kept), examples, _hint(runtime, graph.target)))
    if expected is not None:
        names = {"qjax's interpreter": mine} | ({} if theirs is None or runtime is None else {runtime: theirs})
        for name, outputs in names.items():
            joined = [
                [
                    inputs.joined(
                        ir.tensors[output],
                        [
                            inputs.examples_of(ir.tensors[output], one[i], count)
                            for one, count in zip(outputs, kept, strict=True)
                        ],
                    )
                    for i, output in enumerate(ir.outputs)
                ]
            ]
            found = _compared(graph, [expected], joined, [None])
            results.append(Result(f"{name} against {expect}, target {graph.target}", found, examples))
    return results


def _compared(
    graph: IntegerGraph,
    expected: Sequence[Sequence[np.ndarray]],
    got: Sequence[Sequence[np.ndarray]],
    kept: Sequence[int | None],
) -> tuple[Differing, ...]:
    """Output by output; where one side gives reals, the codes of the other are dequantized."""
    found: list[Differing] = []
    for index, name in enumerate(graph.ir.outputs):
        tensor, tally = graph.ir.tensors[name], Differing(name)
        for left, right, count in zip(expected, got, kept, strict=True):
            pair = [inputs.examples_of(tensor, np.asarray(side[index]), count) for side in (left, right)]
            if any(value.dtype == np.float32 for value in pair):
                pair = [value if value.dtype == np.float32 else reals(graph, name, value) for value in pair]
            tally.add(pair[0], pair[1], inputs.batch_axis(tensor))
        found.append(tally)
    return tuple(found)


def reals(graph: IntegerGraph, name: str, codes: np.ndarray) -> np.ndarray:
    """The reals of one output's codes."""
    if graph.ir.tensors[name].quantization is None:
        raise Refused(f"output {name!r} has no scale, so its codes stand for no reals: give codes to compare with.")
    return np.asarray(dequantize_output(graph.ir, name, codes))


def _expected(graph: IntegerGraph, path: str, values: Sequence[np.ndarray]) -> list[np.ndarray]:
    ir = graph.ir
    names = list(dict.fromkeys(ir.outputs))
    with refusing():
        found = dict(zip(names, arrays.read([path], names), strict=True))
    axes = [inputs.batch_axis(ir.tensors[name]) for name in ir.inputs]
    size = next((v.shape[a] for v, a in zip(values, axes, strict=True) if a is not None), None)
    for name, value in found.items():
        tensor = ir.tensors[name]
        shape = tuple(size if n is None else n for n in tensor.shape)
        if value.shape != shape:
            raise Refused(f"{path}: output {name!r}: expected shape {shape}, got {value.shape}.")
        if value.dtype.name not in (tensor.dtype, "float32"):
            raise Refused(
                f"{path}: output {name!r}: expected codes of dtype {tensor.dtype} or reals of float32, "
                f"got {value.dtype}."
            )
    return [found[name] for name in ir.outputs]


def _hint(runtime: str, target: str) -> str:
    own = RUNTIMES[runtime].targets
    if not own or target in own:
        return ""
    arm = platform.machine().lower() in ("aarch64", "arm64")
    here = next((name for name in own if name.endswith("_arm") == arm), own[0])
    return f"{runtime} computes here as the target {here} does, and this graph as {target}: try --target {here}."
