"""Every output in which two rules differ gets the one cause that Python's rationals give it."""

import itertools
import math
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from qjax.comparison.causes import Side, classify, findings
from qjax.graph.ir import Graph, Node, Tensor
from qjax.graph.kernels import attributes, prepare, run_node
from qjax.graph.rounding_phrases import FORMULAS, QUANTIZATIONS, RULES, phrase, rule_phrase
from qjax.numerics import float32
from qjax.numerics.fixed_point import effective_scale
from qjax.numerics.input_quantization import INPUT_QUANTIZATIONS
from qjax.numerics.rules import get_rule, rule_names
from qjax.ops import formulas
from qjax.run.accumulators import accumulators
from tests.export.graphs import quantization
from tests.lower.lowered import DENSE

RNG = np.random.default_rng(0)
ZERO_POINT = 5
S_X = S_Y = np.float32(1)
FAMILIES = ("nemo:65536", "power_of_two:TRN:WRAP", "power_of_two:RND_INF:SAT", "power_of_two:RND_ZERO:SAT_ZERO")
RULES_HERE = [name for name in (*rule_names(), *FAMILIES) if not get_rule(name).needs_key]


def accumulator_values(scales: np.ndarray) -> np.ndarray:
    """Per scale: accumulators at random, on and beside exact ties, and at the ends of int32."""
    columns = []
    for scale in scales:
        exact = Fraction(float(scale))
        halves = [Fraction(2 * int(k) + 1, 2) / exact for k in RNG.integers(-3000, 3000, 24)]
        ties = [round(h) + d for h in halves for d in (-1, 0, 1)]
        random = [int(v) for v in RNG.integers(-30000, 30000, 40) / float(scale)]
        edges = [-(2**31), 2**31 - 1, 0, 1, -1, 2**30, 2**24 + 1, -(2**24) - 1]
        columns.append([min(max(v, -(2**31)), 2**31 - 1) for v in (*ties, *random, *edges)])
    return np.asarray(columns).T.astype(np.int64).astype(np.int32)


def side(rule: str, scales: np.ndarray, label: str) -> Side:
    """One dense layer of zero weights, whose biases are accumulators: any int32 through a real node."""
    channels = len(scales)
    wide = quantization(-32768, 32767, scale=S_Y, zero_point=ZERO_POINT)
    weights = quantization(-127, scale=scales, zero_point=np.zeros(channels, np.int32), axes=(1,))
    constants = get_rule(rule).prepare(effective_scale(S_X, scales, S_Y))._asdict()
    tensors = [
        Tensor("x", (None, 1), "int8", quantization(scale=S_X, zero_point=0)),
        Tensor("kernel", (1, channels), "int8", weights, np.zeros((1, channels), np.int8)),
        Tensor("bias", (channels,), "int32", None, np.zeros(channels, np.int32)),
        *(Tensor(role, np.shape(value), "int32", None, np.asarray(value)) for role, value in constants.items()),
        Tensor("y", (None, channels), "int16", wide),
    ]
    roles = {"kernel": "kernel", "bias": "bias", **{role: role for role in constants}}
    node = Node("y", "dot", ("x",), "y", roles, {**DENSE, "rule": rule})
    return Side(Graph({t.name: t for t in tensors}, (node,), ("x",), ("y",), rule), node, label)


def codes_of(of: Side, acc: np.ndarray) -> np.ndarray:
    """The node's own codes, the accumulators being its bias."""
    constants = {**prepare(of.graph)["y"], "bias": acc}
    return np.asarray(run_node(of.graph, of.node, constants, [np.zeros((len(acc), 1), np.int8)]))


SCALES = {
    "any": np.asarray([0.3, 0.0021, 0.71, 1.7, 3e-5, 0.0117], np.float32),
    "powers of two": np.asarray([0.5, 2.0**-3, 2.0**-9, 2.0, 2.0**-17], np.float32),
}


@pytest.fixture(scope="module", params=SCALES)
def table(request: pytest.FixtureRequest) -> tuple[np.ndarray, dict[str, tuple[Side, np.ndarray]]]:
    scales = SCALES[request.param]
    acc = accumulator_values(scales)
    rules = [name for name in RULES_HERE if request.param != "any" or not name.startswith("power_of_two")]
    made = {name: side(name, scales, name) for name in rules}
    return acc, {name: (of, codes_of(of, acc)) for name, of in made.items()}


def kernel_scales(of: Side) -> np.ndarray:
    """The scales of the weights, one per channel."""
    quantization = of.graph.tensors["kernel"].quantization
    assert quantization is not None
    return np.asarray(quantization.scale)


def exact_scale(rule: str, scale: Any) -> Fraction:
    """The effective scale that a rule works with, from its definition: the constants of the node are not read.

    S_X = S_Y = 1, so it is the scale of the weights, whose 24 bits every rule holds exactly; but for two.
    """
    if rule == "int16x8":
        # the multiplier has 15 bits, and 2^15 is cut to 2^15 - 1
        mantissa, exponent = math.frexp(float(scale))
        return min(math.floor(mantissa * 2**15 + 0.5), 2**15 - 1) * Fraction(2) ** (exponent - 15)
    if rule.startswith("nemo:"):
        steps = int(rule.partition(":")[2])
        return Fraction(round(Fraction(float(scale)) * steps), steps)
    return Fraction(float(scale))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_every_pair_of_rules_is_explained(
    table: tuple[np.ndarray, dict[str, tuple[Side, np.ndarray]]], step: int
) -> None:
    """All pairs, or each rule with its neighbours and some others."""
    acc, made = table
    differing = 0
    pairs = list(itertools.combinations(made, 2))
    neighbours = set(itertools.pairwise(made))
    for left, right in [pair for number, pair in enumerate(pairs) if number % step == 0 or pair in neighbours]:
        (a, mine), (b, theirs) = made[left], made[right]
        found = classify(a, b, ([acc], [acc]), (mine, theirs))
        total = int(np.sum(mine != theirs))
        causes = sum(n for (kind, _), n in found.items() if kind not in ("off", "sums", "measured"))
        assert causes == total, (left, right, found)
        assert not any(kind in ("other", "accumulator", "grid") for kind, _ in found), (left, right, found)
        differing += total
        # a tie is counted as one if and only if it is one under both constants
        ties = 0
        e_a, e_b = ([exact_scale(rule, scale) for scale in kernel_scales(a)] for rule in (left, right))
        for row, column in zip(*np.nonzero(mine != theirs), strict=True):
            value, other = int(acc[row, column]) * e_a[column], int(acc[row, column]) * e_b[column]
            if value == other and value % 1 == Fraction(1, 2) and abs(value) < 2**15:
                ties += abs(int(mine[row, column]) - int(theirs[row, column])) == 1
        assert found["tie", ""] <= ties
        plain = {"nearest_even", "nearest_away", "single_round", "double_round", "neon", "float32", "tosa_single"}
        if {left, right} <= plain:
            assert found["tie", ""] == ties, (left, right, found)
    assert differing > 5000


@pytest.mark.parametrize("twice", ["double_round", "neon"])
def test_ties_of_the_first_rounding(table: tuple[np.ndarray, dict[str, tuple[Side, np.ndarray]]], twice: str) -> None:
    """Against one rounding of the same constants: what is no tie is a tie after the first rounding."""
    acc, made = table
    (a, mine), (b, theirs) = made["nearest_even"], made[twice]
    found = classify(a, b, ([acc], [acc]), (mine, theirs))
    ties = doubles = wraps = 0
    m, s = b.constant("multiplier").tolist(), b.constant("shift").tolist()
    for row, column in zip(*np.nonzero(mine != theirs), strict=True):
        product = Fraction(int(acc[row, column]) * m[column], 2 ** (31 - s[column]))
        if not -(2**31) <= int(acc[row, column]) << max(s[column], 0) < 2**31 or abs(product) >= 2**31:
            wraps += 1
        elif product % 1 == Fraction(1, 2):
            ties += 1
        else:
            steps = 2 ** max(-s[column], 0)
            first = Fraction((product * steps + Fraction(1, 2)).__floor__(), steps)
            assert first % 1 == Fraction(1, 2)
            doubles += 1
    assert (found["tie", ""], found["double_rounding", "b"], found["overflow", ""]) == (ties, doubles, wraps)
    assert ties + doubles > 0


def test_float32_is_named_where_its_product_decides(
    table: tuple[np.ndarray, dict[str, tuple[Side, np.ndarray]]],
) -> None:
    """The exact product acc * e, with float32's own e, is no tie; float32's product is one, or lies beyond it."""
    acc, made = table
    (a, mine), (b, theirs) = made["float64_away"], made["float32"]
    found = classify(a, b, ([acc], [acc]), (mine, theirs))
    counted = 0
    for row, column in zip(*np.nonzero(mine != theirs), strict=True):
        value = int(acc[row, column]) * exact_scale("float32", kernel_scales(b)[column])
        code = int(theirs[row, column]) - ZERO_POINT
        counted += abs(value - code) > Fraction(1, 2) and abs(code) < 32000
    assert found["float32", "b"] == counted


def test_how_far_each_is_from_the_real_value(table: tuple[np.ndarray, dict[str, tuple[Side, np.ndarray]]]) -> None:
    acc, made = table
    (a, mine), (b, theirs) = made["nearest_even"], made["double_round"]
    found = classify(a, b, ([acc], [acc]), (mine, theirs))
    off = [0, 0]
    for row, column in zip(*np.nonzero(mine != theirs), strict=True):
        real = int(acc[row, column]) * Fraction(float(kernel_scales(a)[column]))
        for i, codes in enumerate((mine, theirs)):
            place = real - (int(codes[row, column]) - ZERO_POINT)
            off[i] += abs(place) > Fraction(1, 2) and abs(real) < 2**15
    overflown = found["overflow", ""]
    assert abs(found["off", "a"] - off[0]) <= overflown
    assert abs(found["off", "b"] - off[1]) <= overflown


@pytest.mark.parametrize(
    "name", ["float32_bias", "openvino", "torch_fbgemm", "torch_onednn", "torch_onednn_conv", "torch_qnnpack"]
)
def test_a_bias_within_the_rule(name: str) -> None:
    """Against an int32 bias: where they part, the biases decide, or the float32 steps of one of the two."""
    scales = np.asarray([0.031, 0.07], np.float32)
    plain, biased = side("float32", scales, "plain"), side(name, scales, "biased")
    bias = np.asarray([101, -20] if name == "torch_qnnpack" else [100.4, -20.6], np.float32)
    prepared = get_rule(name).prepare(effective_scale(S_X, scales, S_Y), float32.of(bias))._asdict()
    tensors = dict(biased.graph.tensors)
    for role, value in prepared.items():
        tensors[role] = Tensor(role, np.shape(value), "int32", None, np.asarray(value))
    biased = Side(biased.graph.replace(tensors=tensors), biased.node, "biased")
    rounded = np.asarray([100, -21], np.int32)
    tensors = dict(plain.graph.tensors)
    tensors["bias"] = Tensor("bias", (2,), "int32", None, rounded)
    plain = Side(plain.graph.replace(tensors=tensors), plain.node, "plain")
    sums = np.arange(-4000, 4000, dtype=np.int32)[:, None] * np.ones((1, 2), np.int32)
    mine, theirs = codes_of(plain, sums + rounded), codes_of(biased, sums)
    found = classify(plain, biased, ([sums + rounded], [sums]), (mine, theirs))
    expected: Counter[tuple[str, str]] = Counter()
    for row, column in zip(*np.nonzero(mine != theirs), strict=True):
        total, e = int(sums[row, column]), Fraction(float(scales[column]))
        values = (total + int(rounded[column])) * e, (total + Fraction(float(bias[column]))) * e
        codes = (int(codes[row, column]) - ZERO_POINT for codes in (mine, theirs))
        off = [abs(value - code) > Fraction(1, 2) for value, code in zip(values, codes, strict=True)]
        expected["float32", "a" if off[0] else "b"] += any(off)
        expected["bias", ""] += not any(off)
    assert found == +expected
    assert expected["bias", ""] > 100
    texts = [f.text for f in findings(plain, biased) if f.kind == "bias"]
    assert texts == ["the bias is part of the rule in biased, of the int32 sum in plain"]


def test_accumulators_come_out_of_the_kernel() -> None:
    of = side("tosa_double", SCALES["any"], "a")
    constants = {**prepare(of.graph)["y"], "bias": np.asarray([1, -(2**31), 2**31 - 1, 0, -7, 9], np.int32)}
    (acc,) = accumulators("dot", attributes(of.graph, of.node), constants, [np.zeros((3, 1), np.int8)])
    assert acc.dtype == np.int32
    assert np.array_equal(acc, np.broadcast_to(constants["bias"], (3, 6)))


@pytest.mark.parametrize(
    ("names", "phrases"),
    [(rule_names, RULES), (formulas.names, FORMULAS), (lambda: INPUT_QUANTIZATIONS, QUANTIZATIONS)],
)
def test_everything_registered_has_a_phrase(names: Callable[[], tuple[str, ...]], phrases: dict[str, str]) -> None:
    assert set(names()) == set(phrases)


def test_phrases_of_names_with_parameters() -> None:
    assert rule_phrase("power_of_two:TRN:WRAP") == "shifts with the rounding TRN and the overflow WRAP"
    assert rule_phrase("nemo:256") == "rounds down with a multiplier of 256 steps to 1"
    assert rule_phrase("of_a_user") == "follows of_a_user"
    assert phrase("float32/f32") == RULES["float32"]
    assert phrase("exact sum (nearest_up)") == "adds exactly in 64 bits and rounds once, ties up"
