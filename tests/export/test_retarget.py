"""A graph under another target is what a conversion for that target gives."""

import dataclasses

import jax
import pytest
from flax import nnx

import qjax
from qjax import targets
from qjax.export.retarget import retarget
from tests.export.graphs import assert_equal
from tests.layers.round_trip import data
from tests.targets.test_every_target import Network, recipe_of

NAMES = [name for name in targets.names() if name != "fpga"]


class Doubled(nnx.Module):
    def __call__(self, x: jax.Array) -> jax.Array:
        return (x + nnx.relu(x)) * 2.0


@pytest.fixture(scope="module")
def graphs():
    """The same quantized model converted for every target: the grids of averages are their inputs' own."""
    x = data(4, 6, 6, 2)
    qmodel = qjax.quantize(Network(normalized=True), recipe_of("tflite_micro"), x)
    qmodel.eval()
    return {name: qjax.convert(qmodel, x, target=name).ir for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sampled(2)
def test_retargeting_is_converting(graphs, name):
    for other in ("nearest_even", "tflite_xnnpack", "onnxruntime", "torch_fbgemm"):
        assert_equal(retarget(graphs[other], name), graphs[name])


def test_there_and_back(graphs):
    for name in NAMES:
        assert retarget(graphs[name], name) is graphs[name]
        assert_equal(retarget(retarget(graphs["tosa"], name), "tosa"), graphs["tosa"])


def test_a_step_behind_an_addition_stays(graphs):
    """2 (x + y) is no addition of any runtime: its factors stay, the rounding is the target's."""
    x = data(4, 6)
    qmodel = qjax.quantize(Doubled(), qjax.Recipe(), x)
    graph, wanted = (qjax.convert(qmodel, x, target=name).ir for name in ("nearest_even", "tflite_micro"))
    *_, node = retarget(graph, "tflite_micro").nodes
    assert node.attributes["rounding"] == "nearest_away"
    assert_equal(retarget(graph, "tflite_micro"), wanted)


def test_float_biases_become_integers(graphs):
    """From a runtime that adds float biases to one that does not, and back to one that divides them otherwise."""
    for name in ("torch_fbgemm", "torch_qnnpack", "torch_onednn"):
        there = retarget(graphs[name], "nearest_even")
        assert_equal(there, graphs["nearest_even"])


def test_unknown_targets_are_named(graphs):
    with pytest.raises(ValueError, match="Unknown target 'tensorrt'"):
        retarget(graphs["tvm"], "tensorrt")


def test_a_graph_without_scales_is_refused(graphs):
    graph = graphs["tvm"]
    name = graph.nodes[0].output
    bare = dataclasses.replace(graph.tensors[name], quantization=None)
    with pytest.raises(ValueError, match=f"{name!r} has no scale"):
        retarget(graph.replace(tensors={**graph.tensors, name: bare}), "tosa")


def test_the_steps_of_a_loop_keep_sharing_their_constants():
    x = data(2, 3, 4)
    model = nnx.RNN(nnx.LSTMCell(4, 8, rngs=nnx.Rngs(0)))
    qmodel = qjax.quantize(model, qjax.Recipe(), x)
    qmodel.eval()
    graph, wanted = (qjax.convert(qmodel, x, target=name).ir for name in ("nearest_even", "tflite_micro"))
    changed = retarget(graph, "tflite_micro")
    assert_equal(changed, wanted)
    assert len(changed.tensors) == len(wanted.tensors)
    assert_equal(retarget(changed, "nearest_even"), graph)
