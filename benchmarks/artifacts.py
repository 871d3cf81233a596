"""Every artifact in every runtime: whether the codes are the graph's, how large it is, how long it takes.

`python -m benchmarks artifacts`. Outputs are compared on the whole test split of the digits and on random codes whose
first examples are the edges, code by code. Times are paired with ONNX Runtime's float32 model of the same network in
the same process; both hold what their Python interface takes to feed an input and to fetch an output, and one thread,
but for XLA, which takes all cores. Emulated machines are not timed.
"""

import dataclasses
import functools
import importlib.metadata
import io
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from rich import box
from rich.console import Console
from rich.table import Table

import qjax
from benchmarks import float_onnx
from benchmarks.machines import MACHINES
from benchmarks.networks import NETWORKS, Network, trained
from benchmarks.shipping import Way, ways
from benchmarks.timing import Paired, paired
from experiments.data import Digits, digits
from experiments.training import accuracy, scores
from qjax.cli.inputs import random_codes
from qjax.contrib.lab.machine import machine

BATCHES = (1, 32)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a run takes; the defaults are the table of docs/artifacts.md.

    seconds: per pair of times, 0 for none. examples: of the test split, and as many random ones.
    """

    networks: tuple[str, ...] = tuple(NETWORKS)
    seconds: float = 1.0
    epochs: int = 8
    quantized_epochs: int = 4
    examples: int = 500


QUICK = Settings(("MLP W8A8",), 0.0, 2, 1, 64)
"""One network, fewer codes, no times: does it run?"""


@dataclasses.dataclass
class Row:
    """One artifact in one runtime; differ: codes of (test split, random), None where nothing can run it."""

    way: Way
    differ: tuple[int, int] | None
    compared: tuple[int, int]
    size: int
    arena: int | None
    times: dict[int, Paired]

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "artifact": self.way.artifact,
            "runtime": self.way.runtime,
            "target": self.way.target,
            "compared": dict(zip(("digits", "random"), self.compared, strict=True)),
            "differ": None if self.differ is None else dict(zip(("digits", "random"), self.differ, strict=True)),
            "bytes": self.size,
            "arena_bytes": self.arena,
            "times": {str(batch): times.document() for batch, times in self.times.items()},
        }


@dataclasses.dataclass
class Section:
    """The rows of one network."""

    network: Network
    rows: list[Row]
    float_bytes: int
    accuracies: tuple[float, float]

    @property
    def differ(self) -> int:
        """Codes, of all rows."""
        return sum(sum(row.differ) for row in self.rows if row.differ is not None)

    def title(self) -> str:
        """The network and its float32 model."""
        first, second = (f"{100 * share:.1f}%" for share in self.accuracies)
        text = f"{self.network.name}: {first} of the test images in float32, {second} as integers. "
        text += f"The float32 .onnx takes {self.float_bytes:,} bytes"
        times = {
            batch: 1e6 * float(np.median(found.reference))
            for row in self.rows[:1]
            for batch, found in row.times.items()
        }
        took = [f"{t:.0f} us for {'one example' if batch == 1 else batch}" for batch, t in times.items()]
        return text + "." + (f" It takes {' and '.join(took)}." if took else "")

    def table(self) -> Table:
        """One line per row."""
        table = Table(box=box.MARKDOWN)
        table.add_column("artifact", no_wrap=True)
        table.add_column("runtime", no_wrap=True)
        for name in ("digits: differ", "random: differ", "bytes", "arena", *(f"time, batch {b}" for b in BATCHES)):
            table.add_column(name, justify="right", no_wrap=True)
        for row in self.rows:
            counts = [
                "-" if row.differ is None else f"{wrong:,} of {of:,}"
                for wrong, of in zip(row.differ or (0, 0), row.compared, strict=True)
            ]
            arena = "-" if row.arena is None else f"{row.arena:,}"
            times = [f"{row.times[b].ratio:.2f}" if b in row.times else "-" for b in BATCHES]
            table.add_row(row.way.artifact, row.way.runtime, *counts, f"{row.size:,}", arena, *times)
        return table

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "network": self.network.name,
            "float32_accuracy": self.accuracies[0],
            "accuracy": self.accuracies[1],
            "float32_bytes": self.float_bytes,
            "rows": [row.document() for row in self.rows],
        }


@dataclasses.dataclass
class Inputs:
    """Codes for one graph, and the interpreter's answers by the size of the batch."""

    graph: qjax.IntegerGraph
    codes: np.ndarray
    answers: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)

    def batches(self, size: int) -> list[np.ndarray]:
        """Slices along the batch; the last one repeats its last example."""
        total = len(self.codes)
        index = np.minimum(np.arange(-(-total // size) * size), total - 1)
        return list(self.codes[index].reshape(-1, size, *self.codes.shape[1:]))

    def expected(self, size: int) -> np.ndarray:
        """At that batch, because an optimised runtime may treat the last elements of a tensor otherwise."""
        if size not in self.answers:
            self.answers[size] = self.joined([np.asarray(self.graph.run(codes)) for codes in self.batches(size)])
        return self.answers[size]

    def joined(self, outputs: Sequence[np.ndarray]) -> np.ndarray:
        """The outputs of `batches` as one array."""
        return np.concatenate(outputs)[: len(self.codes)]


def section_of(network: Network, data: Digits, settings: Settings, made: Sequence[Way]) -> Section:
    """Ship one network in every way."""
    images = data.test_images[: settings.examples]
    content = float_onnx.model_of(network.model).SerializeToString()
    reference = _float_session(content, network, images)
    inputs: dict[str, Inputs] = {}
    rows: list[Row] = []
    for way in qjax.calibration.track(made, network.name):
        if way.target not in inputs:
            graph = network.graph(way.target)
            (random,) = random_codes(graph.ir, settings.examples, 0)
            inputs[way.target] = Inputs(graph, np.concatenate([np.asarray(graph.quantize(images)), random]))
        rows.append(_row(way, inputs[way.target], len(images), reference, settings.seconds))
    integers = np.asarray(next(iter(inputs.values())).graph(images))
    labels = data.test_labels[: settings.examples]
    found = accuracy(scores(network.model, images), labels), accuracy(integers, labels)
    return Section(network, rows, len(content), found)


def _row(way: Way, inputs: Inputs, digits: int, reference: Callable[[int], Any], seconds: float) -> Row:
    differ, compared, size, arena = [0, 0], [0, 0], 0, None
    times: dict[int, Paired] = {}
    for batch in way.batches:
        with tempfile.TemporaryDirectory(prefix="qjax-") as folder:
            loaded = way.load(inputs.graph, Path(folder), batch)
            size, arena = size or loaded.size, arena or loaded.arena
            if loaded.outputs is None:
                return Row(way, None, (0, 0), size, arena, {})
            batches, expected = inputs.batches(batch), inputs.expected(batch)
            found = inputs.joined(loaded.outputs(batches))
            if (found.shape, found.dtype) != (expected.shape, expected.dtype):
                raise AssertionError(f"{way}: {found.dtype}{found.shape}, expected {expected.dtype}{expected.shape}")
            for part, rows in enumerate((slice(None, digits), slice(digits, None))):
                differ[part] += int(np.sum(found[rows] != expected[rows]))
                compared[part] += expected[rows].size
            if seconds and way.timed and loaded.call is not None:
                name = f"{way.artifact}, {way.runtime}, batch {batch} / float32"
                call = functools.partial(loaded.call, np.ascontiguousarray(batches[0]))
                times[batch] = paired(name, call, reference(batch), seconds=seconds)
    return Row(way, (differ[0], differ[1]), (compared[0], compared[1]), size, arena, times)


def _float_session(content: bytes, network: Network, images: np.ndarray) -> Callable[[int], Any]:
    """By the size of the batch, a call of the float32 model, which was found to be the network."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    first = np.ascontiguousarray(images.transpose(0, 3, 1, 2))
    got, wanted = session.run(None, {"x": first})[0], np.asarray(scores(network.model, images))
    if not np.allclose(got, wanted, rtol=1e-5, atol=1e-5):
        raise AssertionError(f"{network.name}: the float32 ONNX model is another network")

    def of(batch: int) -> Any:
        feeds = {"x": np.ascontiguousarray(np.resize(first, (batch, *first.shape[1:])))}
        return lambda: session.run(None, feeds)

    return of


def artifacts(settings: Settings, console: Console) -> Iterator[Section]:
    """The sections in turn, each printed when it is done; what is not installed is printed too."""
    made = ways()
    for way in made:
        if way.needs:
            console.print(f"left out: {way.artifact} in {way.runtime}, which needs {', '.join(way.needs)}")
    data = digits()
    networks = trained(data, settings.networks, epochs=settings.epochs, quantized_epochs=settings.quantized_epochs)
    for network in networks:
        section = section_of(network, data, settings, [way for way in made if not way.needs])
        console.print(text_of([section]))
        yield section


def text_of(sections: Sequence[Section]) -> str:
    """Markdown."""
    out = io.StringIO()
    console = Console(file=out, width=200, color_system=None)
    for section in sections:
        console.print(section.title(), soft_wrap=True)
        console.print(section.table())
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip() + "\n"


def versions() -> dict[str, str]:
    """What answered."""
    found: dict[str, str] = {}
    for name in ("onnx", "onnxruntime", "ai-edge-litert", "tflite-micro"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    for tool in dict.fromkeys(tool for m in MACHINES if not m.missing for tool in (m.compiler, m.emulator) if tool):
        done = subprocess.run([tool, "--version"], capture_output=True, text=True, check=True)
        number = re.search(r"\d+\.\d+[.\d]*", done.stdout.splitlines()[0].split(")")[-1] or done.stdout)
        found[tool] = number[0] if number else done.stdout.splitlines()[0]
    return found


def page_text(sections: Sequence[Section]) -> str:
    """The tables, the machine and the versions."""
    where = machine()
    answered = ", ".join(f"{name} {version}" for name, version in versions().items())
    return (
        f"{text_of(sections)}\nMachine: {where['cpu']}, {where['cores']} cores.\n"
        f"Versions: Python {where['python']}, jax {where['jax']}, {answered}.\n"
    )
