"""One model under every target: which targets answer alike, and what the others change."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import qjax
from experiments.cost.cases import Case
from experiments.lab.deployments import fingerprint
from experiments.real.methods import outputs_of

REFERENCE = "nearest_even"
"""The exact real value, rounded to the nearest code, ties to even: what every other target is compared with."""

COMPARED = 32
"""How many examples are compared node by node: those with other outputs first."""


@dataclasses.dataclass
class Row:
    """One network under targets that gave the same outputs for all inputs.

    codes, compared: output codes that differ from those of the reference, of how many. changed, decisions: decisions.
    score: the task's, in percent. first: the first node that differs though its inputs agree; op, cause: its operation
    and the most frequent kind of cause there; share: of its codes. nodes: in how many nodes differences arise.
    refused: why the targets cannot take this network; the other fields are empty then.
    """

    network: str
    setting: str
    targets: list[str]
    codes: int = 0
    compared: int = 0
    changed: int = 0
    decisions: int = 0
    score: float | None = None
    first: str = ""
    op: str = ""
    cause: str = ""
    share: float = 0.0
    nodes: int = 0
    refused: str = ""


@dataclasses.dataclass
class _Group:
    """Targets with one graph, or with graphs of equal outputs."""

    targets: list[str]
    graph: qjax.IntegerGraph
    outputs: tuple[np.ndarray, ...]


def rows(network: str, setting: str, case: Case, targets: Sequence[str]) -> list[Row]:
    """The reference's row, then groups by how much they differ, then those that refuse."""
    names = [REFERENCE, *(name for name in targets if name != REFERENCE)]
    graphs: dict[str, tuple[qjax.IntegerGraph, list[str]]] = {}
    refused: dict[str, list[str]] = {}
    reference = qjax.convert(case.qmodel, case.sample, target=REFERENCE)
    for name in names:
        try:
            graph = reference.retarget(name)
        except ValueError as error:
            refused.setdefault(_reason(error), []).append(name)
        else:
            graphs.setdefault(fingerprint(graph), (graph, []))[1].append(name)
    groups = _merged([_Group(found, graph, _run(graph, case)) for graph, found in graphs.values()])
    even = groups[0]
    judged = [_judged(network, setting, case, even, group) for group in groups]
    judged[1:] = sorted(judged[1:], key=lambda row: (row.codes, row.targets))
    return [*judged, *(Row(network, setting, found, refused=why) for why, found in refused.items())]


def _reason(error: ValueError) -> str:
    """Its first sentence, as it is for every target and on every machine: without their names and the user's file."""
    text = re.sub(r" \([^()]*\.py:\d+\)", "", str(error))
    return re.sub(r"the target '\w+'", "the target", text).split(". ")[0]


def _run(graph: qjax.IntegerGraph, case: Case) -> tuple[np.ndarray, ...]:
    found = outputs_of(graph, case.test)
    # a process can map only so many compiled kernels (Linux: vm.max_map_count)
    jax.clear_caches()
    return found


def _merged(groups: Sequence[_Group]) -> list[_Group]:
    """Those of equal outputs as one, in the order of their firsts."""
    found: list[_Group] = []
    for group in groups:
        same = (one for one in found if all(map(np.array_equal, one.outputs, group.outputs)))
        first = next(same, None)
        if first is None:
            found.append(group)
        else:
            first.targets += group.targets
    return found


def _judged(network: str, setting: str, case: Case, even: _Group, group: _Group) -> Row:
    mine, theirs = case.decide(group.outputs), case.decide(even.outputs)
    differ = sum(int(np.sum(a != b)) for a, b in zip(group.outputs, even.outputs, strict=True))
    row = Row(network, setting, group.targets, differ, sum(out.size for out in even.outputs))
    row.changed, row.decisions, row.score = int(np.sum(mine != theirs)), mine.size, case.score(group.outputs)
    if group is not even and _same_nodes(even.graph, group.graph):
        _where(row, qjax.compare(even.graph, group.graph, [_examples(case, even, group)]))
        jax.clear_caches()
    return row


def _same_nodes(a: qjax.IntegerGraph, b: qjax.IntegerGraph) -> bool:
    """Whether `compare` can pair them: a target may write a normalisation as several operations."""
    return [(node.name, node.op) for node in a.ir.nodes] == [(node.name, node.op) for node in b.ir.nodes]


def _examples(case: Case, even: _Group, group: _Group) -> tuple[np.ndarray, ...]:
    """Arguments of `COMPARED` examples."""
    pairs = zip(group.outputs, even.outputs, strict=True)
    counts = sum(np.sum(a != b, axis=tuple(range(1, a.ndim))) for a, b in pairs)
    chosen = np.argsort(np.asarray(counts) == 0, kind="stable")[:COMPARED]
    return tuple(np.concatenate(column)[chosen] for column in zip(*case.test, strict=True))


def _where(row: Row, report: Any) -> None:
    row.nodes = len(report.diverging)
    if report.first is not None:
        first = report.first
        row.first, row.op, row.share = first.name, first.op, first.own.count / first.own.compared
        row.cause = first.causes[0].kind if first.causes else ""
