"""One small network under every target: the exact forward is the converted graph, whatever the runtime's rounding."""

# flax annotates what its constructors make as optional or as a bare Module
# pyright: reportOptionalMemberAccess=false, reportAttributeAccessIssue=false

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import qjax
from qjax import targets
from qjax.export import artifact
from qjax.graph.rounding_phrases import method_of
from qjax.numerics.accumulator import EXACT
from tests.export.graphs import differences
from tests.layers.round_trip import assert_same, data, train_step

UNSIGNED = qjax.QSpec(bits=8, signed=False, symmetric=False)
SAMPLE = data(8, 6, 6, 2)
MORE = jnp.concatenate([SAMPLE, data(8, 6, 6, 2, seed=1) * 3])


class Network(nnx.Module):
    """What most of a network's time goes into, and every other operation that a target has an opinion on."""

    def __init__(self, normalized: bool):
        rngs = nnx.Rngs(0)
        self.stem = nnx.Conv(2, 4, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs) if normalized else lambda x: x
        self.depthwise = nnx.Conv(4, 4, (3, 3), feature_group_count=4, rngs=rngs)
        self.head = nnx.Linear(4 * 9, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.norm(self.stem(x)))
        x = x + self.depthwise(x)
        x = lax.reduce_window(x, np.float32(0), lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") / np.float32(4)
        x = x * (x - jnp.flip(x, 1))
        return self.head(jnp.concatenate([jnp.mean(x, axis=(1, 2))] * 9, axis=1))


def recipe_of(name: str) -> qjax.Recipe:
    if name == "fpga":
        # one shift per product: every scale a power of two
        powers = {"method": "tqt", "weight_method": "tqt"}
        return qjax.Recipe(target=name, weights=qjax.QSpec(bits=8), **powers)  # pyright: ignore[reportArgumentType]
    unsigned = name.startswith(("torch", "onnx"))
    return qjax.Recipe(target=name, activations=UNSIGNED) if unsigned else qjax.Recipe(target=name)


def saturates(name: str) -> bool:
    """Whether sums may saturate in pairs: never where activations have 7 bits."""
    return targets.get(name).accumulator.pairs


@functools.cache
def trained(unsigned: bool, powers: bool, same_grid: frozenset[str], quantize: str) -> qjax.QuantizedModel:
    """The network after a step of training: all that a target has a say in there."""
    target = targets.get("fpga" if powers else "nearest_even")
    recipe = recipe_of("onnxruntime" if unsigned else target.name)
    recipe = dataclasses.replace(recipe, target=target.replace(same_grid=same_grid, quantize=quantize))
    qmodel = qjax.quantize(Network(normalized=not powers), recipe, SAMPLE)
    assert np.isfinite(train_step(qmodel, SAMPLE))
    qmodel.eval()
    return qmodel


@functools.cache
def converted(name: str) -> tuple[qjax.QuantizedModel, qjax.IntegerGraph, np.ndarray]:
    """The trained model, its graph under a target, and the outputs of `MORE`."""
    target, recipe = targets.get(name), recipe_of(name)
    qmodel = trained(recipe.activations == UNSIGNED, name == "fpga", target.same_grid, target.quantize)
    graph = qjax.convert(qmodel, SAMPLE, target=name)
    return qmodel, graph, np.asarray(graph(MORE))


COMPILED = ("onnxruntime_avx2",)
"""Pairs that saturate, and formulas in float32; XLA takes long for each, so the rest are left to `make test-all`."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in COMPILED else pytest.mark.exhaustive) for n in targets.names()]
)
def test_the_exact_forward_is_the_graph(name):
    qmodel, graph, outputs = converted(name)
    assert graph.target == name
    assert graph.ir.quantization == targets.get(name).quantize
    forward = nnx.jit(qjax.exact(qmodel, SAMPLE, target=name))
    assert_same(np.asarray(forward(qmodel, MORE)), outputs)
    assert len(np.unique(outputs)) > 8


@pytest.mark.parametrize("name", targets.names())
@pytest.mark.sampled(1)
def test_every_operation_converts_and_is_saved(name):
    _, graph, _ = converted(name)
    target = targets.get(name)
    known = set()
    for node in graph.ir.nodes:
        if node.op in ("add", "multiply", "sum"):
            op = {"sum": "mean", "add": "subtract" if node.attributes.get("subtract") else "add"}.get(node.op, node.op)
            assert node.attributes.get("formula") == target.formula(op)
            known.add(op)
    assert known == {"add", "subtract", "multiply", "mean"}
    # what a target leaves on the nodes survives a file
    assert differences(graph.ir, artifact.from_bytes(artifact.to_bytes(graph.ir))) == []


TWICE = (
    "double_round",
    "neon",
    "tflite_depthwise_neon",
    "tflite_arm_depthwise",
    "tflite_multiply",
    "tflite_multiply_neon",
)
"""Rules and formulas that round twice: the first rounding makes ties, of about one code in 2^8."""

REAL_BIAS = ("torch_fbgemm", "torch_onednn", "torch_onednn_conv", "openvino")
"""Rules that add the bias as a real number. Training adds it as a count of the accumulator's steps, at most half a step
off. About one value in 10^3 lies so near to a tie that it is then rounded to the other side."""

FEW_BITS = ("nvdla", "openvino_add")
"""Rules and formulas whose multipliers have 14 or 15 bits: a scale is up to 2^-16 of itself off, a code of 100 by 1.5
thousandths."""


@functools.cache
def trained_for(name: str) -> tuple[qjax.QuantizedModel, qjax.IntegerGraph]:
    """The network trained for this very target, its sums within what pairs hold."""
    recipe = dataclasses.replace(recipe_of(name), reduce_range=saturates(name))
    qmodel = qjax.quantize(Network(normalized=name != "fpga"), recipe, SAMPLE)
    assert np.isfinite(train_step(qmodel, SAMPLE))
    qmodel.eval()
    return qmodel, qjax.convert(qmodel, SAMPLE)


@pytest.mark.parametrize("name", targets.names())
@pytest.mark.sampled(1)
def test_training_computes_what_the_graph_does(name):
    """But for second roundings, the two float32 roundings of some additions, real biases, and short multipliers."""
    qmodel, graph = trained_for(name)
    report = qjax.verify(graph, qmodel, [MORE])
    methods = {node.name: method_of(node) for node in graph.ir.nodes}
    near = [node for node in report.nodes if methods[node.name] in TWICE + REAL_BIAS + FEW_BITS]
    assert [node for node in report.nodes if node.local and node not in near] == []
    for node in near:
        assert node.local <= max(node.compared // 100, 4), node
        assert node.local_max <= 1, node


@pytest.mark.parametrize("name", [name for name in targets.names() if saturates(name)])
@pytest.mark.sampled(1)
def test_pairs_differ_only_where_they_saturate(name):
    """The same model without pairs: the codes that differ are those of nodes whose sums saturate."""
    qmodel, graph, _ = converted(name)
    exact = targets.get(name).replace(name="exact sums", accumulator=EXACT, depthwise_accumulator=None)
    found = qjax.compare(qjax.convert(qmodel, SAMPLE, target=exact), graph, [MORE])
    arising = {node.op: node for node in found.nodes if node.own.count}
    assert set(arising) <= {"conv", "dot"}
    for node in arising.values():
        assert {cause.kind for cause in node.causes} == {"accumulator"}, node.text
        assert node.accumulators >= node.own.count


def test_a_target_of_ones_own_trains_converts_and_verifies():
    chip = qjax.targets.Target("chip", "single_round", conv="nearest_away", add="tflite_add", quantize="division")
    qmodel = qjax.quantize(Network(normalized=True), qjax.Recipe(target=chip), SAMPLE)
    qmodel.eval()
    graph = qjax.convert(qmodel, SAMPLE)
    known = {node.name: node.attributes.get("rule") or node.attributes.get("formula") for node in graph.ir.nodes}
    assert known["stem"] == "nearest_away"
    assert known["depthwise"] == known["head"] == "single_round"
    assert known["add"] == "tflite_add"
    assert graph.ir.quantization == "division"
    assert qjax.verify(graph, qmodel, [SAMPLE]).compared > 0
