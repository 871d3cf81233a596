"""Codes of more than 8 bits, of any kind or with a zero point or unsigned: refused where the runtime has none."""

import numpy as np
import pytest
from flax import nnx

import qjax
from qjax import targets
from qjax.assign import assign
from qjax.graph.ir import Graph, Node, Quantization, Tensor
from qjax.graph.unsupported import ConversionError
from qjax.ops.quantize import Quantize
from qjax.targets import Target

X = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
NARROW = {n for n in targets.names() if n.startswith("torch_")} | {"openvino_cpu", "executorch_xnnpack"}
"""Runtimes whose activations have 8 bits at most."""

WITH = {"double_round", "nearest_even", "onnxruntime", "onnxruntime_avx2", "single_round", "tvm", "tvm_neon"}
"""Rules, and the runtimes that take any zero point at 16 bits."""


def network() -> nnx.Module:
    return nnx.Sequential(nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(8, 3, rngs=nnx.Rngs(1)))


def recipe(target, spec=None, **settings):
    return qjax.Recipe(target=target, activations=spec or qjax.QSpec(bits=8, symmetric=False), **settings)


def test_every_target_says_whether_it_has_them():
    assert {name for name in targets.names() if targets.get(name).wide_zero_points} == WITH
    assert {name for name in targets.names() if not targets.get(name).wide_activations} == NARROW
    # what a target does not state, it does not have
    assert not Target("chip").wide_zero_points
    assert not Target("chip").wide_activations


@pytest.mark.parametrize("target", sorted(NARROW))
@pytest.mark.sampled(1)
def test_what_has_8_bits_only_refuses_wider_codes(target):
    wide = qjax.QSpec(bits=16)
    with pytest.raises(ValueError, match=rf"Quantizer 'input': expected activations of at most 8 bits, .*{target!r}"):
        qjax.quantize(network(), recipe(target, wide), X)
    with pytest.raises(ValueError, match=rf"/kernel': expected weights of at most 8 bits, .*{target!r}.* Got QSpec"):
        qjax.quantize(network(), recipe(target, weights=qjax.QSpec(bits=9, axis=-1)), X)
    qmodel = qjax.quantize(network(), recipe("nearest_even", wide), X)
    graph = qjax.convert(qmodel, X)
    for make in (lambda: qjax.convert(qmodel, X, target=target), lambda: graph.retarget(target)):
        with pytest.raises(
            ConversionError,
            match=rf"^the tensor 'input': expected activations of at most 8 bits.*{target!r} is known .* Got int16",
        ):
            make()


@pytest.mark.parametrize("target", sorted(set(targets.names()) - WITH - NARROW - {"fpga"}))
@pytest.mark.parametrize(
    "spec", [qjax.QSpec(bits=16, symmetric=False), qjax.QSpec(bits=9, symmetric=False), qjax.QSpec(16, signed=False)]
)
@pytest.mark.sampled(9)
def test_quantize_refuses_the_recipe(target, spec):
    message = (
        rf"Quantizer 'input': expected codes of more than 8 bits to be int16 with the zero point 0, .* {target!r}.*"
        rf"Got QSpec\(bits={spec.bits}, .*Use qjax.QSpec\(bits={spec.bits}, symmetric=True\) for it"
    )
    with pytest.raises(ValueError, match=message):
        qjax.quantize(network(), recipe(target, spec), X)


@pytest.mark.parametrize("where", ["input", "2"])
def test_an_override_and_a_weight_are_looked_at_too(where):
    spec = qjax.QSpec(bits=12, symmetric=False)
    override = qjax.Override(activations=spec) if where == "input" else qjax.QSpec(bits=12, axis=-1, symmetric=False)
    with pytest.raises(ValueError, match=r"Quantizer '(input|layers/2/kernel)': expected codes of more than 8 bits"):
        qjax.quantize(network(), recipe("tosa", overrides={where if where == "input" else ".*2": override}), X)


def test_convert_and_retarget_refuse_the_graph():
    qmodel = qjax.quantize(network(), recipe("nearest_even", qjax.QSpec(bits=10, symmetric=False)), X)
    graph = qjax.convert(qmodel, X)
    for make in (lambda: qjax.convert(qmodel, X, target="tflite_micro"), lambda: graph.retarget("tflite_micro")):
        with pytest.raises(
            ConversionError,
            match=r"^the tensor 'input': .*the target 'tflite_micro' is known to have\. Got int16, "
            r"zero point -?\d+\. Use qjax.QSpec\(bits=10, symmetric=True\)",
        ):
            make()
    kept = qjax.convert(qmodel, X, target="onnxruntime").ir.tensors["input"].quantization
    assert kept is not None
    assert np.any(kept.zero_point)


def test_the_error_names_the_node_and_the_line():
    known = Quantization(np.asarray(0.5, np.float32), np.asarray(0, np.int32), -128, 127)
    wide = Quantization(np.asarray(0.25, np.float32), np.asarray(0, np.int32), 0, 65535)
    tensors = {
        "x": Tensor("x", (None, 3), "int8", known),
        "acc": Tensor("acc", (None, 3), "int32"),
        "y": Tensor("y", (None, 3), "uint16", wide),
    }
    nodes = (
        Node("acc", "rescale", ("x",), "acc", {}, {}, "user.py:3"),
        Node("y", Quantize.name, ("acc",), "y", {}, {}, "user.py:4"),
    )
    with pytest.raises(ConversionError, match=r"the tensor 'y' of quantize 'y' \(user.py:4\): .* Got uint16\. Use"):
        assign(Graph(tensors, nodes, ("x",), ("y",), ""), targets.get("cmsis_nn"))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("setting", [{"first_last_bits": 16}, {"output_bits": 16}])
@pytest.mark.parametrize("target", ["tflite_reference", "tosa", "onnxruntime"])
@pytest.mark.filterwarnings("ignore:quantize. the model trains")
def test_widths_that_the_recipe_derives_are_symmetric_where_they_must(target, setting):
    if "first_last_bits" in setting and not targets.get(target).wide_weights:
        with pytest.raises(ValueError, match=r"kernel': expected weights of at most 8 bits.*first_last_bits"):
            qjax.quantize(network(), recipe(target, **setting), X)
        return
    qmodel = qjax.quantize(network(), recipe(target, **setting), X)
    specs = {name: q.spec for name, q in qmodel.plan.quantizers if q.spec.bits == 16}
    assert specs
    assert all(spec.symmetric for spec in specs.values()) == (target not in WITH)
    if "output_bits" in setting:  # 16 bits of both operands do not fit int32
        assert any(tensor.dtype == "int16" for tensor in qjax.convert(qmodel, X).ir.tensors.values())
