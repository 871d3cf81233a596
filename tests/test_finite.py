"""NaN and infinity: in parameters, statistics, scales and inputs; what every runtime makes of them."""

# pyright: reportAttributeAccessIssue=false

import functools

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from flax import nnx

import qjax
from qjax.export.tflite_schema.file import File, Scales
from qjax.graph.check import GraphError, check_integer
from qjax.graph.ir import Tensor
from tests.export.emit.onnx_runs import by_onnxruntime
from tests.export.emit.tflite_runtimes import litert, micro
from tests.layers.round_trip import data


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.a, self.n, self.b = nnx.Linear(6, 5, rngs=rngs), nnx.BatchNorm(5, rngs=rngs), nnx.Linear(5, 3, rngs=rngs)
        self.unread = nnx.Param(jnp.full((2,), jnp.nan))
        self.mask = nnx.Variable(jnp.asarray([0.0, -jnp.inf, 0.0]))

    def __call__(self, x):
        x = self.b(nnx.relu(self.n(self.a(x))))
        return jnp.where(self.mask[...][None] < 0, jnp.zeros_like(x), x)


X = data(4, 6)


@pytest.fixture(scope="module")
def qmodel():
    model = qjax.quantize(Net(), qjax.Recipe(), X)
    model.eval()
    return model


@pytest.fixture(scope="module")
def graph(qmodel):
    return qjax.convert(qmodel, X)


def spoiled(qmodel, path, value, count=1):
    copy = nnx.clone(qmodel)
    variable = functools.reduce(getattr, path, copy.model)
    array = np.array(variable[...])
    array.reshape(-1)[:count] = value
    variable[...] = jnp.asarray(array)
    return copy


PARAMETERS = ["a/kernel", "a/bias", "n/scale", "n/bias", "n/mean", "n/var", "b/kernel", "b/bias"]


def test_quantize_names_parameters():
    model = nnx.Sequential(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(3, 2, rngs=nnx.Rngs(0)))
    model.layers[0].kernel[...] = model.layers[0].kernel[...].at[0, 0].set(jnp.nan)
    with pytest.raises(ValueError, match="Parameters that are not finite: layers/0/kernel: 1 NaN and 0 infinite of 12"):
        qjax.quantize(model, qjax.Recipe(), np.ones((2, 4), np.float32))


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.sampled(8)
def test_parameters_and_statistics(qmodel, graph, name, value):
    bad = spoiled(qmodel, name.split("/"), value, 2)
    counts = "2 NaN and 0 infinite" if np.isnan(value) else "0 NaN and 2 infinite"
    for what, call in {
        "convert": lambda: qjax.convert(bad, X),
        "verify": lambda: qjax.verify(graph, bad, [X]),
    }.items():
        with pytest.raises(ValueError, match=rf"{what}: expected finite parameters, got {name}: {counts} of \d+\."):
            call()


def test_the_exact_forward(qmodel):
    bad = spoiled(qmodel, ("a", "kernel"), np.nan)
    with pytest.raises(ValueError, match="expected finite parameters, got a/kernel: 1 NaN"):
        qjax.exact(bad, X)
    forward = qjax.exact(qmodel, X)
    with pytest.raises(ValueError, match="expected finite parameters, got a/kernel: 1 NaN"):
        forward(bad, X)
    # inside jit nothing can be raised
    jitted = nnx.jit(forward)
    assert np.isnan(np.asarray(jitted(bad, X))).any()
    assert np.isnan(np.asarray(jitted(qmodel, X.at[1, 2].set(jnp.nan)))).any()
    assert np.array_equal(jitted(qmodel, X), qjax.convert(qmodel, X)(X))


def test_scales(qmodel):
    bad = nnx.clone(qmodel)
    bad.quantizers["a"].log2_scale[...] = jnp.asarray(jnp.nan)
    with pytest.raises(ValueError, match="got quantizer a, log2_scale: 1 NaN and 0 infinite of 1"):
        qjax.convert(bad, X)


def test_calibration(qmodel):
    for value in (jnp.nan, jnp.inf):
        with pytest.raises(ValueError, match=r"Quantizer .input.: .* expected finite calibration data"):
            qjax.calibrate(nnx.clone(qmodel), [X.at[0, 0].set(value)])


def test_constants_of_a_float_island(tmp_path):
    class Half(nnx.Module):
        def __init__(self):
            self.a, self.b = (nnx.Linear(4, 4, rngs=nnx.Rngs(0)) for _ in range(2))

        def __call__(self, x):
            return self.b(self.a(x))

    x = data(2, 4)
    qmodel = qjax.quantize(Half(), qjax.Recipe(overrides={"b": qjax.FLOAT}), x)
    qmodel.eval()
    graph = qjax.convert(qmodel, x)
    name = next(t.name for t in graph.ir.constants() if t.dtype == "float32" and t.shape == (4, 4))
    value = np.array(graph.ir.tensors[name].value)
    value[0, :2] = np.nan
    bad = graph.ir.replace(tensors={**graph.ir.tensors, name: Tensor(name, (4, 4), "float32", None, value)})
    for call in (lambda: check_integer(bad), lambda: qjax.IntegerGraph(bad).save(tmp_path / "model.qjax")):
        with pytest.raises(GraphError, match=rf"Constant '{name}': expected numbers, got 2 NaN of 16"):
            call()
    assert not (tmp_path / "model.qjax").exists()


# ---------------------------------------------------------------------------- inputs


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_graph_refuses_them_in_its_inputs(graph, value, tmp_path):
    x = X.at[0, :2].set(value)
    counts = "2 NaN and 0 infinite" if np.isnan(value) else "0 NaN and 2 infinite"
    graph.save(tmp_path / "model.qjax")
    loaded = qjax.load(tmp_path / "model.qjax")
    for call in (graph, graph.quantize, loaded, graph.retarget("tflite_micro")):
        for given in (x, np.asarray(x), x.astype(jnp.bfloat16)):
            with pytest.raises(ValueError, match=f"Input 'input': expected finite numbers, got {counts}"):
                call(given)
    # in a trace: the zero point, and the ends of the range
    q = graph.ir.tensors["input"].quantization
    code = int(q.zero_point) if np.isnan(value) else q.qmax if value > 0 else q.qmin
    assert np.asarray(jax.jit(graph.quantize)(x))[0, :2].tolist() == [code, code]
    assert np.array_equal(jax.jit(graph)(x), graph.dequantize(graph.run(jax.jit(graph.quantize)(x))))


SPECIAL = np.array([np.nan, -np.nan, np.inf, -np.inf, 3e38, -3e38, 0.34], np.float32)
LOW, HIGH = -128, 127
BY_RUNTIME = {
    # NaN, -NaN, inf, -inf, and two finite numbers beyond 2^31 steps
    "reference": [LOW] * 6,
    "optimized": [LOW] * 6,
    "xnnpack": [HIGH, HIGH, HIGH, LOW, HIGH, LOW],
    "micro": [LOW] * 6,
    "onnxruntime": [LOW, LOW, HIGH, LOW, HIGH, LOW],
    "qjax": [5, 5, HIGH, LOW, HIGH, LOW],
}


def quantized_by(runtime):
    scale, zero_point = np.float32(0.1), 5
    if runtime == "qjax":
        params = qjax.QParams(scale, np.int32(zero_point), qjax.QSpec(bits=8, symmetric=False))
        return qjax.numerics.affine.quantize(jnp.asarray(SPECIAL), params)
    if runtime == "onnxruntime":
        helper, kinds = onnx.helper, onnx.TensorProto
        node = helper.make_node("QuantizeLinear", ["x", "s", "z"], ["y"])
        values = [
            helper.make_tensor_value_info(n, k, SPECIAL.shape) for n, k in (("x", kinds.FLOAT), ("y", kinds.INT8))
        ]
        given = [
            helper.make_tensor("s", kinds.FLOAT, [], [scale]),
            helper.make_tensor("z", kinds.INT8, [], [zero_point]),
        ]
        graph = helper.make_graph([node], "g", values[:1], values[1:], given)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
        (plain,), (optimized,) = (outputs for _, outputs in by_onnxruntime(model, {"x": SPECIAL}))
        assert np.array_equal(plain, optimized)
        return plain
    file = File()
    x = file.tensor("x", SPECIAL.shape, "float32")
    y = file.tensor("y", SPECIAL.shape, "int8", Scales(scale, zero_point))
    file.operator("QUANTIZE", [x], [y])
    content = bytes(file.to_bytes([x], [y], description="quantize"))
    return (
        micro(content, [SPECIAL], ["y"])["y"]
        if runtime == "micro"
        else litert(content, runtime, [SPECIAL], every=False)["y"]
    )


@pytest.mark.parametrize("runtime", BY_RUNTIME)
def test_what_every_runtime_makes_of_them(runtime):
    """The table of docs/inputs-outputs.md."""
    assert np.asarray(quantized_by(runtime)).tolist() == [*BY_RUNTIME[runtime], 8]


def test_an_emitted_function_of_reals_is_qjaxs_row(graph, tmp_path):
    graph.emit("stablehlo", tmp_path / "model.stablehlo", reals=True)
    exported = jax.export.deserialize(bytearray((tmp_path / "model.stablehlo").read_bytes()))
    x = np.resize(SPECIAL, X.shape)
    assert np.array_equal(exported.call(x), jax.jit(graph)(x))
