"""A vendor's backend: partitioning keeps results, and `exact`, `verify` and `compare` speak of the device's graph."""

# flax annotates what its constructors make as optional or as a bare Module
# pyright: reportOptionalMemberAccess=false, reportAttributeAccessIssue=false

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax
from qjax import ops, targets
from qjax.assign import assign
from qjax.assign.partition import group_like
from qjax.export import (
    Backend,
    Fusion,
    compose,
    describe,
    expand,
    op,
    optional,
    register_backend,
    tensor,
)
from qjax.export.integer_graph import IntegerGraph
from qjax.graph.ir import Graph, Node
from qjax.graph.kernels import attributes, prepare
from tests.assign.chip import IMAGES, Residual
from tests.export.graphs import assert_equal
from tests.layers.round_trip import assert_same, data
from tests.lower.lowered import residual_network

TARGETS = ("nearest_even", "tflite_micro", "onnxruntime", "tvm", "tosa")


def lowered(name: str) -> Graph:
    """A network with every kind of chain, under a target, without a trace."""
    return assign(residual_network(), targets.get(name))


# ---------------------------------------------------------------------------- partitioning


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.sampled(2)
def test_the_members_own_kernels_give_the_plain_graphs_codes(name: str) -> None:
    graph = lowered(name)
    whole = op("clamp", op("add", op("conv", tensor("x"), relu=True), tensor("r")))
    tail = op("dot", optional(op("reshape", op("window_sum", tensor("x")))))
    backend = Backend(f"whole_{name}", name, [Fusion("conv_add_clip", whole, compose), Fusion("tail", tail, compose)])
    fused = backend.partition(graph)
    assert [node.op for node in fused.nodes] == ["backend", "backend"]
    codes = np.random.default_rng(0).integers(-128, 128, (16, 6, 6, 4)).astype(np.int8)
    assert_same(IntegerGraph(fused).run(codes), IntegerGraph(graph).run(codes))
    # and back
    assert differences_but_order(expand(fused), graph) == []


def differences_but_order(a: Graph, b: Graph) -> list[str]:
    tensors = {name: a.tensors[name] for name in b.tensors}
    assert len(a.tensors) == len(tensors)
    order = {node.name: node for node in a.nodes}
    nodes = tuple(order[node.name] for node in b.nodes)
    assert_equal(a.replace(tensors=tensors, nodes=nodes), b)
    return []


@pytest.mark.exhaustive
def test_a_fused_node_keeps_everything(plain: IntegerGraph, device: IntegerGraph) -> None:
    (node,) = [n for n in device.ir.nodes if n.name == "add"]
    conv = next(n for n in plain.ir.nodes if n.op == "conv")
    assert (node.op, node.output, node.inputs) == ("backend", "add", ("input", "input"))
    assert (node.attributes["backend"], node.attributes["pattern"]) == ("test_chip", "conv_add_relu")
    members = ops.backend.members_of(attributes(device.ir, node))
    assert [(m.label, m.op, m.name, m.inputs) for m in members.values()] == [
        ("conv", "conv", "conv", (0,)),
        ("add", "add", "add", ("conv", 0)),
    ]
    known = members["conv"].attributes
    assert {key: known[key] for key in conv.attributes if key != "rule"} == {
        key: value for key, value in conv.attributes.items() if key != "rule"
    }
    assert (known["dtype"], known["input_dtypes"]) == ("int8", ["int8"])
    assert members["conv"].location == conv.location
    assert {"conv/kernel", "conv/bias", "conv/zero", "add/clamp_min", "multiplier", "shift"} <= set(node.constants)
    inner = device.ir.tensors[node.constants["conv/zero"]].quantization
    assert inner is not None
    before = plain.ir.tensors["conv"].quantization
    assert before is not None
    assert float(np.asarray(inner.scale)) == float(np.asarray(before.scale))
    # nothing that the device computes is a tensor of the graph any more
    assert "conv" not in device.ir.tensors
    assert device.target == "tosa"


def test_the_graph_is_printed_with_all_that_it_hides(plain: IntegerGraph, device: IntegerGraph) -> None:
    assert "int8 weights, int32, bias int32, nearest_even" in str(plain)
    assert "int32, scaled and added in int64, exact sum (nearest_even), relu" in str(plain)
    assert "test_chip:conv_add_relu" in str(device)
    text = describe(plain)
    for said in (
        "accumulator int32, bias int32",
        "padding with the zero point of input",
        "constant bias: conv/bias: int32 3",
        "requantization nearest_even",
        "zero point",
        "strides = [1, 1]",
    ):
        assert said in text
    text = describe(device)
    for said in (
        "computed by test_chip's kernel conv_add_relu",
        "member conv = conv(input): int8 batchx5x5x3",
        "groups = 1",
    ):
        assert said in text
    narrow = lowered("nearest_even")
    register = [["bits", 14], ["overflow", "saturate"], ["pairs", False], ["operands", "centered"]]
    register += [["order", "hwc"], ["unit", "sum"], ["padding", "zero_point"]]
    first = dataclasses.replace(narrow.nodes[0], attributes={**narrow.nodes[0].attributes, "accumulator": register})
    assert "accumulator int14 saturate, bias int32" in describe(narrow.replace(nodes=(first, *narrow.nodes[1:])))


# ---------------------------------------------------------------------------- verify, exact, compare


@pytest.mark.exhaustive
def test_exact_is_the_devices_graph(qmodel: qjax.QuantizedModel, chip: Backend, device: IntegerGraph) -> None:
    more = jnp.concatenate([IMAGES, data(4, 5, 5, 3, seed=1) * 3])
    forward = qjax.exact(qmodel, IMAGES, target=chip)
    # a loss whose own derivative does not depend on the value, so that the gradients are the same bits
    weights = data(8, 4, seed=2)

    @nnx.jit
    def both(model: Any) -> Any:
        def loss(model: Any, forward: Any) -> Any:
            value = forward(model, more)
            return jnp.sum(value * weights), value

        grads, value = nnx.grad(lambda m: loss(m, forward), has_aux=True)(model)
        return value, grads, nnx.grad(lambda m: loss(m, lambda m, x: m(x)), has_aux=True)(model)[0]

    value, exact, trained = both(qmodel)
    assert_same(value, device(more))
    assert not np.array_equal(np.asarray(value), np.asarray(qjax.convert(qmodel, IMAGES, target="tosa")(more)))
    exact, trained = nnx.to_pure_dict(exact), nnx.to_pure_dict(trained)
    assert_same(exact, trained)
    leaves = jax.tree.leaves(exact)
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in leaves)
    assert any(np.any(np.asarray(leaf) != 0) for leaf in leaves)


def test_a_recipe_may_name_the_backend(chip: Backend) -> None:
    register_backend(chip)
    model = qjax.quantize(Residual(), qjax.Recipe(target=chip), IMAGES)
    model.eval()
    for graph in (qjax.convert(model, IMAGES), qjax.convert(model, IMAGES, target="test_chip")):
        assert [node.op for node in graph.ir.nodes] == ["backend", "sum", "backend"]
        assert graph.ir.target == "tosa"
    assert [node.op for node in qjax.convert(model, IMAGES, target="tosa").ir.nodes] == ["conv", "add", "sum", "dot"]
    assert qjax.Recipe(target="test_chip").target == "test_chip"


def test_verify_and_compare_speak_of_the_device(
    qmodel: qjax.QuantizedModel, plain: IntegerGraph, device: IntegerGraph
) -> None:
    report = qjax.verify(device, qmodel, [IMAGES])
    found = {node.name: node for node in report.nodes}
    assert found["add"].op == "test_chip:conv_add_relu"
    assert found["add"].local > 0
    assert "conv" not in found
    compared = qjax.compare(plain, device, IMAGES)
    assert compared.labels == ("nearest_even", "test_chip")
    assert compared.first is not None
    assert compared.first.name == "add"
    assert [(cause.kind, cause.side) for cause in compared.first.causes] == [("backend", "b")]
    assert compared.first.causes[0].count == compared.first.own.count
    assert "come from test_chip's kernel conv_add_relu" in compared.first.text
    assert (compared.only_a, compared.only_b) == ((), ())
    # the other way round, and the device with itself
    assert qjax.compare(device, plain, IMAGES)["add"].own.count == compared["add"].own.count
    assert qjax.compare(device, device, IMAGES).equal
    # what the plain graph computes, in the device's groups
    grouped = IntegerGraph(group_like(plain.ir, device.ir))
    assert_same(grouped(IMAGES), plain(IMAGES))
    assert [node.op for node in grouped.ir.nodes] == ["backend", "sum", "backend"]


def test_the_kernel_runs_on_its_own(device: IntegerGraph) -> None:
    """An emitter needs a node's JSON attributes, its constants and nothing else."""
    import json

    codes = device.quantize(IMAGES)
    node: Node = device.ir.nodes[0]
    facts = json.loads(json.dumps(attributes(device.ir, node)))
    constants = {role: np.asarray(value) for role, value in prepare(device.ir)[node.name].items()}
    got = ops.get("backend").kernel(facts, constants, [codes, codes])
    assert got.dtype == jnp.int8
    assert got.shape == (4, 5, 5, 3)
    assert all(value.dtype.kind in "iu" for value in constants.values())
