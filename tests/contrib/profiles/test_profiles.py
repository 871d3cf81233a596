"""Every profile: a network that it takes, from recipe to file, and one that it refuses, with the message."""

import json
import re

import jax
import numpy as np
import onnxruntime
import pytest
from flax import nnx

import qjax
from qjax import QSpec, Recipe
from qjax.contrib import profiles
from qjax.contrib.profiles import ProfileError
from qjax.contrib.profiles.contents import check_file
from qjax.export.emit.onnx import to_model
from tests.contrib.profiles.networks import IMAGES, ROWS, Chain, Gelu, Maximum, Residual, Softmax, Subtraction

NAMES = profiles.names()

REFUSED = {
    "coreml": (Gelu, "'table' (qjax:table)", "not known for this device"),
    "cortex_m": (None, "", ""),
    "edge_tpu": (Gelu, "'table' (CAST)", "operators after it cannot run there either"),
    "esp_dl": (Gelu, "'table' (qjax:table)", "not known for this device"),
    "ethos_u": (Gelu, "'table' (GATHER)", "got GATHER, not known for this device"),
    "executorch_xnnpack": (Gelu, "'table' (qjax:table)", "not known for this device"),
    "litert": (None, "", ""),
    "openvino_cpu": (Gelu, "'table' (qjax:table)", "not known for this device"),
    "openvino_gpu": (Gelu, "'table' (qjax:table)", "not known for this device"),
    "openvino_npu": (Residual, "'add' (Add)", "expected inputs with the same scale and zero point"),
    "qnn_htp": (Gelu, "'table' (qjax:table)", "not known for this device"),
    "stm32_n6": (Softmax, "'softmax' (SOFTMAX)", "got SOFTMAX, not known for this device"),
    "tensorrt": (Gelu, "'table' (qjax:table)", "not known for this device"),
    "tidl": (Subtraction, "(Sub)", "expected a constant on one side, got two computed inputs"),
}
"""Profile -> a network, the node and the reason; None: it refuses a float island."""


def test_every_profile_is_tested():
    assert set(REFUSED) == set(NAMES)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", NAMES)
def test_a_network_that_passes(name, tmp_path):
    profile = profiles.get(name)
    model = Chain()
    qmodel = qjax.quantize(model, Recipe(profile=name), IMAGES)
    graph = qjax.convert(qmodel, IMAGES)
    assert graph.target == profile.targets[0]
    verdict = graph.check(name)
    assert bool(verdict), str(verdict)
    assert str(verdict).splitlines()[0] == f"{name} ({profile.title}): no rule is broken."
    assert sum(count for _, count in verdict.operators) >= 5
    if not profile.emits:
        with pytest.raises(ProfileError, match="writes no file that this device takes"):
            graph.emit(profile.format, tmp_path / "model", profile=name)
        return
    if profile.format == "pte":
        return  # tests/contrib/executorch/test_oracle_pte.py writes and runs it
    path = tmp_path / f"model.{profile.format}"
    graph.emit(profile.format, path)
    assert check_file(path.read_bytes(), name).operators == verdict.operators
    # the recipe's profile goes with the saved graph
    graph.save(tmp_path / "model.qjax")
    assert qjax.load(tmp_path / "model.qjax").ir.metadata["profile"] == name


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NAMES)
def test_a_network_that_does_not_pass(name):
    kind, node, reason = REFUSED[name]
    if kind is None:
        reason = "a product in float" if profiles.get(name).floats else "got a float island. Drop their qjax.FLOAT"
        kind, node = Chain, "'island'"
        recipe = Recipe(profile=name, overrides={"conv": qjax.FLOAT})
    else:
        recipe = Recipe(profile=name)
    sample = IMAGES if kind in (Chain, Residual) else ROWS
    with pytest.raises(ProfileError, match=f"^quantize: profile '{name}': ") as raised:
        qjax.quantize(kind(), recipe, sample)
    said = str(raised.value)
    assert profiles.get(name).otherwise in said
    line = next(line for line in said.splitlines() if reason in line)
    assert node in line or "FLOAT" in line, said
    assert "networks.py:" in line, said


def test_all_violations_come_at_once():
    """Of the recipe's overrides and of the model's structure, each with its line, source and cure."""
    recipe = Recipe(profile="tensorrt", overrides={"dense": qjax.Override(activations=QSpec(bits=8, symmetric=False))})
    with pytest.raises(ProfileError) as raised:
        qjax.quantize(Gelu(), recipe, ROWS)
    lines = str(raised.value).splitlines()
    assert lines[0].startswith("quantize: profile 'tensorrt': 2 rules are broken; the parser refuses the file")
    assert re.match(
        r"  quantizer 'dense' \(.*networks.py:\d+\): expected symmetric codes \(zero point 0\), got symmetric=False\. "
        r"Leave activations out of the recipe, or use activations=QSpec\(bits=8, narrow_range=False\)\. \[NvInfer\.h",
        lines[1],
    )
    assert "'table' (qjax:table)" in lines[2]
    assert "[onnx-tensorrt" in lines[2]


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("tensorrt", {"target": "nearest_even"}, "target: expected one of onnxruntime, got nearest_even. Leave target"),
        ("tensorrt", {"activations": QSpec(symmetric=False)}, "activations: expected symmetric codes"),
        ("tensorrt", {"weights": QSpec(bits=4)}, "weights: expected 8 bits, got 4"),
        ("tensorrt", {"weights": QSpec(group_size=4)}, "weights: expected no groups of scales, got group_size=4"),
        ("qnn_htp", {"activations": QSpec(symmetric=False)}, "expected codes of uint16 or uint8, got int8"),
        ("openvino_cpu", {"weights": QSpec(narrow_range=False)}, "expected codes from -127 to 127, got narrow_range"),
    ],
)
def test_a_recipe_that_contradicts_its_profile(name, fields, said):
    with pytest.raises(ProfileError, match=f"^Recipe: profile '{name}': 1 rule is broken") as raised:
        Recipe(profile=name, **fields)
    assert said in str(raised.value)


def test_a_recipe_keeps_what_fits():
    per_tensor = QSpec(bits=8)
    recipe = Recipe(profile="tensorrt", weights=per_tensor)
    assert recipe.weights is per_tensor
    assert recipe.activations == QSpec(bits=8, narrow_range=False)
    assert Recipe(profile="esp_dl").method == "tqt"
    assert Recipe().profile is None
    assert Recipe(profile="ethos_u", target="cmsis_nn").target == "cmsis_nn"
    with pytest.raises(ValueError, match=r"Unknown profile 'tensorr'\. Did you mean 'tensorrt'"):
        Recipe(profile="tensorr")


def test_trained_weights_are_judged_by_convert():
    """A sum of weights depends on their values, so `quantize` leaves it open."""
    ethos = profiles.get("ethos_u")
    source = ethos.rules[0].source
    strict = profiles.Profile(
        **{
            **{field: getattr(ethos, field) for field in ethos.__dataclass_fields__},
            "name": "ethos_u_of_this_test",
            "rules": (profiles.rules.weight_sum({"CONV_2D"}, 100, source),),
        }
    )
    qmodel = qjax.quantize(Chain(), Recipe(profile=strict), IMAGES)
    with pytest.raises(ProfileError, match=r"convert: .*1 rule is broken") as raised:
        qjax.convert(qmodel, IMAGES)
    assert "expected a sum of absolute weights of at most 100 for every output channel, got " in str(raised.value)
    # another target is another device: nothing is claimed then
    assert "profile" not in qjax.convert(qmodel, IMAGES, target="nearest_even").ir.metadata


def test_files_of_a_profile(tmp_path):
    graph = qjax.convert(qjax.quantize(Chain(), Recipe(profile="tensorrt"), IMAGES), IMAGES)
    with pytest.raises(ProfileError, match=r"expected style='qdq', got style='integer'\. Leave it out"):
        graph.emit("onnx", tmp_path / "model.onnx", style="integer")
    with pytest.raises(ProfileError, match="expected the format 'onnx', got 'c'"):
        graph.emit("c", tmp_path / "model", profile="tensorrt")
    graph.emit("c", tmp_path / "model")
    other = qjax.convert(qjax.quantize(Maximum(), Recipe(target="tflite_micro"), ROWS), ROWS)
    with pytest.raises(ProfileError, match="emit: profile 'ethos_u': "):
        other.emit("tflite", tmp_path / "model.tflite", profile="ethos_u")
    assert not (tmp_path / "model.tflite").exists()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["tensorrt", "openvino_cpu", "qnn_htp"])
def test_portable_files_keep_the_codes(name, tmp_path):
    """ONNX Runtime computes what the graph does, with its optimizer and without."""
    qmodel = qjax.quantize(Chain(), Recipe(profile=name), IMAGES)
    x = np.asarray(jax.random.normal(jax.random.key(2), (64, 8, 8, 3)))
    graph = qjax.convert(qmodel, IMAGES)
    path = tmp_path / "model.onnx"
    graph.emit("onnx", path, batch=64)
    expected = np.asarray(graph(x))
    for level in ("ORT_ENABLE_ALL", "ORT_DISABLE_ALL"):
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
        options.log_severity_level = 3
        options.add_session_config_entry("session.qdqisint8allowed", "1")
        if name == "qnn_htp":
            # without VNNI its products of uint8 and int8 saturate otherwise
            options.add_session_config_entry("session.x64quantprecision", "1")
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        (got,) = session.run(None, {session.get_inputs()[0].name: x})
        assert np.array_equal(got, expected), level
    with pytest.raises(ValueError, match="expected portable='floats' or 'codes' with style='qdq'"):
        to_model(graph.ir, style="qdq", portable="int8")


def test_the_command(tmp_path):
    from click.testing import CliRunner

    from qjax.cli import program

    def run(*arguments: str):
        done = CliRunner().invoke(program, ["check", *arguments])
        return done.exit_code, done.output

    graph = qjax.convert(qjax.quantize(Gelu(), Recipe(target="tflite_micro"), ROWS), ROWS)
    graph.save(tmp_path / "model.qjax")
    graph.emit("tflite", tmp_path / "model.tflite")
    code, text = run(str(tmp_path / "model.tflite"), "--profile", "ethos_u")
    assert code == 1
    assert "'table' (GATHER)" in text
    assert "networks.py:" in text
    code, text = run(str(tmp_path / "model.qjax"), "--profile", "litert", "--json")
    assert code == 0
    assert json.loads(text)["passes"] is True
    assert "GATHER" in json.loads(text)["operators"]
    code, text = run()
    assert code == 0
    assert all(name in text for name in NAMES)
    code, text = run("--profile", "tensorrt")
    assert code == 0
    assert "source: NvInfer.h" in text
    assert "https://github.com/NVIDIA/TensorRT" in text


def test_what_is_no_file_of_the_device(tmp_path):
    graph = qjax.convert(qjax.quantize(Gelu(), Recipe(target="tflite_micro"), ROWS), ROWS)
    graph.emit("tflite", tmp_path / "model.tflite")
    data = (tmp_path / "model.tflite").read_bytes()
    with pytest.raises(ValueError, match=r"profile 'tensorrt': expected a .onnx file, got .tflite"):
        check_file(data, "tensorrt")
    with pytest.raises(ValueError, match="damaged"):
        check_file(data[:200], "ethos_u")
    with pytest.raises(ValueError, match=r"damaged \.onnx file"):
        check_file(b"nothing", "tensorrt")
    # a target that the format has no file for is a violation too, and names the cure
    other = qjax.convert(qjax.quantize(nnx.Linear(6, 4, rngs=nnx.Rngs(0)), Recipe(), ROWS), ROWS)
    verdict = other.check("ethos_u")
    assert not verdict.passes
    assert "graph.retarget" in str(verdict)
