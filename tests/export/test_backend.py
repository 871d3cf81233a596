"""A vendor's backend: partitioning keeps results, `exact` is the device's graph, errors and files."""

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
from qjax.export import (
    Backend,
    Fusion,
    artifact,
    compose,
    describe,
    expand,
    op,
    optional,
    passes,
    register_backend,
    tensor,
)
from qjax.export.check import GraphError, check_integer
from qjax.export.integer_graph import IntegerGraph
from qjax.export.interpreter import attributes, prepare
from qjax.export.ir import Graph, Node
from qjax.export.passes.partition import group_like
from qjax.numerics import effective_scale, quantize_multiplier
from tests.export.graphs import assert_equal
from tests.export.lowered import residual_network
from tests.layers.round_trip import assert_same, data

CONV_ADD = op("add", op("conv", tensor("x"), name="conv"), tensor("residual"), name="add")
TARGETS = ("nearest_even", "tflite_micro", "onnxruntime", "torch_fbgemm", "tosa")


class Residual(nnx.Module):
    """relu(conv(x) + x), a mean, a head."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.conv = nnx.Conv(3, 3, (3, 3), rngs=rngs)
        self.head = nnx.Linear(3, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(nnx.relu(self.conv(x) + x).mean(axis=(1, 2)))


IMAGES = data(4, 5, 5, 3)


@pytest.fixture(scope="module")
def qmodel() -> qjax.QuantizedModel:
    model = qjax.quantize(Residual(), qjax.Recipe(), IMAGES)
    model.eval()
    return model


@pytest.fixture(scope="module")
def plain(qmodel: qjax.QuantizedModel) -> IntegerGraph:
    return qjax.convert(qmodel, IMAGES)


def halved(inputs: Any, node: ops.Fused) -> jax.Array:
    """The convolution at half of its accumulator's precision, then the addition as it is; clamps by itself."""
    conv, (x, residual) = node["conv"], inputs
    known = {**conv.attributes, "rule": "single_round"}
    doubled = {**conv.constants, "multiplier": node.constants["multiplier"], "shift": node.constants["shift"]}
    codes = ops.get("conv").kernel(known, ops.get("conv").runtime(known, doubled), [x])
    # the last bit of the convolution's codes is lost on this device
    return node["add"].run(codes & jnp.int8(-2), residual)


def scales(match: Any) -> dict[str, Any]:
    """Multiplier and shift made anew, as a vendor would."""
    conv = match["conv"]
    e = effective_scale(conv.inputs[0].quantization.scale, conv.weight_scale, conv.output.quantization.scale)
    return quantize_multiplier(e)._asdict()


@pytest.fixture(scope="module")
def chip() -> Backend:
    return Backend("test_chip", "tosa", [Fusion("conv_add_relu", CONV_ADD, halved, scales), (op("dot"), compose)])


@pytest.fixture(scope="module")
def device(chip: Backend, qmodel: qjax.QuantizedModel) -> IntegerGraph:
    return qjax.convert(qmodel, IMAGES, target=chip)


def lowered(name: str) -> Graph:
    """A network with every kind of chain, under a target, without a trace."""
    graph = passes.codes_of_bounds(passes.fuse(residual_network(), targets.get(name)))
    graph = check_integer(passes.remove_dead(passes.remove_identities(graph)))
    return graph.replace(target=name, quantization=targets.get(name).quantize)


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


# ---------------------------------------------------------------------------- files


def test_an_artifact_needs_the_backend(device: IntegerGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    content = artifact.to_bytes(device.ir)
    again = artifact.from_bytes(content)
    assert_equal(again, device.ir)
    assert_same(IntegerGraph(again)(IMAGES), device(IMAGES))
    kernels = ops.backend._kernels
    monkeypatch.setattr(ops.backend, "_kernels", {k: v for k, v in kernels.items() if k != "test_chip"})
    with pytest.raises(GraphError, match=r"needs the kernel 'conv_add_relu' of the backend 'test_chip', which is not"):
        artifact.from_bytes(content)
    monkeypatch.setattr(ops.backend, "_kernels", {"test_chip": {"compose": compose}})
    with pytest.raises(GraphError, match="which the backend 'test_chip' registered here does not have"):
        artifact.from_bytes(content)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"members": []}, "must be a list of members"),
        ({"members": [3]}, "must be a list of"),
        ({"members": [[["label", "a"]]]}, "has the fields label, op"),
        ({"label": "a/b"}, "a string of its own without '/'"),
        ({"op": "exec"}, "unknown operation 'exec'"),
        ({"op": "backend"}, "unknown operation 'backend'"),
        ({"inputs": [7]}, "reads 7, which is no input"),
        ({"inputs": ["later"]}, "reads 'later', which is no input"),
        ({"output": ["t", []]}, r"output must be \[name, shape, dtype, qmin, qmax\]"),
        ({"attributes": [["key"]]}, r"must be a list of \[name, value\]"),
    ],
)
def test_damaged_members(device: IntegerGraph, change: dict[str, Any], message: str) -> None:
    node = device.ir.nodes[0]
    members = [[list(pair) for pair in member] for member in node.attributes["members"]]
    for key, value in change.items():
        if key == "members":
            members = value
        else:
            members[0] = [[field, value if field == key else old] for field, old in members[0]]
    broken = dataclasses.replace(node, attributes={**node.attributes, "members": members})
    with pytest.raises(GraphError, match=message):
        check_integer(device.ir.replace(nodes=(broken, *device.ir.nodes[1:])))


# ---------------------------------------------------------------------------- errors


def partition(graph: IntegerGraph, name: str, kernel: Any, prepare: Any = None, **options: Any) -> Graph:
    return Backend(name, "nearest_even", [Fusion("p", op("dot", name="d"), kernel, prepare)], **options).partition(
        graph.ir
    )


def test_kernels_are_checked(plain: IntegerGraph) -> None:
    with pytest.raises(ValueError, match=r"return codes of int8 and shape \(batch, 4\). Got int32 and shape \(1, 4\)"):
        partition(plain, "wide", lambda inputs, node: compose(inputs, node).astype(jnp.int32))
    with pytest.raises(ValueError, match=r"shape \(batch, 4\). Got int8 and shape \(1, 3\)"):
        partition(plain, "short", lambda inputs, node: compose(inputs, node)[:, :3])
    with pytest.raises(ValueError, match=r"for a batch of 3 expected codes of shape \(3, 4\), got \(1, 4\)"):
        partition(plain, "one", lambda inputs, node: compose(inputs, node)[:1])
    with pytest.raises(TypeError, match="expected integers only, got floats in"):
        partition(plain, "float", lambda i, n: jnp.round(compose(i, n).astype(jnp.float32) * 0.5).astype(jnp.int8))
    with pytest.raises(ValueError, match="Got NoneType and shape None"):
        partition(plain, "none", lambda inputs, node: None)
    q = plain.ir.tensors["head"].quantization
    assert q is not None
    narrow = dataclasses.replace(plain.ir.tensors["head"], quantization=dataclasses.replace(q, qmin=-100, qmax=100))
    graph = IntegerGraph(plain.ir.replace(tensors={**plain.ir.tensors, "head": narrow}))
    with pytest.raises(ValueError, match=r"expected codes within \[-100, 100\], got \[.*Clamp to node.qmin"):
        partition(graph, "range", lambda i, n: (i[0][:, :1] + jnp.zeros((1, 4), jnp.int8)) | jnp.int8(-128))


def test_prepare_is_checked(plain: IntegerGraph) -> None:
    with pytest.raises(TypeError, match="expected integers of at most 32 bits in 's', got float32"):
        partition(plain, "p1", compose, lambda match: {"s": match["d"].weight_scale})
    with pytest.raises(ValueError, match=r"a role is a name without '/', and not a zero point's. Got 'a/b'"):
        partition(plain, "p2", compose, lambda match: {"a/b": np.int32(1)})
    with pytest.raises(TypeError, match="expected int arrays by role, got list"):
        partition(plain, "p3", compose, lambda match: [1])
    with pytest.raises(KeyError, match=r"No member 'e' was matched. Matched: d"):
        partition(plain, "p4", lambda inputs, node: node["e"].run(*inputs))


def test_what_no_pattern_matches_may_be_refused(plain: IntegerGraph) -> None:
    with pytest.raises(
        qjax.ConversionError, match=r"test_backend.py:\d+: backend 'r1' has no pattern for 'conv' \(conv\)"
    ):
        partition(plain, "r1", compose, others=("sum", "add"))
    with pytest.raises(qjax.ConversionError, match=r"allow no operation alone. Patterns: p"):
        partition(plain, "r2", compose, others=())
    assert len(partition(plain, "r3", compose, others=("sum", "add", "conv")).nodes) == 4


def test_names() -> None:
    with pytest.raises(ValueError, match="two patterns are named compose"):
        Backend("twice", "tosa", [(op("dot"), compose), (op("conv"), compose)])
    with pytest.raises(ValueError, match="a target has this name"):
        register_backend(Backend("tosa", "tosa"))
    register_backend(Backend("same", "tosa", [(op("dot"), compose)]))
    register_backend(Backend("same", "tosa", [(op("dot"), compose)]))
    with pytest.raises(ValueError, match="Another backend is registered under the name 'same'"):
        register_backend(Backend("same", "tosa", [(op("conv"), compose)]))
    with pytest.raises(ValueError, match=r"Unknown target 'nowhere'.*Registered backends: .*same"):
        qjax.Recipe(target="nowhere")
    with pytest.raises(ValueError, match="others may hold"):
        Backend("x", "tosa", others=("relu",))
    with pytest.raises(TypeError, match=r"expected a Fusion or \(pattern, kernel\), got int"):
        Backend("x", "tosa", [3])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="Backend: expected a name"):
        Backend("", "tosa")


class Bounded(nnx.Module):
    def __init__(self, bound: float):
        self.head = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
        self.bound = bound

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.maximum(self.head(x), self.bound)


def test_relu_and_values_inside_jit() -> None:
    x = data(4, 3)
    backend = Backend("relu_only", "nearest_even", [(op("dot", relu=True), compose)])
    for bound in (0.0, 0.25):
        model = qjax.quantize(Bounded(bound), qjax.Recipe(), x)
        model.eval()
        graph = qjax.convert(model, x, target=backend)
        assert [node.op for node in graph.ir.nodes] == ["backend" if bound == 0 else "dot"]
        forward = nnx.jit(qjax.exact(model, x, target=backend))
        if bound == 0:
            assert_same(forward(model, x), graph(x))
        else:
            with pytest.raises(ValueError, match="is not known inside jit: its lower bound is a constant other than 0"):
                forward(model, x)
    asks = Backend("asks", "nearest_even", [(op("dot", where=lambda n: n.constants["bias"][0] > 0), compose)])
    with pytest.raises(ValueError, match="asks for the value of an array of 'head', which is not known inside jit"):
        nnx.jit(qjax.exact(model, x, target=asks))(model, x)  # pyright: ignore[reportPossiblyUnboundVariable]


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
