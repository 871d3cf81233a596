"""A Target is checked when it is made, and named targets are found."""

import re

import pytest

import qjax
from qjax import targets
from qjax.contrib import profiles
from qjax.numerics.accumulator import Accumulator
from qjax.ops import formulas
from qjax.targets import Target, Weighted

NAMED = (
    "cmsis_nn",
    "executorch_xnnpack",
    "fpga",
    "nearest_even",
    "nvdla",
    "onnxruntime",
    "openvino_cpu",
    "tflite_micro",
    "tflite_optimized_arm",
    "tflite_optimized_x86",
    "tflite_reference",
    "tflite_xnnpack",
    "torch_fbgemm",
    "torch_fbgemm_avx2",
    "torch_onednn",
    "torch_qnnpack",
    "tosa",
    "tvm",
    "tvm_neon",
)


def test_every_published_name_is_there_and_described():
    assert set(NAMED) <= set(targets.names())
    for name in targets.names():
        assert targets.get(name).name == name
        assert targets.get(name).description


@pytest.mark.parametrize("name", targets.names())
def test_every_formula_exists_and_computes_its_operation(name):
    formulas.check_target(targets.get(name))


def test_a_formula_that_does_not_fit_is_refused_by_the_recipe():
    with pytest.raises(
        ValueError, match=r"Target 'chip', mean: the formula 'tflite_add' only computes add, subtract\."
    ):
        qjax.Recipe(target=Target("chip", mean="tflite_add"))
    with pytest.raises(ValueError, match=r"Target 'chip', add: Unknown formula 'nearest'\. Known.*tflite_add"):
        qjax.Recipe(target=Target("chip", add="nearest"))
    with pytest.raises(
        ValueError, match=r"Target 'chip': scaled_matmul needs a matmul formula that takes a factor.*None"
    ):
        qjax.Recipe(target=Target("chip", scaled_matmul=True))


def test_which_rule_finishes_a_product():
    target = Target("chip", "single_round", per_channel="neon", dot=Weighted("double_round", "f32"), conv="ruy")
    assert target.weighted("dot") == Weighted("double_round", "f32")
    assert target.weighted("dot", per_channel=True) == Weighted("double_round", "f32")
    assert target.weighted("conv") == target.weighted("conv", per_channel=True) == Weighted("ruy")
    assert target.weighted("depthwise") == Weighted("single_round")
    assert target.weighted("depthwise", per_channel=True) == Weighted("neon")
    other = target.replace(name="other", dot_per_channel="nearest_away")
    assert other.weighted("dot", per_channel=True) == Weighted("nearest_away")


def test_errors_say_what_was_expected():
    with pytest.raises(
        ValueError, match=r"Target 'chip', requantize: rule must be one of .*double_round.* Got 'dubble'"
    ):
        Target("chip", "dubble")
    with pytest.raises(ValueError, match="Target 'chip', conv: Weighted: expected a deterministic rule"):
        Target("chip", conv="stochastic")
    with pytest.raises(ValueError, match="expected a scale of the form 'f64' or 'f32', got 'f16'"):
        Weighted("neon", "f16")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"quantize must be one of reciprocal, .* Got 'floor'"):
        Target("chip", quantize="floor")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="same_grid: expected 'mean' and 'average_pool' only, got"):
        Target("chip", same_grid=frozenset({"add"}))
    near = r"Unknown target 'tflite'\. Did you mean 'tflite_micro' \(microcontrollers\), .*\? Known targets: cmsis_nn, "
    with pytest.raises(ValueError, match=near):
        targets.get("tflite")
    with pytest.raises(ValueError, match="Another target is registered under the name 'tflite_micro'"):
        targets.register(Target("tflite_micro"))
    with pytest.raises(ValueError, match=r"Unknown formula 'tflite_ad'\. Known formulas: .*tflite_add"):
        formulas.get("tflite_ad")


def test_targets_are_values():
    a = Target("chip", accumulator=Accumulator(14, "saturate"))
    assert a == Target("chip", accumulator=Accumulator(14, "saturate"))
    assert hash(a) == hash(a.replace())
    assert targets.get(a) is a


@pytest.mark.parametrize(
    ("word", "cure"),
    [
        ("cortex-m4", "'tflite_micro' or 'cmsis_nn'"),
        ("ESP32", "'tflite_micro' or 'cmsis_nn'"),
        ("litert", "'tflite_optimized_x86'"),
        ("tflm", "Did you mean 'tflite_micro'?"),
        ("onnx", "Did you mean 'onnxruntime'?"),
        ("pytorch", "'torch_fbgemm'"),
        ("cpu", "a runtime and not a processor: 'onnxruntime'"),
        ("cuda", "Use 'nearest_even'"),
        ("tensorrt", "Recipe(profile='tensorrt')"),
        ("ethos-u55", "Recipe(profile='ethos_u')"),
        ("hls4ml", "Did you mean 'fpga'?"),
        ("openvino", "Did you mean 'openvino_cpu'?"),
        ("executorch", "Did you mean 'executorch_xnnpack'?"),
        ("neon", "Did you mean 'tvm_neon'?"),
        ("int8", "Recipe(weights=QSpec(bits=...))"),
    ],
)
def test_words_for_devices_and_formats_have_a_cure(word, cure):
    with pytest.raises(ValueError, match=re.escape(cure)):
        targets.get(word)


def test_the_names_in_these_cures_exist():
    words = (
        "cortex",
        "litert",
        "torch",
        "cpu",
        "gpu",
        "hls4ml",
        "ort",
        "trt",
        "coreml",
        "snpe",
        "coral",
        "ethos",
        "tidl",
    )
    said: list[str] = []
    for word in words:
        with pytest.raises(ValueError, match="Unknown target") as error:
            targets.get(f"{word}_x")
        said += re.findall(r"'([a-z0-9_]+)'", str(error.value).partition("Known targets")[0])[1:]
    formats = {"stablehlo", "onnx", "integer", "qonnx", "rtl"}
    assert set(said) - formats <= {*targets.names(), *profiles.names()}
    assert len(set(said)) > 15
