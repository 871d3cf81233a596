"""Tensors with several rows for each example: frames that are folded into the batch, pairs, flat results."""

import dataclasses
import functools
import subprocess
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax
from qjax.graph.batch_shapes import bytes_at, shapes_at
from qjax.reporting import counts
from qjax.runtimes.batches import batches
from qjax.runtimes.onnx import session_of


class Video(nnx.Module):
    """Frames are examples of the convolution."""

    def __init__(self):
        self.conv = nnx.Conv(2, 8, (3, 3), rngs=nnx.Rngs(0))
        self.dense = nnx.Linear(8, 3, rngs=nnx.Rngs(1))

    def __call__(self, x):
        batch, frames, *image = x.shape
        y = nnx.relu(self.conv(x.reshape(batch * frames, *image))).mean((1, 2))
        return self.dense(y.reshape(batch, frames, 8).mean(1))


class Flat(nnx.Module):
    """Every example has four rows of the result."""

    def __init__(self):
        self.dense = nnx.Linear(6, 3, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return nnx.relu(self.dense(x)).reshape(-1, 3)


class Windows(nnx.Module):
    """A recurrent layer over windows, which are examples of it."""

    def __init__(self):
        self.rnn = nnx.RNN(nnx.GRUCell(3, 4, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))

    def __call__(self, x):
        batch, windows, steps, features = x.shape
        y: Any = self.rnn(x.reshape(batch * windows, steps, features))
        return y[:, -1].reshape(batch, windows, 4)


class Pairs(nnx.Module):
    """Two inputs are one batch of twice the size."""

    def __init__(self):
        self.dense = nnx.Linear(6, 8, rngs=nnx.Rngs(0))

    def __call__(self, x):
        a, b = x[:, 0], x[:, 1]
        both = nnx.relu(self.dense(jnp.concatenate([a, b], 0))).reshape(2, a.shape[0], -1)
        return both[0] - both[1]


BATCH = 8
MODELS = {
    "video": (Video, (BATCH, 4, 5, 5, 2)),
    "flat": (Flat, (BATCH, 4, 6)),
    "pairs": (Pairs, (BATCH, 2, 6)),
    "windows": (Windows, (BATCH, 2, 4, 3)),
}


SIZES = [
    pytest.param(name, size, marks=[] if (name, size) in chosen else [pytest.mark.exhaustive])
    for chosen in [{("video", 3), ("flat", 1), ("pairs", 8), ("windows", 3)}]
    for name in MODELS
    for size in (1, 3, 8)
]
"""Every model and every size once; the others are for `make test-all`."""


@functools.cache
def converted(name: str, target: str = "onnxruntime") -> tuple[qjax.IntegerGraph, jax.Array]:
    build, shape = MODELS[name]
    x = jax.random.normal(jax.random.key(0), shape)
    qmodel = qjax.quantize(build(), qjax.Recipe(target=target), x)
    qmodel.eval()
    return qjax.convert(qmodel, x), x


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "size"), SIZES)
def test_shapes_are_those_of_the_interpreter(name, size):
    graph, x = converted(name)
    shapes = shapes_at(graph.ir, size)
    assert set(shapes) == set(graph.ir.tensors)
    output = graph.run(graph.quantize(x[:size]))
    assert shapes[graph.ir.outputs[0]] == output.shape
    assert bytes_at(graph.ir, size)[graph.ir.outputs[0]] == output.size
    assert any(shape[0] not in (size, 1) for name, shape in shapes.items() if None in graph.ir.tensors[name].shape)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "size"), SIZES)
def test_compiled_c(name, size):
    graph, x = converted(name)
    codes = np.asarray(graph.quantize(x[:size]))
    expected = np.asarray(graph.run(codes))
    found = graph.native(size).run(codes)
    assert found.shape == expected.shape
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled(2)
def test_emitted_c_tests_every_code(name, tmp_path):
    graph, _ = converted(name)
    graph.emit("c", tmp_path, name="net", batch=3, vectors=4)
    elements = 4 * int(np.prod(shapes_at(graph.ir, 3)[graph.ir.outputs[0]]))
    done = subprocess.run(["make", "-s", "-C", tmp_path, "test"], check=True, capture_output=True, text=True)
    assert f"net: 0 of {elements} codes differ" in done.stdout


@pytest.mark.parametrize("name", ["video", "flat", "windows"])
@pytest.mark.parametrize("style", ["qdq", "qoperator", "integer"])
@pytest.mark.parametrize("batch", [None, 3])
@pytest.mark.sampled(4)
def test_onnx_files(name, style, batch, tmp_path):
    graph, x = converted(name)
    path = tmp_path / "model.onnx"
    options: dict[str, Any] = {} if style == "integer" else {"codes": True}
    graph.emit("onnx", path, style=style, batch=batch, **options)
    session = session_of(str(path), threads=1)
    for size in (3,) if batch else (1, 8):
        codes = np.asarray(graph.quantize(x[:size]))
        (found,) = session.run(None, {session.get_inputs()[0].name: codes})
        assert np.array_equal(found, np.asarray(graph.run(codes)))
    assert len(qjax.read(path).ir.nodes) == len(graph.ir.nodes)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["video", "flat"])
def test_runtimes_are_compared_on_all_rows(name, tmp_path):
    graph, x = converted(name, "tflite_micro")
    graph.emit("tflite", tmp_path / "model.tflite", batch=3)
    codes = np.asarray(graph.quantize(x))
    done = list(batches(graph.ir, [codes], 3, whole=True))
    tensor = graph.ir.tensors[graph.ir.outputs[0]]
    taken = [len(one.examples_of(tensor, np.asarray(graph.run(one.arrays[0])))) for one in done]
    assert taken == ([3, 3, 2] if name == "video" else [12, 12, 12])


def test_what_a_folded_network_costs():
    graph, _ = converted("video")
    conv = next(node for node in graph.ir.nodes if node.name == "conv")
    assert counts.macs(graph.ir, conv, 2) == 2 * counts.macs(graph.ir, conv) == 2 * 4 * 5 * 5 * 9 * 2 * 8
    assert counts.peak_bytes(graph.ir, 2) == 2 * counts.peak_bytes(graph.ir, 1)


def test_a_batch_that_an_operation_does_not_take():
    graph, _ = converted("pairs")
    (shaped,) = (node for node in graph.ir.nodes if node.attributes.get("shape") == [2, None, 8])
    wrong = graph.ir.replace(
        nodes=tuple(
            node if node.name != shaped.name else dataclasses.replace(node, attributes={"shape": [3, None, 8]})
            for node in graph.ir.nodes
        )
    )
    assert shaped.output in shapes_at(graph.ir, 4)
    with pytest.raises(ValueError, match="cannot compute operands of shape"):
        shapes_at(wrong, 4)
