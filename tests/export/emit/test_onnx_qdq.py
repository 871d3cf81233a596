"""Styles "qdq" and "qoperator": ONNX Runtime's kernels of 8 bits give the interpreter's bits; files read back."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import qjax
from conformance import cases
from conformance.case import Case
from conformance.single import graph_of
from qjax import targets
from qjax.assign import assign
from qjax.assign.retarget import stated
from qjax.contrib.importers import read_graph as read
from qjax.export.emit.onnx import emit, to_model
from qjax.graph.check import GraphError
from qjax.graph.ir import Graph, Node
from qjax.run.interpreter import Interpreter
from tests.export.emit.nodes import of_operations
from tests.export.emit.onnx_runs import checked, differing
from tests.export.graphs import assert_equal, differences

FLOATS = {"Conv", "MatMul", "Gemm", "Add", "Mul", "AveragePool", "GlobalAveragePool", "Softmax"}
STYLES = ("qdq", "qoperator")


def facts_of(model: onnx.ModelProto) -> dict[str, Any]:
    return json.loads(model.metadata_props[0].value)


def run(
    model: onnx.ModelProto, feeds: Mapping[str, Any], folder: Path, *, optimized: bool = True
) -> tuple[list[np.ndarray], list[str]]:
    """The outputs under the options that the model asks for, and the operators that the optimizer left."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    level = ort.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimized else level.ORT_DISABLE_ALL
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    for key, value in facts_of(model)["onnxruntime_session"].items():
        options.add_session_config_entry(key, value)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    outputs = [np.asarray(value) for value in session.run(None, dict(feeds))]
    return outputs, [node.op_type for node in onnx.load(folder / "optimized.onnx").graph.node]


def read_back(model: onnx.ModelProto, folder: Path) -> Graph:
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return read(path)


def runtime_cases(dtype: str) -> dict[str, Case]:
    found: dict[str, Case] = {}
    for name, channels in (("channels", True), ("tensor", False)):
        dense, conv = (make(dtype, per_channel=channels) for make in (cases.fully_connected, cases.conv2d))
        # the first: random codes; the last: accumulators at the edges of int32
        found |= {f"dense_{name}": dense[3], f"dense_{name}_extreme": dense[-1]}
        found |= {f"conv_{name}": conv[3], f"conv_{name}_extreme": conv[-1]}
    found["depthwise"] = cases.depthwise_conv2d(dtype, per_channel=True)[3]
    found["add"] = cases.elementwise("add", dtype)[2]
    found["multiply"] = cases.elementwise("multiply", dtype)[2]
    found["mean"] = cases.mean(dtype, same_grid=False)[1]
    found["pool"] = cases.average_pool(dtype, same_grid=False)[1]
    found["softmax"] = cases.softmax_on_any_grid(dtype)[-1]
    found["rescale"] = cases.rescale(dtype, dtype)[0]
    return found


OPERATORS = {
    "dense": "QGemm",
    "conv": "QLinearConv",
    "depthwise": "QLinearConv",
    "add": "QLinearAdd",
    "multiply": "QLinearMul",
    "mean": "QLinearGlobalAveragePool",
    "pool": "QLinearAveragePool",
    "softmax": "QLinearSoftmax",
    "rescale": "QuantizeLinear",
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("dtype", "styles"),
    [
        ("uint8", STYLES[:1]),
        ("int8", STYLES[1:]),
        pytest.param("uint8", STYLES[1:], marks=pytest.mark.exhaustive),
        pytest.param("int8", STYLES[:1], marks=pytest.mark.exhaustive),
    ],
)
def test_every_operation_is_a_kernel_of_codes(dtype, styles, tmp_path):
    wrong: dict[str, Any] = {}
    for name, case in runtime_cases(dtype).items():
        graph = graph_of(case, targets.get("onnxruntime"))
        want = [np.asarray(value) for value in Interpreter(graph)(*case.inputs)]
        for style in styles:
            model = checked(to_model(graph, style=style, codes=True))
            got, operators = run(model, dict(zip(graph.inputs, case.inputs, strict=True)), tmp_path)
            fused = OPERATORS[name.split("_")[0]] in operators and not FLOATS & set(operators)
            if dtype == "int8" and name.split("_")[0] in ("dense", "conv", "depthwise", "softmax"):
                # uint8 in the kernel, int8 before and behind it
                fused = operators == ["Cast", "Add", OPERATORS[name.split("_")[0]], "Cast", "Add"]
            known = differences(read_back(model, tmp_path), graph)
            if differing(got, want) or known or not fused or model.functions:
                wrong[f"{name} {style}"] = differing(got, want), operators, known
    assert wrong == {}


@pytest.mark.parametrize(
    ("length", "x_scale", "y_scale", "loops"), [(12, 0.1, 1e-4, 0), (1, 0.1, 1 / 256, 0), (30, 3.0, 1e-4, 1)]
)
def test_a_softmax_for_which_the_kernel_has_no_result(length, x_scale, y_scale, loops, tmp_path):
    """Its product leaves float32. In smaller numbers it does not, unless the least of them would lose bits."""
    x = np.random.default_rng(0).integers(-128, 128, (40, length)).astype(np.int8)
    grids = cases.grid_of(np.float32(x_scale), 3, "int8"), cases.grid_of(np.float32(y_scale), -128, "int8")
    graph = graph_of(Case("softmax", (x,), grids[:1], grids[1]), targets.get("onnxruntime"))
    want = [np.asarray(value) for value in Interpreter(graph)(x)]
    for style in STYLES:
        model = checked(to_model(graph, style=style, codes=True))
        got, operators = run(model, {graph.inputs[0]: x}, tmp_path)
        assert differing(got, want) == 0
        assert (operators.count("Scan"), operators.count("QLinearSoftmax")) == (loops, 0)
        assert_equal(read_back(model, tmp_path), graph)


def test_pairs_that_saturate(tmp_path):
    """On a CPU with VNNI the runtime is exact: the weights are int8 and the target is what such a file cannot say."""
    for case in (
        cases.fully_connected("uint8", per_channel=True)[0],
        cases.conv2d("uint8", per_channel=False)[4],
        cases.depthwise_conv2d("uint8", per_channel=True)[0],
    ):
        graph = graph_of(case, targets.get("onnxruntime_avx2"))
        for style in STYLES:
            model = checked(to_model(graph, style=style, codes=True))
            kinds = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
            assert kinds[graph.nodes[0].constants["kernel"]] == onnx.TensorProto.INT8
            assert "x64quantprecision must not be set" in model.doc_string
            assert_equal(read_back(model, tmp_path), graph)
            if "vnni" in Path("/proc/cpuinfo").read_text():
                continue
            got, _ = run(model, dict(zip(graph.inputs, case.inputs, strict=True)), tmp_path)
            assert differing(got, [np.asarray(value) for value in Interpreter(graph)(*case.inputs)]) == 0


def test_weights_are_unsigned_unless_no_cpu_gets_signed_ones_wrong():
    for dtype in ("uint8", "int8"):
        case = cases.conv2d(dtype, per_channel=True)[0]
        graph = graph_of(case, targets.get("onnxruntime"))
        kernel = graph.tensors[graph.nodes[0].constants["kernel"]]
        small = np.clip(np.asarray(kernel.value), -64, 64).astype(np.int8)
        few = graph.replace(tensors={**graph.tensors, kernel.name: dataclasses.replace(kernel, value=small)})
        for which, vnni, kind in (
            (graph, False, onnx.TensorProto.UINT8),
            (graph, True, onnx.TensorProto.INT8),
            (few, False, onnx.TensorProto.INT8),
        ):
            model = to_model(which, codes=True, vnni=vnni)
            kinds = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
            assert kinds[kernel.name] == kind
    with pytest.raises(ValueError, match="vnni=True with portable=None under 'onnxruntime_avx2'"):
        to_model(graph_of(case, targets.get("onnxruntime_avx2")), vnni=True)


@pytest.mark.exhaustive
def test_codes_of_16_bits_and_what_no_kernel_computes(tmp_path):
    """Subtraction and a change of the grid are floats between quantizers; all other 16-bit nodes stay functions."""
    for name, case, functions in (
        ("rescale", cases.rescale("int16", "int16")[1], False),
        ("dense", cases.fully_connected("int16", per_channel=True)[0], True),
        ("add", cases.elementwise("add", "int16")[1], True),
    ):
        graph = graph_of(case, targets.get("onnxruntime"))
        want = [np.asarray(value) for value in Interpreter(graph)(*case.inputs)]
        model = checked(to_model(graph, codes=True))
        assert bool(model.functions) == functions, name
        for optimized in (True, False):
            got, _ = run(model, dict(zip(graph.inputs, case.inputs, strict=True)), tmp_path, optimized=optimized)
            assert differing(got, want) == 0, name
        assert_equal(read_back(model, tmp_path), graph)


@pytest.mark.exhaustive
def test_shapes_that_no_runtime_has(tmp_path):
    wrong: dict[str, Any] = {}
    seen = 0
    for name, (given, inputs) in of_operations().items():
        try:
            graph = assign(stated(given), targets.get("onnxruntime"))
        except (AssertionError, GraphError, ValueError):
            # products in these graphs have no scales of their weights
            continue
        seen += 1
        want = [np.asarray(value) for value in Interpreter(graph)(*inputs)]
        model = checked(to_model(graph, codes=True))
        got, _ = run(model, dict(zip(graph.inputs, inputs, strict=True)), tmp_path)
        known = differences(read_back(model, tmp_path), graph)
        if differing(got, want) or known:
            wrong[name] = differing(got, want), known
    assert wrong == {}
    assert seen > 20


def test_results_that_are_inputs_or_come_twice(tmp_path):
    case = cases.elementwise("add", "int8")[2]
    graph = graph_of(case, targets.get("onnxruntime")).replace(outputs=("y", "x1", "y"), quantization="division")
    codes = [np.asarray(value) for value in Interpreter(graph)(*case.inputs)]
    reals = qjax.IntegerGraph(graph).dequantize(*codes)
    feeds = dict(zip(graph.inputs, case.inputs, strict=True))
    fed: dict[str, np.ndarray] = {}
    for name, x in feeds.items():
        fed[name] = np.asarray(qjax.IntegerGraph(graph.replace(outputs=(name,))).dequantize(x))
    for style in STYLES:
        for given, want, in_codes in ((feeds, codes, True), (fed, reals, False)):
            model = checked(to_model(graph, style=style, codes=in_codes))
            got, operators = run(model, given, tmp_path)
            assert "QLinearAdd" in operators
            assert differing(got, [np.asarray(value) for value in want]) == 0
            assert_equal(read_back(model, tmp_path), graph)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16"])
def test_a_change_of_the_grid_between_two_operations(dtype, tmp_path):
    """Two quantizers behind one another, which the optimizer would merge."""
    case = cases.elementwise("add", dtype)[2]
    first = graph_of(case, targets.get("onnxruntime"))
    y = first.tensors["y"]
    assert y.quantization is not None
    coarse = dataclasses.replace(y.quantization, scale=np.float32(y.quantization.scale * np.float32(3.7)))
    changed = {name: dataclasses.replace(y, name=name, quantization=coarse) for name in ("z", "twice")}
    nodes = (
        *first.nodes,
        Node("z", "rescale", ("y",), "z"),
        Node("twice", "add", ("z", "x0"), "twice", {}, {"subtract": False}),
    )
    bare = first.replace(nodes=nodes, tensors={**first.tensors, **changed}, outputs=("twice",))
    graph = assign(stated(bare), targets.get("onnxruntime"))
    want = [np.asarray(value) for value in Interpreter(graph)(*case.inputs)]
    for style in STYLES:
        model = checked(to_model(graph, style=style, codes=True))
        assert facts_of(model)["onnxruntime_session"]["session.disable_double_qdq_remover"] == "1"
        got, _ = run(model, dict(zip(graph.inputs, case.inputs, strict=True)), tmp_path)
        assert differing(got, want) == 0
        assert_equal(read_back(model, tmp_path), graph)


def test_clear_errors(tmp_path):
    case = cases.elementwise("add", "int8")[2]
    other = graph_of(case, targets.get("tflite_micro"))
    own = graph_of(case, targets.get("onnxruntime"))
    assert to_model(other).metadata_props[0].value.startswith('{"style":"integer"')
    for style in STYLES:
        cure = r"has that of 'tflite_micro'. graph.retarget\('onnxruntime'\) .* style='integer'"
        with pytest.raises(ValueError, match=cure):
            emit(other, tmp_path / "model.onnx", style=style)
        with pytest.raises(ValueError, match="batch of at least 1"):
            to_model(own, style=style, batch=0)
        with pytest.raises(ValueError, match="codes=True"):
            to_model(own, style=style, codes="yes")  # pyright: ignore[reportArgumentType]
        with pytest.raises(ValueError, match="by 'reciprocal': emit it with codes=True"):
            to_model(own.replace(quantization="reciprocal"), style=style)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("style", ["qdq", "qoperator"])
def test_every_initializer_is_read(style):
    """Of one that no node reads, ONNX Runtime warns when it loads the file; a bias had a scale that nothing read."""
    case = cases.conv2d("int8", per_channel=True)[0]
    model = to_model(graph_of(case, targets.get("onnxruntime")), style=style)
    read = {name for node in model.graph.node for name in node.input}
    assert {proto.name for proto in model.graph.initializer} <= read
    assert model.graph.initializer
