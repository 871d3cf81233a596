"""What a vendor's backend refuses: files without it, kernels, names, and values that a trace does not know."""

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
from qjax import ops
from qjax.export import (
    Backend,
    Fusion,
    artifact,
    compose,
    op,
    register_backend,
)
from qjax.export.integer_graph import IntegerGraph
from qjax.graph.check import GraphError, check_integer
from qjax.graph.ir import Graph
from tests.assign.chip import IMAGES
from tests.export.graphs import assert_equal
from tests.layers.round_trip import assert_same, data

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
    with pytest.raises(GraphError, match="but the backend 'test_chip' that is registered here only has"):
        artifact.from_bytes(content)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"members": []}, "must be a list of members"),
        ({"members": [3]}, "must be a list of"),
        ({"members": [[["label", "a"]]]}, "has the fields label, op"),
        ({"label": "a/b"}, "a unique string without '/'"),
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
    with pytest.raises(ValueError, match=r"expected a role without '/' that is not a zero point's, got 'a/b'"):
        partition(plain, "p2", compose, lambda match: {"a/b": np.int32(1)})
    with pytest.raises(TypeError, match="expected int arrays by role, got list"):
        partition(plain, "p3", compose, lambda match: [1])
    with pytest.raises(KeyError, match=r"No member 'e' was matched. The matched ones are: d"):
        partition(plain, "p4", lambda inputs, node: node["e"].run(*inputs))


def test_what_no_pattern_matches_may_be_refused(plain: IntegerGraph) -> None:
    with pytest.raises(qjax.ConversionError, match=r"chip.py:\d+: backend 'r1' has no pattern for 'conv' \(conv\)"):
        partition(plain, "r1", compose, others=("sum", "add"))
    with pytest.raises(qjax.ConversionError, match=r"allow no operation. Patterns: p"):
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
            with pytest.raises(
                ValueError, match=r"inside jit it is unknown .* its lower bound is a constant other than 0"
            ):
                forward(model, x)
    asks = Backend("asks", "nearest_even", [(op("dot", where=lambda n: n.constants["bias"][0] > 0), compose)])
    with pytest.raises(ValueError, match="asks for the value of an array of 'head', which is not known inside jit"):
        nnx.jit(qjax.exact(model, x, target=asks))(model, x)  # pyright: ignore[reportPossiblyUnboundVariable]
