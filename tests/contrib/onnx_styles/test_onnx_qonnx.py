"""Style "qonnx": what a file holds, what is refused, its outputs in the interpreter of ONNX, and recorded ones."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

import qjax
from conformance import cases, single
from conformance.case import Grid
from qjax import targets
from qjax.export.emit.onnx import to_model
from tests.contrib.onnx_styles.qonnx_networks import NETWORKS, WIDTHS, graph_of, inputs, recipe

FOLDER = Path(__file__).with_name("qonnx")


class Quant(OpRun):
    """QONNX's operator, from its documents."""

    op_domain = "qonnx.custom_op.general"

    def _run(self, x, scale, zero_point, bits, signed=None, narrow=None, rounding_mode=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        assert rounding_mode == "ROUND"
        span = 2 ** int(bits)
        low, high = (-span // 2 + narrow, span // 2 - 1) if signed else (0, span - 1 - narrow)
        steps = np.rint(np.clip(x / scale + zero_point, low, high))
        return (((steps - zero_point) * scale).astype(np.float32),)


def evaluated(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    (name,) = (value.name for value in model.graph.input)
    evaluator: Any = ReferenceEvaluator(model, new_ops=[Quant])
    return np.asarray(evaluator.run(None, {name: x})[0])


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.sampled(1)
def test_a_network(name, width):
    graph, x = graph_of(name, width), inputs(name, 32, 1)
    model = to_model(graph.ir, style="qonnx")
    expected = np.asarray(graph(x))
    assert len(np.unique(expected)) > 10
    np.testing.assert_array_equal(evaluated(model, x), expected)
    assert {(entry.domain, entry.version) for entry in model.opset_import} == {("", 16), (Quant.op_domain, 1)}
    kinds = {node.op_type for node in model.graph.node}
    assert "Quant" in kinds
    assert not kinds & {"QuantizeLinear", "DequantizeLinear", "Cast"}
    weights = {"w8a8": 8, "w4a4": 4, "ternary": 2}[width]
    held = {proto.name: onnx.numpy_helper.to_array(proto) for proto in model.graph.initializer}
    quants = [node for node in model.graph.node if node.op_type == "Quant" and node.input[0] in held]
    assert {float(held[node.input[3]]) for node in quants} == {float(weights)}
    assert all(np.all(np.frexp(held[node.input[1]])[0] == 0.5) for node in quants)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", NETWORKS)
def test_the_recorded_codes_of_qonnx(name, width):
    """A saved graph, inputs and what qonnx 1.0.0 gave: python -m tests.contrib.onnx_styles.record_qonnx."""
    graph = qjax.load(FOLDER / f"{name}_{width}.qjax")
    held = np.load(FOLDER / f"{name}_{width}.npz")
    np.testing.assert_array_equal(graph(held["inputs"]), held["outputs"])


def test_unsigned_codes():
    """All pairs of codes; of int8, a zero point at the lowest code is no zero point of Quant."""
    for dtype, zero in (("uint8", 0), ("int8", -128)):
        case = cases.elementwise("add", dtype)[0]
        grids = [Grid(np.asarray(scale, np.float32), zero, dtype) for scale in (0.25, 0.5, 0.5)]
        graph = single.graph_of(dataclasses.replace(case, grids=tuple(grids[:2]), output=grids[2]), targets.get("fpga"))
        model = to_model(graph, style="qonnx")
        assert [node.op_type for node in model.graph.node] == ["Quant", "Quant", "Add", "Quant"]
        reals = [(x.astype(np.float32) - zero) * grid.scale for x, grid in zip(case.inputs, grids, strict=False)]
        feeds = dict(zip((value.name for value in model.graph.input), reals, strict=True))
        (found,) = ReferenceEvaluator(model, new_ops=[Quant]).run(None, feeds)
        sums = np.clip(np.rint((reals[0] + reals[1]) / 0.5), 0, 255) * 0.5
        np.testing.assert_array_equal(found, sums)


def test_what_has_no_exact_form(tmp_path):
    with pytest.raises(
        ValueError, match=r"the arithmetic of the target 'fpga', but the graph has that of 'onnxruntime'\. Train"
    ):
        to_model(single.graph_of(cases.elementwise("add", "int8")[0], targets.get("onnxruntime")), style="qonnx")
    graph = graph_of("rows", "w8a8")
    with pytest.raises(ValueError, match=r"has float inputs and outputs. Got codes=True"):
        graph.emit("onnx", tmp_path / "model.onnx", style="qonnx", codes=True)
    with pytest.raises(ValueError, match="expected a batch of at least 1"):
        to_model(graph.ir, style="qonnx", batch=0)
    with pytest.raises(ValueError, match=r"'qonnx' is the same file for every CPU\. Got vnni=True; leave it out"):
        to_model(graph.ir, style="qonnx", vnni=True)
    plain = qjax.Recipe(target="fpga", method="tqt", weight_method="tqt", activations=qjax.QSpec(symmetric=False))
    qmodel = qjax.quantize(NETWORKS["rows"][0](_rngs()), plain, inputs("rows", 16, 0))
    qmodel.eval()
    odd = qjax.convert(qmodel, inputs("rows", 2, 0))
    with pytest.raises(
        ValueError,
        match=r"expected the full range of some number of bits, with the zero point 0.*use activations=QSpec",
    ):
        to_model(odd.ir, style="qonnx")
    case = cases.elementwise("add", "int8")[3]
    centred = dataclasses.replace(case, grids=tuple(dataclasses.replace(grid, zero_point=0) for grid in case.grids))
    scaled = single.graph_of(centred, targets.get("fpga"))
    with pytest.raises(ValueError, match=r"scales that are powers of two. Got tensor 'x1'"):
        to_model(scaled, style="qonnx")


def test_sums_that_float32_does_not_hold():
    graph = graph_of("rows", "w8a8").ir
    (first, *_) = graph.nodes
    name = first.constants["bias"]
    bias = dataclasses.replace(graph.tensors[name], value=np.full(64, 2**24, np.int32))
    with pytest.raises(ValueError, match=r"needs products whose sums stay within 2\^24 steps.*use fewer bits"):
        to_model(graph.replace(tensors={**graph.tensors, name: bias}), style="qonnx")


def test_a_function_is_refused():
    from flax import nnx

    class Smooth(nnx.Module):
        def __init__(self):
            self.dense = nnx.Linear(16, 4, rngs=_rngs())

        def __call__(self, x):
            return nnx.gelu(self.dense(x))

    qmodel = qjax.quantize(Smooth(), recipe("w8a8"), inputs("rows", 8, 0))
    qmodel.eval()
    with pytest.raises(ValueError, match=r"has no exact form for node '.*', table"):
        to_model(qjax.convert(qmodel, inputs("rows", 2, 0)).ir, style="qonnx")


def _rngs() -> Any:
    from flax import nnx

    return nnx.Rngs(0)


def test_a_file_is_not_read_and_the_error_says_what_it_is(tmp_path):
    path = tmp_path / "model.onnx"
    graph_of(next(iter(NETWORKS)), "w8a8").emit("onnx", path, style="qonnx")
    with pytest.raises(ValueError, match=r"This is QONNX, whose tensors are floats .*graph.save"):
        qjax.read(path)
