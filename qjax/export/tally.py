"""The counts of one node, and the sentence that says them."""

from collections import Counter
from pathlib import PurePath

from qjax.export.causes import Finding, Key
from qjax.export.comparison import Cause, Difference, NodeComparison


class Tally:
    """The counts of one node over all batches."""

    def __init__(self) -> None:
        self.own = self.arriving = self.end_to_end = Difference()
        self.kinds: Counter[Key] = Counter()


def described(
    what: str,
    name: str,
    op: str,
    location: str | None,
    tally: Tally,
    found: list[Finding],
    causes: tuple[Cause, ...],
    labels: tuple[str, str],
) -> NodeComparison:
    """One node, its counts put into a sentence; what: "node", or "input" for the codes that are made of an input."""
    off = (tally.kinds["off", "a"], tally.kinds["off", "b"])
    measured, sums = tally.kinds["measured", ""], tally.kinds["sums", ""]
    own, text = tally.own, ""
    if own.count:
        # a file and its folder tell enough; `location` has the whole path
        short = "/".join(PurePath(location).parts[-2:]) if location else ""
        place = f" ({op}, {short})" if short else f" ({op})"
        verb = "differs" if own.count == 1 else "differ"
        text = f"{what} {name}{place}: {own.count:,} of {own.compared:,} {verb}, {own.direction}"
        kinds = {cause.kind for cause in causes}
        # the last bits of scales differ wherever one of them is a float32: said only where they decide
        said = [f.text for f in found if f.kind != "scale" or "scale" in kinds]
        if said:
            text += ". " + "; ".join(said)
        if causes:
            text += ". " + "; ".join(cause.text for cause in causes)
        if sums:
            text += f". {sums:,} of the {own.compared:,} accumulators differ"
        if any(off):
            text += (
                f". Not the code nearest to the real value: {off[0]:,} of {labels[0]}'s, {off[1]:,} of {labels[1]}'s"
            )
        text += "."
    return NodeComparison(
        name, op, location, own, tally.arriving, tally.end_to_end, causes, tuple(found), sums, off, measured, text
    )
