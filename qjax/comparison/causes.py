"""Explains, output by output, why two nodes differ although their inputs agree.

`findings` lists what differs in the nodes themselves. `classify` determines, for each output that differs, which of
these decided, from the exact value of its accumulator. `explain` describes the counts in words.
| --- | --- |
| `tie` | is exactly between two codes for both; their rules send ties different ways |
| `double_rounding` | is no tie, but the first rounding of one of them makes it one |
| `float32`, `float64` | is so near a tie that a float step of one of them carries it onto or over the tie |
| `truncation` | is truncated by one of them instead of rounded |
| `formula` | is no tie, but the formula of one of them does not compute the nearest code |
| `scale` | the nearest codes differ, because the effective scales do |
| `bias` | the nearest codes differ, because the biases do |
| `overflow` | leaves the range in which the rules are roundings at all |
| `accumulator` | comes from accumulators that differ before their bias |
| `grid` | has other quantization parameters: scales, zero points or ranges differ |
| `method` | comes from another formula, in a node without accumulators (a softmax, a division) |
| `constant` | is moved or selected by other constants, in a node without accumulators |
| `backend` | is computed by a vendor's own kernel |
| `other` | none of these |
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qjax.comparison.compared_node import Side as Side
from qjax.comparison.compared_node import kernel_scale, scalar_scale
from qjax.comparison.exact_values import (
    FLOAT32_CONSTANTS,
    Ratio,
    Reading,
    bias_of,
    compare_halves,
    ints,
    read_rule,
    sum_value,
)
from qjax.comparison.findings import Finding as Finding
from qjax.comparison.findings import differing_fields as differing_fields
from qjax.comparison.findings import findings as findings
from qjax.comparison.findings import grid_findings
from qjax.graph.rounding_phrases import method_of
from qjax.ops import backend
from qjax.run.accumulators import signed_scales

# ---------------------------------------------------------------------------- describes the causes of `causes` in words

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


_TWICE = (
    "double_round",
    "neon",
    "tflite_arm_depthwise",
    "tflite_arm_depthwise_3x3",
    "tflite_depthwise_neon",
    "tosa_double",
)


def classify(
    a: Side,
    b: Side,
    accumulators: tuple[Sequence[np.ndarray], Sequence[np.ndarray]],
    codes: tuple[np.ndarray, np.ndarray],
) -> Counter[Key]:
    """Count the outputs that differ by (kind, side).

    accumulators: of both nodes on the same inputs, see `run.accumulators`. codes: their outputs. Further keys:
    ("sums", "") counts the accumulators that differ, over all outputs; ("measured", "") counts the outputs that differ
    while their accumulators agree; ("off", "a" | "b") counts those of them that are not the code nearest to the real
    value.
    """
    found: Counter[Key] = Counter()
    mask = codes[0] != codes[1]
    total = int(np.sum(mask))
    fused = [side.node.op == backend.NAME and side.node.attributes["backend"] is not None for side in (a, b)]
    if any(fused):
        found["backend", "both" if all(fused) else "a" if fused[0] else "b"] = total
        return found
    if not accumulators[0] or not accumulators[1]:
        same = method_of(a.node) == method_of(b.node)
        found["constant" if same else "method", ""] = total
        return found
    shape = codes[0].shape
    raw = [_without_bias(side, accs, shape) for side, accs in zip((a, b), accumulators, strict=True)]
    sums_differ = np.zeros(shape, bool)
    for left, right in zip(*raw, strict=True):
        sums_differ |= left != right
    found["sums", ""] = int(np.sum(sums_differ))
    found["accumulator", ""] = int(np.sum(mask & sums_differ))
    rest = mask & ~sums_differ
    if not np.any(rest):
        return +found
    picked = [
        _Picked(side, accs, shape, rest, out) for side, accs, out in zip((a, b), accumulators, codes, strict=True)
    ]
    found.update(_decide(*picked))
    return +found


def _without_bias(side: Side, accumulators: Sequence[np.ndarray], shape: tuple[int, ...]) -> list[np.ndarray]:
    arrays = [np.broadcast_to(acc, shape).astype(np.int32) for acc in accumulators]
    if "bias" not in side.node.constants:
        return arrays
    bias = np.broadcast_to(side.constant("bias"), shape)
    return [acc - bias for acc in arrays]


class _Picked:
    """The outputs of one side that differ although their sums agree, flattened."""

    def __init__(
        self,
        side: Side,
        accumulators: Sequence[np.ndarray],
        shape: tuple[int, ...],
        mask: np.ndarray,
        codes: np.ndarray,
    ) -> None:
        self.side = side
        self.shape = shape
        self.mask = mask
        self.accumulators = [np.broadcast_to(acc, shape)[mask].astype(np.int64) for acc in accumulators]
        q = side.output.quantization
        assert q is not None
        self.quantization = q
        self.zero_point = self.pick(q.zero_point).astype(np.int64)
        self.codes = codes[mask].astype(np.int64)
        self.centred = self.codes - self.zero_point

    def pick(self, value: Any) -> np.ndarray:
        """The differing elements of something that broadcasts to the output."""
        return np.broadcast_to(np.asarray(value), self.shape)[self.mask]

    def bias(self) -> Ratio | None:
        """The bias in steps of the accumulator, or None."""
        rule = self.side.rule
        if rule is not None and rule.takes_bias:
            return bias_of(rule, {role: self.pick(value) for role, value in self.side.rule_constants().items()})
        return Ratio.of(self.pick(self.side.constant("bias"))) if "bias" in self.side.node.constants else None

    def reading(self) -> Reading | None:
        """The accumulators after the node's own constants; None for a formula that is not a rule."""
        nothing = np.zeros(self.codes.shape, bool)
        rule, node = self.side.rule, self.side.node
        if rule is not None:
            constants = {role: self.pick(value) for role, value in self.side.rule_constants().items()}
            acc = self.accumulators[0]
            if len(self.accumulators) > 1:
                acc = acc + sum(self.accumulators[1:])
            q = self.quantization
            return read_rule(rule, constants, acc, self.zero_point, (q.qmin, q.qmax))
        if "rounding" not in node.attributes:
            return None
        factors = [Ratio.of(self.pick(self.side.constant(f"factor{i}"))) for i in range(len(self.accumulators))]
        high, low = (ints(self.pick(self.side.constant(f"offset_{half}"))) for half in ("high", "low"))
        total = sum_value(self.accumulators, factors)
        total = Ratio(total.num + ((high << 31) + low) * total.den, total.den)
        shift = self.pick(self.side.constant("shift")).astype(np.int64)
        value = total * Ratio.dyadic(np.ones(shift.shape, np.int64), -shift)
        return Reading(value, value, nothing)

    def real(self) -> Ratio | None:
        """The exact value in output steps by the scales of the tensors; None if the rule includes more than these."""
        node, graph = self.side.node, self.side.graph
        if "rounding" in node.attributes or (self.side.rule is not None and self.side.rule.takes_bias):
            return None
        inputs = [scalar_scale(graph, name) for name in node.inputs]
        if any(scale is None for scale in inputs):
            return None
        steps = [Ratio.of(scale) for scale in inputs if scale is not None]
        if "kernel" in node.constants:
            factors = [steps[0] * Ratio.of(self.pick(kernel_scale(graph, node)))]
        else:
            factors = signed_scales(node.op, node.attributes, steps)
        value = sum_value(self.accumulators, factors) / Ratio.of(self.pick(self.quantization.scale))
        if "count" in node.constants:
            value = value / Ratio.of(self.pick(self.side.constant("count")))
        return value

    def off(self, value: Ratio) -> np.ndarray:
        """Where the code is not one of those nearest to `value` within the node's range."""
        low, high = self.side.ends()
        place = compare_halves(value, self.centred)
        return ((place == 2) & (self.codes < high)) | ((place == -2) & (self.codes > low))

    def blame(self, seen: Ratio | None) -> np.ndarray:
        """For each output, the kind of cause if its code is not the nearest to the exact value."""
        rule = self.side.rule
        if rule is None:
            # An exact sum can only be wrong by the rounding of its factors to 30 bits.
            kind = "formula" if "formula" in self.side.node.attributes else "scale"
            return np.full(self.codes.shape, kind, object)
        if rule.name.startswith(("nemo", "power_of_two:TRN")):
            return np.full(self.codes.shape, "truncation", object)
        kind = "other"
        if rule.name in _TWICE:
            kind = "double_rounding"
        elif rule.constants in FLOAT32_CONSTANTS:
            kind = "float32"
        elif rule.name == "float64_away":
            kind = "float64"
        if seen is None:
            return np.full(self.codes.shape, "other", object)
        # The explanation holds only if the last rounding sees a tie, or a number that rounds to this code.
        return np.where(np.abs(compare_halves(seen, self.centred)) <= 1, kind, "other").astype(object)


def _decide(a: _Picked, b: _Picked) -> Counter[Key]:
    found: Counter[Key] = Counter()
    if grid_findings(a.side, b.side):
        found["grid", ""] = a.codes.size
        return found
    same_ends = a.side.ends() == b.side.ends()
    real = a.real() or b.real()
    left, right = a.reading(), b.reading()
    if left is None or right is None:
        # At least one of the two is a formula, so measure both by the exact value.
        if real is None:
            found["formula", ""] = a.codes.size
            return found
        none = np.zeros(a.codes.shape, bool)
        own = [Reading(real, real, none) if side is None else side for side in (left, right)]
        left, right = (dataclasses.replace(reading, exact=real) for reading in own)
    undecided = np.ones(a.codes.shape, bool)

    def settle(where: np.ndarray, kind: str, side: str = "") -> None:
        found[kind, side] += int(np.sum(undecided & where))
        undecided[where] = False

    settle(left.overflows | right.overflows, "overflow")
    counted = undecided.copy()
    for x, y in zip(a.accumulators, b.accumulators, strict=True):
        counted &= x == y
    off = [a.off(left.exact), b.off(right.exact)]
    if not same_ends:
        inside = np.maximum(a.codes, b.codes) > min(a.side.ends()[1], b.side.ends()[1])
        inside |= np.minimum(a.codes, b.codes) < max(a.side.ends()[0], b.side.ends()[0])
        settle(inside, "grid")
    blames = [a.blame(left.seen), b.blame(right.seen)]
    both = off[0] & off[1]
    settle(both & (blames[0] == blames[1]) & (blames[0] == "formula"), "formula", "both")
    for side, place, blame in (("a", off[0], blames[0]), ("b", off[1], blames[1])):
        for kind in sorted(set(blame[place & undecided])):
            settle(place & (blame == kind), str(kind), side)
    # Neither side is wrong, because both round the values that they see.
    ties = [np.abs(compare_halves(r.exact, p.centred)) == 1 for r, p in ((left, a), (right, b))]
    settle(ties[0] & ties[1] & ((left.exact - right.exact).sign() == 0), "tie")
    biases = (a.bias(), b.bias())
    if biases[0] is not None and biases[1] is not None:
        settle((biases[0] - biases[1]).sign() != 0, "bias")
    settle((left.exact - right.exact).sign() != 0, "scale")
    settle(undecided.copy(), "other")
    if real is not None:
        for side, picked in (("a", a), ("b", b)):
            found["off", side] = int(np.sum(picked.off(real) & counted))
        found["measured", ""] = int(np.sum(counted))
    return found
