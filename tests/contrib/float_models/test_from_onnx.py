"""`qjax.from_onnx`: what the module is, what it computes, that it trains and converts, and what it refuses."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime
import optax
import pytest
from flax import nnx
from onnx import TensorProto, helper

import qjax
from qjax.export.read_errors import ReadError
from tests.contrib.float_models.onnx_nets import Net, attention, cnn


@pytest.fixture
def opened(tmp_path):
    """Saves a model and opens it."""

    def open_(model: onnx.ModelProto) -> Any:
        onnx.save(model, tmp_path / "model.onnx")
        return qjax.from_onnx(tmp_path / "model.onnx")

    return open_


def images(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, 3, 8, 8)).astype(np.float32)


def runtime(model: onnx.ModelProto, *inputs: np.ndarray) -> Any:
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return session.run(None, {port.name: x for port, x in zip(session.get_inputs(), inputs, strict=True)})


def test_weights_have_the_names_and_shapes_of_the_file(opened):
    model = opened(cnn())
    names = model.parameter_names
    assert names["stem.conv.weight"] == "stem.conv.weight"
    assert names["block.0.bias"] == "block.0.bias"
    for proto in cnn().graph.initializer[:-1]:
        if proto.data_type == TensorProto.FLOAT:
            value: Any = model
            for part in names[proto.name].split("."):
                value = getattr(value, part)
            np.testing.assert_array_equal(value[...], onnx.numpy_helper.to_array(proto))
            assert type(value) is (nnx.BatchStat if "running" in proto.name else nnx.Param)
    assert (model.input_names, model.output_names) == (("x",), ("scores",))


@pytest.mark.parametrize("count", [1, 5])
def test_it_computes_what_onnx_runtime_does_for_any_batch(opened, count: int):
    proto, x = cnn(), images(count)
    np.testing.assert_allclose(opened(proto)(x), runtime(proto, x)[0], 1e-4, 1e-5)


def test_channels_move_once(opened):
    """At the input, and before the features are flattened."""
    model = opened(cnn())
    equations = jax.make_jaxpr(lambda x: model(x))(images(2)).eqns
    assert sum(eqn.primitive.name == "transpose" for eqn in equations) == 2


def test_shuffled_channels_stay_last(opened):
    """As in ShuffleNet: a reshape splits the channels, a transposition swaps the parts, a reshape joins them."""
    n = Net()
    n.node("Conv", "x", n.weight("a.weight", 6, 3, 1, 1), out="a")
    n.node("Reshape", "a", n.constant("split", np.array([0, 2, 3, 8, 8])), out="b")
    n.node("Transpose", "b", out="c", perm=[0, 2, 1, 3, 4])
    n.node("Reshape", "c", n.constant("join", np.array([0, -1, 8, 8])), out="d")
    n.node("Conv", "d", n.weight("e.weight", 4, 6, 1, 1), out="e")
    n.node("Transpose", "e", out="y", perm=[0, 2, 3, 1])
    proto, x = n.model({"x": (TensorProto.FLOAT, ["n", 3, 8, 8])}, ["y"]), images(2)
    model = opened(proto)
    np.testing.assert_allclose(model(x), runtime(proto, x)[0], 1e-5, 1e-6)
    # One at the input, and one of the parts.
    assert sum(eqn.primitive.name == "transpose" for eqn in jax.make_jaxpr(model)(x).eqns) == 2


def test_split_channels_that_are_no_shuffle(opened):
    n = Net()
    n.node("Conv", "x", n.weight("a.weight", 6, 3, 1, 1), out="a")
    n.node("Reshape", "a", n.constant("split", np.array([0, 2, 3, 8, 8])), out="b")
    n.node("ReduceMax", "b", out="y", axes=[2], keepdims=0)
    proto, x = n.model({"x": (TensorProto.FLOAT, ["n", 3, 8, 8])}, ["y"]), images(2)
    np.testing.assert_allclose(opened(proto)(x), runtime(proto, x)[0], 1e-5, 1e-6)


def test_a_batch_that_the_file_fixes(opened):
    """A class token is repeated, and the sizes of reshapes follow the batch."""
    model, x = opened(attention(1)), np.random.default_rng(0).normal(size=(3, 4, 8)).astype(np.float32)
    whole = [
        np.concatenate(parts) for parts in zip(*(runtime(attention(1), x[i : i + 1]) for i in range(3)), strict=True)
    ]
    found = model(x)
    assert list(found) == ["y", "j"]
    for got, want in zip(found.values(), whole, strict=True):
        np.testing.assert_allclose(got, want, 1e-5, 1e-6)


def test_several_inputs_by_name(opened):
    n = Net()
    n.node("Sub", "first", "second", out="y")
    model = opened(n.model({name: (TensorProto.FLOAT, ["n", 2]) for name in ("first", "second")}, ["y"]))
    a, b = np.ones((3, 2), np.float32), np.full((3, 2), 3, np.float32)
    for found in (model(a, b), model(a, second=b), model({"second": b, "first": a})):
        np.testing.assert_array_equal(found, a - b)
    with pytest.raises(TypeError, match=r"takes first \(float32, anyx2\), second .*; got float32\[3,2\]"):
        model(a)


def test_statistics_move_in_training_only(opened):
    model, x = opened(cnn()), images(8)
    before = model.stem.bn.running_mean[...]
    model(x)
    np.testing.assert_array_equal(model.stem.bn.running_mean[...], before)
    model.train()
    assert model.deterministic is False
    model(x)
    assert not np.array_equal(model.stem.bn.running_mean[...], before)


def test_it_trains(opened):
    n = Net()
    n.node("Gemm", "x", n.weight("fc1.weight", 6, 4), n.weight("fc1.bias", 6), out="a", transB=1)
    n.node("Relu", "a", out="b")
    n.node("MatMul", "b", n.weight("fc2", 6, 3), out="y")
    model = opened(n.model({"x": (TensorProto.FLOAT, ["n", 4])}, ["y"]))
    x, wanted = (np.random.default_rng(i).normal(size=(16, size)).astype(np.float32) for i, size in ((1, 4), (2, 3)))
    qmodel = qjax.quantize(model, qjax.Recipe(), x)
    optimizer = nnx.Optimizer(qmodel, optax.sgd(1e-2), wrt=nnx.Param)
    losses = []
    for _ in range(2):

        def loss(qmodel):
            return jnp.mean((qmodel(x) - wanted) ** 2)

        value, gradient = nnx.value_and_grad(loss)(qmodel)
        optimizer.update(qmodel, gradient)
        losses.append(float(value))
    assert losses[-1] < losses[0]
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(nnx.state(qmodel, nnx.Param)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("target", "file"), [("tflite_reference", "litert"), ("onnxruntime", "onnxruntime")])
def test_no_code_differs_between_exact_graph_and_file(opened, target: str, file: str):
    model, x = opened(cnn()), images(8)
    qmodel = qjax.quantize(model, qjax.Recipe(target=target), x)
    qjax.calibrate(qmodel, [x])
    graph = qjax.convert(qmodel, x)
    np.testing.assert_array_equal(qjax.exact(qmodel, x)(qmodel, x), graph(x))
    report = qjax.verify(graph, qmodel, [x], runtimes=[file])
    assert "no code of 80 differs" in str(report)
    # The scales are named after the file's weights.
    assert {"stem/conv/weight", "fc/weight"} <= set(qmodel.qparams())


# ---------------------------------------------------------------------- weights in other files


def test_weights_beside_the_model(tmp_path):
    proto, x = cnn(), images(2)
    onnx.save(proto, tmp_path / "model.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    assert (tmp_path / "weights.bin").exists()
    np.testing.assert_allclose(qjax.from_onnx(tmp_path / "model.onnx")(x), runtime(cnn(), x)[0], 1e-4, 1e-5)


@pytest.mark.parametrize("location", ["../weights.bin", "/etc/passwd", "", ".", "link/weights.bin"])
def test_no_file_outside_of_the_folder_is_opened(tmp_path, location: str):
    (tmp_path / "weights.bin").write_bytes(bytes(10_000))
    folder = tmp_path / "inner"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path)
    proto = cnn()
    tensor = proto.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    entry = tensor.external_data.add()
    entry.key, entry.value = "location", location
    (folder / "model.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(ReadError, match=r"no file outside of the model's folder"):
        qjax.from_onnx(folder / "model.onnx")


# ---------------------------------------------------------------------- refusals


def test_every_unknown_operator_is_listed(opened):
    model = helper.make_model(
        helper.make_graph(
            [
                helper.make_node("STFT", ["x", "step"], ["a"], name="spectrum"),
                helper.make_node("MyOp", ["a"], ["y"], name="mine", domain="com.me"),
            ],
            "g",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 64, 1])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
            [onnx.numpy_helper.from_array(np.array(8), "step")],
        ),
        opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("com.me", 1)],
        ir_version=9,
    )
    with pytest.raises(qjax.Unsupported, match="2 parts of the model are not supported") as error:
        opened(model)
    assert "STFT 'spectrum'" in str(error.value)
    assert "com.me.MyOp 'mine'" in str(error.value)


def test_a_quantized_file_belongs_to_another_reader(opened):
    n = Net()
    n.constant("s", np.array(0.1, np.float32))
    n.node("QuantizeLinear", "x", "s", out="q")
    n.node("DequantizeLinear", "q", "s", out="y")
    with pytest.raises(qjax.Unsupported, match=r"the file is quantized: .*qjax\.read\(path\)"):
        opened(n.model({"x": (TensorProto.FLOAT, [1, 2])}, ["y"]))


def test_damaged_and_missing_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="check the path"):
        qjax.from_onnx(tmp_path / "none.onnx")
    data = cnn().SerializeToString()
    for cut in (0, 10, len(data) // 2):
        (tmp_path / "cut.onnx").write_bytes(data[:cut])
        with pytest.raises(ReadError, match=r"cut\.onnx: "):
            qjax.from_onnx(tmp_path / "cut.onnx")
    (tmp_path / "large.onnx").write_bytes(data)
    with pytest.raises(ReadError, match="expected at most 10 bytes"):
        qjax.from_onnx(tmp_path / "large.onnx", max_bytes=10)


def test_arguments_that_the_model_does_not_take(opened):
    model = opened(cnn())
    with pytest.raises(TypeError, match="expected float32, got float64"):
        model(images(1).astype(np.float64))
    with pytest.raises(ValueError, match=r"expected x \(float32, anyx3x8x8\), got an array of shape \[1, 8, 8, 3\]"):
        model(images(1).transpose(0, 2, 3, 1))


def test_a_shape_that_depends_on_data(opened):
    n = Net()
    n.node("Reshape", "x", "shape", out="y")
    ports = {"x": (TensorProto.FLOAT, ["n", 4]), "shape": (TensorProto.INT64, [2])}
    model = opened(n.model(ports, ["y"]))
    x, shape = np.zeros((2, 4), np.float32), np.array([4, 2])
    assert model(x, shape).shape == (4, 2)
    with pytest.raises(qjax.Unsupported, match=r"Reshape '/y/Reshape': a shape, .* depends on an input"):
        jax.eval_shape(lambda x, s: model(x, s), x, shape.astype(np.int32))


def test_a_batch_that_cannot_follow(opened):
    """Elements at places that belong to the exported batch, as PyTorch writes `as_strided`."""
    n = Net()
    n.node("Reshape", "x", n.constant("flat", np.array([-1])), out="a")
    n.node("Gather", "a", n.constant("places", np.arange(8).reshape(1, 8)), out="y", axis=0)
    model = opened(n.model({"x": (TensorProto.FLOAT, [1, 8])}, ["y"]))
    assert model(np.zeros((1, 8), np.float32)).shape == (1, 8)
    with pytest.raises(qjax.Unsupported, match=r"Gather '/y/Gather': .*free batch: torch\.onnx\.export"):
        model(np.zeros((3, 8), np.float32))


def test_numbers_of_64_bits(opened):
    """Floats of 64 bits and integers beyond 32 bits are refused unless JAX computes with 64."""
    n = Net()
    n.node("Mul", "x", n.constant("large", np.array([2**40])), out="y")
    proto = n.model({"x": (TensorProto.INT64, ["n"])}, ["y"])
    proto.graph.output[0].type.tensor_type.elem_type = TensorProto.INT64
    with pytest.raises(qjax.Unsupported, match=r"integers from 1099511627776 .*jax_enable_x64"):
        jax.eval_shape(opened(proto), np.arange(3, dtype=np.int32))
    n = Net()
    n.node("Cast", "x", out="y", to=TensorProto.DOUBLE)
    proto = n.model({"x": (TensorProto.FLOAT, ["n"])}, ["y"])
    proto.graph.output[0].type.tensor_type.elem_type = TensorProto.DOUBLE
    model = opened(proto)
    with pytest.raises(qjax.Unsupported, match="jax_enable_x64"):
        model(np.zeros(3, np.float32))
