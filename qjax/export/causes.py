"""Why the outputs of two nodes differ although their inputs agree.

First what differs in the nodes themselves (`findings`): method, weights, bias, accumulator, grids, bounds. Then, for
each output that differs, which of these decided it (`classify`), from the exact value of its accumulator:

| kind | the output |
| --- | --- |
| `tie` | is exactly between two codes for both; their rules send ties different ways |
| `double_rounding` | is no tie, but the first rounding of one of them makes it one |
| `float32`, `float64` | is so near a tie that a float step of one of them carries it onto or over the tie |
| `truncation` | is cut off by one of them instead of rounded |
| `formula` | is no tie, and the formula of one of them does not give the nearest code |
| `scale` | the nearest codes differ, because the effective scales do |
| `bias` | the nearest codes differ, because the biases do |
| `overflow` | leaves the range in which the rules are roundings at all |
| `accumulator` | comes from accumulators that differ before their bias |
| `grid` | stands on other grids: scales, zero points or ranges differ |
| `constant` | is moved or selected by other constants, in a node without accumulators |
| `other` | none of these |
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from qjax.export.exact_values import (
    FLOAT32_CONSTANTS,
    Ratio,
    Reading,
    bias_of,
    compare_halves,
    ints,
    read_rule,
    scale_of,
    sum_value,
)
from qjax.export.ir import Graph, Node, Quantization, Tensor
from qjax.export.methods import method_of, phrase
from qjax.export.probe import signed_scales
from qjax.numerics.accumulator import Accumulator
from qjax.numerics.fixed_point import effective_scale
from qjax.numerics.rules import Rule, get_rule, rule_names
from qjax.ops.channels import weight_to_result

Key = tuple[str, str]
"""(kind, side): the side is "a", "b" or "both" where one of the two is to blame, else ""."""

_TWICE = (
    "double_round",
    "neon",
    "tflite_arm_depthwise",
    "tflite_arm_depthwise_3x3",
    "tflite_depthwise_neon",
    "tosa_double",
)
_HANDLED = ("rule", "formula", "rounding", "accumulator")
_BOUNDS = ("clamp_min", "clamp_max")


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that differs in two nodes, whether or not it shows in an output."""

    kind: str
    text: str


@dataclasses.dataclass(frozen=True)
class Side:
    """One of the two nodes, with its graph and the name that a report calls it by."""

    graph: Graph
    node: Node
    label: str

    @property
    def output(self) -> Tensor:
        """The tensor that the node computes."""
        return self.graph.tensors[self.node.output]

    @property
    def rule(self) -> Rule | None:
        """The rule of requantization that finishes the node; of a formula too, if it is one."""
        name = self.node.attributes.get("rule")
        if name is None:
            name = str(self.node.attributes.get("formula", "")).partition("/")[0]
            if name not in rule_names() and ":" not in name:
                return None
        return get_rule(str(name))

    def constant(self, role: str) -> np.ndarray:
        """A constant of the node, on the host."""
        return np.asarray(self.graph.constant(self.node, role))

    def rule_constants(self) -> dict[str, np.ndarray]:
        """The constants of `rule`, by role."""
        return {} if self.rule is None else {role: self.constant(role) for role in self.rule.fields}

    def grids(self) -> list[Quantization | None]:
        """The quantization of every input, then of the output."""
        return [self.graph.tensors[name].quantization for name in (*self.node.inputs, self.node.output)]

    def ends(self) -> tuple[int, int]:
        """The least and the greatest code that the node can give."""
        q = self.output.quantization
        assert q is not None
        low, high = q.qmin, q.qmax
        if "clamp_min" in self.node.constants:
            low = max(low, int(self.constant("clamp_min")))
        if "clamp_max" in self.node.constants:
            high = min(high, int(self.constant("clamp_max")))
        return low, high


def findings(a: Side, b: Side) -> list[Finding]:
    """Everything that differs in the two nodes."""
    found: list[Finding] = []
    methods = [method_of(side.node) for side in (a, b)]
    if methods[0] != methods[1]:
        found.append(Finding("method", "; ".join(_method_text(side) for side in (a, b))))
    for key in sorted({*a.node.attributes, *b.node.attributes} - {*_HANDLED}):
        left, right = (side.node.attributes.get(key) for side in (a, b))
        if _listed(left) != _listed(right):
            found.append(Finding("constant", f"the attribute {key!r} is {left} in {a.label}, {right} in {b.label}"))
    registers = [Accumulator.of_json(side.node.attributes.get("accumulator")) for side in (a, b)]
    if registers[0] != registers[1]:
        text = f"the accumulator's bits are {registers[0]} in {a.label}, {registers[1]} in {b.label}"
        found.append(Finding("accumulator", text))
    found += [*_grid_findings(a, b), *_constant_findings(a, b)]
    return found


def _listed(value: Any) -> Any:
    """Tuples as lists: a saved graph knows no tuples."""
    return [_listed(item) for item in value] if isinstance(value, list | tuple) else value


def _method_text(side: Side) -> str:
    method = method_of(side.node)
    if method is None:
        return f"{side.label} only moves codes"
    name = "" if method.startswith("exact sum") else f" ({method})"
    return f"{side.label} {phrase(method)}{name}"


def _grid_findings(a: Side, b: Side) -> list[Finding]:
    found: list[Finding] = []
    names = [*a.node.inputs, a.node.output]
    for name, left, right in zip(names, a.grids(), b.grids(), strict=True):
        if left is None or right is None:
            if left is not right:
                found.append(Finding("grid", f"only one of the graphs has a scale for {name!r}"))
            continue
        found += [Finding("grid", f"{what} of {name!r} differ here") for what in differing_fields(left, right)]
    return found


def differing_fields(a: Quantization, b: Quantization) -> list[str]:
    """What two grids differ in: "the scales", "the zero points", "the ranges of codes"."""
    found: list[str] = []
    if not np.array_equal(np.asarray(a.scale), np.asarray(b.scale)):
        found.append("the scales")
    if not np.array_equal(np.asarray(a.zero_point), np.asarray(b.zero_point)):
        found.append("the zero points")
    if (a.qmin, a.qmax) != (b.qmin, b.qmax):
        found.append("the ranges of codes")
    return found


def _constant_findings(a: Side, b: Side) -> list[Finding]:
    found: list[Finding] = []
    rules = (a.rule, b.rule)
    both_rules = rules[0] is not None and rules[1] is not None
    finishing = {role for rule in rules if rule is not None for role in rule.fields}
    if both_rules:
        found += _scale_findings(a, b)
    same_method = method_of(a.node) == method_of(b.node)
    for role in sorted({*a.node.constants, *b.node.constants}):
        # the constants of two methods have other meanings under one name
        if (role in finishing and both_rules) or (not same_method and role not in ("kernel", "bias", *_BOUNDS)):
            continue
        if role == "bias" and any(rule is not None and rule.takes_bias for rule in rules):
            continue
        sides = [side for side in (a, b) if role in side.node.constants]
        kind = {"kernel": "accumulator", "bias": "bias"}.get(role, "grid" if role in _BOUNDS else "constant")
        if len(sides) == 1:
            found.append(Finding(kind, f"only {sides[0].label} has the constant {role!r}"))
            continue
        left, right = (np.asarray(side.constant(role)) for side in (a, b))
        if left.shape != right.shape:
            found.append(Finding(kind, f"{role!r} has shape {left.shape} in {a.label}, {right.shape} in {b.label}"))
            continue
        differ = left != right
        if np.any(differ):
            most = int(np.max(np.abs(left.astype(np.int64) - right.astype(np.int64))))
            word = {"kernel": "weights", "bias": "biases"}.get(role, f"values of {role!r}")
            text = f"{int(np.sum(differ)):,} of {differ.size:,} {word} differ, by at most {most:,}"
            found.append(Finding(kind, text))
    return found


def _scale_findings(a: Side, b: Side) -> list[Finding]:
    scales = [scale_of(side.rule, side.rule_constants()) for side in (a, b) if side.rule is not None]
    if None in scales:
        return []
    left, right = (scale for scale in scales if scale is not None)
    delta = left - right
    zeros = delta.num * 0
    differ = delta.sign() != 0
    found: list[Finding] = []
    if np.any(differ):
        most = max(
            (
                abs(d / e)
                for d, e in zip(delta.to_float(), Ratio(left.num + zeros, left.den + zeros).to_float(), strict=True)
                if e
            ),
            default=np.inf,
        )
        count = f"{int(np.sum(differ)):,} of {differ.size:,} effective scales differ" if differ.size > 1 else ""
        text = f"{count or 'the effective scales differ'}, by at most {most:.1e} of their value"
        forms = (_form(a), _form(b))
        if None not in forms and forms[0] != forms[1]:
            text += "".join(f"; {side.label} forms them {form}" for side, form in zip((a, b), forms, strict=True))
        found.append(Finding("scale", text))
    takes = [side.rule is not None and side.rule.takes_bias for side in (a, b)]
    if all(takes):
        biases = [bias_of(side.rule, side.rule_constants()) for side in (a, b) if side.rule is not None]
        if biases[0] is not None and biases[1] is not None and np.any((biases[0] - biases[1]).sign() != 0):
            found.append(Finding("bias", "the biases within the two rules differ"))
    elif any(takes):
        inside, outside = (a, b) if takes[0] else (b, a)
        text = f"the bias is part of the rule in {inside.label}, of the int32 sum in {outside.label}"
        found.append(Finding("bias", text))
    return found


def _form(side: Side) -> str | None:
    """How the effective scales of a product with weights were formed; None where both ways give these constants."""
    rule, node = side.rule, side.node
    scales = [_scale(side.graph, name) for name in (*node.inputs, node.output)]
    if rule is None or rule.takes_bias or "kernel" not in node.constants or any(scale is None for scale in scales):
        return None
    constants = side.rule_constants()
    s_w = _kernel_scale(side.graph, node)
    matching: list[str] = []
    forms: tuple[tuple[Literal["f64", "f32"], str], ...] = (("f64", "in doubles"), ("f32", "from a float32 product"))
    for form, words in forms:
        fresh = rule.prepare(effective_scale(scales[0], s_w, scales[-1], form=form))._asdict()
        same = (np.array_equal(np.broadcast_to(v, constants[role].shape), constants[role]) for role, v in fresh.items())
        if all(same):
            matching.append(words)
    return matching[0] if len(matching) == 1 else None


# ---------------------------------------------------------------------------- output by output


def classify(
    a: Side,
    b: Side,
    accumulators: tuple[Sequence[np.ndarray], Sequence[np.ndarray]],
    codes: tuple[np.ndarray, np.ndarray],
) -> Counter[Key]:
    """Count the outputs that differ by (kind, side).

    accumulators: of both nodes on the same inputs, see `probe.accumulators`. codes: their outputs. More keys say what
    else is known: ("sums", ""), how many accumulators differ, over all outputs; ("measured", ""), how many outputs
    differ while their accumulators agree; ("off", "a" | "b"), how many of those are not the code nearest to the real
    value.
    """
    found: Counter[Key] = Counter()
    mask = codes[0] != codes[1]
    total = int(np.sum(mask))
    if not accumulators[0] or not accumulators[1]:
        found["constant", ""] = total
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
    """The outputs of one side that differ with equal sums, flat."""

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
        """The elements of something that broadcasts to the output."""
        return np.broadcast_to(np.asarray(value), self.shape)[self.mask]

    def bias(self) -> Ratio | None:
        """The bias in steps of the accumulator, None where there is none."""
        rule = self.side.rule
        if rule is not None and rule.takes_bias:
            return bias_of(rule, {role: self.pick(value) for role, value in self.side.rule_constants().items()})
        return Ratio.of(self.pick(self.side.constant("bias"))) if "bias" in self.side.node.constants else None

    def reading(self) -> Reading | None:
        """What the node's own constants make of the accumulators; None for a formula that is no rule."""
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
        """The exact value in output steps by the scales of the tensors; None where more is folded in."""
        node, graph = self.side.node, self.side.graph
        if "rounding" in node.attributes or (self.side.rule is not None and self.side.rule.takes_bias):
            return None
        inputs = [_scale(graph, name) for name in node.inputs]
        if any(scale is None for scale in inputs):
            return None
        steps = [Ratio.of(scale) for scale in inputs if scale is not None]
        if "kernel" in node.constants:
            factors = [steps[0] * Ratio.of(self.pick(_kernel_scale(graph, node)))]
        else:
            factors = signed_scales(node.op, node.attributes, steps)
        value = sum_value(self.accumulators, factors) / Ratio.of(self.pick(self.quantization.scale))
        if "count" in node.constants:
            value = value / Ratio.of(self.pick(self.side.constant("count")))
        return value

    def off(self, value: Ratio) -> np.ndarray:
        """Where the code is not one of the nearest to `value` within the node's range."""
        low, high = self.side.ends()
        place = compare_halves(value, self.centred)
        return ((place == 2) & (self.codes < high)) | ((place == -2) & (self.codes > low))

    def blame(self, seen: Ratio | None) -> np.ndarray:
        """For each output, the kind to name if its code is not the nearest to the exact value."""
        rule = self.side.rule
        if rule is None:
            # an exact sum is off only by what its 30-bit factors lack
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
        # the explanation holds only if the number that the last rounding sees is a tie, or within the code's own cell
        return np.where(np.abs(compare_halves(seen, self.centred)) <= 1, kind, "other").astype(object)


def _scale(graph: Graph, name: str) -> Any:
    quantization = graph.tensors[name].quantization
    return None if quantization is None or np.size(quantization.scale) != 1 else np.asarray(quantization.scale)


def _kernel_scale(graph: Graph, node: Node) -> np.ndarray:
    kernel = graph.tensors[node.constants["kernel"]]
    assert kernel.quantization is not None
    q = kernel.quantization
    sizes = [size or 1 if axis in q.axes else 1 for axis, size in enumerate(kernel.shape)]
    full = np.asarray(q.scale).reshape(sizes)
    return weight_to_result(full, node.attributes["channels"], node.attributes["rank"])


def _decide(a: _Picked, b: _Picked) -> Counter[Key]:
    found: Counter[Key] = Counter()
    if _grid_findings(a.side, b.side):
        found["grid", ""] = a.codes.size
        return found
    same_ends = a.side.ends() == b.side.ends()
    real = a.real() or b.real()
    left, right = a.reading(), b.reading()
    if left is None or right is None:
        # one of them is a formula: both are measured by the real value
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
    # neither is to blame: both round their own values
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


# ---------------------------------------------------------------------------- in words


def explain(key: Key, count: int, a: Side, b: Side, outputs: int) -> str:
    """One clause about `count` outputs of one kind."""
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
            return f"{n} {'is' if one else 'are'} cut off by {who}, not rounded"
        case "formula":
            are = "is no tie" if one else "are no ties"
            return f"{n} {are}, and {who or 'one of the two'} does not give the nearest code"
        case "scale":
            return f"{n} {'is' if one else 'are'} decided by the effective scales"
        case "bias":
            return f"{n} {'is' if one else 'are'} decided by the biases"
        case "overflow":
            return f"{n} {'leaves' if one else 'leave'} the range in which the two are roundings (overflow)"
        case "accumulator":
            return f"{n} {'has another accumulator' if one else 'have other accumulators'} before the bias"
        case "grid":
            return f"{n} because the grids differ"
        case "constant":
            return f"{n} because constants or attributes differ"
        case _:
            where = f" in {who}" if who else ""
            return f"{n} by none of the known causes{where}; {outputs:,} outputs were compared"


def _of(side: Side, a: Side, b: Side) -> str:
    """A name that tells the side from the other one: its method, or its label where the two share the method."""
    method = method_of(side.node)
    return method if method is not None and method_of(a.node) != method_of(b.node) else side.label


def summary(tally: Mapping[Key, int]) -> dict[Key, int]:
    """The causes among the counts of `classify`, most frequent first."""
    causes = {key: n for key, n in tally.items() if key[0] not in ("off", "sums", "measured") and n}
    return dict(sorted(causes.items(), key=lambda item: -item[1]))
