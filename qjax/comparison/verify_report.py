"""The result of `verify`: a verdict, and the counts per node."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from qjax import ops
from qjax.graph.ir import Graph, Node
from qjax.graph.rounding_phrases import method_of, phrase
from qjax.numerics.accumulator import EXACT, Accumulator
from qjax.ops import backend
from qjax.support.tables import Grid, Printed

_CLIPPED = 0.01
"""A greater share of clipped inputs is reported first. Ranges that clip outliers on purpose clip less than this."""

_ROWS = 30
"""A longer table shows only the nodes that differ."""


@dataclasses.dataclass(frozen=True)
class NodeReport:
    """Counts over all batches.

    local: outputs that differ although the node received the training forward's input codes; local_max: by how many
    steps at most. end_to_end, end_to_end_max: the same when the graph runs from its inputs. cause: what the node
    computes differently from the training forward; "" if nothing differs locally.
    """

    name: str
    op: str
    location: str | None
    compared: int
    local: int
    local_max: int
    end_to_end: int
    end_to_end_max: int
    cause: str = ""


@dataclasses.dataclass(frozen=True)
class RealReport:
    """An output that stays in float32: how many of its numbers differ, and by how much."""

    name: str
    compared: int
    differ: int
    by_at_most: float


@dataclasses.dataclass(frozen=True)
class InputReport:
    """How many of an input's numbers lie outside the range of its codes, which comes from the calibration data.

    low, high: the least and the greatest number in the batches. least, greatest: those that have a code.
    """

    name: str
    compared: int
    clipped: int
    low: float
    high: float
    least: float
    greatest: float

    @property
    def share(self) -> float:
        """The share of numbers that are clipped."""
        return self.clipped / max(1, self.compared)


@dataclasses.dataclass(frozen=True)
class OutputReport:
    """The distance of a dequantized output of the graph from the training forward's output.

    by_at_most: the greatest absolute difference. noise, signal: for each channel (element of the last axis), the sums
    of the squares of the differences and of the training forward's numbers.
    """

    name: str
    by_at_most: float
    noise: tuple[float, ...]
    signal: tuple[float, ...]

    @property
    def decibels(self) -> float:
        """10 log10(signal / noise) over all channels; infinite if nothing differs."""
        return _decibels(sum(self.noise), sum(self.signal))

    @property
    def worst(self) -> tuple[int, float]:
        """The channel with the least ratio of signal to noise, and that ratio in decibels."""
        ratios = [_decibels(noise, signal) for noise, signal in zip(self.noise, self.signal, strict=True)]
        return min(enumerate(ratios), key=lambda pair: pair[1])


def _decibels(noise: float, signal: float) -> float:
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


class FileReport(Protocol):
    """The comparison of an emitted file, run on its real runtime, with the graph."""

    @property
    def equal(self) -> bool:
        """Whether no value differs."""
        ...

    @property
    def sentence(self) -> str:
        """The comparison in one line."""
        ...


@dataclasses.dataclass(frozen=True)
class Report(Printed):
    """The result of `verify`. `str(report)` is a verdict and a table; `report.exact` is whether nothing differs at all.

    predictions: how many of the `predicted` final predictions (argmax over the last axis of the first output) differ.
    reals: the outputs without quantization parameters. outputs: the distance of each output from the training
    forward's. target, trained_for: the targets of the graph and of the model. as_converted: whether `convert` makes
    this very graph of the model as it is now, so that the graph computes what `qjax.exact` computes; None if nothing
    differs, or if the target is unknown here, because then it is not checked. changed: otherwise, the first difference.
    files: what each requested runtime computes with the file emitted for it. inputs: how many numbers of each input are
    clipped. uncalibrated: the quantizers whose calibration data were a single number.
    """

    nodes: tuple[NodeReport, ...]
    examples: int
    predictions: int
    reals: tuple[RealReport, ...] = ()
    predicted: int = 0
    outputs: tuple[OutputReport, ...] = ()
    target: str = ""
    trained_for: str = ""
    as_converted: bool | None = None
    changed: str = ""
    files: tuple[FileReport, ...] = ()
    inputs: tuple[InputReport, ...] = ()
    uncalibrated: tuple[str, ...] = ()

    def with_files(self, files: Sequence[FileReport]) -> "Report":
        """This report, extended by what runtimes compute with the emitted files."""
        return dataclasses.replace(self, files=tuple(files))

    def against(self, changed: str) -> "Report":
        """This report, extended by the first difference between the graph and a new conversion ("" for none)."""
        return dataclasses.replace(self, as_converted=not changed, changed=changed)

    @property
    def exact(self) -> bool:
        """Whether no code of any node, no float output, and no output of an emitted file differs."""
        return self._same_as_training and all(file.equal for file in self.files)

    @property
    def _same_as_training(self) -> bool:
        codes = all(node.local == 0 and node.end_to_end == 0 for node in self.nodes)
        return codes and all(real.differ == 0 for real in self.reals)

    @property
    def compared(self) -> int:
        """The number of codes compared, over all nodes."""
        return sum(node.compared for node in self.nodes)

    @property
    def local(self) -> int:
        """The number of codes that differ although the inputs agree, over all nodes."""
        return sum(node.local for node in self.nodes)

    @property
    def local_max(self) -> int:
        """The largest such difference, in steps."""
        return max((node.local_max for node in self.nodes), default=0)

    @property
    def output_mismatches(self) -> int:
        """Codes of the graph's last node that differ end to end."""
        return self.nodes[-1].end_to_end if self.nodes else 0

    @property
    def verdict(self) -> str:
        """The meaning of the counts: whether the graph is right, how far predictions are, why, and what to do."""
        seen = f"{self.examples:,} examples, {self.compared:,} codes"
        files = [file.sentence for file in self.files]
        if self._same_as_training:
            said = f"No code differs: the graph computes what the training forward computes ({seen})."
            return "\n".join([*self.ranges(), said, *files])
        return "\n".join([*self.ranges(), *self._same(), *files, *self._distances(), *self._reasons(seen)])

    def ranges(self) -> list[str]:
        """Why exact results may still be useless: ranges that do not fit these inputs."""
        lines = [
            f"{each.share:.1%} of the numbers of {each.name!r} are clipped: they reach from {each.low:.4g} to "
            f"{each.high:.4g}, the codes from {each.least:.4g} to {each.greatest:.4g}. Calibrate with data like these."
            for each in self.inputs
            if each.share >= _CLIPPED
        ]
        if self.uncalibrated:
            names = ", ".join(map(repr, self.uncalibrated[:4])) + (", ..." if len(self.uncalibrated) > 4 else "")
            lines.append(
                f"The ranges of {len(self.uncalibrated)} quantizers ({names}) come from a single number each. Call "
                "qjax.calibrate(qmodel, batches) with real data."
            )
        return lines

    def _same(self) -> list[str]:
        if self.as_converted is None:
            return []
        if self.as_converted:
            return ["The graph is bit-identical to qjax.exact for this model."]
        return [f"The graph differs from what qjax.convert returns for this model now: {self.changed}. Convert again."]

    def _distances(self) -> list[str]:
        lines = [f"Predictions: {self.predictions:,} of {self.predicted:,} differ from the training forward's."]
        for output in self.outputs:
            if output.decibels == math.inf:
                lines.append(f"Output {output.name}: equal.")
                continue
            channel, least = output.worst
            worst = f" (channel {channel}: {least:.1f} dB)" if len(output.noise) > 1 else ""
            lines.append(f"Output {output.name}: {output.decibels:.1f} dB{worst}, by at most {output.by_at_most:.3g}.")
        return lines

    def _reasons(self, seen: str) -> list[str]:
        lines = [f"Training and graph differ in {self.local:,} codes where a node's inputs agree ({seen})."]
        if self.as_converted is False:
            return lines
        if self.target != self.trained_for:
            lines.append(
                f"The model was quantized for the target {self.trained_for!r}, the graph is for {self.target!r}: "
                f"quantize with qjax.Recipe(target={self.target!r})."
            )
        groups: dict[tuple[str, str], list[NodeReport]] = {}
        for node in self.nodes:
            if node.local:
                groups.setdefault((node.op, node.cause), []).append(node)
        if groups:
            lines.append(f"Training rounds to the nearest code, ties to even. The target {self.target!r}:")
        for (op, cause), nodes in groups.items():
            count, most = sum(n.local for n in nodes), max(n.local_max for n in nodes)
            where = nodes[0].name if len(nodes) == 1 else f"{len(nodes)} nodes"
            lines.append(f"  {op} ({where}), {count:,} codes by at most {most}: {cause}")
        if groups:
            lines.append(
                "Cure: train the last epochs with qjax.exact(qmodel, sample), which computes the graph's codes."
            )
        return lines

    def parts(self) -> list[Grid | str]:
        """The verdict, a table, and further lines."""
        header = (
            "node",
            "op",
            "compared",
            "differ, same inputs",
            "by at most",
            "differ, end to end",
            "by at most",
        )
        shown = [n for n in self.nodes if len(self.nodes) <= _ROWS or n.local or n.end_to_end]
        rows = [(n.name, n.op, n.compared, n.local, n.local_max, n.end_to_end, n.end_to_end_max) for n in shown]
        lines: list[Grid | str] = [self.verdict]
        if rows:
            lines += ["", Grid(header, rows)]
        if len(shown) < len(self.nodes):
            lines.append(f"{len(self.nodes) - len(shown)} more nodes: no code differs.")
        lines += [
            f"float output {r.name}: {r.differ} of {r.compared} numbers differ, by at most {r.by_at_most:.3g}"
            for r in self.reals
        ]
        return lines


def cause_of(node: Node) -> str:
    """What a node computes differently from the training forward, in words that continue "the target"."""
    if node.op != backend.NAME:
        accumulator = Accumulator.of_json(node.attributes.get("accumulator"))
        if accumulator != EXACT:
            if accumulator.pairs:
                return f"sums in {accumulator}, which saturate (Recipe(reduce_range=True) keeps such sums exact)"
            return f"sums in {accumulator} bits, where training sums exactly"
    method = method_of(node)
    if method in ("nearest_even", "exact sum (nearest_even)"):
        return "rounds the exact number, where training rounds a float32 number"
    if method is not None:
        return phrase(method)
    arithmetic = None if node.op == backend.NAME else ops.get(node.op).arithmetic(node.attributes)
    return f"computes {node.op} as {arithmetic}" if arithmetic else f"computes {node.op} in integers"


def first_difference(a: Graph, b: Graph) -> str:
    """The first difference between two graphs among everything that decides a code; "" if they compute the same."""
    if (a.inputs, a.outputs) != (b.inputs, b.outputs):
        return f"its inputs and outputs are {(a.inputs, a.outputs)}, now {(b.inputs, b.outputs)}"
    if a.quantization != b.quantization:
        return f"its inputs are quantized by {a.quantization!r}, now by {b.quantization!r}"
    names = [node.name for node in a.nodes], [node.name for node in b.nodes]
    if names[0] != names[1]:
        other = next((y for x, y in zip(*names, strict=False) if x != y), "one graph has more nodes")
        return f"the nodes differ, from {other!r} on"
    for name in a.inputs:
        if _parameters(a, name) != _parameters(b, name):
            return f"the quantization parameters of {name!r} differ"
    for left, right in zip(a.nodes, b.nodes, strict=True):
        fields = [
            (n.op, n.inputs, n.output, _tuples_to_lists(dict(n.attributes)), set(n.constants)) for n in (left, right)
        ]
        if fields[0] != fields[1]:
            return f"the node {left.name!r} has another operation or other attributes"
        for role in left.constants:
            if not _same(a.constant(left, role), b.constant(right, role)):
                return f"{role} of the node {left.name!r} differs"
        for name in (*left.inputs, left.output):
            if _parameters(a, name) != _parameters(b, name):
                return f"the quantization parameters of {name!r} differ"
    return ""


def _parameters(graph: Graph, name: str) -> Any:
    tensor = graph.tensors[name]
    q = tensor.quantization
    own = None if q is None else (q.qmin, q.qmax, np.asarray(q.scale).tolist(), np.asarray(q.zero_point).tolist())
    return tensor.dtype, own


def _same(a: Any, b: Any) -> bool:
    x, y = np.asarray(a), np.asarray(b)
    return x.dtype == y.dtype and np.array_equal(x, y)


def _tuples_to_lists(value: Any) -> Any:
    """Tuples as lists, because a saved graph has no tuples."""
    if isinstance(value, Mapping):
        return {key: _tuples_to_lists(item) for key, item in value.items()}
    return [_tuples_to_lists(item) for item in value] if isinstance(value, list | tuple) else value
