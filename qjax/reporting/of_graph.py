"""Builds the report of a graph: its structure, and with data how its codes are used."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from qjax import targets
from qjax.analysis.accumulators import AccumulatorReport, accumulators
from qjax.export.integer_graph import IntegerGraph
from qjax.reporting import facts
from qjax.reporting.document import MEASURES, Document, Measure, Table, codes_histogram, nodes_of, number
from qjax.run.interpreter import check_shapes
from qjax.run.quantize_io import inputs_of, quantize_inputs
from qjax.run.stepwise import Env, Runner
from qjax.support.progress import track

_ENDS = Measure(
    "ends", "codes at the ends", "Share of the output's codes that are the smallest or the largest code.", "high", "%"
)
_USED = Measure("used", "codes used", "Share of all codes that occur.", "low", "%")


@dataclasses.dataclass(frozen=True)
class Usage:
    """How often each code of a tensor occurs over all batches. counts: int64 [codes], from qmin on."""

    counts: np.ndarray
    qmin: int

    @property
    def ends(self) -> float:
        """The share of codes that are the least or the greatest one."""
        return float(self.counts[0] + self.counts[-1]) / max(1, int(self.counts.sum()))

    @property
    def used(self) -> float:
        """The share of codes that occur."""
        return float((self.counts > 0).mean())

    @property
    def entropy(self) -> float:
        """The bits of information per code."""
        shares = self.counts[self.counts > 0] / max(1, int(self.counts.sum()))
        return max(0.0, -math.fsum(shares * np.log2(shares)))


def usage(graph: IntegerGraph, batches: Sequence[tuple[Any, ...]]) -> dict[str, Usage]:
    """Tensor -> the usage of its codes, for all quantized tensors; the graph runs node by node."""
    ir = graph.ir
    runner = Runner(ir, "graph", graph.interpreter.constants)
    counts: dict[str, np.ndarray] = {}

    def add(name: str, codes: Any) -> None:
        q = ir.tensors[name].quantization
        if q is None or q.qmax - q.qmin > 2**16:
            return
        # Count on the host, because np.bincount accepts any integer dtype, and a device would compile once per shape.
        flat = np.asarray(codes).reshape(-1).astype(np.int64) - q.qmin
        found = np.bincount(np.clip(flat, 0, q.qmax - q.qmin), minlength=q.qmax - q.qmin + 1)
        counts[name] = counts.get(name, 0) + found

    for args in track(batches, "report: batch", compiles=True):
        arrays = inputs_of(ir, args)
        check_shapes(ir, [tuple(np.shape(x)) for x in arrays])
        env = Env(runner, quantize_inputs(ir, arrays))
        for name in ir.inputs:
            add(name, env.value(name))
        for node in ir.nodes:
            add(node.output, jax.block_until_ready(env.compute(node)))
            env.release(node)
    found: dict[str, Usage] = {}
    for name, values in counts.items():
        q = ir.tensors[name].quantization
        assert q is not None
        found[name] = Usage(values, q.qmin)
    return found


def of_graph(graph: IntegerGraph, batches: Sequence[tuple[Any, ...]] | None, *, title: str, source: bool) -> Document:
    """Measure a graph. batches: arguments of calls; with None, only what is known without data is shown."""
    nodes, tensors = nodes_of(graph, source=source)
    seen = {} if batches is None else usage(graph, batches)
    report = accumulators(graph, batches)
    add_accumulators(nodes, report)
    for node in nodes:
        known = seen.get(node["output"])
        if known is None:
            continue
        node["measures"] |= {"ends": number(100 * known.ends), "used": number(100 * known.used)}
        tensors[node["output"]]["histogram"] = codes_histogram(known.counts, known.qmin)
        tensors[node["output"]]["figures"] += [
            ("codes at the ends", f"{known.ends:.3%}"),
            ("codes used", f"{known.used:.1%}"),
            ("entropy", f"{known.entropy:.2f} bits"),
        ]
    measures = (*((_ENDS, _USED) if seen else ()), *MEASURES)
    data = "" if batches is None else f", on {report.examples:,} examples"
    return Document(
        title=title,
        kind="graph",
        state="unknown",
        headline=f"A graph of {len(graph.ir.nodes)} nodes under the target {graph.target}{data}.",
        cards=[*graph_cards(graph, report)],
        advice=graph_advice(graph, report, seen, batches is None),
        measures=measures,
        nodes=nodes,
        tensors=tensors,
        tables=[node_table(nodes, measures), accumulator_table(report)],
    )


def graph_cards(graph: IntegerGraph, report: AccumulatorReport) -> list[tuple[str, str, str]]:
    """Cards with the target, size, work and headroom of a graph."""
    totals = facts.facts(graph)["totals"]
    rooms = [node.headroom for node in report.nodes]
    cards = [
        ("target", graph.target, "the runtime whose rounding the graph computes"),
        ("bytes in a file", f"{totals['packed_bytes']:,}", f"{totals['weight_bytes']:,} of weights"),
        ("MACs per example", f"{totals['macs']:,}", ""),
        ("activations in memory", f"{totals['peak_activation_bytes']:,} bytes", "at most, one example"),
    ]
    if rooms:
        cards.append(("accumulators", f"{report.bits} bits", f"worst input; {min(rooms)} bits of headroom"))
    return cards


def graph_advice(graph: IntegerGraph, report: AccumulatorReport, seen: dict[str, Usage], no_data: bool) -> list[str]:
    """The advice that follows from a graph alone."""
    found = overflow_advice(report, graph.target)
    crowded = [(name, u) for name, u in seen.items() if u.ends > 0.05]
    for name, known in sorted(crowded, key=lambda item: -item[1].ends)[:3]:
        found.append(
            f"{known.ends:.1%} of the codes of {name} are at an end of their range. After a relu this is normal. "
            "Elsewhere the tensor is clipped: calibrate with more data."
        )
    if no_data:
        found.append("Pass data to see how codes are used: qjax.report(graph, batches).")
    found.append(
        "For errors against the float model, pass the quantized model instead: qjax.report(qmodel, batches). For "
        "another runtime's rounding, pass two graphs: qjax.report((graph, graph.retarget(name)), batches)."
    )
    return found


def overflow_advice(report: AccumulatorReport, target: str) -> list[str]:
    """Advice for registers that some input overflows, and for pairs that an x86 CPU without VNNI would saturate.

    The latter is given only for targets whose runtimes have such kernels.
    """
    found: list[str] = []
    narrow = [node for node in report.nodes if node.headroom < 0]
    if narrow:
        names = ", ".join(node.name for node in narrow[:4]) + (", ..." if len(narrow) > 4 else "")
        found.append(
            f"Some input overflows the accumulator of {names}. Constrain their weights with "
            "qjax.training.constrain_accumulators."
        )
    cut = [node for node in report.nodes if node.observed is not None and node.observed.pairs_saturated]
    if cut and f"{target}_avx2" in targets.names():
        found.append(
            f"{len(cut)} {'node has' if len(cut) == 1 else 'nodes have'} pairs of products that x86 CPUs without VNNI "
            "saturate. If you ship there: "
            "Recipe(reduce_range=True)."
        )
    return found


def add_accumulators(nodes: list[dict[str, Any]], report: AccumulatorReport) -> None:
    """Add the bits that the data needed to the worst case."""
    known = {node.name: node for node in report.nodes}
    for node in nodes:
        entry = known.get(node["name"])
        if entry is None:
            continue
        seen = entry.observed
        node["accumulator"] = {
            "register": entry.accumulator.bits,
            "worst": entry.bits,
            "observed": None if seen is None else seen.bits,
            "partial": None if seen is None else seen.partial_bits,
        }


def node_table(nodes: Sequence[dict[str, Any]], measures: Sequence[Measure]) -> Table:
    """Tabulate all nodes with all measures."""
    shown = [m for m in measures if any(node["measures"].get(m.key) is not None for node in nodes)]
    header = [
        "node",
        "op",
        "rounding",
        *(f"{m.label}{f', {m.unit}' if m.unit in ('dB', '%') else ''}" for m in shown),
        "line",
    ]
    rows: list[list[Any]] = []
    for node in nodes:
        rounding = next((value for label, value in node["facts"] if label == "rounding"), "-").partition(":")[0]
        values = [cell(node["measures"].get(m.key)) for m in shown]
        line = "/".join((node.get("location") or "-").split("/")[-2:])
        rows.append([node["name"], node["op"], rounding, *values, line])
    return Table("Nodes", header, rows, [node["name"] for node in nodes])


def accumulator_table(report: AccumulatorReport) -> Table:
    """Tabulate registers, worst cases and what the data needed."""
    header = ["node", "products", "register, bits", "worst case, bits", "headroom, bits", "pairs at risk"]
    header += ["data, bits", "data with partial sums, bits", "overflows", "pairs clipped"] if report.examples else []
    rows: list[list[Any]] = []
    for node in report.nodes:
        row: list[Any] = [node.name, f"{node.products:,}", node.accumulator.bits, node.bits, node.headroom]
        row.append("-" if node.weight_pairs is None else f"{node.pairs_at_risk:,} of {node.weight_pairs:,}")
        seen = node.observed
        if report.examples:
            row += ["-"] * 4 if seen is None else [seen.bits, seen.partial_bits, seen.overflowed, _pairs(seen)]
        rows.append(row)
    return Table("Accumulators", header, rows, [node.name for node in report.nodes])


def _pairs(seen: Any) -> str:
    return "-" if seen.pairs is None else f"{seen.pairs_saturated:,} of {seen.pairs:,}"


def cell(value: float | None) -> str:
    """Format a measure for a table."""
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if value == int(value) else f"{value:,.4g}"
