"""Style "openvino": what a file holds, what is refused, and recorded codes of OpenVINO on whole networks."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import qjax
from conformance import cases, single
from qjax import targets
from qjax.export.emit.onnx import to_model
from qjax.graph.ir import Graph
from tests.contrib.onnx_styles.openvino_networks import NETWORKS, RECIPE, graph_of, images

FOLDER = Path(__file__).with_name("openvino")


def single_graph(case: Any) -> Graph:
    return single.graph_of(case, targets.get("openvino_cpu"))


def made(model: onnx.ModelProto) -> dict[str, onnx.NodeProto]:
    return {name: node for node in model.graph.node for name in node.output}


def arrays(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {proto.name: np.asarray(numpy_helper.to_array(proto)) for proto in model.graph.initializer}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", NETWORKS)
def test_the_recorded_codes_of_openvino(name):
    """Saved graphs, inputs and codes of openvino 2026.4.1: python -m tests.contrib.onnx_styles.record_openvino."""
    graph = qjax.load(FOLDER / f"{name}.qjax")
    held = np.load(FOLDER / f"{name}.npz")
    np.testing.assert_array_equal(graph.run(held["inputs"]), held["outputs"])


@pytest.mark.exhaustive
def test_the_style_of_the_target(tmp_path):
    _, graph = graph_of("mobile")
    graph.emit("onnx", tmp_path / "own.onnx")
    graph.emit("onnx", tmp_path / "asked.onnx", style="openvino")
    assert (tmp_path / "own.onnx").read_bytes() == (tmp_path / "asked.onnx").read_bytes()
    model = onnx.load(tmp_path / "own.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert not model.functions
    assert {entry.domain for entry in model.opset_import} == {""}


def test_quantizers_have_a_scale_that_moves_exactly():
    """And weights have a scale per channel, the effective one."""
    model = to_model(single_graph(cases.conv2d("uint8", per_channel=True)[0]))
    values, nodes = arrays(model), made(model)
    conv = next(node for node in model.graph.node if node.op_type == "Conv")
    scales = values[nodes[conv.input[1]].input[1]]
    case = cases.conv2d("uint8", per_channel=True)[0]
    assert case.kernel_grid is not None
    exact = np.float64(case.grids[0].scale) * case.kernel_grid.scale.astype(np.float64) / np.float64(case.output.scale)
    np.testing.assert_array_equal(scales, exact.astype(np.float32))
    grids = [node for node in model.graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
    inner = [node for node in grids if node.output[0] not in ("y", conv.input[1])]
    assert len(inner) >= 4
    assert all(values[node.input[1]] == 0.5 for node in inner)


@pytest.mark.parametrize(("op", "bias"), [("conv", 0), ("conv", 7), ("dense", 0), ("depthwise", 0)])
def test_no_bias_is_one_number(op, bias):
    """OpenVINO would make it a part of the quantizer: a channel more, or a bias of 2^-60 in one of them."""
    make = {"conv": cases.conv2d, "dense": cases.fully_connected, "depthwise": cases.depthwise_conv2d}[op]
    case = make("uint8", per_channel=True)[0]
    assert case.bias is not None
    assert case.kernel_grid is not None
    shared = dataclasses.replace(case.kernel_grid, scale=np.full_like(case.kernel_grid.scale, 0.01))
    model = to_model(single_graph(dataclasses.replace(case, bias=np.full_like(case.bias, bias), kernel_grid=shared)))
    values = arrays(model)
    (node,) = (node for node in model.graph.node if node.op_type in ("Conv", "Add"))
    found = values[node.input[-1]]
    assert np.ptp(found) > 0
    more = op == "dense" or bias != 0
    assert found.size == case.bias.size + more
    assert more or np.ptp(found) <= 2.0**-60
    assert ("Slice" in {node.op_type for node in model.graph.node}) == more


def test_what_has_no_exact_form():
    case = cases.depthwise_conv2d("uint8", per_channel=False)[0]
    assert case.bias is not None
    with pytest.raises(ValueError, match=r"a grouped convolution whose channels all have the same bias, .* steps"):
        to_model(single_graph(dataclasses.replace(case, bias=np.full_like(case.bias, 3))))
    with pytest.raises(ValueError, match=r"has no exact form for node 'y', dot"):
        to_model(single_graph(cases.matmul("uint8")[0]))
    with pytest.raises(ValueError, match=r"takes codes of uint8\. Got 'x0' of int8; quantize the model with"):
        to_model(single_graph(cases.elementwise("add", "int8")[0]))
    onnxruntime = single.graph_of(cases.elementwise("add", "uint8")[0], targets.get("onnxruntime"))
    with pytest.raises(
        ValueError, match=r"has the arithmetic of the target 'openvino_cpu', but the graph has that of 'onnxr"
    ):
        to_model(onnxruntime, style="openvino")
    with pytest.raises(ValueError, match="expected a batch of at least 1"):
        to_model(single_graph(cases.elementwise("add", "uint8")[0]), batch=0)


@pytest.mark.parametrize(
    ("shape", "window", "known", "groups"),
    [
        ((1, 2, 1, 4), (2, 2, 4, 8), {"rhs_dilation": [1, 2], "padding": [[0, 0], [1, 1]]}, 1),
        ((1, 4, 4, 4), (1, 1, 4, 8), {"padding": [[0, 0], [0, 1]], "strides": [1, 2]}, 1),
        ((1, 4, 4, 2), (3, 3, 1, 20), {}, 2),
    ],
)
def test_shapes_that_openvino_gets_wrong(shape, window, known, groups):
    """Measured: wrong sums, another shape, or the end of its process."""
    case = cases.conv2d("uint8", per_channel=False)[0]
    assert case.kernel_grid is not None
    x, kernel = np.zeros(shape, np.uint8), np.ones(window, np.int8)
    bias = np.arange(window[-1], dtype=np.int32)
    attributes = {"strides": (1, 1), "padding": "VALID"}
    small = (1, *(n - k + 1 for n, k in zip((8, 8), window[:2], strict=True)), window[-1])
    made_ = single_graph(
        dataclasses.replace(
            case, inputs=(np.zeros((1, 8, 8, shape[3]), np.uint8),), kernel=kernel, bias=bias, attributes=attributes
        )
    )
    (node,) = made_.nodes
    assert node.attributes["groups"] == groups
    tensors = {
        **made_.tensors,
        "x0": dataclasses.replace(made_.tensors["x0"], shape=x.shape),
        "y": dataclasses.replace(made_.tensors["y"], shape=_after(shape, window, {**node.attributes, **known})),
    }
    assert made_.tensors["y"].shape == small
    graph = made_.replace(tensors=tensors, nodes=(dataclasses.replace(node, attributes={**node.attributes, **known}),))
    with pytest.raises(ValueError, match=r"has no exact form for node 'y', conv"):
        to_model(graph)


def _after(shape: Any, window: Any, known: Any) -> tuple[int, ...]:
    rows = zip(shape[1:3], window, known["strides"], known["rhs_dilation"], known["padding"], strict=False)
    return (shape[0], *((n + sum(p) - (k - 1) * d - 1) // s + 1 for n, k, s, d, p in rows), window[3])


def test_a_sum_that_float32_does_not_hold():
    """Which OpenVINO adds the zero point's part to."""
    case = cases.fully_connected("uint8", per_channel=False)[0]
    assert case.kernel is not None
    deep = dataclasses.replace(
        case, inputs=(np.zeros((2, 600), np.uint8),), kernel=np.full((600, case.kernel.shape[1]), 127, np.int8)
    )
    with pytest.raises(ValueError, match=r"needs matrix products whose sums stay within 2\^24.*Got up to 19431000"):
        to_model(single_graph(deep))
    plain = dataclasses.replace(deep, grids=(dataclasses.replace(case.grids[0], zero_point=0),))
    to_model(single_graph(plain))


@pytest.mark.exhaustive
def test_int8_activations_train_and_run():
    """The target takes them, and only the file does not."""
    recipe = qjax.Recipe(target="openvino_cpu")
    qmodel, x = graph_of("dense")[0], images(4, 3)
    assert RECIPE.target == recipe.target
    signed = qjax.quantize(NETWORKS["dense"](_rngs()), recipe, images(4, 0))
    signed.eval()
    graph = qjax.convert(signed, images(2, 0))
    assert np.array_equal(qjax.exact(signed, images(2, 0))(signed, x), graph(x))
    assert type(qmodel) is type(signed)


def _rngs() -> Any:
    from flax import nnx

    return nnx.Rngs(0)
