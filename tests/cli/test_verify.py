"""`qjax verify` and `qjax compare`: equal, or where and by how much not."""

import re

import numpy as np
import pytest

from qjax import compare, runtimes, targets
from qjax.cli import inputs
from qjax.runtimes import comparing
from qjax.runtimes.batches import batches
from qjax.runtimes.comparing import Differing


@pytest.mark.exhaustive
@pytest.mark.parametrize("runtime", ["c", "onnxruntime"])
def test_a_network(qjax, runtime):
    said = qjax("verify", "network.qjax", "--runtime", runtime, "--examples", 21).stdout.splitlines()
    assert said[0] == f"{runtime} against qjax's interpreter, target tflite_micro"
    assert said[3].split() == ["scores", "210", "0", "0", "-"]
    assert said[4] == "21 examples, 210 codes: no code differs."


@pytest.mark.parametrize("runtime", ["litert-reference", "onnx-reference", "onnxruntime-plain", "stablehlo"])
def test_every_runtime(qjax, runtime):
    said = qjax("verify", "dense.qjax", "--runtime", runtime, "--examples", 21).stdout.splitlines()
    assert said[-1] == "21 examples, 84 codes: no code differs."


@pytest.mark.exhaustive
@pytest.mark.parametrize("style", ["integer", "qdq", "qoperator"])
def test_every_style_of_onnx(qjax, style):
    """int8 activations between float operators need an option of the session, which the file names."""
    line = ["--runtime", "onnxruntime", "--target", "onnxruntime", "--style", style, "--examples", 21]
    assert "210 codes: no code differs" in qjax("verify", "network.qjax", *line).stdout


@pytest.mark.parametrize("runtime", ["c", "onnxruntime", "stablehlo"])
def test_several_inputs_and_outputs(qjax, runtime):
    assert "48 codes: no code differs" in qjax("verify", "pair.qjax", "--runtime", runtime, "--examples", 8).stdout


@pytest.mark.exhaustive
def test_a_runtime_of_another_target(qjax):
    """The same file is another function there: exit code 1, the place, and the target to try."""
    line = ["verify", "dense.qjax", "--runtime", "litert", "--examples", 400, "--batch", 100]
    said = qjax(*line, code=1).stdout
    found = re.search(r"y +1600 +\d+ +1 +\[\d+, \d\]: -?\d+ expected, -?\d+\n", said)
    assert found, said
    hint, target = said.splitlines()[-1].split(": try --target ")
    assert hint.endswith("and this graph as tflite_micro")
    assert target[:-1] in ("tflite_xnnpack", "tflite_xnnpack_arm")
    qjax(*line, "--target", target[:-1])
    optimized = {"tflite_xnnpack": "tflite_optimized_x86", "tflite_xnnpack_arm": "tflite_optimized_arm"}[target[:-1]]
    qjax("verify", "dense.qjax", "--runtime", "litert-optimized", "--target", optimized)


@pytest.mark.exhaustive
def test_given_inputs(qjax, folder, graphs):
    codes = np.random.default_rng(1).integers(-128, 128, (5, 5)).astype(np.int8)
    np.save(folder / "given.npy", codes)
    np.save(folder / "given_reals.npy", np.asarray(codes, np.float32))
    assert (
        "5 examples, 20 codes" in qjax("verify", "dense.qjax", "given.npy", "--codes", "--runtime", "stablehlo").stdout
    )
    assert "5 examples, 20 codes" in qjax("verify", "dense.qjax", "given_reals.npy", "--runtime", "stablehlo").stdout


@pytest.fixture
def outputs(folder, graphs):
    x = np.random.default_rng(2).normal(size=(11, 5)).astype(np.float32)
    np.save(folder / "x.npy", x)
    graph = graphs["dense"]
    codes = np.array(graph.run(graph.quantize(x)))
    np.save(folder / "codes.npy", codes)
    np.save(folder / "reals.npy", np.asarray(graph(x)))
    return codes


@pytest.mark.parametrize("file", ["codes.npy", "reals.npy"])
@pytest.mark.sampled(1)
def test_expected_outputs(qjax, outputs, file):
    said = qjax("verify", "dense.qjax", "x.npy", "--expect", file, "--batch", 4).stdout
    assert said.startswith(f"qjax's interpreter against {file}")
    assert "11 examples, 44 codes: no code differs." in said
    both = qjax("verify", "dense.qjax", "x.npy", "--expect", file, "--runtime", "stablehlo").stdout
    assert [line for line in both.splitlines() if " against " in line] == [
        "stablehlo against qjax's interpreter, target tflite_micro",
        f"qjax's interpreter against {file}, target tflite_micro",
        f"stablehlo against {file}, target tflite_micro",
    ]


def test_other_outputs_than_expected(qjax, folder, outputs):
    outputs[9, 2] ^= 3
    np.savez(folder / "other.npz", y=outputs)
    said = qjax("verify", "dense.qjax", "x.npy", "--expect", "other.npz", "--batch", 4, code=1).stdout
    got = outputs[9, 2] ^ 3
    assert f"[9, 2]: {outputs[9, 2]} expected, {got}" in said
    assert said.splitlines()[-1] == "11 examples, 44 codes: 1 differ."


def test_refused(refused, folder, outputs):
    assert refused("verify", "dense.qjax").startswith("Give --runtime (c, executorch, litert, ")
    assert "needs the inputs" in refused("verify", "dense.qjax", "--expect", "codes.npy")
    assert "'tensorrt' is not one of" in refused("verify", "dense.qjax", "--runtime", "tensorrt")
    assert "--style is for the runtimes" in refused("verify", "dense.qjax", "--runtime", "c", "--style", "integer")
    np.save(folder / "short.npy", outputs[:3])
    line = ["verify", "dense.qjax", "x.npy", "--expect"]
    assert "output 'y': expected shape (11, 4), got (3, 4)" in refused(*line, "short.npy")
    np.save(folder / "wide.npy", outputs.astype(np.int32))
    assert "expected codes of dtype int8 or floats of dtype float32, got int32" in refused(*line, "wide.npy")


def test_a_format_that_cannot_hold_the_graph(refused):
    assert "tflite" in refused("verify", "pair.qjax", "--runtime", "litert")


@pytest.mark.parametrize(
    ("runtime", "module", "cure"),
    [
        ("litert", "ai_edge_litert.interpreter", "LiteRT is not installed: pip install ai-edge-litert"),
        ("onnxruntime", "onnxruntime", "ONNX Runtime is not installed: pip install onnxruntime"),
        ("onnx-reference", "onnx.reference", "The package onnx is not installed: pip install onnx"),
        ("tflite-micro", "tflite_micro", "TFLite Micro is not installed: pip install tflite-micro"),
    ],
)
def test_runtimes_that_are_missing(refused, monkeypatch, runtime, module, cure):
    monkeypatch.setitem(__import__("sys").modules, module, None)
    assert refused("verify", "dense.qjax", "--runtime", runtime) == cure


def test_no_compiler(refused, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    assert "no C compiler" in refused("verify", "dense.qjax", "--runtime", "c")


def test_targets_of_runtimes_exist():
    assert {name for runtime in runtimes.RUNTIMES.values() for name in runtime.targets} <= set(targets.names())


# ---------------------------------------------------------------------------- random codes


def test_random_codes_begin_with_the_edges(graphs):
    graph = graphs["network"].ir
    (codes,) = inputs.random_codes(graph, 9, 0)
    assert (codes.dtype, codes.shape) == (np.int8, (9, 8, 8, 1))
    flat = codes.reshape(9, -1)
    assert (flat[0] == -128).all()
    assert (flat[1] == 127).all()
    assert (flat[2] == -20).all()
    assert set(flat[3]) == {-128, 127}
    assert list(flat[4]) == list(range(-128, -64))
    np.testing.assert_array_equal(codes, inputs.random_codes(graph, 9, 0)[0])
    assert (codes != inputs.random_codes(graph, 9, 1)[0]).any()
    words, _ = inputs.random_codes(graphs["pair"].ir, 500, 0)
    assert set(words) == set(range(6))


def test_batches_cover_every_example_once(graphs):
    graph = graphs["pair"].ir
    values = [np.arange(7, dtype=np.int32), np.arange(21, dtype=np.int8).reshape(7, 3)]
    for whole in (False, True):
        found = list(batches(graph, values, 3, whole=whole))
        assert [one.count for one in found] == [3, 3, 1]
        assert [len(one.arrays[0]) for one in found] == ([3, 3, 3] if whole else [3, 3, 1])
        for index, value in enumerate(values):
            joined = np.concatenate([one.arrays[index][: one.count] for one in found])
            np.testing.assert_array_equal(joined, value)


# ---------------------------------------------------------------------------- counting


def test_differences_are_counted():
    tally = Differing("y")
    a = np.asarray([[1, 2], [3, -128]], np.int8)
    tally.add(a, a.copy(), 0)
    b = a.copy()
    b[1] = [5, 127]
    tally.add(a, b, 0)
    assert (tally.compared, tally.count, tally.largest) == (8, 2, 255)
    assert tally.first == "[3, 0]: 3 expected, 5"
    with pytest.raises(ValueError, match=r"expected int8 of shape \(2, 2\), got int16"):
        tally.add(a, a.astype(np.int16))


def test_a_wrong_runtime_is_found(qjax, monkeypatch):
    """One code, in the last example, which stands in a batch that is filled up."""

    def prepare(name, graph, folder, batch, options):
        def run(arrays):
            out = np.array(graph.run(*arrays))
            out[:, 1] ^= (arrays[0][:, 0] == 77).astype(np.int8)
            return [out]

        return run

    monkeypatch.setattr(comparing, "prepare", prepare)
    x = np.zeros((10, 5), np.int8)
    np.save("zeros.npy", x)
    line = ["verify", "dense.qjax", "zeros.npy", "--codes", "--runtime", "c", "--batch", 4]
    qjax(*line)
    x[9, 0] = 77
    np.save("zeros.npy", x)
    assert "40 codes: 1 differ" in qjax(*line, code=1).stdout


# ---------------------------------------------------------------------------- compare


def test_one_model_under_two_targets(qjax, graphs, folder):
    x = np.random.default_rng(0).normal(size=(256, 5)).astype(np.float32)
    np.save(folder / "images.npy", x)
    names = ("tflite_micro", "tflite_xnnpack")
    said = qjax("compare", "dense.qjax", "images.npy", "--targets", ",".join(names), code=1).stdout
    report = compare(graphs["dense"].retarget(names[0]), graphs["dense"].retarget(names[1]), x)
    assert said == f"{report}\n"
    assert not report.equal
    # the model's own target is the first of the two
    assert qjax("compare", "dense.qjax", "images.npy", "--targets", names[1], code=1).stdout == said


def test_two_models(qjax, folder, graphs):
    graphs["dense"].retarget("tflite_micro").save(folder / "copy.qjax")
    assert "64 examples, 256 codes: no code differs." in qjax("compare", "dense.qjax", "copy.qjax").stdout


def test_comparisons_that_are_refused(refused, folder):
    assert refused("compare", "dense.qjax").startswith("Give a second model or --targets")
    assert "Give a second model" in refused("compare", "dense.qjax", "network.qjax", "--targets", "tvm")
    assert "expected two names" in refused("compare", "dense.qjax", "--targets", "tvm,,tosa")
    assert "different models" in refused("compare", "dense.qjax", "network.qjax")
