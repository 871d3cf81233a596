"""Describes the causes of `causes` in words."""

from collections.abc import Mapping

from qjax.comparison.compared_node import Side
from qjax.graph.rounding_phrases import method_of

Key = tuple[str, str]
"""(kind, side): the side is "a", "b" or "both" if one or both are responsible, otherwise ""."""


def explain(key: Key, count: int, a: Side, b: Side, outputs: int) -> str:
    """Describe `count` outputs of one kind in one clause."""
    kind, side = key
    n = f"{count:,}"
    one = count == 1
    blamed = [s for name, s in (("a", a), ("b", b)) if side in (name, "both")]
    who = " and ".join(_of(s, a, b) for s in blamed)
    match kind:
        case "tie":
            return f"{n} {'is an exact tie' if one else 'are exact ties'}"
        case "double_rounding":
            return f"{n} {'becomes a tie' if one else 'become ties'} in the first of the two roundings of {who}"
        case "float32" | "float64":
            lie, them = ("lies", "it") if one else ("lie", "them")
            return f"{n} {lie} so near a tie that the {kind} steps of {who} carry {them} onto or over it"
        case "truncation":
            return f"{n} {'is' if one else 'are'} truncated by {who} instead of rounded"
        case "formula":
            are = "is no tie" if one else "are no ties"
            return f"{n} {are}, and {who or 'one of the two'} does not give the nearest code"
        case "scale":
            return f"{n} {'is' if one else 'are'} decided by the effective scales"
        case "bias":
            return f"{n} {'is' if one else 'are'} decided by the biases"
        case "overflow":
            return f"{n} {'leaves' if one else 'leave'} the range in which both rules round (overflow)"
        case "accumulator":
            return f"{n} {'has another accumulator' if one else 'have other accumulators'} before the bias"
        case "grid":
            return f"{n} because the grids differ"
        case "backend":
            return f"{n} {'comes' if one else 'come'} from {who}"
        case "method":
            return f"{n} {'comes' if one else 'come'} from other arithmetic in {a.label} than in {b.label}"
        case "constant":
            return f"{n} because constants or attributes differ"
        case _:
            where = f" in {who}" if who else ""
            return f"{n} for no known cause{where}; {outputs:,} outputs were compared"


def _of(side: Side, a: Side, b: Side) -> str:
    """A name that distinguishes the side from the other one: its method, or its label if both have the same method."""
    method = method_of(side.node)
    return method if method is not None and method_of(a.node) != method_of(b.node) else side.label


def summary(tally: Mapping[Key, int]) -> dict[Key, int]:
    """The causes among the counts of `classify`, most frequent first."""
    causes = {key: n for key, n in tally.items() if key[0] not in ("off", "sums", "measured") and n}
    return dict(sorted(causes.items(), key=lambda item: -item[1]))
