"""What `qjax inspect` says of a model."""

import dataclasses
import itertools
import json

import numpy as np
import pytest

from qjax.export import Backend, Fusion, compose, op, tensor
from qjax.export.integer_graph import IntegerGraph
from qjax.graph.ir import Graph, Node, Tensor
from qjax.numerics.accumulator import Accumulator
from qjax.reporting import counts


def test_the_document_is_the_graph(qjax, graphs):
    found, graph = json.loads(qjax("inspect", "network.qjax", "--json", "--batch", 3).stdout), graphs["network"].ir
    assert found["target"] == "tflite_micro"
    assert [node["name"] for node in found["nodes"]] == [node.name for node in graph.nodes]
    assert [tensor["name"] for tensor in found["tensors"]] == list(graph.tensors)
    for entry in found["tensors"]:
        tensor = graph.tensors[entry["name"]]
        assert (entry["shape"], entry["dtype"]) == (list(tensor.shape), tensor.dtype)
        assert entry["constant"] == (tensor.value is not None)
        if tensor.quantization is not None:
            np.testing.assert_array_equal(np.asarray(entry["scale"], np.float32), tensor.quantization.scale)
            np.testing.assert_array_equal(entry["zero_point"], tensor.quantization.zero_point)
    (image,) = found["inputs"]
    assert image["reals"] == [(-128 + 20) / 64, (127 + 20) / 64]
    assert found["totals"]["macs"] == 3 * (8 * 8 * 4 * 9 + 8 * 8 * 4 * 9 * 4 + 64 * 10)
    assert found["totals"]["weight_bytes"] == 36 + 144 + 640


def test_accumulators_in_the_worst_case(qjax, graphs):
    """The sum over all weights, each with the code that is worst for it, and the bias."""
    found = {node["name"]: node for node in json.loads(qjax("inspect", "dense.qjax", "--json").stdout)["nodes"]}
    graph = graphs["dense"].ir
    (node,) = graph.nodes
    q = graph.tensors["x"].quantization
    w = np.asarray(graph.constant(node, "kernel")).astype(int)
    bias = np.asarray(graph.constant(node, "bias"))
    codes = [q.qmin - int(q.zero_point), q.qmax - int(q.zero_point)]
    sums = [sorted(c * weight for c in codes) for weight in w.reshape(-1)]
    low, high = (np.asarray([s[end] for s in sums]).reshape(w.shape).sum(0) + bias for end in (0, 1))
    entry = found["y"]
    assert entry["accumulator_range"] == [low.min(), high.max()]
    bits = entry["accumulator_bits"]
    assert -(2 ** (bits - 1)) <= low.min() < -(2 ** (bits - 2)) or 2 ** (bits - 2) <= high.max() < 2 ** (bits - 1)
    assert entry["headroom"] == 32 - bits


def test_a_narrow_register_has_its_own_headroom(qjax, graphs, folder):
    """The bias comes behind a register of 16 bits, so it does not count."""
    graph = graphs["dense"].ir
    (node,) = graph.nodes
    attributes = {**node.attributes, "accumulator": Accumulator(bits=16, overflow="wrap").to_json()}
    changed = graph.replace(nodes=(dataclasses.replace(node, attributes=attributes),))
    IntegerGraph(changed).save(folder / "narrow.qjax")
    (entry,) = json.loads(qjax("inspect", "narrow.qjax", "--json").stdout)["nodes"]
    q = graph.tensors["x"].quantization
    w = np.asarray(graph.constant(node, "kernel")).astype(int)
    codes = np.asarray([q.qmin - int(q.zero_point), q.qmax - int(q.zero_point)])
    products = w[..., None] * codes
    assert entry["accumulator_range"] == [products.min(-1).sum(0).min(), products.max(-1).sum(0).max()]
    assert entry["headroom"] == 16 - entry["accumulator_bits"]
    assert entry["accumulator"].startswith("int16")


def test_tables(qjax):
    nodes = qjax("inspect", "network.qjax").stdout
    assert nodes.startswith(
        "network.qjax: target tflite_micro, 6 nodes\n  input  image: int8 batchx8x8x1, scale 0.015625"
    )
    row = next(line for line in nodes.splitlines() if line.startswith("conv2"))
    assert row.split()[:6] == ["conv2", "conv", "conv1", "batchx8x8x4", "int8", "0.1"]
    assert "double_round" in row
    assert "for a batch of 1: 12,160 MACs" in nodes
    tensors = qjax("inspect", "network.qjax", "--tensors").stdout
    assert "conv2/bias" in tensors
    assert "for a batch of 1" in tensors


def test_under_another_target(qjax):
    assert "float32" in qjax("inspect", "dense.qjax", "--target", "tflite_xnnpack").stdout


# ---------------------------------------------------------------------------- counts


def conv_graph(size, window, inputs, features, groups, stride, padding, spread, dilation) -> tuple[Graph, Node]:
    attributes = {
        "strides": [stride],
        "padding": [list(padding)],
        "lhs_dilation": [spread],
        "rhs_dilation": [dilation],
        "groups": groups,
        "lhs_layout": [0, 2, 1],
        "rhs_layout": [2, 1, 0],
        "out_layout": [0, 2, 1],
    }
    kernel = np.zeros((window, inputs // groups, features), np.int8)
    tensors = {
        "x": Tensor("x", (None, size, inputs), "int8"),
        "w": Tensor("w", kernel.shape, "int8", None, kernel),
        "y": Tensor("y", (None, 1, features), "int8"),
    }
    node = Node("y", "conv", ("x",), "y", {"kernel": "w"}, attributes)
    return Graph(tensors, (node,), ("x",), ("y",), "nearest_even"), node


def test_products_of_convolutions_one_by_one():
    inputs, features, batch = 4, 8, 2
    cases = itertools.product((5, 8), (1, 3), (1, 2, 4), (1, 2), (0, 2), (1, 2, 3), (1, 2))
    for size, window, groups, stride, pad, spread, dilation in cases:
        graph, node = conv_graph(size, window, inputs, features, groups, stride, (pad, pad + 1), spread, dilation)
        length = (size - 1) * spread + 1
        count, start = 0, -pad
        while start + (window - 1) * dilation < length + pad + 1:
            for tap in range(window):
                place = start + tap * dilation
                inserted = 0 <= place < length and place % spread
                count += 0 if inserted else (inputs // groups) * features
            start += stride
        assert counts.macs(graph, node, batch) == batch * count


@pytest.mark.parametrize("weight", [0, 1, None])
def test_products_of_matrices(weight):
    """b = 2, m = 3, k = 5, n = 7, with the batch of the product anywhere."""
    x, w = Tensor("x", (2, 3, 5), "int8"), Tensor("w", (2, 5, 7), "int8")
    attributes = {
        "weight": weight,
        "lhs_contracting": [2],
        "rhs_contracting": [1],
        "lhs_batch": [0],
        "rhs_batch": [0],
    }
    inputs = {0: ("w",), 1: ("x",), None: ("x", "w")}[weight]
    constants = {0: {"kernel": "x"}, 1: {"kernel": "w"}, None: {}}[weight]
    node = Node("y", "dot", inputs, "y", constants, attributes)
    y = Tensor("y", (2, 3, 7), "int8")
    assert counts.macs(Graph({"x": x, "w": w, "y": y}, (node,), (), (), "nearest_even"), node) == 2 * 3 * 5 * 7


def test_activations_that_are_alive(graphs):
    """Of the network: image 64, conv1 and conv2 and add 256 each, pool and flat 64, scores 10."""
    graph = graphs["network"].ir
    # while the sum is computed, conv1, conv2 and the sum itself
    assert counts.peak_bytes(graph, 1) == 3 * 256
    assert counts.peak_bytes(graph, 5) == 5 * 3 * 256
    first = graph.replace(nodes=graph.nodes[:1], outputs=("conv1",))
    assert counts.peak_bytes(first, 1) == 64 + 256
    # an output that nothing reads stays to the end
    kept = graph.replace(outputs=("conv2", "scores"))
    assert counts.peak_bytes(kept, 1) == 3 * 256
    assert counts.peak_bytes(graph.replace(nodes=(), outputs=("image",)), 1) == 64


def test_fused_nodes_count_as_their_members(qjax, graphs, folder):
    """One node that stands for a convolution and an addition has the products of both."""
    graph = graphs["network"].ir
    pattern = op("add", tensor("x"), op("conv", tensor("x")))
    fused = Backend("cli_test", "tflite_micro", [Fusion("pair", pattern, compose)]).partition(graph)
    assert [node.op for node in fused.nodes] == ["conv", "backend", "max_pool", "reshape", "dot"]
    IntegerGraph(fused).save(folder / "fused.qjax")
    found, plain = (json.loads(qjax("inspect", f"{n}.qjax", "--json").stdout) for n in ("fused", "network"))
    assert found["totals"]["macs"] == plain["totals"]["macs"]
    assert found["nodes"][1]["macs"] == 8 * 8 * 4 * 9 * 4
    assert "backend" in qjax("inspect", "fused.qjax").stdout
