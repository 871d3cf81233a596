"""Which rule a target gives to activations of 16 bits and to depthwise convolutions, down to the nodes of a graph."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax
from qjax import targets
from qjax.targets import Target, Weighted
from tests.layers.round_trip import assert_same, data, train_step

WIDE = qjax.QSpec(bits=16)


def test_wide_activations_have_rules_of_their_own():
    target = Target("chip", "double_round", dot="neon", wide="int16x8", wide_dot=Weighted("float64_away"))
    assert target.weighted("dot") == target.weighted("dot", per_channel=True) == Weighted("neon")
    for per_channel in (False, True):
        assert target.weighted("dot", per_channel=per_channel, wide=True) == Weighted("float64_away")
        assert target.weighted("conv", per_channel=per_channel, wide=True) == Weighted("int16x8")
        assert target.weighted("depthwise", per_channel=per_channel, wide=True) == Weighted("int16x8")
    assert target.replace(name="other", wide_dot=None).weighted("dot", wide=True) == Weighted("int16x8")
    assert Target("plain", "neon").weighted("conv", wide=True) == Weighted("neon")


def test_errors():
    with pytest.raises(ValueError, match=r"Target 'chip', wide: rule must be one of .* Got 'int16'"):
        Target("chip", wide="int16")
    with pytest.raises(ValueError, match=r"tables must be one of exact, gemmlowp, tflite, xnnpack.*\. Got 'lut'"):
        Target("chip", tables="lut")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"softmax must be one of None, gemmlowp, float32.*\. Got 'exact'"):
        Target("chip", softmax="exact")  # pyright: ignore[reportArgumentType]


class Layers(nnx.Module):
    """A convolution, a depthwise one of 12 channels and a matrix product."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.conv = nnx.Conv(3, 12, (3, 3), rngs=rngs)
        self.depthwise = nnx.Conv(12, 12, (3, 3), feature_group_count=12, rngs=rngs)
        self.head = nnx.Linear(12, 5, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.depthwise(nnx.relu(self.conv(x)))))


SAMPLE = data(3, 6, 6, 3)


@functools.cache
def trained(activations: qjax.QSpec | None, quantize: str) -> qjax.QuantizedModel:
    """The layers after one step of training: all that a target has a say in there."""
    target = targets.get("nearest_even").replace(quantize=quantize)
    recipe = qjax.Recipe(target=target) if activations is None else qjax.Recipe(target=target, activations=activations)
    qmodel = qjax.quantize(Layers(), recipe, SAMPLE)
    assert np.isfinite(train_step(qmodel, SAMPLE))
    return qmodel


def converted(name: str, activations: qjax.QSpec | None = None) -> qjax.IntegerGraph:
    """The graph under a target, which the exact forward equals, also at another batch size."""
    qmodel = trained(activations, targets.get(name).quantize)
    graph = qjax.convert(qmodel, SAMPLE, target=name)
    forward = nnx.jit(qjax.exact(qmodel, SAMPLE, target=name))
    batch = jnp.concatenate([SAMPLE, data(2, 6, 6, 3, seed=1) * 3])
    assert_same(forward(qmodel, batch), graph(batch))
    return graph


RULES = {
    "tflite_micro": ("int16x8", "int16x8", "int16x8"),
    "tflite_reference": ("int16x8", "int16x8", "float64_away"),
    "tflite_optimized_x86": ("int16x8", "int16x8", "float64_away"),
    "tflite_xnnpack": ("int16x8", "int16x8", "float64_away"),
    "single_round": ("single_round", "single_round", "single_round"),
}


_FIRST = ("tflite_micro", "tflite_optimized_x86")


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in _FIRST else pytest.mark.exhaustive) for n in RULES])
@pytest.mark.exhaustive
def test_int16_activations_convert_under_the_rule_of_the_runtime(name):
    graph = converted(name, WIDE)
    assert tuple(node.attributes["rule"] for node in graph.ir.nodes) == RULES[name]
    assert graph.ir.tensors[graph.ir.nodes[0].inputs[0]].dtype == "int16"


@pytest.mark.slow
@pytest.mark.exhaustive
def test_depthwise_channels_beyond_whole_vectors():
    graph = converted("tflite_optimized_x86")
    assert [node.attributes["rule"] for node in graph.ir.nodes] == ["neon", "tflite_depthwise_neon", "neon"]
    # the channel, and nothing else, chooses: a batch is its images
    codes = np.asarray(graph.quantize(data(3, 6, 6, 3)))
    assert np.array_equal(graph.run(codes), np.concatenate([graph.run(codes[i : i + 1]) for i in range(3)]))


def test_what_the_runtimes_have_besides():
    known = {name: (targets.get(name).tables, targets.get(name).softmax) for name in targets.names()}
    assert known["tflite_micro"] == known["cmsis_nn"] == ("gemmlowp", "gemmlowp")
    assert known["tflite_reference"] == ("tflite", "gemmlowp")
    assert known["tflite_optimized_x86"] == ("tflite", "float32")
    assert known["tflite_xnnpack"] == ("xnnpack", "float32")
    assert known["onnxruntime"] == ("exact", "onnx")
