"""`qjax quantize`: from a float file and calibration data to a file of integers."""

import json

import numpy as np
import onnx
import pytest
from onnx import TensorProto

import qjax as library
from tests.contrib.float_models.onnx_nets import Net, cnn


def small() -> onnx.ModelProto:
    """Two dense layers, and two outputs of different sizes."""
    n = Net()
    n.node("Gemm", "x", n.weight("first.weight", 6, 4), n.weight("first.bias", 6), out="a", transB=1)
    n.node("Relu", "a", out="hidden")
    n.node("Gemm", "hidden", n.weight("second.weight", 3, 6), n.weight("second.bias", 3), out="scores", transB=1)
    return n.model({"x": (TensorProto.FLOAT, ["batch", 4])}, ["scores", "hidden"])


def rows(count: int = 24) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(count, 4)).astype(np.float32)


@pytest.fixture
def float_files(folder):
    """small.onnx and rows.npy in the folder of the commands."""
    onnx.save(small(), folder / "small.onnx")
    np.save(folder / "rows.npy", rows())
    return folder


def test_a_file_for_a_runtime(qjax, float_files):
    said = qjax(
        "quantize", "small.onnx", "--data", "rows.npy", "--target", "tflite_micro", "--effort", "none",
        "-o", "small.tflite", "--report", "small.html",
    ).stdout  # fmt: skip
    lines = {line.split()[0]: line.split() for line in said.splitlines() if line}
    assert float(lines["scores"][1]) > 25
    assert lines["scores"][3].endswith("%")
    assert f"small.tflite: {(float_files / 'small.tflite').stat().st_size:,} bytes" in said
    assert "small.html: " in said
    graph = library.read(float_files / "small.tflite")
    assert graph.target == "tflite_micro"
    assert graph.ir.inputs == ("x",)
    assert set(graph.ir.outputs) == {"scores", "hidden"}
    found = graph(rows())
    wanted = library.from_onnx(float_files / "small.onnx")(rows())
    assert set(found) == set(wanted) == {"scores", "hidden"}
    for name, value in wanted.items():
        assert np.abs(np.asarray(found[name]) - np.asarray(value)).max() < 0.1


def test_the_result_as_json(qjax, float_files):
    qjax(
        "quantize", "small.onnx", "--data", "rows.npy", "--target", "onnxruntime", "--bits", "4", "--effort", "fast",
        "--json", "-o", "small.qjax",
    )  # fmt: skip
    done = qjax("quantize", "small.onnx", "--data", "rows.npy", "--target", "onnxruntime", "--json", "-o", "again.onnx",
                "--effort", "none")  # fmt: skip
    found = json.loads(done.stdout)
    assert [row["name"] for row in found["outputs"]] == ["hidden", "scores"]
    assert found["examples"] == 24
    assert found["steps"] == []
    assert found["files"][0]["path"] == "again.onnx"
    assert library.load(float_files / "small.qjax").target == "onnxruntime"


def test_a_result_that_hardly_resembles_the_model_is_named(qjax, float_files):
    """The weights of an input that is nearly 0 are large, so 2 bits round all others to 0."""
    model = small()
    (weight,) = (tensor for tensor in model.graph.initializer if tensor.name == "first.weight")
    values = onnx.numpy_helper.to_array(weight).copy()
    values[:, 0] = 50
    weight.CopyFrom(onnx.numpy_helper.from_array(values, "first.weight"))
    onnx.save(model, float_files / "uneven.onnx")
    np.save(float_files / "uneven.npy", rows() * np.array([1e-4, 1, 1, 1], np.float32))
    call = ("quantize", "uneven.onnx", "--data", "uneven.npy", "--target", "nearest_even", "--effort", "none")
    assert "'hidden' keeps " in qjax(*call, "--bits", "2", "-o", "coarse.qjax").stderr
    assert "dB of the float" not in qjax(*call, "--bits", "16", "-o", "fine.qjax").stderr


def test_what_is_wrong_with_the_call(refused, float_files):
    call = ("quantize", "small.onnx", "--data", "rows.npy", "--target")
    assert "expected a name that ends in .tflite, .onnx" in refused(*call, "tflite_micro", "-o", "model.bin")
    assert "create it first" in refused(*call, "tflite_micro", "-o", "none/model.tflite")
    assert "'onnxruntime' is no runtime of .tflite files" in refused(*call, "onnxruntime", "-o", "refused.tflite")
    assert "no_such" in refused(*call, "no_such", "-o", "model.onnx")
    assert "got a quantized graph" in refused("quantize", "dense.qjax", *call[2:], "tosa", "-o", "x.qjax")
    assert "only .tflite files have signatures" in refused(*call, "tosa", "-o", "x.qjax", "--signature", "a")
    assert not (float_files / "refused.tflite").exists()


def test_what_is_wrong_with_the_data(refused, float_files):
    def message(value: np.ndarray, name: str = "x") -> str:
        np.savez(float_files / "wrong.npz", **{name: value})  # pyright: ignore[reportArgumentType]
        return refused("quantize", "small.onnx", "--data", "wrong.npz", "--target", "tosa", "-o", "x.qjax")

    assert "expected arrays called x" in message(rows(), "images")
    assert "expected float32, got float64: array.astype(np.float32)" in message(rows().astype(np.float64))
    assert "expected an array of examplesx4, got 24x2x2" in message(rows().reshape(24, 2, 2))
    assert "every number is 0.0, so the data have no range" in message(np.zeros((4, 4), np.float32))
    assert "NaN" in message(np.full((4, 4), np.nan, np.float32))
    assert "no example" in message(rows(0))


def test_what_is_wrong_with_the_model(refused, float_files):
    (float_files / "noise.onnx").write_bytes(bytes(range(256)))
    call = ("--data", "rows.npy", "--target", "tosa", "-o", "x.qjax")
    assert "noise.onnx: expected an ONNX model" in refused("quantize", "noise.onnx", *call)
    n = Net()
    n.constant("s", np.array(0.1, np.float32))
    n.node("QuantizeLinear", "x", "s", out="q")
    n.node("DequantizeLinear", "q", "s", out="y")
    onnx.save(n.model({"x": (TensorProto.FLOAT, [1, 2])}, ["y"]), float_files / "quantized.onnx")
    assert "qjax.read(path)" in refused("quantize", "quantized.onnx", *call)


@pytest.mark.exhaustive
def test_the_standard_effort_on_images(qjax, float_files):
    onnx.save(cnn(), float_files / "cnn.onnx")
    images = np.random.default_rng(0).normal(size=(32, 3, 8, 8)).astype(np.float32)
    np.savez(float_files / "images.npz", x=images)
    said = qjax("quantize", "cnn.onnx", "--data", "images.npz", "--target", "tflite_xnnpack", "-o", "cnn.tflite").stdout
    assert "equalize" in said
    assert "judged on" in said
