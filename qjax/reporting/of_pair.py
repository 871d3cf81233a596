"""Builds the report of two graphs of one model: where they diverge first, by how much, and why."""

from collections.abc import Sequence
from typing import Any

from qjax.comparison.compare import compare
from qjax.comparison.result import Comparison
from qjax.export.integer_graph import IntegerGraph
from qjax.reporting import facts
from qjax.reporting.document import MEASURES, Document, Measure, Table, nodes_of, number

_SHARES = (
    Measure(
        "own", "differences arising here", "Percentage of codes that differ although the inputs agree.", "high", "%"
    ),
    Measure("arriving", "differences arriving", "Percentage of codes that differ because the inputs do.", "high", "%"),
    Measure(
        "end",
        "differences end to end",
        "Percentage of codes that differ when both graphs run from their inputs.",
        "high",
        "%",
    ),
    Measure("largest", "largest difference", "The largest difference that arises here, in steps.", "high", "steps"),
)


def of_pair(
    a: IntegerGraph, b: IntegerGraph, batches: Sequence[tuple[Any, ...]], *, title: str, source: bool
) -> Document:
    """Compare two graphs on the same inputs."""
    comparison = compare(a, b, batches)
    names = comparison.labels
    nodes, tensors = nodes_of(a, source=source)
    others, other_tensors = nodes_of(b, source=False)
    known = {node.name: node for node in comparison.nodes}
    pairs = {node["name"]: node for node in others}
    for node in nodes:
        other, found = pairs.get(node["name"]), known.get(node["name"])
        node["other"] = None if other is None else other["facts"]
        node["other_tensors"] = [] if other is None else other["tensors"]
        if found is None:
            continue
        node["measures"] |= {
            "own": _share(found.own.count, found.own.compared),
            "arriving": _share(found.arriving.count, found.arriving.compared),
            "end": _share(found.end_to_end.count, found.end_to_end.compared),
            "largest": found.own.largest,
        }
        node["text"] = found.text
        node["first"] = comparison.first is not None and comparison.first.name == node["name"]
    measures = (*_SHARES, *MEASURES)
    return Document(
        title=title,
        kind="pair",
        state="exact" if comparison.equal else "differs",
        headline=comparison.conclusion,
        cards=_cards(comparison, a, b),
        advice=_advice(comparison, one_target=a.target == b.target),
        measures=measures,
        nodes=nodes,
        tensors={**{f"b/{name}": t for name, t in other_tensors.items()}, **tensors},
        tables=[_table(comparison), _facts_table(nodes, names)],
        details=[("Causes, node by node", "\n".join(node.text for node in comparison.diverging))],
        labels=names,
    )


def _share(count: int, compared: int) -> float | None:
    return number(100 * count / compared) if compared else None


def _cards(comparison: Comparison, a: IntegerGraph, b: IntegerGraph) -> list[tuple[str, str, str]]:
    first = comparison.first
    cards = [
        *(
            (label, graph.target, "target") if label != graph.target else ("target", label, f"graph {letter}")
            for letter, label, graph in zip("ab", comparison.labels, (a, b), strict=True)
        ),
        ("first divergence", "none" if first is None else first.name, "" if first is None else first.own.direction),
        ("nodes in which differences arise", f"{len(comparison.diverging)} of {len(comparison.nodes)}", ""),
        ("predictions that differ", f"{comparison.predictions:,}", f"{comparison.examples:,} examples"),
    ]
    for output in comparison.outputs[:2]:
        end = output.end_to_end
        cards.append((f"output {output.name}", f"{end.count:,} of {end.compared:,}", "codes differ end to end"))
    sizes = [facts.facts(g)["totals"]["packed_bytes"] for g in (a, b)]
    cards.append(("bytes in a file", f"{sizes[0]:,} and {sizes[1]:,}", "a and b"))
    return cards


def _advice(comparison: Comparison, *, one_target: bool) -> list[str]:
    first = comparison.first
    if comparison.equal:
        return ["No code differs on this data: the graphs are interchangeable."]
    found = [] if first is None else [first.text]
    if comparison.predictions == 0:
        found.append("No prediction differs on this data.")
    if one_target:
        found.append(
            "Both graphs have the same target, so the models differ. qjax.report(qmodel, batches) compares each with "
            "its float model."
        )
    else:
        found.append(
            "To train for one of them, quantize with its target, qjax.Recipe(target=...), and train the last epochs "
            "with qjax.exact."
        )
    return found


def _table(comparison: Comparison) -> Table:
    header = [
        "node",
        "op",
        "compared",
        "arise here",
        "by at most",
        "mean",
        "arrive",
        "end to end",
        "by at most, end to end",
    ]
    header += ["causes"]
    rows = [
        [
            n.name,
            n.op,
            f"{n.own.compared:,}",
            f"{n.own.count:,}",
            n.own.largest,
            f"{n.own.mean:+.1e}" if n.own.total else "0",
            f"{n.arriving.count:,}",
            f"{n.end_to_end.count:,}",
            n.end_to_end.largest,
            ", ".join(f"{cause.count:,} {cause.kind}" for cause in n.causes) or "-",
        ]
        for n in comparison.nodes
    ]
    note = "Differences are b - a, in steps."
    for label, names in zip(comparison.labels, (comparison.only_a, comparison.only_b), strict=True):
        if names:
            note += f" {', '.join(names)} could not be compared, because only {label} has them."
    return Table("Comparison", header, rows, [n.name for n in comparison.nodes], note)


def _facts_table(nodes: Sequence[dict[str, Any]], labels: Sequence[str]) -> Table:
    rows: list[list[Any]] = []
    owners: list[str | None] = []
    for node in nodes:
        other = dict(node["other"] or ())
        for label, value in node["facts"]:
            if other.get(label, value) != value:
                rows.append([node["name"], label, value, other[label]])
                owners.append(node["name"])
    return Table("What the nodes do differently", ["node", "what", labels[0], labels[1]], rows, owners)
