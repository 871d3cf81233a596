"""Models that ONNX Runtime's own tool quantizes: read here, they give its bits, floats in and floats out."""

import numpy as np
import pytest

import qjax
from qjax.assign.retarget import retarget
from qjax.contrib.importers.onnx import read
from qjax.export.integer_graph import IntegerGraph
from tests.contrib.importers.onnx_models import FORMATS, TYPES, both, cnn, mlp, normal, quantized

CHOICES = [
    ("mlp", "qdq", "uint8", "int8", True, False),
    ("mlp", "operators", "uint8", "uint8", False, True),
    ("cnn", "qdq", "int8", "int8", True, True),
    ("cnn", "operators", "uint8", "int8", True, False),
]
MORE = [
    ("mlp", "qdq", "int8", "int8", False, True),
    ("cnn", "qdq", "uint8", "int8", True, False),
    ("cnn", "qdq", "uint8", "uint8", False, True),
    ("cnn", "operators", "int8", "int8", False, False),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    made = {}

    def get(choice):
        if choice not in made:
            name, form, activations, weights, per_channel, symmetric = choice
            float_model, shape = {"mlp": mlp, "cnn": cnn}[name]()
            data = quantized(
                float_model,
                shape,
                tmp_path_factory.mktemp("static"),
                quant_format=FORMATS[form],
                activation_type=TYPES[activations],
                weight_type=TYPES[weights],
                per_channel=per_channel,
                extra_options={"ActivationSymmetric": symmetric},
            )
            made[choice] = data, shape
        return made[choice]

    return get


@pytest.mark.parametrize(
    "choice",
    [*CHOICES, *(pytest.param(choice, marks=pytest.mark.slow) for choice in MORE)],
    ids=lambda choice: "-".join(map(str, choice)),
)
@pytest.mark.sampled(3)
def test_gives_the_bits_of_onnxruntime(model, choice):
    data, shape = model(choice)
    found, expected, graph = both(data, {"x": normal(48, *shape, scale=1.2)})
    assert graph.target == "onnxruntime"
    assert "floats_in_onnxruntime" not in graph.ir.metadata
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert len(np.unique(theirs)) > 10
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.exhaustive
def test_is_a_graph_like_any_other(model, tmp_path):
    """It is saved, loaded, compared, put under another target, and takes any batch."""
    data, shape = model(CHOICES[0])
    graph = IntegerGraph(read(data))
    x = normal(5, *shape)
    graph.save(tmp_path / "graph.qjax")
    np.testing.assert_array_equal(qjax.load(tmp_path / "graph.qjax")(x), graph(x))
    (tmp_path / "model.onnx").write_bytes(data)
    np.testing.assert_array_equal(qjax.read(tmp_path / "model.onnx")(x), graph(x))
    np.testing.assert_array_equal(graph(x[:2]), graph(x)[:2])
    other = IntegerGraph(retarget(graph.ir, "tflite_micro"))
    assert np.abs(np.asarray(other(x)) - np.asarray(graph(x))).max() < 0.2
    direct = IntegerGraph(read(data, target="tflite_micro"))
    np.testing.assert_array_equal(direct(x), other(x))


def test_names_are_those_of_the_file(model):
    data, _ = model(CHOICES[0])
    graph = read(data)
    assert graph.inputs == ("x_QuantizeLinear_Output",)
    assert graph.outputs == ("y_QuantizeLinear_Output",)
    assert [node.name for node in graph.nodes] == [node.output for node in graph.nodes]
    assert "w0_quantized" in graph.tensors
    assert "b0_quantized" in graph.tensors
