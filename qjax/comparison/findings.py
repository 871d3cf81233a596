"""Lists what differs in two nodes even if no output changes: method, weights, bias, accumulator, grids, bounds."""

import dataclasses
from typing import Any, Literal

import numpy as np

from qjax.comparison.compared_node import Side, kernel_scale, scalar_scale
from qjax.comparison.exact_values import Ratio, bias_of, scale_of
from qjax.graph.ir import Quantization
from qjax.graph.rounding_phrases import method_of, phrase
from qjax.numerics.accumulator import Accumulator
from qjax.numerics.fixed_point import effective_scale
from qjax.ops import backend

_HANDLED = ("rule", "formula", "rounding", "accumulator", "backend", "pattern", "members")
_BOUNDS = ("clamp_min", "clamp_max")


@dataclasses.dataclass(frozen=True)
class Finding:
    """A difference between two nodes, whether or not it changes an output."""

    kind: str
    text: str


def findings(a: Side, b: Side) -> list[Finding]:
    """List everything that differs in the two nodes."""
    found: list[Finding] = []
    methods = [method_of(side.node) for side in (a, b)]
    if methods[0] != methods[1]:
        found.append(Finding("method", "; ".join(_method_text(side) for side in (a, b))))
    for key in sorted({*a.node.attributes, *b.node.attributes} - {*_HANDLED}):
        left, right = (side.node.attributes.get(key) for side in (a, b))
        if _tuples_to_lists(left) != _tuples_to_lists(right):
            found.append(Finding("constant", f"the attribute {key!r} is {left} in {a.label}, {right} in {b.label}"))
    registers = [Accumulator.of_json(side.node.attributes.get("accumulator")) for side in (a, b)]
    if registers[0] != registers[1]:
        text = f"the accumulator's bits are {registers[0]} in {a.label}, {registers[1]} in {b.label}"
        found.append(Finding("accumulator", text))
    found += [*grid_findings(a, b), *_constant_findings(a, b)]
    return found


def _tuples_to_lists(value: Any) -> Any:
    """Tuples as lists, because a saved graph has no tuples."""
    return [_tuples_to_lists(item) for item in value] if isinstance(value, list | tuple) else value


def _method_text(side: Side) -> str:
    method = method_of(side.node)
    if method is None:
        return f"{side.label} only moves codes"
    name = "" if method.startswith("exact sum") or side.node.op == backend.NAME else f" ({method})"
    return f"{side.label} {phrase(method)}{name}"


def grid_findings(a: Side, b: Side) -> list[Finding]:
    """List the differences between the grids of their inputs and outputs."""
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
    """The fields in which two grids differ: "the scales", "the zero points", "the ranges of codes"."""
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
        # Constants of two methods can have the same name but different meanings.
        kind = {"kernel": "accumulator", "bias": "bias"}.get(role, "grid" if role in _BOUNDS else "constant")
        shared = role.endswith(("/kernel", "/bias")) if a.node.op == backend.NAME else kind != "constant"
        if (role in finishing and both_rules) or (not same_method and not shared):
            continue
        if role == "bias" and any(rule is not None and rule.takes_bias for rule in rules):
            continue
        sides = [side for side in (a, b) if role in side.node.constants]
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
    """How the effective scales of a product with weights were computed; None if both ways give these constants."""
    rule, node = side.rule, side.node
    scales = [scalar_scale(side.graph, name) for name in (*node.inputs, node.output)]
    if rule is None or rule.takes_bias or "kernel" not in node.constants or any(scale is None for scale in scales):
        return None
    constants = side.rule_constants()
    s_w = kernel_scale(side.graph, node)
    matching: list[str] = []
    forms: tuple[tuple[Literal["f64", "f32"], str], ...] = (("f64", "in doubles"), ("f32", "from a float32 product"))
    for form, words in forms:
        fresh = rule.prepare(effective_scale(scales[0], s_w, scales[-1], form=form))._asdict()
        same = (np.array_equal(np.broadcast_to(v, constants[role].shape), constants[role]) for role, v in fresh.items())
        if all(same):
            matching.append(words)
    return matching[0] if len(matching) == 1 else None
