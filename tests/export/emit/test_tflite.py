"""Graphs as .tflite files: the living runtime of the target gives the graph's codes, node by node and as a whole."""

# flax annotates what its constructors make as optional or as a bare Module
# pyright: reportOptionalMemberAccess=false, reportAttributeAccessIssue=false, reportArgumentType=false

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import qjax
from conformance import cases, single
from qjax import targets
from qjax.assign.retarget import retarget
from qjax.export import document
from qjax.export.emit.tflite import emit, to_bytes
from qjax.graph.ir import Graph
from qjax.run.interpreter import Interpreter
from tests.export.emit.tflite_runtimes import MODES, TARGETS, compared, litert, micro, random_codes
from tests.layers.round_trip import data

INT4 = qjax.QSpec(bits=4, axis=-1)


class Images(nnx.Module):
    """Convolutions of every kind side by side, then pools, additions, gates and clamps."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        conv = lambda features, window=(3, 3), **options: nnx.Conv(4, features, window, rngs=rngs, **options)  # noqa: E731
        self.stem = nnx.Conv(2, 4, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.layers = nnx.Dict(
            strided=conv(5, strides=2),
            explicit=conv(8, strides=2, padding=((1, 1), (1, 1))),
            dilated=conv(8, kernel_dilation=2, padding="VALID"),
            grouped=conv(8, feature_group_count=2),
            depthwise=conv(8, feature_group_count=4),
            gaps=conv(4, kernel_dilation=2, feature_group_count=4),
            transposed=nnx.ConvTranspose(4, 3, (3, 3), strides=(2, 2), rngs=rngs),
        )
        self.head = nnx.Linear(4, 5, rngs=rngs)

    def __call__(self, x: jax.Array):
        y = nnx.relu(self.norm(self.stem(x)))
        found = {name: layer(y) for name, layer in self.layers.items()}
        found["residual"] = nnx.relu6(y + self.layers["gaps"](y))
        found["gate"] = y * jnp.max(y, axis=(1, 2), keepdims=True)
        with jax.numpy_dtype_promotion("standard"):
            found["average"] = nnx.avg_pool(y, (3, 3), (2, 2), padding="SAME")
            found["inside"] = nnx.avg_pool(y, (3, 3), (2, 2), padding="SAME", count_include_pad=False)
        found["maximum"] = nnx.max_pool(y, (3, 3), (2, 2), padding=((1, 1), (1, 1)))
        found["joined"] = jnp.concatenate([y, jnp.flip(y, (1, 2))], axis=-1)[:, 1::2]
        found["head"] = jnp.clip(self.head(jnp.mean(y, axis=(1, 2))), -0.4, 0.3)
        return found


class Sequences(nnx.Module):
    """Attention, general dense layers, one-dimensional convolutions, affine steps, moves."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.query, self.key = (nnx.LinearGeneral(4, (2, 3), rngs=rngs) for _ in range(2))
        self.out = nnx.LinearGeneral((2, 3), 5, axis=(-2, -1), rngs=rngs)
        self.conv = nnx.Conv(4, 8, (3,), padding="CAUSAL", rngs=rngs)
        self.weight = nnx.Param(jnp.asarray(np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)))

    def __call__(self, x: jax.Array):
        q, k = self.query(x), self.key(x)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        y = jnp.einsum("oi,bti->bot", self.weight[...], x)
        with jax.numpy_rank_promotion("allow"):
            steps = x * jnp.arange(1, 5, dtype=jnp.float32) + 0.3
        return {
            "scores": scores,
            "mixed": self.out(jnp.einsum("bhqk,bkhd->bqhd", scores, q)),
            "conv": self.conv(x),
            "left": y,
            "steps": steps,
            "added": nnx.relu((x + steps) * 0.7 + 0.1),
            "product": (x * steps) * 0.5 + 0.2,
            "summed": nnx.relu(jnp.sum(x, axis=1)),
            "subtracted": x - steps,
            "padded": lax.pad(x, jnp.float32(0), ((0, 0, 0), (1, 2, 1), (0, -1, 0))),
            "turned": jnp.broadcast_to(x[:, None, 1:3], (x.shape[0], 3, 2, 4)).transpose(0, 2, 1, 3),
            "part": jnp.split(x, 2, axis=2)[1],
            "clipped": jnp.clip(x, -0.5, 0.7),
        }


class Small(nnx.Module):
    """A dense layer behind a convolution, an addition and an average."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.stem = nnx.Conv(2, 4, (3, 3), rngs=rngs)
        self.depthwise = nnx.Conv(4, 4, (3, 3), feature_group_count=4, rngs=rngs)
        self.head = nnx.Linear(4 * 9, 6, rngs=rngs)

    def __call__(self, x: jax.Array):
        x = nnx.relu(self.stem(x))
        x = x + self.depthwise(x)
        x = lax.reduce_window(x, np.float32(0), lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") / np.float32(4)
        return self.head(x.reshape(x.shape[0], -1))


class Functions(nnx.Module):
    """Functions that the runtimes have kernels for, and one that is a table everywhere."""

    def __init__(self):
        self.dense = nnx.Linear(6, 12, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array):
        y = self.dense(x)
        return jax.nn.sigmoid(y), jnp.tanh(y), jax.nn.gelu(y), jax.nn.softmax(y)


class Choices(nnx.Module):
    """Masks, comparisons, indices, order."""

    def __init__(self):
        self.dense = nnx.Linear(6, 12, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array):
        y = self.dense(x)
        first = jnp.argmax(y, axis=1)
        values, places = lax.top_k(y, 3)
        return {
            "masked": jnp.where(y > np.float32(0.1), y, np.float32(-0.3)),
            "between": (y > np.float32(-0.2)) & (y <= np.float32(0.4)),
            "maximum": jnp.maximum(y, y[:, ::-1]),
            "minimum": jnp.min(y, axis=1),
            "first": first,
            "number": first.astype(jnp.float32) * np.float32(0.1),
            "best": jnp.take_along_axis(y, first[:, None], axis=1),
            "rows": y[:, np.array([3, 0, 11, 3])],
            "greatest": lax.cummax(y, axis=1),
            "sums": jnp.cumsum(y, axis=1),
            "quotient": y / y[:, ::-1],
            "values": values,
            "places": places,
        }


class Embedded(nnx.Module):
    def __init__(self):
        self.table = nnx.Embed(10, 6, rngs=nnx.Rngs(0))
        self.head = nnx.Linear(6, 5, rngs=nnx.Rngs(1))

    def __call__(self, tokens: jax.Array):
        return self.head(self.table(tokens))


def converted(model, x, **recipe) -> Graph:
    qmodel = qjax.quantize(model, qjax.Recipe(target="tflite_micro", **recipe), x)
    qmodel.eval()
    return qjax.convert(qmodel, x).ir


FOUR = qjax.QSpec(bits=4, symmetric=False)
WIDE = qjax.QSpec(bits=16)
MODELS = {
    "images": lambda: converted(Images(), data(8, 6, 6, 2)),
    "sequences": lambda: converted(Sequences(), data(8, 5, 4)),
    "small": lambda: converted(Small(), data(8, 6, 6, 2)),
    "small, int16x8": lambda: converted(Small(), data(8, 6, 6, 2), activations=WIDE, output_bits=16),
    "small, W4A4": lambda: converted(Small(), data(8, 6, 6, 2), weights=INT4, activations=FOUR),
    "functions": lambda: converted(Functions(), 3 * data(8, 6)),
    "choices": lambda: converted(Choices(), data(8, 6)),
    "embedding": lambda: converted(Embedded(), jnp.arange(24, dtype=jnp.int32).reshape(8, 3) % 10),
}
SLOW = ("images", "sequences")


@functools.cache
def model(name: str) -> Graph:
    return MODELS[name]()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in MODELS])
@pytest.mark.sampled(2)
def test_every_node_is_the_runtimes(name, target):
    count, wrong = compared(retarget(model(name), target), batch=16)
    assert count > 500
    assert wrong == {}


EDGES = {
    "fully connected": lambda: cases.fully_connected("int8", per_channel=True)[1::9],
    "convolution": lambda: cases.conv2d("int8", per_channel=True)[3::6],
    "depthwise": lambda: cases.depthwise_conv2d("int8", per_channel=False, channels=(16, 12, 7))[2::5],
    "from 16 to 8 bits": lambda: cases.rescale("int16", "int8")[:1],
    "mean": lambda: cases.mean("int8")[:1],
}
"""Accumulators and scales that separate one rounding from another."""


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", EDGES)
@pytest.mark.sampled(8)
def test_nodes_at_the_edges(kind, target):
    for case in EDGES[kind]():
        graph = single.graph_of(case, targets.get(target))
        (expected,) = Interpreter(graph)(*case.inputs)
        file = to_bytes(graph)
        if target == "tflite_micro":
            found = micro(file, case.inputs, graph.outputs)
        else:
            found = litert(file, MODES[target], case.inputs, every=False)
        assert np.array_equal(found["y"], expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", MODES)
@pytest.mark.parametrize("name", ["small", "choices"])
def test_another_batch(name, target):
    graph = retarget(model(name), target)
    inputs = random_codes(graph, 5)
    found = litert(to_bytes(graph), MODES[target], inputs, every=False)
    for output, expected in zip(graph.outputs, Interpreter(graph)(*inputs), strict=True):
        assert np.array_equal(found[output], expected), output


@pytest.mark.exhaustive
def test_what_the_file_says(tmp_path):
    graph = model("small, W4A4")
    path = tmp_path / "model.tflite"
    emit(graph, path)
    file = path.read_bytes()
    assert file == to_bytes(graph)
    assert file[4:8] == b"TFL3"
    # the bindings call everything optional
    schema: Any = importlib.import_module("ai_edge_litert.schema_py_generated")
    parsed = schema.ModelT.InitFromPackedBuf(file)
    held = {entry.name.decode(): bytes(parsed.buffers[entry.buffer].data) for entry in parsed.metadata}
    assert held["min_runtime_version"].rstrip(b"\0") == b"2.17.0"
    stated = document.read(held["qjax"], "")
    assert stated["target"] == "tflite_micro"
    assert [node["name"] for node in stated["nodes"]] == [node.name for node in graph.nodes]
    (signature,) = parsed.signatureDefs
    assert signature.signatureKey == b"serving_default"
    assert [entry.name.decode() for entry in signature.inputs] == list(graph.inputs)
    tensors = parsed.subgraphs[0].tensors
    named = {tensor.name.decode(): tensor for tensor in tensors}
    assert len(named) == len(tensors)
    assert set(graph.outputs) | {node.output for node in graph.nodes} <= set(named)
    # two codes per byte in the convolution, in the file once
    kernel = named[next(node for node in graph.nodes if node.op == "conv").constants["kernel"]]
    assert kernel.type == schema.TensorType.INT4
    assert len(parsed.buffers[kernel.buffer].data) == kernel.shape.prod() // 2
    assert kernel.quantization.quantizedDimension == 0
    data_of = [bytes(buffer.data) for buffer in parsed.buffers if buffer.data is not None]
    assert len(set(data_of)) == len(data_of)
    read = schema.Model.GetRootAs(file)
    for index in range(read.BuffersLength()):
        buffer = read.Buffers(index)
        if buffer.DataLength():
            start = buffer._tab.Vector(buffer._tab.Offset(4))
            assert start % 16 == 0


def test_other_targets_say_why():
    with pytest.raises(ValueError, match=r"contains scales but no rounding.*'nearest_even'.*retarget.*emit\('onnx'\)"):
        to_bytes(retarget(model("small"), "nearest_even"))


def test_every_problem_is_listed():
    x = data(8, 6, 6, 2)
    unsigned = converted(Small(), x, activations=qjax.QSpec(bits=8, signed=False, symmetric=False))
    with pytest.raises(ValueError, match="codes of uint8") as caught:
        to_bytes(unsigned)
    assert str(caught.value).count("TFLite's kernels take signed codes") == 7
    asymmetric = converted(Small(), x, weights=qjax.QSpec(bits=8, axis=-1, symmetric=False))
    with pytest.raises(ValueError, match="weights with a zero point") as caught:
        to_bytes(asymmetric)
    assert "3 parts of the graph" in str(caught.value)
    assert "test_tflite.py:" in str(caught.value)


def test_constants_that_the_runtime_would_not_make():
    graph = model("small")
    name = graph.nodes[0].constants["multiplier"]
    tensor = graph.tensors[name]
    other = type(tensor)(tensor.name, tensor.shape, tensor.dtype, None, np.asarray(tensor.value) + np.int32(1))
    with pytest.raises(ValueError, match=r"not those that 'tflite_micro' makes of the scales.*retarget"):
        to_bytes(graph.replace(tensors={**graph.tensors, name: other}))


@pytest.mark.parametrize("batch", [0, -1, True, 2.0])
def test_the_batch_is_a_number(batch):
    with pytest.raises(ValueError, match="expected a batch of 1 or more"):
        to_bytes(model("small"), batch=batch)
