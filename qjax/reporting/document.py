"""The content of a report as JSON values: a verdict, the nodes of the network, its tensors, and named measures."""

import dataclasses
import linecache
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qjax.export.integer_graph import IntegerGraph
from qjax.graph.ir import Node, Tensor
from qjax.graph.node_view import NodeView
from qjax.graph.rounding_phrases import phrase
from qjax.reporting import facts
from qjax.support.names import short_location

_SCALES = 4096
"""The most scales of one tensor on a page; a tensor with more (groups of weights) shows evenly spaced ones."""
_BARS = 128


@dataclasses.dataclass(frozen=True)
class Measure:
    """A number per node that colours the graph.

    bad: which end deserves attention, "high" or "low", or "" for neither. unit: written after the number, such as "dB".
    """

    key: str
    label: str
    help: str
    bad: str = ""
    unit: str = ""


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of a page. nodes: the node that each row belongs to, or None."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[Any]]
    nodes: Sequence[str | None]
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Document:
    """Everything on a page.

    state: "exact", "equal" (to `qjax.exact`), "differs" or "unknown". headline: one sentence.
    cards: (label, value, note), the figures at the top. advice: what to do next, most urgent first.
    details: longer texts, (title, lines). extra: HTML of one more section, whose author must escape names.
    nodes, tensors: JSON values, see `nodes_of`; the script draws both.
    """

    title: str
    kind: str
    state: str
    headline: str
    cards: Sequence[tuple[str, str, str]]
    advice: Sequence[str]
    measures: Sequence[Measure]
    nodes: Sequence[Mapping[str, Any]]
    tensors: Mapping[str, Any]
    tables: Sequence[Table]
    details: Sequence[tuple[str, str]] = ()
    labels: Sequence[str] = ()
    extra: str = ""

    def data(self) -> dict[str, Any]:
        """The data for the script."""
        return {
            "kind": self.kind,
            "labels": list(self.labels),
            "measures": [dataclasses.asdict(measure) for measure in self.measures],
            "nodes": list(self.nodes),
            "tensors": dict(self.tensors),
        }


def nodes_of(graph: IntegerGraph, *, source: bool) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The graph's inputs and nodes in execution order, and the tensors that have a page of their own.

    Args:
      source: whether to include the line of the user's file that each node comes from.
    """
    found = facts.facts(graph)
    ir = graph.ir
    tensors: dict[str, Any] = {}
    nodes: list[dict[str, Any]] = []
    for name in ir.inputs:
        tensors[name] = tensor_of(ir.tensors[name], "input")
        nodes.append(
            {"name": name, "op": "input", "inputs": [], "output": name, "tensors": [name], "facts": [], "measures": {}}
        )
    for node, fact in zip(ir.nodes, found["nodes"], strict=True):
        own = [node.output]
        tensors[node.output] = tensor_of(ir.tensors[node.output], "activation")
        kernels = [name for role, name in node.constants.items() if role.rpartition("/")[2] == "kernel"]
        given = [name for name in node.inputs if ir.tensors[name].value is not None]
        for name in (*kernels, *given):
            tensors.setdefault(name, tensor_of(ir.tensors[name], "weight"))
            own.append(name)
        bits = next((tensors[name]["bits"] for name in own[1:] + own[:1] if tensors[name]["bits"] is not None), None)
        nodes.append(
            {
                "name": node.name,
                "op": NodeView(ir, node).kind,
                "inputs": list(node.inputs),
                "output": node.output,
                "tensors": own,
                "location": _near(node.location),
                "source": line_of(node.location) if source else None,
                "facts": _facts(graph, node, fact),
                "measures": {
                    "bits": bits,
                    "bytes": fact["constant_bytes"],
                    "macs": fact["macs"],
                    "headroom": fact["headroom"],
                },
            }
        )
    return nodes, tensors


def _facts(graph: IntegerGraph, node: Node, fact: Mapping[str, Any]) -> list[tuple[str, str]]:
    view = NodeView(graph.ir, node)
    shape = " x ".join("batch" if n is None else str(n) for n in view.output.shape) or "scalar"
    found = [("output", f"{view.output.dtype}, {shape}"), ("computed in", view.arithmetic)]
    if fact["method"] is not None:
        found.append(("rounding", f"{fact['method']}: {phrase(fact['method'])}"))
    if fact["accumulator_bits"] is not None:
        low, high = fact["accumulator_range"]
        found.append(("accumulator, worst case", f"{fact['accumulator_bits']} bits, {low:,} to {high:,}"))
    return [(label, value) for label, value in found if value]


MEASURES = (
    Measure("bits", "bits", "Bits of the weights, or of the output where a node has no weights.", "low", "bits"),
    Measure("headroom", "headroom", "Bits of the accumulator that no input can use.", "low", "bits"),
    Measure("bytes", "bytes", "Bytes of the node's constants in memory.", "", "bytes"),
    Measure("macs", "MACs", "Multiplications per example.", "", "MACs"),
)


def tensor_of(tensor: Tensor, kind: str) -> dict[str, Any]:
    """One tensor: its grid, its scales, and, if it is a constant, the histogram of its codes."""
    q = tensor.quantization
    found: dict[str, Any] = {
        "name": tensor.name,
        "kind": kind,
        "dtype": tensor.dtype,
        "shape": ["batch" if n is None else n for n in tensor.shape],
        "bits": None,
        "figures": [],
    }
    if q is None:
        return found
    scale, zero = np.asarray(q.scale, np.float64), np.asarray(q.zero_point)
    found["bits"] = (int(q.qmax) - int(q.qmin)).bit_length()
    found["qmin"], found["qmax"] = int(q.qmin), int(q.qmax)
    found["axes"] = list(q.axes)
    found["scale"] = _some(scale)
    found["scales"] = int(scale.size)
    found["zero_point"] = [int(zero.min()), int(zero.max())] if zero.size else None
    if tensor.value is not None:
        found["histogram"] = codes_histogram(*count_codes(np.asarray(tensor.value), q.qmin, q.qmax))
    return found


def _some(scale: np.ndarray) -> list[float]:
    flat = scale.reshape(-1)
    if flat.size > _SCALES:
        flat = flat[np.linspace(0, flat.size - 1, _SCALES).astype(int)]
    # Nine digits distinguish every float32 from its neighbours.
    return [float(f"{value:.9g}") for value in flat]


def count_codes(codes: np.ndarray, qmin: int, qmax: int) -> tuple[np.ndarray, int]:
    """int64 [codes]: how often each code from qmin to qmax occurs; and qmin."""
    wide = codes.reshape(-1).astype(np.int64) - qmin
    return np.bincount(np.clip(wide, 0, qmax - qmin), minlength=qmax - qmin + 1), qmin


def codes_histogram(counts: np.ndarray, qmin: int) -> dict[str, Any]:
    """A histogram of codes alone; neighbouring codes are combined into at most 128 bars."""
    group = -(-counts.size // _BARS) if counts.size > 32 else 1
    after = np.add.reduceat(counts, np.arange(0, counts.size, group))
    return {"qmin": int(qmin), "width": group, "after": after.tolist()}


def number(value: float | None) -> float | None:
    """A number that JSON can represent, rounded to the digits on the page; None for NaN and infinities."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def _near(location: str | None) -> str | None:
    """A location relative to the working folder; for one elsewhere, only its last folder is kept."""
    here = os.getcwd() + os.sep
    return location.removeprefix(here) if location and location.startswith(here) else short_location(location)


def line_of(location: str | None) -> str | None:
    """The text of a line "file:line", if the file is on this machine."""
    path, _, line = (location or "").rpartition(":")
    return linecache.getline(path, int(line)).strip()[:200] or None if path and line.isdigit() else None
