"""The result of `compare`: counts per node and causes, with sentences for both."""

import dataclasses
from textwrap import fill

import numpy as np

from qjax.comparison.causes import Finding
from qjax.support.tables import Grid, Printed


@dataclasses.dataclass(frozen=True)
class Difference:
    """How two arrays of codes differ; differences are `b - a`, in steps.

    compared: number of codes. count: how many differ. up, down: how many of these are greater or less in b.
    largest: the greatest absolute difference. total: the signed sum of all differences.
    """

    compared: int = 0
    count: int = 0
    up: int = 0
    down: int = 0
    largest: int = 0
    total: int = 0

    @classmethod
    def of(cls, a: np.ndarray, b: np.ndarray) -> "Difference":
        """Two integer arrays of one shape."""
        if np.array_equal(a, b):
            return cls(a.size)
        steps = b.astype(np.int64) - a.astype(np.int64)
        up, down = int(np.sum(steps > 0)), int(np.sum(steps < 0))
        return cls(a.size, up + down, up, down, int(np.max(np.abs(steps))), int(np.sum(steps)))

    def __add__(self, other: "Difference") -> "Difference":
        return Difference(
            self.compared + other.compared,
            self.count + other.count,
            self.up + other.up,
            self.down + other.down,
            max(self.largest, other.largest),
            self.total + other.total,
        )

    @property
    def mean(self) -> float:
        """The mean of `b - a` over all codes: the bias of b relative to a, in steps."""
        return self.total / self.compared if self.compared else 0.0

    @property
    def direction(self) -> str:
        """How far and which way, in words: "all by +1", "by 1 (3 up, 4 down)", "by at most 7 (3 up, 4 down)"."""
        size = "1" if self.largest == 1 else f"at most {self.largest:,}"
        if self.up and self.down:
            return f"by {size} ({self.up:,} up, {self.down:,} down)"
        all_ = "all " if self.count > 1 else ""
        sign = "+" if self.up else "-"
        return (
            f"{all_}by {sign}{self.largest:,}"
            if self.largest == 1
            else f"{all_}{'up' if self.up else 'down'}, by {size}"
        )


@dataclasses.dataclass(frozen=True)
class Cause:
    """One reason for differences that arise in a node: its kind (see `causes`), the number of outputs, and a text."""

    kind: str
    side: str
    count: int
    text: str


@dataclasses.dataclass(frozen=True)
class NodeComparison:
    """One node of both graphs, or an input's quantization.

    own: what arises in the node: b's node on *a's* input codes against a's. arriving: what comes in through the
    inputs: b's node on a's inputs against b's node on its own. end_to_end: a's codes against b's, with each graph run
    from its inputs. The totals of own and arriving add up to that of end_to_end; the counts need not.
    causes: of `own`, most frequent first. findings: what differs in the two nodes, whether or not an output changes.
    accumulators: how many accumulators differ on the same inputs (counted only where outputs differ).
    off: how many of a's and of b's codes are not the nearest to the exact real value, among the `measured` outputs
    that differ although the accumulators agree.
    text: a sentence, "" if nothing arises.
    """

    name: str
    op: str
    location: str | None
    own: Difference
    arriving: Difference
    end_to_end: Difference
    causes: tuple[Cause, ...] = ()
    findings: tuple[Finding, ...] = ()
    accumulators: int = 0
    off: tuple[int, int] = (0, 0)
    measured: int = 0
    text: str = ""


@dataclasses.dataclass(frozen=True)
class Comparison(Printed):
    """The result of `compare`; `str()` is a table, a sentence per node that diverges, and a conclusion.

    labels: the names of a and b. nodes: inputs that were given as floats, then nodes in execution order.
    only_a, only_b: names of the nodes in only one of the graphs. outputs: the outputs, paired by position.
    predictions: how many final predictions (argmax over the last axis of the first output) differ.
    """

    labels: tuple[str, str]
    nodes: tuple[NodeComparison, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    outputs: tuple[NodeComparison, ...]
    examples: int
    predictions: int

    @property
    def equal(self) -> bool:
        """Whether every code of every common node, and of the outputs, is the same on this data."""
        return all(n.own.count == 0 and n.end_to_end.count == 0 for n in (*self.nodes, *self.outputs))

    @property
    def first(self) -> NodeComparison | None:
        """The first node that diverges although its inputs agree; an input counts as one."""
        return next(iter(self.diverging), None)

    @property
    def diverging(self) -> tuple[NodeComparison, ...]:
        """The nodes in which differences arise."""
        return tuple(node for node in self.nodes if node.own.count)

    def __getitem__(self, name: str) -> NodeComparison:
        """The node of that name."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise KeyError(f"No node {name!r} in both graphs. Nodes: {', '.join(node.name for node in self.nodes)}.")

    def parts(self) -> list[Grid | str]:
        """The labels, a table, a sentence for each node that diverges, and a conclusion."""
        header = ("node", "op", "compared", "arise here", "by at most", "mean", "arrive", "end to end", "by at most")
        rows = [
            (
                n.name,
                n.op,
                n.own.compared,
                n.own.count,
                n.own.largest,
                f"{n.own.mean:+.1e}" if n.own.total else "0",
                n.arriving.count,
                n.end_to_end.count,
                n.end_to_end.largest,
            )
            for n in self.nodes
        ]
        a, b = self.labels
        head: list[Grid | str] = [f"a: {a}, b: {b}; differences are b - a, in steps", Grid(header, rows), ""]
        lines = [node.text for node in self.diverging]
        for label, names in ((a, self.only_a), (b, self.only_b)):
            if names:
                lines.append(f"Only {label} has {', '.join(names)}: not compared.")
        lines.append(self.conclusion)
        return [*head, *(fill(line, 118, subsequent_indent="  ", break_on_hyphens=False) for line in lines)]

    @property
    def conclusion(self) -> str:
        """The result in one or two sentences."""
        codes = sum(n.own.compared for n in self.nodes)
        seen = f"{self.examples:,} examples, {codes:,} codes"
        if self.equal:
            return f"{seen}: no code differs."
        text = f"{seen}: "
        first = self.first
        if first is None:
            text += "no difference arises in a node that both graphs have."
        else:
            text += f"the first difference arises in {first.name!r}"
            text += f", differences arise in {len(self.diverging)} of {len(self.nodes)} nodes."
        for output in self.outputs:
            end = output.end_to_end
            text += f" At the output {output.name!r} {end.count:,} of {end.compared:,} codes differ"
            text += f", {end.direction}" if end.count else ""
            if output.own.count or output.arriving.count:
                text += f": {output.own.count:,} arise there, {output.arriving.count:,} arrive"
            text += "."
        return f"{text} {self.predictions:,} of the predictions {'differs' if self.predictions == 1 else 'differ'}."
