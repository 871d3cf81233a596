"""Recurrent networks in ONNX, style "integer": one Scan over the steps, with the interpreter's codes."""

from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime
import pytest
from flax import nnx

import qjax
from qjax.contrib.importers.onnx import written_by_qjax
from qjax.export import document
from qjax.export.emit.onnx import integer, tensors
from qjax.export.read_errors import ReadError
from qjax.run.interpreter import Interpreter
from tests.export.emit.test_c_loops import CHAINS
from tests.run.test_find_loops import Both, Recurrent, Stack, converted, recurrent

NETWORKS = {
    "last": (lambda: Recurrent(), (2, 4, 3)),
    "steps": (lambda: Recurrent(every=True, reverse=True), (2, 4, 3)),
    "both": (lambda: Both(), (2, 4, 3)),
}
SCANS = {"last": 1, "steps": 1, "both": 2, "no_loop": 0}


class Layers(nnx.Module):
    """Flax's own recurrent layers, one on the other."""

    def __init__(self) -> None:
        self.first = nnx.RNN(nnx.LSTMCell(3, 4, rngs=nnx.Rngs(0)))
        self.second = nnx.RNN(nnx.GRUCell(4, 4, rngs=nnx.Rngs(1)), return_carry=True)

    def __call__(self, x):
        first: Any = self.first(x)
        carry, y = cast("Any", self.second(first))
        return y[:, -1], carry


def scans(model: onnx.ModelProto) -> int:
    return sum(node.op_type == "Scan" for node in model.graph.node)


def check(graph, inputs, **options) -> onnx.ModelProto:
    """The file has the codes of the graph in ONNX Runtime, and is read back as the graph."""
    model = integer.to_model(graph, **options)
    onnx.checker.check_model(model)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    found: Any = session.run(None, {entry.name: x for entry, x in zip(session.get_inputs(), inputs, strict=True)})
    wanted = [np.asarray(x) for x in Interpreter(graph)(*inputs)]
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    assert [entry.name for entry in session.get_outputs()] == list(graph.outputs)
    again = written_by_qjax.read(model)
    for ours, theirs in zip(graph.nodes, again.nodes, strict=True):
        assert document.of_node(ours) == document.of_node(theirs)
    assert list(again.tensors) == list(graph.tensors)
    for name, tensor in graph.tensors.items():
        if tensor.value is not None:
            np.testing.assert_array_equal(again.tensors[name].value, np.asarray(tensor.value))
    return model


@pytest.mark.parametrize("name", CHAINS)
def test_states_and_outputs_of_every_kind(name: str) -> None:
    rng = np.random.RandomState(0)
    model = check(CHAINS[name], [rng.randint(-1000, 1000, (2, 4)).astype(np.int32) for _ in range(2)])
    assert scans(model) == SCANS.get(name, 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name", ["last", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("steps", "both"))]
)
def test_recurrent_layers(name: str) -> None:
    made, shape = NETWORKS[name]
    _, graph, x = recurrent(4) if name == "last" else converted(made(), shape)
    codes = [np.asarray(graph.quantize(x))]
    assert scans(check(graph.ir, codes)) == SCANS[name]
    other = np.concatenate([codes[0], codes[0][::-1]])
    assert scans(check(graph.ir, [other], batch=4)) == SCANS[name]


def test_layers_with_weights_of_their_own_are_no_loop() -> None:
    _, graph, x = converted(Stack(5), (2, 4))
    assert scans(check(graph.ir, [np.asarray(graph.quantize(x))])) == 0


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_file_does_not_grow_with_the_steps(tmp_path) -> None:
    sizes, nodes = [], []
    for steps in (8, 32):
        x = jnp.asarray(np.random.default_rng(0).normal(size=(2, steps, 3)), jnp.float32)
        qmodel = qjax.quantize(Layers(), qjax.Recipe(), x)
        qjax.calibrate(qmodel, [x])
        qmodel.eval()
        graph = qjax.convert(qmodel, x)
        model = check(graph.ir, [np.asarray(graph.quantize(x))])
        sizes.append(len(model.SerializeToString()))
        nodes.append([node.op_type for node in model.graph.node])
        graph.emit("onnx", tmp_path / "model.onnx")
        np.testing.assert_array_equal(
            qjax.read(tmp_path / "model.onnx").run(graph.quantize(x))[0], graph.run(graph.quantize(x))[0]
        )
    assert nodes[0] == nodes[1]
    assert nodes[0].count("Scan") == 2
    assert len(graph.ir.nodes) > 10 * len(nodes[0])
    # the names of all nodes are in the metadata
    assert sizes[1] < 1.5 * sizes[0]


def test_a_changed_body_and_a_damaged_document_are_refused() -> None:
    _, graph, _ = recurrent(4)
    model = integer.to_model(graph.ir)
    body = next(a.g for node in model.graph.node if node.op_type == "Scan" for a in node.attribute if a.name == "body")
    body.node[0].op_type = "Identity"
    with pytest.raises(ReadError, match="does not describe the file"):
        written_by_qjax.read(model)
    model = integer.to_model(graph.ir)
    facts = tensors.taken(model)
    del model.metadata_props[:]
    tensors.put(model, {**facts, "document": facts["document"][:-80]})
    with pytest.raises(ReadError, match="damaged"):
        written_by_qjax.read(model)


def test_a_document_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    text = document.compressed(CHAINS["state"], ())
    assert document.uncompressed(text)["nodes"]
    monkeypatch.setattr(document, "MAX_TEXT", 100)
    with pytest.raises(ValueError, match="damaged or larger than 100 bytes"):
        document.uncompressed(text)
