"""What qjax writes to .tflite comes back as the very graph, and without its metadata as one with the same codes."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

import qjax
from qjax.assign.retarget import retarget
from qjax.contrib.importers import tflite as reader
from qjax.contrib.importers.tflite.written_by_qjax import compared
from qjax.export.emit.tflite import to_bytes
from qjax.export.read_errors import ReadError
from qjax.export.tflite_schema.model import parse
from qjax.graph.check import check_integer
from qjax.run.interpreter import Interpreter
from tests.contrib.importers import tflite_cases as cases
from tests.export.emit.tflite_runtimes import TARGETS, random_codes
from tests.export.graphs import assert_equal
from tests.layers.round_trip import data


class Everything(nnx.Module):
    """Products of every layout, pools, sums, moves, clamps, and an affine step that needs a table."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.stem = nnx.Conv(2, 4, (3, 3), rngs=rngs)
        self.grouped = nnx.Conv(4, 8, (3, 3), feature_group_count=2, strides=2, rngs=rngs)
        self.depthwise = nnx.Conv(4, 8, (3, 3), feature_group_count=4, rngs=rngs)
        self.line = nnx.Conv(4, 3, (3,), rngs=rngs)
        self.heads = nnx.LinearGeneral(4, (2, 3), rngs=rngs)
        self.out = nnx.LinearGeneral((2, 3), 5, axis=(-2, -1), use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array):
        y = nnx.relu(self.stem(x))
        row = y[:, 0]
        with jax.numpy_dtype_promotion("standard"):
            pooled = nnx.avg_pool(y, (3, 3), (2, 2), padding="SAME", count_include_pad=False)
        return {
            "grouped": self.grouped(y),
            "depthwise": nnx.relu6(self.depthwise(y)),
            "line": self.line(row),
            "mixed": self.out(self.heads(row)),
            "pooled": pooled,
            "sum": (y + y) * 0.7,
            "mean": y.mean(axis=(1, 2)),
            "turned": row.transpose(0, 2, 1)[:, ::2],
        }


@pytest.fixture(scope="module")
def graph():
    x = data(4, 6, 6, 2)
    qmodel = qjax.quantize(Everything(), qjax.Recipe(target="tflite_micro"), x)
    qmodel.eval()
    return qjax.convert(qmodel, x).ir


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("group", "target"),
    [
        ("weighted", "tflite_reference"),
        ("weighted", "tflite_micro"),
        ("weighted", "tflite_xnnpack"),
        ("elementwise", "tflite_reference"),
        ("moves", "tflite_reference"),
    ],
)
def test_what_was_read_is_written_and_read_again(group, target):
    made = reader.read(getattr(cases, group)("int8"), target=target)
    assert_equal(reader.read(to_bytes(made)), made)


@pytest.mark.parametrize("cell", [nnx.GRUCell, nnx.LSTMCell])
@pytest.mark.sampled(1)
def test_steps_of_a_recurrent_layer_share_their_weights(cell, tmp_path):
    """Every step reads the same constants: they are there once, and the graph comes back."""
    layer, x = nnx.RNN(cell(3, 4, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1)), data(2, 3, 3)
    qmodel = qjax.quantize(layer, qjax.Recipe(target="tflite_xnnpack"), x)
    qmodel.eval()
    graph = qjax.convert(qmodel, x)
    written = to_bytes(graph.ir)
    held = [tensor.name for tensor in parse(written).tensors if tensor.span is not None and tensor.dtype == "int8"]
    kernels = {node.constants["kernel"] for node in graph.ir.nodes if "kernel" in node.constants}
    assert [name for name in held if name in kernels] == sorted(kernels, key=held.index)
    assert_equal(reader.read(written), graph.ir)


class Twice(nnx.Module):
    """One layer behind two scales: its bias has two steps."""

    def __init__(self):
        self.layer = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array):
        return self.layer(jax.nn.relu(self.layer(x)) * 3)


def test_one_constant_behind_two_scales():
    x = data(3, 4)
    qmodel = qjax.quantize(Twice(), qjax.Recipe(target="tflite_xnnpack"), x)
    qmodel.eval()
    graph = qjax.convert(qmodel, x)
    first, second = (node for node in graph.ir.nodes if "kernel" in node.constants)
    shared = {role: first.constants[role] for role in ("kernel", "bias")}
    gone = {second.constants[role] for role in shared}
    nodes = [
        dataclasses.replace(node, constants={**node.constants, **shared}) if node is second else node
        for node in graph.ir.nodes
    ]
    tensors = {name: tensor for name, tensor in graph.ir.tensors.items() if name not in gone}
    made = check_integer(graph.ir.replace(nodes=tuple(nodes), tensors=tensors))
    written = to_bytes(made)
    held = [tensor for tensor in parse(written).tensors if tensor.span is not None]
    assert [tuple(tensor.shape) for tensor in held].count((4, 4)) == 1
    assert [tuple(tensor.shape) for tensor in held if tensor.dtype == "int32"].count((4,)) == 2
    assert_equal(reader.read(written), made)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("qjax.export.document.deflated", lambda text: text)
        assert len(to_bytes(made)) > len(written)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_the_graph_comes_back(tmp_path, graph, target):
    made = retarget(graph, target)
    path = tmp_path / "model.tflite"
    path.write_bytes(to_bytes(made))
    assert_equal(qjax.read(path).ir, made)
    assert_equal(reader.read(to_bytes(made, batch=3)), made)


@pytest.mark.exhaustive
def test_packed_weights_come_back():
    x = data(4, 6)
    qmodel = qjax.quantize(
        nnx.Linear(6, 5, rngs=nnx.Rngs(0)),
        qjax.Recipe(target="tflite_reference", weights=qjax.QSpec(bits=4, axis=-1)),
        x,
    )
    qmodel.eval()
    made = qjax.convert(qmodel, x).ir
    packed = to_bytes(made, int4=True)
    assert "int4" in {tensor.dtype for tensor in parse(packed).tensors}
    assert_equal(reader.read(packed), made)


@pytest.mark.slow
def test_another_target_is_asked_for(graph):
    made = retarget(graph, "tflite_reference")
    assert_equal(reader.read(to_bytes(made), target="onnxruntime"), retarget(made, "onnxruntime"))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_operators_alone_give_the_same_codes():
    """Read as a stranger's file, with operators that only qjax's own lowering puts there."""

    class Plain(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.stem, self.depthwise = (
                nnx.Conv(2, 4, (3, 3), rngs=rngs),
                nnx.Conv(4, 4, 3, feature_group_count=4, rngs=rngs),
            )
            self.head = nnx.Linear(4 * 9, 6, rngs=rngs)

        def __call__(self, x: jax.Array):
            x = nnx.relu(self.stem(x))
            y = nnx.max_pool(x + x, (2, 2), (2, 2))
            return self.head(y.reshape(y.shape[0], -1)), self.depthwise(x[:, 0]).mean(axis=1)

    x = data(4, 6, 6, 2)
    qmodel = qjax.quantize(Plain(), qjax.Recipe(target="tflite_micro"), x)
    qmodel.eval()
    for target in ("tflite_reference", "tflite_xnnpack"):
        made = retarget(qjax.convert(qmodel, x).ir, target)
        again = reader.read(to_bytes(made), target=target, metadata=False)
        codes = random_codes(made, 8)
        for a, b in zip(Interpreter(made)(*codes), Interpreter(again)(*codes), strict=True):
            assert np.array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.slow
def test_a_file_that_was_changed_is_refused(graph):
    """One weight: the file is whole, and is no longer what the metadata's graph was."""
    made = retarget(graph, "tflite_reference")
    written = to_bytes(made)
    model = parse(written)
    kernel = next(t for t in model.tensors if t.span is not None and t.dtype == "int8" and t.size > 8)
    assert kernel.span is not None
    changed = bytearray(written)
    changed[kernel.span[0]] ^= 1
    assert compared(parse(bytes(changed)), model) != ""
    # the file's own data counts: the graph has the new weight
    assert reader.read(bytes(changed)).target == "tflite_reference"
    swapped = next(o for o in model.operators if o.name == "CONV_2D")
    assert swapped.options["stride_w"] >= 1
    with pytest.MonkeyPatch.context() as patched:
        # not compressed, so that the text can be changed
        for name in ("deflated", "inflated"):
            patched.setattr(f"qjax.export.document.{name}", lambda text: text)
        written = to_bytes(made)
        assert reader.read(written).target == "tflite_reference"
        forged = written.replace(b'"strides":[1,1]', b'"strides":[1,2]', 1)
        assert forged != written
        with pytest.raises(ReadError, match=r"differs from what the target|does not describe the file|is damaged"):
            reader.read(forged)
