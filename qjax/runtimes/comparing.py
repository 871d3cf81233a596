"""Runs a graph in the interpreter and in a runtime on the same codes, and compares the outputs."""

import dataclasses
import difflib
import platform
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qjax.export.integer_graph import IntegerGraph
from qjax.run.quantize_io import dequantize_output
from qjax.runtimes import RUNTIMES, prepare
from qjax.runtimes.batches import Batch, batch_axis, batches
from qjax.support.tables import table


@dataclasses.dataclass
class Differing:
    """The counts for one output.

    largest: the greatest absolute difference. first: the position of the first difference, with both values; the
    example is numbered over all batches.
    """

    name: str
    compared: int = 0
    count: int = 0
    largest: float = 0
    first: str = "-"
    examples: int = 0

    def add(self, expected: np.ndarray, got: np.ndarray, axis: int | None = None) -> None:
        """Add one batch. axis: of the examples, None if there is none.

        Raises:
          ValueError: the shape or dtype is not the expected one.
        """
        if expected.shape != got.shape or expected.dtype != got.dtype:
            raise ValueError(
                f"output {self.name!r}: expected {expected.dtype} of shape {expected.shape}, "
                f"got {got.dtype} of shape {got.shape}."
            )
        wrong = expected != got
        self.compared += expected.size
        found = int(np.sum(wrong))
        if found:
            wide = np.int64 if expected.dtype.kind in "iu" else np.float64
            steps = np.abs(got[wrong].astype(wide) - expected[wrong].astype(wide))
            self.largest = max(self.largest, steps.max().item())
            if not self.count:
                place = tuple(int(i) for i in np.argwhere(wrong)[0])
                shown = [str(i + self.examples if k == axis else i) for k, i in enumerate(place)]
                self.first = f"[{', '.join(shown)}]: {expected[place]} expected, {got[place]}"
        self.count += found
        self.examples += 0 if axis is None else expected.shape[axis]


@dataclasses.dataclass(frozen=True)
class Result:
    """One comparison; `str()` is a table and a conclusion.

    title: what was compared with what. hint: a possible reason for differences.
    """

    title: str
    outputs: tuple[Differing, ...]
    examples: str
    hint: str = ""

    @property
    def equal(self) -> bool:
        """Whether no value differs."""
        return all(output.count == 0 for output in self.outputs)

    @property
    def compared(self) -> int:
        """The number of values compared, over all outputs."""
        return sum(output.compared for output in self.outputs)

    @property
    def differ(self) -> int:
        """The number of values that differ."""
        return sum(output.count for output in self.outputs)

    @property
    def sentence(self) -> str:
        """The comparison in one line, followed by the hint."""
        if self.equal:
            return f"{self.title}: no code of {self.compared:,} differs."
        worst = max(self.outputs, key=lambda output: output.largest)
        said = f"{self.title}: {self.differ:,} of {self.compared:,} codes differ, by at most {worst.largest:.6g}"
        return f"{said} ({worst.name} at {worst.first}). {self.hint}".rstrip()

    def __str__(self) -> str:
        end = "no code differs" if self.equal else f"{self.differ:,} differ"
        lines = [self.title, report(self.outputs), f"{self.examples}, {self.compared:,} codes: {end}."]
        return "\n".join(lines + ([self.hint] if self.hint and not self.equal else []))


def check_runtimes(
    what: str, runtimes: Sequence[str] | Mapping[str, Mapping[str, Any]]
) -> dict[str, Mapping[str, Any]]:
    """The options of the emitter by the name of each runtime.

    Args:
      what: the name of the calling function, for messages.

    Raises:
      TypeError: these are not names. ValueError: one is unknown.
    """
    if isinstance(runtimes, str):
        raise TypeError(f"{what}: expected runtimes= to be a list of names, got a string: write [{runtimes!r}].")
    asked: dict[str, Mapping[str, Any]]
    asked = dict(runtimes) if isinstance(runtimes, Mapping) else {name: {} for name in runtimes}
    for name in asked:
        if name not in RUNTIMES:
            near = difflib.get_close_matches(str(name), RUNTIMES, 1)
            cure = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{what}: expected runtimes= of {', '.join(RUNTIMES)}, got {name!r}.{cure}")
    return asked


_MOST = 32
"""The number of examples per call of a runtime."""


def against_runtimes(
    graph: IntegerGraph, given: Sequence[Sequence[np.ndarray]], runtimes: Mapping[str, Mapping[str, Any]]
) -> tuple[Result, ...]:
    """Emit the graph for each runtime, run the files, and compare every output with the interpreter's.

    Args:
      given: the codes of the inputs, batch by batch. runtimes: options of the emitter by name.

    Raises:
      ValueError: the format cannot hold the graph. ImportError: the runtime is not installed.
    """
    sizes = [value.shape[axis] for values in given for value, axis in _axes(graph, values) if axis is not None]
    size = min([_MOST, *sizes])
    done = [one for values in given for one in batches(graph.ir, values, size, whole=True)]
    mine = computed(graph, done)
    return tuple(
        conclude(graph, name, mine, run_on(graph, name, done, size, options), done)
        for name, options in runtimes.items()
    )


def _axes(graph: IntegerGraph, values: Sequence[np.ndarray]) -> list[tuple[np.ndarray, int | None]]:
    return [(v, batch_axis(graph.ir.tensors[name])) for name, v in zip(graph.ir.inputs, values, strict=True)]


def computed(graph: IntegerGraph, given: Sequence[Batch]) -> list[list[np.ndarray]]:
    """The interpreter's outputs, batch by batch."""
    return [[np.asarray(value) for value in graph.interpreter(*one.arrays)] for one in given]


def run_on(
    graph: IntegerGraph, runtime: str, given: Sequence[Batch], size: int, options: Mapping[str, Any]
) -> list[list[np.ndarray]]:
    """The outputs of the emitted file on a runtime, batch by batch."""
    with tempfile.TemporaryDirectory(prefix="qjax-") as folder:
        run = prepare(runtime, graph, folder, size, dict(options))
        return [run(one.arrays) for one in given]


def conclude(
    graph: IntegerGraph,
    runtime: str,
    mine: Sequence[Sequence[np.ndarray]],
    theirs: Sequence[Sequence[np.ndarray]],
    kept: Sequence[Batch | None],
) -> Result:
    """Compare the interpreter's outputs with a runtime's.

    Args:
      kept: the batches; None means that everything counts.
    """
    title = f"{runtime} against qjax's interpreter, target {graph.target}"
    return Result(title, compared(graph, mine, theirs, kept), examples_text(kept), _hint(runtime, graph.target))


def examples_text(kept: Sequence[Batch | None]) -> str:
    """Describe how many examples were compared."""
    counted = sum(one.count or 0 for one in kept if one is not None)
    return f"{counted:,} examples" if counted else "one run"


def compared(
    graph: IntegerGraph,
    expected: Sequence[Sequence[np.ndarray]],
    got: Sequence[Sequence[np.ndarray]],
    kept: Sequence[Batch | None],
) -> tuple[Differing, ...]:
    """Compare output by output. If one side has float values, the codes of the other are dequantized."""
    found: list[Differing] = []
    for index, name in enumerate(graph.ir.outputs):
        tensor, tally = graph.ir.tensors[name], Differing(name)
        for left, right, batch in zip(expected, got, kept, strict=True):
            pair = [np.asarray(side[index]) for side in (left, right)]
            if batch is not None:
                pair = [batch.examples_of(tensor, value) for value in pair]
            if any(value.dtype == np.float32 for value in pair):
                pair = [value if value.dtype == np.float32 else float_values(graph, name, value) for value in pair]
            tally.add(pair[0], pair[1], batch_axis(tensor))
        found.append(tally)
    return tuple(found)


def float_values(graph: IntegerGraph, name: str, codes: np.ndarray) -> np.ndarray:
    """The codes of one output, dequantized.

    Raises:
      ValueError: the output has no quantization parameters.
    """
    if graph.ir.tensors[name].quantization is None:
        raise ValueError(
            f"output {name!r} has no scale, so its codes cannot be dequantized: pass codes to compare with."
        )
    return np.asarray(dequantize_output(graph.ir, name, codes))


def _hint(runtime: str, target: str) -> str:
    own = RUNTIMES[runtime].targets
    if not own or target in own:
        return ""
    arm = platform.machine().lower() in ("aarch64", "arm64")
    here = next((name for name in own if name.endswith("_arm") == arm), own[0])
    return f"{runtime} computes here as the target {here} does, and this graph as {target}: try --target {here}."


def report(outputs: Sequence[Differing]) -> str:
    """Tabulate all outputs."""
    header = ("output", "compared", "differ", "by at most", "first at")
    rows = [(o.name, o.compared, o.count, f"{o.largest:.6g}", o.first) for o in outputs]
    return table(header, rows)
