"""Each pass on hand-made graphs: what it requires, what it ensures; and the rules of `check`."""

import dataclasses
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qjax import targets
from qjax.assign import assign
from qjax.assign.overflow import bounds, check_accumulators
from qjax.graph.check import GraphError, check, check_integer
from qjax.graph.dead_code import remove_dead, remove_identities
from qjax.graph.ir import Graph, Node, Quantization, Tensor
from qjax.lower import ConversionError
from qjax.ops import formulas
from qjax.run.interpreter import Interpreter
from tests.export.graphs import constant, graph_of, quantization
from tests.lower.lowered import DENSE, accumulator, assemble, dense_chain, real, residual_network

NEAREST = targets.get("nearest_even")


def finished(graph: Graph, target: targets.Target = NEAREST) -> Graph:
    return assign(remove_dead(remove_identities(graph)), target)


# ---------------------------------------------------------------------------- fuse


def test_fuse_leaves_one_node_of_integers():
    before = dense_chain()
    graph = finished(before)
    (node,) = graph.nodes
    assert (node.name, node.op, node.inputs, node.output, node.location) == ("y", "dot", ("x",), "y", "user.py:1")
    assert set(node.constants) == {"kernel", "bias", "multiplier", "shift", "clamp_min"}
    assert node.attributes == {**DENSE, "rule": "nearest_even"}
    assert int(graph.constant(node, "clamp_min")) == -128
    weights, original = graph.tensors[node.constants["kernel"]], before.tensors["w"]
    assert weights.value is not None
    assert original.value is not None
    assert np.array_equal(weights.value[:, [0, 3]], original.value[:, [0, 3]])
    assert np.array_equal(weights.value[:, 1], -original.value[:, 1])  # a negative gamma
    assert not weights.value[:, 2].any()  # a gamma of 1e-20
    # the graph that went in is as it was
    assert before.nodes[0].op == "dot"
    assert before.tensors["w"] is original
    assert len(before.nodes) == 5


def test_the_fused_node_computes_the_real_formula():
    before = dense_chain()
    x = np.random.default_rng(1).integers(-128, 128, (200, 5)).astype(np.int8)
    y = np.asarray(Interpreter(finished(before))(x)[0])
    w = before.tensors["w"]
    assert w.quantization is not None
    assert w.value is not None
    exact = lambda a: [Fraction(float(v)) for v in np.ravel(a)]  # noqa: E731
    gamma, beta = (exact(before.tensors[name].value) for name in ("gamma", "beta"))
    s_x, s_y, s_w = exact(np.float32(0.05))[0], exact(np.float32(0.02))[0], exact(w.quantization.scale)
    acc = (x.astype(object) - 11) @ w.value.astype(object)
    ties = 0
    for column in range(4):
        for row in range(200):
            value = max((acc[row, column] * s_x * s_w[column] * gamma[column] + beta[column]) / s_y, Fraction(0))
            # the bias is rounded to the accumulator's grid, so a value close to a tie may go either way
            step = s_x * s_w[column] * abs(gamma[column]) / s_y
            nearest = {min(max(round(value + d) - 128, -128), 127) for d in (-step, 0, step)}
            ties += len(nearest) > 1
            assert int(y[row, column]) in nearest
    assert ties < 80
    assert len(np.unique(y)) > 50


def test_fuse_refuses_scales_that_the_target_cannot_hold():
    with pytest.raises(ValueError, match=r"needs effective scales .* that are powers of two"):
        finished(residual_network(), targets.get("fpga"))


@pytest.mark.parametrize("target", sorted({*targets.names()} - {"fpga"}))
def test_fuse_writes_the_target_into_the_nodes(target):
    chosen = targets.get(target)
    graph = finished(residual_network(wide=chosen.wide_activations), chosen)
    found = {node.op: node for node in graph.nodes}
    for op in ("conv", "dot"):
        quantization = graph.tensors[found[op].constants["kernel"]].quantization
        assert quantization is not None
        per_channel = bool(quantization.axes)
        assert found[op].attributes["rule"] == chosen.weighted(op, per_channel=per_channel).rule
    for op, formula in (("add", chosen.add), ("window_sum", chosen.average_pool)):
        known = found[op].attributes
        if formula is None:
            assert known["rounding"] == chosen.rounding.value
            assert "formula" not in known
        elif formulas.get(formula).same_grid:
            # the network's average has a grid of its own: a depthwise convolution computes it
            assert known["formula"].startswith(chosen.weighted("depthwise").rule)
        else:
            assert known["formula"] == formula


def test_fuse_needs_one_reader_per_accumulator():
    graph = dense_chain()
    y2 = dataclasses.replace(graph.tensors["y"], name="y2")
    second = Node("y2", "quantize", ("scaled",), "y2")
    graph = graph.replace(tensors={**graph.tensors, "y2": y2}, nodes=(*graph.nodes, second), outputs=("y", "y2"))
    with pytest.raises(ConversionError, match=r"user\.py:1: the accumulator of 'acc' has 2 readers instead of one"):
        assign(graph, NEAREST)


def whole_range(step: dict[str, Any]) -> Graph:
    """A dense layer whose weight may hold -128, and one step behind it."""
    graph = dense_chain()
    w = graph.tensors["w"]
    assert w.quantization is not None
    full = dataclasses.replace(w, quantization=dataclasses.replace(w.quantization, qmin=-128))
    nodes = [dataclasses.replace(n, attributes=step) if n.name == "scaled" else n for n in graph.nodes]
    return graph.replace(tensors={**graph.tensors, "w": full}, nodes=tuple(nodes))


@pytest.mark.parametrize("step", [{"step": "mul"}, {"step": "neg"}, {"step": "sub", "reversed": True}])
def test_fuse_refuses_codes_that_cannot_change_their_sign(step: dict[str, Any]):
    with pytest.raises(ConversionError, match=r"user\.py:1: the weight 'w' may hold the code -128, whose sign cannot"):
        assign(whole_range(step), NEAREST)


def test_fuse_takes_all_codes_where_no_step_changes_their_sign():
    node = assign(whole_range({"step": "sub"}), NEAREST).nodes[0]
    assert node.op == "dot"


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ([(0.0, None), (None, 6.0)], (0, 60)),
        ([(None, 6.0), (0.0, None)], (0, 60)),
        ([(-2.0, 2.0), (-1.0, 3.0)], (-10, 20)),
        ([(0.0, 1.0), (4.0, 5.0)], (40, 40)),  # bounds that do not meet: the later one wins
        ([(4.0, 5.0), (0.0, 1.0)], (10, 10)),
        ([(-100.0, 100.0)], (-128, 127)),
        ([(0.04999, 0.15001)], (0, 2)),
    ],
)
def test_clamps_in_a_chain_become_codes(bounds, expected):
    x = Tensor("x", (None, 2), "int8", quantization(scale=0.1, zero_point=0))
    tensors, nodes, last = [x, accumulator("acc", (None, 2))], [Node("acc", "rescale", ("x",), "acc")], "acc"
    for index, pair in enumerate(bounds):
        roles = {role: f"{role}{index}" for role, bound in zip(("low", "high"), pair, strict=True) if bound is not None}
        tensors += [real(name, pair[role == "high"]) for role, name in roles.items()]
        tensors.append(accumulator(f"c{index}", (None, 2)))
        nodes.append(Node(f"c{index}", "clamp", (last,), f"c{index}", roles))
        last = f"c{index}"
    tensors.append(Tensor("y", (None, 2), "int8", quantization(scale=0.1, zero_point=0)))
    nodes.append(Node("y", "quantize", (last,), "y"))
    graph = finished(assemble(tensors, nodes, "y"))
    codes = np.arange(-128, 128, dtype=np.int8).reshape(-1, 2)
    low, high = expected
    assert np.array_equal(Interpreter(graph)(codes)[0], np.clip(codes, low, high))


def test_clamps_behind_a_quantizer_become_codes():
    graph = finished(residual_network())
    node = next(node for node in graph.nodes if node.op == "clamp")
    assert node.attributes == {}
    # -1.0 * 16 - 20 and 3.5 * 16 - 20
    assert {role: int(graph.constant(node, role)) for role in node.constants} == {"clamp_min": -36, "clamp_max": 36}


# ---------------------------------------------------------------------------- clean


def moving(op: str, attributes: dict[str, Any], before, after) -> Graph:
    """x -> op -> relu-like clamp, so that the op's output is not the graph's."""
    grid = quantization(zero_point=-3)
    tensors = [
        Tensor("x", before, "int8", grid),
        Tensor("m", after, "int8", grid),
        Tensor("y", after, "int8", grid),
        constant("low", -3, "int32"),
    ]
    nodes = [Node("m", op, ("x",), "m", {}, attributes), Node("y", "clamp", ("m",), "y", {"clamp_min": "low"})]
    return check(assemble(tensors, nodes, "y"))


@pytest.mark.parametrize(
    ("op", "attributes", "before", "after", "kept"),
    [
        ("reshape", {"shape": [None, 4]}, (None, 4), (None, 4), False),
        ("reshape", {"shape": [None, 2, 2]}, (None, 4), (None, 2, 2), True),
        ("transpose", {"permutation": [0, 1]}, (None, 4), (None, 4), False),
        ("transpose", {"permutation": [0, 2, 1]}, (None, 4, 4), (None, 4, 4), True),
        ("slice", {"start": [0, 0], "limit": [None, 4], "strides": [1, 1]}, (None, 4), (None, 4), False),
        ("slice", {"start": [0, 0], "limit": [None, 4], "strides": [2, 1]}, (None, 4), (None, 4), True),
        ("slice", {"start": [0, 1], "limit": [None, 4], "strides": [1, 1]}, (None, 4), (None, 3), True),
        ("broadcast", {"shape": [None, 4], "dimensions": [0, 1]}, (None, 4), (None, 4), False),
        ("cast", {}, (None, 4), (None, 4), False),
        ("reverse", {"axes": [1]}, (None, 4), (None, 4), True),
    ],
)
def test_identities_are_removed_and_nothing_else(op, attributes, before, after, kept):
    graph = moving(op, attributes, before, after)
    after_pass = check(remove_identities(graph))
    assert [node.op for node in after_pass.nodes] == ([op, "clamp"] if kept else ["clamp"])
    assert after_pass.nodes[-1].inputs == (("m",) if kept else ("x",))
    assert len(graph.nodes) == 2


def test_an_identity_that_is_an_output_stays():
    graph = moving("reshape", {"shape": [None, 4]}, (None, 4), (None, 4)).replace(outputs=("m", "y"))
    kept = remove_identities(graph).nodes
    assert [(node.op, node.inputs) for node in kept] == [(node.op, node.inputs) for node in graph.nodes]


def test_identities_in_a_row():
    grid = quantization()
    tensors = [Tensor(name, (None, 4), "int8", grid) for name in "xabcy"] + [constant("low", 0, "int32")]
    chain = [Node(new, "reshape", (old,), new, {}, {"shape": [None, 4]}) for old, new in ("xa", "ab", "bc")]
    graph = assemble(tensors, [*chain, Node("y", "clamp", ("c",), "y", {"clamp_min": "low"})], "y")
    (node,) = remove_identities(graph).nodes
    assert node.inputs == ("x",)


def test_dead_nodes_and_tensors():
    graph = moving("reverse", {"axes": [1]}, (None, 4), (None, 4))
    alive = check(remove_dead(graph.replace(outputs=("m",))))
    assert [node.name for node in alive.nodes] == ["m"]
    assert set(alive.tensors) == {"x", "m"}
    unused = graph.replace(inputs=("x", "low2"), tensors={**graph.tensors, "low2": Tensor("low2", (), "int32")})
    assert "low2" in remove_dead(unused).tensors  # an input is part of the signature


# ---------------------------------------------------------------------------- accumulators


def test_accumulators_within_int32_pass():
    graph = finished(residual_network())
    assert check_accumulators(graph) is graph


def wide_graph(count: int | None, op: str = "dot") -> Graph:
    grid = quantization(-32768, 32767, zero_point=0)
    tensors = [
        Tensor("x", (2, count), "int16", grid),
        Tensor("w", (count, 3) if op == "dot" else (2, count), "int16", grid),
        Tensor("y", (2, 3) if op == "dot" else (2, count), "int16", grid),
    ]
    attributes = {**DENSE, "weight": None, "channels": [], "rank": 2, "permutation": None} if op == "dot" else {}
    node = Node("y", op, ("x", "w"), "y", {}, attributes, "user.py:9")
    return assemble(tensors, [node], "y", inputs=("x", "w"))


def test_accumulators_beyond_int32_are_refused():
    check_accumulators(wide_graph(1))
    # 2 * (-32768)^2 = 2^31
    with pytest.raises(
        ConversionError, match=r"user.py:9: the accumulator of 'y' \(dot\) may reach 2147483648, beyond"
    ):
        check_accumulators(wide_graph(2))
    with pytest.raises(ConversionError, match=r"'y' \(dot\) sums over the batch, which has no fixed size, so its"):
        check_accumulators(wide_graph(None))


def test_the_worst_case_is_the_worst_case():
    graph = finished(dense_chain())
    bound = max(abs(end) for end in bounds(graph, graph.nodes[0]) or ())
    node = graph.nodes[0]
    w, bias = (np.asarray(graph.constant(node, role)).astype(object) for role in ("kernel", "bias"))
    # per weight the code that is farthest from the zero point 11, in either direction
    reached = max(
        abs(int(sum(v * (-139 if (v < 0) == up else 116) for v in w[:, j]) + bias[j]))
        for j in range(4)
        for up in (0, 1)
    )
    assert bound == reached


# ---------------------------------------------------------------------------- check


X = Tensor("x", (None, 2, 2), "int8", quantization(zero_point=-3))


def replaced(**changes: Any) -> Graph:
    return graph_of().replace(**changes)


def with_tensor(tensor: Tensor, **changes: Any) -> Graph:
    graph = graph_of()
    return graph.replace(tensors={**graph.tensors, tensor.name: tensor}, **changes)


def with_node(**changes: Any) -> Graph:
    graph = graph_of()
    return graph.replace(nodes=(dataclasses.replace(graph.nodes[0], **changes),))


W = constant("w", [[1, -2], [3, 4]], "int8", quantization(-8, 7, scale=[0.1, 0.2], axes=(1,)))


def grid(**changes: Any) -> Graph:
    assert W.quantization is not None
    return with_tensor(dataclasses.replace(W, quantization=dataclasses.replace(W.quantization, **changes)))


BROKEN = [
    (lambda: replaced(tensors={**graph_of().tensors, "z": X}), "Tensor 'x': expected it under its own name, got 'z'"),
    (lambda: replaced(inputs=("x", "none")), "The graph's inputs: there is no tensor 'none'"),
    (lambda: replaced(inputs=("x", "x")), "Input 'x' is listed twice"),
    (
        lambda: with_tensor(W, inputs=("x", "w")),
        "Input 'w': expected no data, because a tensor is either an input or a constant",
    ),
    (lambda: replaced(inputs=("x", "y")), r"Node 'flatten' \(reshape\) computes 'y', which exists already"),
    (lambda: replaced(outputs=("none",)), "The graph's outputs: there is no tensor 'none'"),
    (
        lambda: replaced(outputs=("y", "t"), tensors={**graph_of().tensors, "t": Tensor("t", (), "int8")}),
        "Output 't' is never computed",
    ),
    (
        lambda: with_tensor(dataclasses.replace(W, shape=(4,))),
        r"Constant 'w': expected data of shape \(4,\), got \(2, 2\)",
    ),
    (lambda: with_node(inputs=("none",)), r"Node 'flatten' \(reshape\): there is no tensor 'none'"),
    (lambda: with_node(output="none"), r"Node 'flatten' \(reshape\): there is no tensor 'none'"),
    (lambda: with_node(inputs=("y",)), r"Node 'flatten' \(reshape\) reads 'y' before it is computed"),
    (lambda: with_node(constants={"kernel": "x"}), "its constant kernel = 'x' carries no data"),
    (lambda: replaced(nodes=graph_of().nodes * 2), r"Node 'flatten' \(reshape\): a second node has this name"),
    (lambda: with_node(op="attention"), "Node 'flatten': unknown operation 'attention'. Known: add,"),
    (
        lambda: with_tensor(Tensor("w", (2,), "float32", None, np.ones(2, np.float32))),
        "Tensor 'w': expected an integer dtype, got float32",
    ),
    (lambda: with_tensor(constant("w", [1], "uint32")), "Tensor 'w': expected an integer dtype, got uint32"),
    (
        lambda: with_tensor(Tensor("w", (2,), "int8", None, np.ones(2, np.int32))),
        "Constant 'w': declared int8, its data is int32",
    ),
    (
        lambda: with_tensor(dataclasses.replace(X, dtype="int64")),
        "Tensor 'x': int64 is for constants, not for inputs or outputs",
    ),
    (lambda: grid(qmin=-9, qmax=128), r"Tensor 'w': the range \[-9, 128\] does not fit int8"),
    (lambda: grid(qmin=7), r"Tensor 'w': the range \[7, 7\] does not fit int8"),
    (lambda: grid(qmax=3), r"Tensor 'w': expected codes within \[-8, 3\], got \[-2, 4\]"),
    (lambda: grid(qmin=-1), r"Tensor 'w': expected codes within \[-1, 7\], got \[-2, 4\]"),
    (lambda: grid(axes=(2,)), r"Tensor 'w': expected axes within \[0, 1\], got \[2\]"),
    (lambda: grid(axes=(-1,)), r"Tensor 'w': expected axes within \[0, 1\], got \[-1\]"),
    (lambda: grid(axes=(1, 1)), r"Tensor 'w': expected every axis once, got \[1, 1\]"),
    (lambda: grid(axes=()), r"Tensor 'w': expected scales of shape \(\), got \(2,\)"),
    (
        lambda: grid(scale=np.ones(2)),
        "Tensor 'w': expected a scale of float32 and a zero point of int32, got float64 and int32",
    ),
    (
        lambda: grid(zero_point=np.zeros(2)),
        "Tensor 'w': expected a scale of float32 and a zero point of int32, got float32 and float64",
    ),
    (
        lambda: grid(zero_point=np.zeros((2, 1), np.int32)),
        r"Tensor 'w': expected a zero point of shape \(\) or \(2,\), got \(2, 1\)",
    ),
    (
        lambda: grid(zero_point=np.asarray([0, 8], np.int32)),
        r"Tensor 'w': expected a zero point within \[-8, 7\], got \[0 8\]",
    ),
    (
        lambda: grid(zero_point=np.asarray(-9, np.int32)),
        r"Tensor 'w': expected a zero point within \[-8, 7\], got -9",
    ),
    (
        lambda: grid(scale=np.asarray([1, 0], np.float32)),
        r"Tensor 'w': expected finite and positive scales, got \[1. 0.\]",
    ),
    (lambda: grid(scale=np.asarray([1, np.inf], np.float32)), "Tensor 'w': expected finite and positive scales"),
]


@pytest.mark.parametrize(("make", "message"), BROKEN)
def test_broken_graphs(make, message):
    with pytest.raises(GraphError, match=message):
        check_integer(make())


def test_whole_graphs_pass():
    for graph in (graph_of(), with_tensor(W), finished(residual_network())):
        assert check_integer(graph) is graph


def test_traced_constants_pass():
    def traced(codes, scale, zero_point):
        w = Tensor("w", (2,), "int8", Quantization(scale, zero_point, -8, 7), codes)
        check_integer(with_tensor(w))
        return codes

    jax.make_jaxpr(traced)(jnp.zeros(2, jnp.int8), jnp.float32(1), jnp.int32(0))
