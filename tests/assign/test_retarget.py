"""A program under another target is what a conversion for that target gives, also after a file."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

import qjax
from qjax import targets
from qjax.assign import assign, imported_nodes
from qjax.assign.retarget import alike, retarget, stated
from qjax.export.artifact import from_bytes, to_bytes
from qjax.graph.check import GraphError
from qjax.graph.ir import Graph, Tensor
from qjax.graph.unsupported import ConversionError
from qjax.run.interpreter import Interpreter
from tests.export.graphs import assert_equal
from tests.layers.round_trip import data
from tests.lower.lowered import dense_chain
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

    class Converted(dict[str, Graph]):
        """Under the targets that a test asks for."""

        def __missing__(self, name: str) -> Graph:
            assert name in NAMES
            self[name] = qjax.convert(qmodel, x, target=name).ir
            return self[name]

    return Converted()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sampled(1)
def test_retargeting_is_converting(graphs, name):
    for other in ("nearest_even", "tflite_xnnpack", "onnxruntime", "torch_fbgemm"):
        assert_equal(retarget(graphs[other], name), graphs[name])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["tflite_xnnpack", "onnxruntime", "torch_fbgemm"])
def test_equal_nodes_are_derived_once_and_others_are_not(name, monkeypatch):
    """The steps of a recurrent layer, whose graph is the same as if every node were derived alone."""
    x = data(2, 6, 3)
    layer = nnx.RNN(nnx.GRUCell(3, 4, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))
    qmodel = qjax.quantize(layer, qjax.Recipe(target=name), x)
    qmodel.eval()
    graph = qjax.convert(qmodel, x).ir
    asked, of = [], imported_nodes._Derived.of

    def counted(self, node, derive):
        def once(*arguments):
            asked.append(node.name)
            return derive(*arguments)

        # a function of its own has a key of its own
        return of(self, node, once if alone else derive)

    monkeypatch.setattr(imported_nodes._Derived, "of", counted)
    bare = stated(graph)
    alone = True
    every = assign(bare, targets.get(name), alike(graph))
    assert len(set(asked)) == len(asked) > 30
    alone = False
    assert_equal(assign(bare, targets.get(name), alike(graph)), every)
    derived = imported_nodes._Derived(graph, targets.get(name))
    names = imported_nodes.stated_nodes(graph)
    keys = {derived._key(node) for node in graph.nodes if node.name in names}
    assert len(keys) < len(names) / 3


def test_nodes_that_differ_in_one_thing_have_keys_of_their_own(graphs):
    graph = graphs["tflite_micro"]
    derived = imported_nodes._Derived(graph, targets.get("tflite_micro"))
    node = next(node for node in graph.nodes if node.op == "add")
    output = graph.tensors[node.output]
    assert output.quantization is not None
    changed = [
        dataclasses.replace(output.quantization, scale=np.float32(output.quantization.scale) * 2),
        dataclasses.replace(output.quantization, zero_point=np.int32(output.quantization.zero_point) + 1),
        dataclasses.replace(output.quantization, qmax=output.quantization.qmax - 1),
    ]
    keys = {derived._key(node)}
    for quantization in changed:
        tensors = {**graph.tensors, output.name: dataclasses.replace(output, quantization=quantization)}
        keys.add(imported_nodes._Derived(graph.replace(tensors=tensors), derived.target)._key(node))
    keys.add(derived._key(dataclasses.replace(node, attributes={**node.attributes, "subtract": True})))
    keys.add(derived._key(dataclasses.replace(node, inputs=(node.inputs[0], node.inputs[0]))))
    keys.add(derived._key(dataclasses.replace(node, constants={**node.constants, "bias": "another"})))
    assert len(keys) == 7
    # a name and a place are nothing that a target looks at
    assert derived._key(dataclasses.replace(node, name="other", location="there")) in keys


@pytest.mark.exhaustive
def test_there_and_back(graphs):
    for name in NAMES:
        assert retarget(graphs[name], name) is graphs[name]
        assert_equal(retarget(retarget(graphs["tosa"], name), "tosa"), graphs["tosa"])


@pytest.mark.exhaustive
def test_a_step_behind_an_addition_stays(graphs):
    """2 (x + y) is no addition of any runtime: its factors stay, the rounding is the target's."""
    x = data(4, 6)
    qmodel = qjax.quantize(Doubled(), qjax.Recipe(), x)
    graph, wanted = (qjax.convert(qmodel, x, target=name).ir for name in ("nearest_even", "tflite_micro"))
    *_, node = retarget(graph, "tflite_micro").nodes
    assert node.attributes["rounding"] == "nearest_away"
    assert_equal(retarget(graph, "tflite_micro"), wanted)


def test_files_keep_what_other_targets_need(graphs):
    """Also real biases, which no program of integers holds."""
    for name in ("tflite_micro", "torch_fbgemm"):
        data = to_bytes(graphs[name])
        loaded = from_bytes(data)
        assert to_bytes(loaded) == data
        assert_equal(loaded, graphs[name])
        assert_equal(quantized_of(loaded), quantized_of(graphs[name]))
        for other in ("nearest_even", "torch_qnnpack", "onnxruntime"):
            assert_equal(retarget(loaded, other), graphs[other])


def test_what_a_file_shares_is_stored_once():
    """Weights, and weights of which some channels have another sign."""
    for gamma in ((1.5, 0.75, 2.0, 1.0), (1.5, -0.75, -2.0, 1.0)):
        quantized = dense_chain(gamma=gamma)
        large = quantized.replace(tensors={**quantized.tensors, **wide(quantized)})
        program = assign(large, targets.get("nearest_even"))
        loaded = from_bytes(to_bytes(program))
        assert_equal(quantized_of(loaded), quantized_of(program))
        assert len(to_bytes(program)) < len(to_bytes(program.replace(quantized=None))) + 6000


def quantized_of(program: Graph) -> Graph:
    assert program.quantized is not None
    return program.quantized


def wide(graph: Graph) -> dict[str, Tensor]:
    """The weight of `dense_chain` and its input with 5,000 features."""
    x, w = graph.tensors["x"], graph.tensors["w"]
    assert w.value is not None
    codes = np.resize(w.value, (5000, 4))
    return {
        "x": dataclasses.replace(x, shape=(None, 5000)),
        "w": dataclasses.replace(w, shape=codes.shape, value=codes),
    }


# ---------------------------------------------------------------------------- without the quantized graph


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NAMES)
def test_programs_alone(graphs, name):
    """What a program without its quantized graph can tell is what the model said, up to rounded biases."""
    codes = np.random.default_rng(0).integers(-100, 100, (7, 6, 6, 2)).astype(np.int8)
    alone = from_bytes(to_bytes(graphs[name].replace(quantized=None)))
    assert alone.quantized is None
    for other in ("nearest_even", "tflite_xnnpack", "tosa"):
        got, want = (np.asarray(Interpreter(graph)(codes)[0]) for graph in (retarget(alone, other), graphs[other]))
        assert np.array_equal(got, want)


def test_constants_that_no_scale_explains_are_not_guessed(graphs):
    """A changed constant is no reason to believe the scales: the quantized graph is gone, and is not made up."""
    graph = graphs["tflite_micro"]
    node = next(node for node in graph.nodes if "multiplier" in node.constants)
    held = graph.tensors[node.constants["multiplier"]]
    changed = dataclasses.replace(held, value=np.asarray(held.value) + np.int32(1))
    edited = graph.replace(tensors={**graph.tensors, held.name: changed})
    assert edited.quantized is None
    with pytest.raises(
        ConversionError, match=f"'tflite_micro' does not derive from .*{node.name!r} .*Convert the model again"
    ):
        retarget(edited, "nearest_even")


def test_stages_are_not_mixed_up(graphs):
    program = graphs["nearest_even"]
    with pytest.raises(GraphError, match="Expected a quantized graph, got a program for 'nearest_even'"):
        assign(program, targets.get("tosa"))
    rounded = quantized_of(program).replace(nodes=program.nodes, tensors=program.tensors)
    with pytest.raises(GraphError, match="rule belong to a program for a target"):
        assign(rounded, targets.get("tosa"))


@pytest.mark.exhaustive
def test_scales_of_groups_take_the_rounding_of_the_target():
    x = data(4, 8)
    recipe = qjax.Recipe(weights=qjax.QSpec(bits=4, axis=-1, group_size=4, group_axis=0))
    qmodel = qjax.quantize(nnx.Linear(8, 3, rngs=nnx.Rngs(0)), recipe, x)
    qmodel.eval()
    graph, wanted = (qjax.convert(qmodel, x, target=name).ir for name in ("nearest_even", "tflite_micro"))
    assert wanted.nodes[-1].attributes["rounding"] == "nearest_away"
    assert_equal(retarget(graph, "tflite_micro"), wanted)
    assert retarget(graph.replace(quantized=None), "tflite_micro").nodes[-1].attributes == wanted.nodes[-1].attributes


@pytest.mark.exhaustive
def test_unknown_targets_are_named(graphs):
    with pytest.raises(ValueError, match="Unknown target 'tensorrt'"):
        retarget(graphs["tvm"], "tensorrt")


def test_a_graph_without_scales_is_refused(graphs):
    graph = graphs["tvm"]
    name = graph.nodes[0].output
    bare = dataclasses.replace(graph.tensors[name], quantization=None)
    with pytest.raises(ValueError, match=f"a scale for the tensor {name!r}"):
        retarget(graph.replace(tensors={**graph.tensors, name: bare}), "tosa")


@pytest.mark.exhaustive
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
