"""`qjax.compare`: counts against the graphs' own tensors, planted differences by name, errors."""

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax
from qjax import targets
from qjax.export import passes
from qjax.export.check import check_integer
from qjax.export.integer_graph import IntegerGraph, quantize_inputs
from qjax.export.interpreter import attributes, prepare, run, run_node
from qjax.export.ir import Graph, Node, Tensor
from qjax.export.probe import accumulators
from qjax.numerics.accumulator import Accumulator
from tests.export.graphs import quantization
from tests.export.lowered import residual_network

RNG = np.random.default_rng(0)
# multiples of half a step of x: half of the inputs are exact ties
REALS = (RNG.integers(-120, 120, (48, 6, 6, 4)) / 64).astype(np.float32)


def built(like: str, **changes: Any) -> IntegerGraph:
    """The residual network as a finished graph under a target, or a changed one."""
    target = dataclasses.replace(targets.get(like), **changes)
    graph = passes.codes_of_bounds(passes.fuse(residual_network(), target))
    graph = check_integer(passes.remove_dead(passes.remove_identities(graph)))
    return IntegerGraph(graph.replace(target=target.name, quantization=target.quantize))


def edited(graph: IntegerGraph, tensor: str, change: Callable[[np.ndarray], np.ndarray]) -> IntegerGraph:
    """The same graph with other data in one constant."""
    old = graph.ir.tensors[tensor]
    new = dataclasses.replace(old, value=change(np.array(old.value)))
    return IntegerGraph(graph.ir.replace(tensors={**graph.ir.tensors, tensor: new}))


def regridded(graph: IntegerGraph, tensor: str, **changes: Any) -> IntegerGraph:
    """The same graph with another scale, zero point or range in one tensor."""
    old = graph.ir.tensors[tensor]
    assert old.quantization is not None
    new = dataclasses.replace(old, quantization=dataclasses.replace(old.quantization, **changes))
    return IntegerGraph(graph.ir.replace(tensors={**graph.ir.tensors, tensor: new}))


def before_rounding(graph: IntegerGraph, node: Node, inputs: list[Any]) -> list[jax.Array]:
    return accumulators(node.op, attributes(graph.ir, node), graph.interpreter.constants[node.name], inputs)


def counts(a: Any, b: Any) -> tuple[int, int, int, int, int]:
    steps = np.asarray(b).astype(np.int64) - np.asarray(a).astype(np.int64)
    up, down = int((steps > 0).sum()), int((steps < 0).sum())
    return up + down, up, down, int(np.abs(steps).max()), int(steps.sum())


def counted(difference: Any) -> tuple[int, int, int, int, int]:
    return difference.count, difference.up, difference.down, difference.largest, difference.total


PAIRS = [
    ("nearest_even", "single_round"),
    ("nearest_even", "double_round"),
    ("tflite_micro", "tflite_xnnpack"),
    ("tflite_optimized_x86", "onnxruntime"),
    ("tosa", "tflite_reference"),
]


@pytest.mark.parametrize(("left", "right"), PAIRS)
def test_counts_are_those_of_the_graphs_tensors(left: str, right: str) -> None:
    a, b = built(left), built(right)
    report = qjax.compare(a, b, REALS)
    codes = [quantize_inputs(g.ir, [REALS]) for g in (a, b)]
    envs = [run(g.ir, g.interpreter.constants, c) for g, c in zip((a, b), codes, strict=True)]
    assert report.labels == (left, right)
    assert [n.name for n in report.nodes] == ["x", *(node.name for node in a.ir.nodes)]
    assert counted(report["x"].own) == counted(report["x"].end_to_end) == counts(codes[0][0], codes[1][0])
    for node in b.ir.nodes:
        inputs = [envs[0][name] for name in node.inputs]
        local = run_node(b.ir, node, b.interpreter.constants[node.name], inputs)
        found = report[node.name]
        assert counted(found.own) == counts(envs[0][node.output], local), node.name
        assert counted(found.arriving) == counts(local, envs[1][node.output]), node.name
        assert counted(found.end_to_end) == counts(envs[0][node.output], envs[1][node.output]), node.name
        assert found.own.total + found.arriving.total == found.end_to_end.total
        assert found.own.compared == envs[0][node.output].size
        assert sum(cause.count for cause in found.causes) == found.own.count
        assert not any(cause.kind == "other" for cause in found.causes), found
        assert bool(found.text) == bool(found.own.count)
    diverging = [n.name for n in report.nodes if n.own.count]
    assert report.first is not None
    assert report.first.name == diverging[0]
    assert not report.equal
    predictions = np.argmax(envs[0]["y"], -1) != np.argmax(envs[1]["y"], -1)
    assert report.predictions == int(predictions.sum())
    assert report.examples == len(REALS)
    text = " ".join(str(report).split())
    for node in report.diverging:
        assert node.text in text
    assert f"the first difference arises in {diverging[0]!r}" in text


def test_causes_of_a_residual_addition() -> None:
    """The sum halves: an odd sum is an exact tie, which the two targets send different ways."""
    a, b = built("nearest_even"), built("single_round")
    node = qjax.compare(a, b, REALS).first
    assert node is not None
    assert (node.name, node.op) == ("r", "add")
    x = np.asarray(a.quantize(REALS)).astype(np.int64) + 5
    env = run(a.ir, a.interpreter.constants, [a.quantize(REALS)])
    total = x + np.asarray(env["h"]).astype(np.int64)
    # ties to even and ties up part where floor(total / 2) is even
    ties = (total % 2 == 1) & (total // 2 % 2 == 0) & (total // 2 - 20 < 127) & (total // 2 - 20 >= -128)
    assert [(c.kind, c.count) for c in node.causes] == [("tie", int(ties.sum()))]
    assert node.own.direction == "all by +1"
    n = f"{int(ties.sum()):,}"
    assert node.text == (
        f"node r (add): {n} of {ties.size:,} differ, all by +1. nearest_even adds exactly in 64 bits and rounds once, "
        f"ties to even; single_round adds exactly in 64 bits and rounds once, ties up. {n} are exact ties."
    )


def test_two_roundings_are_named() -> None:
    node = qjax.compare(built("nearest_even"), built("double_round"), REALS)["h"]
    assert node.own.count > 0
    assert {c.kind for c in node.causes} <= {"double_rounding", "tie"}
    assert "double_round rounds twice, ties up, then away from zero (double_round)" in node.text
    assert "in the first of the two roundings of double_round" in node.text
    assert node.off == (0, sum(c.count for c in node.causes if c.kind == "double_rounding"))


def test_equal_graphs() -> None:
    report = qjax.compare(built("nearest_even"), built("nearest_even"), REALS)
    assert report.equal
    assert report.first is None
    assert report.diverging == ()
    assert report.labels == ("a", "b")
    assert str(report).endswith("48 examples, 31,440 codes: no code differs.")
    assert not any(node.findings for node in report.nodes)


def test_batches_add_up() -> None:
    a, b = built("nearest_even"), built("tflite_reference")
    whole = qjax.compare(a, b, REALS)
    parts = qjax.compare(a, b, (REALS[i : i + 16] for i in range(0, 48, 16)))
    assert whole.nodes == parts.nodes
    assert (whole.examples, whole.predictions) == (parts.examples, parts.predictions)


def test_codes_in_place_of_reals() -> None:
    """Both graphs get the same codes, so the inputs' quantization is not compared."""
    a, b = built("nearest_even"), built("tflite_micro")
    report = qjax.compare(a.ir, b.ir, a.quantize(REALS))
    assert [n.name for n in report.nodes] == [node.name for node in a.ir.nodes]
    assert report.nodes[0].arriving.count == 0
    reals = qjax.compare(a, b, REALS)
    assert report["h"].own == reals["h"].own
    assert reals["x"].own.count > 0


def test_quantization_of_inputs() -> None:
    """Half of the reals are exact ties of x / s, where half even and half away part for even floors."""
    a, b = built("nearest_even"), built("nearest_even", quantize="division_away", name="away")
    report = qjax.compare(a, b, REALS)
    node = report.first
    assert node is not None
    assert (node.name, node.op) == ("x", "quantize")
    twice = (REALS * 64).astype(np.int64)
    ties = (twice % 2 == 1) & ((np.abs(twice) // 2) % 2 == 0)
    assert [(c.kind, c.count) for c in node.causes] == [("tie", int(ties.sum()))]
    assert "computes rint(x * (1/s)) + z (reciprocal); away computes round(x / s) + z" in node.text
    assert report["h"].own.count == 0
    assert report["h"].arriving.count == report["h"].end_to_end.count > 0
    # near ties: a scale whose reciprocal is inexact
    scaled = quantization(scale=np.float32(0.0137), zero_point=-5)
    odd = [
        IntegerGraph(
            g.ir.replace(tensors={**g.ir.tensors, "x": dataclasses.replace(g.ir.tensors["x"], quantization=scaled)})
        )
        for g in (built("nearest_even"), built("nearest_even", quantize="division", name="divides"))
    ]
    x = (np.arange(-96, 96, dtype=np.float32) + np.float32(0.5)) * np.float32(0.0137)
    near = qjax.compare(odd[0], odd[1], np.resize(x, (8, 6, 6, 4)))["x"]
    assert near.own.count > 0
    assert {c.kind for c in near.causes} <= {"tie", "float32"}


@pytest.mark.parametrize(
    ("tensor", "node", "kind", "text"),
    [
        ("h/bias", "h", "bias", "1 of 4 biases differ, by at most 900"),
        ("y/kernel", "y", "accumulator", "1 of 252 weights differ, by at most 9"),
        ("clipped/clamp_max", "clipped", "constant", "1 of 1 values of 'clamp_max' differ, by at most 3"),
        ("r/factor1", "r", "scale", "1 of 1 values of 'factor1' differ"),
        ("h/shift", "h", "scale", "effective scales differ"),
    ],
)
def test_planted_constants_are_named(tensor: str, node: str, kind: str, text: str) -> None:
    amounts = {"h/bias": 900, "y/kernel": 9, "clipped/clamp_max": -3, "r/factor1": 2**24, "h/shift": 1}

    def change(value: np.ndarray) -> np.ndarray:
        flat = value.reshape(-1)
        flat[0] += amounts[tensor] if flat[0] <= 100 or tensor != "y/kernel" else -amounts[tensor]
        return value

    a = built("nearest_even")
    report = qjax.compare(a, edited(a, tensor, change), REALS)
    found = report.first
    assert found is not None
    assert found.name == node
    assert [n.name for n in report.diverging] == [node]
    assert [c.kind for c in found.causes] == [kind]
    assert text in found.text
    assert found.causes[0].count == found.own.count
    assert all(not n.findings for n in report.nodes if n.name != node)


def test_planted_weight_counts_accumulators() -> None:
    a = built("nearest_even")

    def change(value: np.ndarray) -> np.ndarray:
        value[0, 0] += 1 if value[0, 0] < 127 else -1
        return value

    report = qjax.compare(a, edited(a, "y/kernel", change), REALS)
    env = run(a.ir, a.interpreter.constants, [a.quantize(REALS)])
    moved = int(np.sum(np.asarray(env["flat"])[:, 0] != 3))
    assert report["y"].accumulators == moved
    assert f"{moved:,} of the 336 accumulators differ" in report["y"].text


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"scale": np.float32(2.0**-4 * 1.01)}, "the scales of 'r' differ here"),
        ({"zero_point": np.int32(-19)}, "the zero points of 'r' differ here"),
        ({"qmax": 100}, "the ranges of codes of 'r' differ here"),
    ],
)
def test_planted_grids_are_named(changes: dict[str, Any], text: str) -> None:
    a = built("nearest_even")
    report = qjax.compare(a, regridded(a, "r", **changes), REALS)
    assert any(text == finding.text for finding in report["r"].findings)
    assert all(c.kind == "grid" for node in report.diverging for c in node.causes)
    if "scale" not in changes:  # a scale alone is read by nobody: the multipliers are constants
        assert report.first is report["r"]
        assert text in report["r"].text


def test_accumulators_of_another_width() -> None:
    narrow = Accumulator(14, "saturate")
    a, b = built("nearest_even"), built("nearest_even", accumulator=narrow, name="narrow")
    report = qjax.compare(a, b, REALS)
    node = report["h"]
    assert [c.kind for c in node.causes] == ["accumulator"]
    assert "the accumulator's bits are 32 in nearest_even, 14 saturate in narrow" in node.text
    x = [a.quantize(REALS)]
    sums = [before_rounding(g, g.ir.nodes[0], x)[0] for g in (a, b)]
    assert node.accumulators == int(np.sum(np.asarray(sums[0]) != np.asarray(sums[1]))) > 0


def test_scales_formed_in_float32() -> None:
    """The same rule under two forms of the effective scale: decided by its last bits, or nothing differs."""
    rule = targets.Weighted
    a = built("nearest_even", requantize=rule("neon", "f64"), name="doubles")
    b = built("nearest_even", requantize=rule("neon", "f32"), name="floats")
    report = qjax.compare(a, b, REALS)
    texts = [f.text for f in report["y"].findings if f.kind == "scale"]
    assert len(texts) == 1
    assert "doubles forms them in doubles; floats forms them from a float32 product" in texts[0]
    assert all(c.kind in ("scale", "tie", "double_rounding") for n in report.diverging for c in n.causes)


def test_accumulators_are_the_sums_of_products() -> None:
    """int64 sums of centred codes by numpy, for every kind of node."""
    graph = built("tflite_micro")
    env = {k: np.asarray(v) for k, v in run(graph.ir, graph.interpreter.constants, [graph.quantize(REALS)]).items()}
    found = {
        node.name: [np.asarray(acc) for acc in before_rounding(graph, node, [jnp.asarray(env[n]) for n in node.inputs])]
        for node in graph.ir.nodes
    }
    x, h = env["x"].astype(np.int64) + 5, env["h"].astype(np.int64)
    assert np.array_equal(found["r"][0], x)
    assert np.array_equal(found["r"][1], h)
    assert found["clipped"] == found["flat"] == []
    clipped = env["clipped"].astype(np.int64) + 20
    assert np.array_equal(found["p"][0], clipped.reshape(48, 3, 2, 3, 2, 4).sum((2, 4)))
    node = next(n for n in graph.ir.nodes if n.name == "h")
    kernel, bias = (np.asarray(graph.ir.constant(node, role)).astype(np.int64) for role in ("kernel", "bias"))
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    total = sum(padded[:, i : i + 6, j : j + 6] @ kernel[i, j] for i in range(3) for j in range(3))
    assert np.array_equal(found["h"][0], total + bias)
    node = graph.ir.nodes[-1]
    kernel, bias = (np.asarray(graph.ir.constant(node, role)).astype(np.int64) for role in ("kernel", "bias"))
    assert np.array_equal(found["y"][0], (env["flat"].astype(np.int64) - 3) @ kernel + bias)


class Gated(nnx.Module):
    """Two inputs, an embedding, a gate, products of activations, a subtraction, a mean, two outputs."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(11, 4, rngs=rngs)
        self.query = nnx.Linear(4, 4, rngs=rngs)
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, ids: jax.Array, x: jax.Array) -> dict[str, Any]:
        rows = self.query(self.embed(ids))
        scores = jnp.einsum("btd,bsd->bts", rows, x)
        gated = jnp.concatenate([rows * x, rows - x], axis=-1)
        return {"y": self.head(gated.mean(axis=1)), "scores": scores}


def test_a_model_under_two_targets() -> None:
    ids = RNG.integers(0, 11, (32, 5)).astype(np.int32)
    x = RNG.normal(size=(32, 5, 4)).astype(np.float32)
    qmodel = qjax.quantize(Gated(nnx.Rngs(0)), qjax.Recipe(), (ids, x))
    graphs = [qjax.convert(qmodel, (ids, x), target=t) for t in ("tflite_micro", "onnxruntime")]
    report = qjax.compare(graphs[0], graphs[1], (ids, x))
    ops = {node.op for node in report.nodes}
    assert {"embed", "dot", "multiply", "add", "sum", "concatenate", "quantize"} <= ops
    assert len(report.outputs) == 2
    for node in report.nodes:
        assert sum(c.count for c in node.causes) == node.own.count
        assert not any(c.kind == "other" for c in node.causes), node.text
    for output, name in zip(report.outputs, graphs[0].ir.outputs, strict=True):
        assert name in (output.name, graphs[0].ir.nodes[-1].output)
    by_hand = [np.asarray(v) for v in jax.tree.leaves([g(ids, x) for g in graphs])]
    assert report.equal == (np.array_equal(by_hand[0], by_hand[2]) and not report.diverging)
    assert "At the output" in " ".join(str(report).split()) or report.equal


def test_a_node_that_one_graph_alone_has() -> None:
    a = built("nearest_even")
    nodes = tuple(
        dataclasses.replace(n, inputs=("r",)) if n.name == "p" else n for n in a.ir.nodes if n.name != "clipped"
    )
    b = IntegerGraph(a.ir.replace(nodes=nodes))
    report = qjax.compare(a, b, REALS)
    assert report.only_a == ("clipped",)
    assert report.only_b == ()
    assert "Only a has clipped: not compared." in str(report)
    assert report["p"].own.count == 0
    assert report["p"].arriving.count > 0
    other = qjax.compare(b, a, REALS)
    assert other.only_b == ("clipped",)
    assert other["p"].end_to_end.total == -report["p"].end_to_end.total


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda ir: ir.replace(inputs=("h",)), r"different models: inputs x and 1 outputs against inputs h"),
        (lambda ir: retyped(ir, "r", dtype="int16"), r"'r' is int8 batchx6x6x4 in a, int16 batchx6x6x4 in b"),
        (lambda ir: retyped(ir, "p", shape=(None, 3, 3, 5)), r"'p' is int8 batchx3x3x4 in a, int8 batchx3x3x5 in b"),
        (lambda ir: renamed(ir, "z"), r"no node in common"),
        (lambda ir: replaced(ir, "flat", op="transpose"), r"node 'flat' is reshape of 1 tensors in a, transpose"),
    ],
)
def test_graphs_of_different_models(changed: Callable[[Graph], Graph], message: str) -> None:
    a = built("nearest_even")
    with pytest.raises(ValueError, match=message):
        qjax.compare(a.ir, changed(a.ir), REALS)


def retyped(ir: Graph, name: str, **changes: Any) -> Graph:
    tensor: Tensor = dataclasses.replace(ir.tensors[name], **changes)
    return ir.replace(tensors={**ir.tensors, name: tensor})


def renamed(ir: Graph, suffix: str) -> Graph:
    return ir.replace(nodes=tuple(dataclasses.replace(node, name=node.name + suffix) for node in ir.nodes))


def replaced(ir: Graph, name: str, **changes: Any) -> Graph:
    def change(node: Node) -> Node:
        return dataclasses.replace(node, **changes) if node.name == name else node

    return ir.replace(nodes=tuple(change(node) for node in ir.nodes))


def test_wrong_arguments() -> None:
    a, name = built("nearest_even"), cast(Any, "tflite")
    with pytest.raises(TypeError, match=r"expected two graphs from qjax\.convert, got str"):
        qjax.compare(a, name, REALS)
    with pytest.raises(TypeError, match="expected an array, a tuple of arrays, or an iterable of batches, got int"):
        qjax.compare(a, a, 3)
    with pytest.raises(TypeError, match="takes reals, or codes of dtype int8; got int32"):
        qjax.compare(a, a, np.zeros((1, 6, 6, 4), np.int32))
    with pytest.raises(TypeError, match="takes 1 inputs"):
        qjax.compare(a, a, (REALS, REALS))
    with pytest.raises(ValueError, match="expected shape"):
        qjax.compare(a, a, REALS[:, :5])
    with pytest.raises(ValueError, match="at least one batch, got none"):
        qjax.compare(a, a, [])
    with pytest.raises(KeyError, match="No node 'nothing' in both graphs"):
        qjax.compare(a, a, REALS)["nothing"]


def test_prepared_constants_are_not_needed() -> None:
    """Graphs of the intermediate form are prepared here."""
    a = built("nearest_even")
    assert qjax.compare(a.ir, a, REALS).equal
    assert set(prepare(a.ir)) == set(a.interpreter.constants)
