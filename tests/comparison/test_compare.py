"""`qjax.compare`: counts against the graphs' own tensors, models, errors."""

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax
from qjax.export.integer_graph import IntegerGraph
from qjax.graph.ir import Graph, Node, Tensor
from qjax.graph.kernels import prepare, run_node
from qjax.run.interpreter import run
from qjax.run.quantize_io import quantize_inputs
from tests.comparison.compared import REALS, RNG, built, counted, counts
from tests.export.graphs import quantization

PAIRS = [
    ("nearest_even", "single_round"),
    ("nearest_even", "double_round"),
    ("tflite_micro", "tflite_xnnpack"),
    ("tflite_optimized_x86", "onnxruntime"),
    ("tosa", "tflite_reference"),
]


@pytest.mark.parametrize(("left", "right"), PAIRS)
@pytest.mark.sampled(2)
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


@pytest.mark.exhaustive
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
        (lambda ir: renamed(ir, "z"), r"graphs without a common node"),
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
    with pytest.raises(TypeError, match=r"compare: expected batches .*, got 3"):
        qjax.compare(a, a, cast(Any, 3))
    with pytest.raises(TypeError, match="expected floats, or codes of dtype int8, got int32"):
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


def test_a_softmax_has_no_accumulators_and_is_compared_all_the_same():
    x = np.random.default_rng(0).standard_normal((256, 16)).astype(np.float32) * 2
    model = nnx.Sequential(nnx.Linear(16, 12, rngs=nnx.Rngs(0)), nnx.softmax)
    qmodel = qjax.quantize(model, qjax.Recipe(), x)
    qjax.calibrate(qmodel, [x], progress=False)
    qmodel.eval()
    graph = qjax.convert(qmodel, x, target="nearest_even")
    other = graph.retarget("onnxruntime")
    assert [node.op for node in other.ir.nodes] == [node.op for node in graph.ir.nodes] == ["dot", "softmax"]
    node = qjax.compare(graph, other, [x])["softmax"]
    differing = int(np.sum(np.asarray(graph(x)) != np.asarray(other(x))))
    assert node.end_to_end.count == differing > 0
    assert [(cause.kind, cause.count) for cause in node.causes] == [("method", node.own.count)]
    assert "other arithmetic in nearest_even than in onnxruntime" in node.causes[0].text
