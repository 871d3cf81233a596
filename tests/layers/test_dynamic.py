"""Scales of activations that are found at run time (`qjax.Dynamic`): formula and graph."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from flax import linen, nnx
from jax import lax
from jax.core import Tracer

import qjax
from qjax import Dynamic, QSpec, Recipe
from qjax.export.integer_graph import IntegerGraph
from qjax.numerics.affine import round_to_grid
from qjax.numerics.dynamic import divided, dynamic_codes
from qjax.ops.dynamic import DynamicCodes, DynamicProduct
from qjax.tracing import from_jaxpr
from tests.layers.dynamic_models import ASYMMETRIC, F32, MLP, Conv, Linear, Stack, X, normal, product_of

UNSIGNED = QSpec(bits=8, symmetric=False, signed=False)


# ---------------------------------------------------------------------------- the formula, in numpy


def reference_codes(x: np.ndarray, spec: QSpec, axes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes less their zero point (int64), scale, zero point; all keep x's rank. Data without NaN."""
    if spec.symmetric:
        scale = (np.abs(x).max(axes, keepdims=True) / F32(spec.qmax)).astype(F32)
    else:
        lo, hi = np.minimum(x.min(axes, keepdims=True), F32(0)), np.maximum(x.max(axes, keepdims=True), F32(0))
        scale = ((hi - lo) / F32(spec.qmax - spec.qmin)).astype(F32)
    scale = np.where(scale == 0, F32(1), scale)
    zero = np.zeros(scale.shape, np.int64)
    if not spec.symmetric:
        zero = np.rint(np.clip(F32(spec.qmin) - lo / scale, spec.qmin, spec.qmax)).astype(np.int64)
    codes = np.clip(np.rint(x / scale).astype(np.int64) + zero, spec.qmin, spec.qmax)
    return codes - zero, scale, zero


def reference_weight(w: np.ndarray, spec: QSpec, axes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Codes (int64) and scale: the formula of every weight, max|w| * fl(1 / qmax) and rint(w * (1 / scale))."""
    scale = np.abs(w).max(axes, keepdims=True) * F32(1 / spec.qmax)
    return np.clip(np.rint(w * (F32(1) / scale)), spec.qmin, spec.qmax).astype(np.int64), scale


def weights_of(setting: Dynamic) -> QSpec:
    """The weights' codes of a setting without a `WeightFormat`."""
    weights = setting.weights or QSpec(bits=8, axis=-1)
    assert isinstance(weights, QSpec)
    return weights


def activations_of(setting: Dynamic) -> QSpec:
    return setting.activations or QSpec(bits=8)


def reference_groups(x: np.ndarray, w: np.ndarray, setting: Dynamic) -> np.ndarray:
    """The products of every group, each rounded to float32, added up in their order."""
    size = weights_of(setting).group_size
    assert size is not None
    codes, scale, _ = reference_codes(x, activations_of(setting), (x.ndim - 1,) if setting.per == "row" else (0, 1))
    total: Any = 0
    for k in range(0, len(w), size):
        w_codes, w_scale = reference_weight(w[k : k + size], weights_of(setting), (0,))
        acc = (codes[:, k : k + size] @ w_codes).astype(F32)
        total = (acc * (scale * w_scale).astype(F32)).astype(F32) + total
    return total.astype(F32)


def reference_linear(x: np.ndarray, w: np.ndarray, setting: Dynamic) -> np.ndarray:
    codes, scale, _ = reference_codes(
        x, activations_of(setting), (x.ndim - 1,) if setting.per == "row" else (*range(x.ndim),)
    )
    w_codes, w_scale = reference_weight(w, weights_of(setting), (0, 1) if weights_of(setting).axis is None else (0,))
    return (codes @ w_codes).astype(F32) * (scale * w_scale).astype(F32)


@pytest.mark.parametrize(
    "spec",
    [QSpec(bits=8), QSpec(bits=4), ASYMMETRIC, UNSIGNED, UNSIGNED.replace(bits=3)],
    ids=["int8", "int4", "asymmetric int8", "uint8", "uint3"],
)
@pytest.mark.parametrize("axes", [(0, 1), (1,)], ids=["tensor", "row"])
def test_codes_are_those_of_the_formula(spec: QSpec, axes: tuple[int, ...]) -> None:
    x = normal(128, 96, seed=1) * np.geomspace(1e-12, 1e12, 128, dtype=F32)[:, None]
    x[0], x[1], x[2] = 0, np.abs(x[1]), -np.abs(x[2])
    expected, scale, zero = reference_codes(x, spec, axes)
    for run in (dynamic_codes, jax.jit(dynamic_codes, static_argnums=(1, 2))):
        found = [np.asarray(a) for a in run(jnp.asarray(x), spec, axes)]
        np.testing.assert_array_equal(found[1], scale.squeeze(axes))
        np.testing.assert_array_equal(found[2], zero.squeeze(axes))
        np.testing.assert_array_equal(found[0], expected + zero)
    assert found[0].min() >= spec.qmin
    assert found[0].max() <= spec.qmax


def test_zeros_have_scale_1_and_what_is_no_number_stays_within_the_codes() -> None:
    for spec in (QSpec(bits=8), UNSIGNED):
        codes, scale, zero = dynamic_codes(jnp.zeros((2, 3)), spec, (0, 1))
        assert (scale, zero) == (1, 0)
        assert not codes.any()
        x = jnp.array([[np.nan, 1.0, -1.0], [np.inf, 1.0, -np.inf], [1e-44, 0, 0]], jnp.float32)
        codes, scale, zero = dynamic_codes(x, spec, (1,))
        np.testing.assert_array_equal(scale, [1, 2.0**100, 1])
        assert codes[0, 0] == zero[0]
        assert codes.min() >= spec.qmin
        assert codes.max() <= spec.qmax


@pytest.mark.exhaustive
def test_quotients_are_those_of_ieee_whatever_the_compiler_sees() -> None:
    x, scale = normal(256, 128, seed=2), np.abs(normal(256, 1, seed=3)) + F32(0.01)
    rows = jax.jit(lambda x, s: divided(x, jnp.broadcast_to(s, x.shape)))
    np.testing.assert_array_equal(rows(x, scale), x / scale)
    np.testing.assert_array_equal(jax.vmap(rows)(x[:, None], scale[:, None])[:, 0], x / scale)
    np.testing.assert_array_equal(jax.jit(lambda x: divided(x, F32(127)))(x), x / F32(127))
    # the emulation of it in integers, which inputs of a graph for ONNX Runtime take
    emulated = round_to_grid(jnp.asarray(x), jnp.asarray(scale), "nearest_even", quantization="division")
    np.testing.assert_array_equal(jnp.round(rows(x, scale)), emulated)


def test_codes_and_sums_are_those_of_onnx_runtime() -> None:
    helper, kinds = onnx.helper, onnx.TensorProto
    x, w = normal(64, 32, seed=4) * F32(2.7) + F32(0.3), normal(32, 16, seed=5)
    setting = Dynamic(activations=UNSIGNED)
    product = product_of(lambda x, w: x @ w, x, w, setting)
    codes, _, sums = product.weight_parts(jnp.asarray(w))
    x_codes, scale, zero = jax.jit(product.coding)(x)
    acc = jax.jit(product.accumulator)(x_codes, zero, codes, sums)
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["codes", "scale", "zero"]),
        helper.make_node("MatMulInteger", ["codes", "w", "zero"], ["sums"]),
    ]
    outputs = {"codes": kinds.UINT8, "scale": kinds.FLOAT, "zero": kinds.UINT8, "sums": kinds.INT32}
    graph = helper.make_graph(
        nodes,
        "dynamic",
        [helper.make_tensor_value_info("x", kinds.FLOAT, x.shape)],
        [helper.make_tensor_value_info(name, kind, None) for name, kind in outputs.items()],
        [onnx.numpy_helper.from_array(np.asarray(codes), "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    options = ort.SessionOptions()
    # without VNNI products of uint8 and int8 saturate otherwise
    options.add_session_config_entry("session.x64quantprecision", "1")
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    theirs = dict(zip(outputs, session.run(list(outputs), {"x": x}), strict=True))
    np.testing.assert_array_equal(scale, theirs["scale"])
    # int8 holds unsigned codes less 128
    np.testing.assert_array_equal(zero + 128, theirs["zero"])
    np.testing.assert_array_equal(np.asarray(x_codes, np.int32) + 128, theirs["codes"])
    np.testing.assert_array_equal(acc, theirs["sums"])


# ---------------------------------------------------------------------------- layers


def agree(model: nnx.Module, recipe: Recipe, x: np.ndarray) -> tuple[Any, IntegerGraph]:
    """The quantized model and its graph, which equals the compiled training forward."""
    qmodel = qjax.quantize(model, recipe, x)
    graph = qjax.convert(qmodel, x)
    np.testing.assert_array_equal(nnx.jit(lambda m, x: m(x))(qmodel, x), graph(x))
    return qmodel, graph


def kinds(graph: IntegerGraph) -> list[tuple[str, tuple[int | None, ...]]]:
    """dtype and shape of every constant of more than one number."""
    return sorted((t.dtype, tuple(t.shape)) for t in graph.ir.constants() if np.size(t.value) > 1)


SETTINGS = {
    "tensor, symmetric": Dynamic(),
    "tensor, asymmetric": Dynamic(activations=ASYMMETRIC),
    "row, symmetric": Dynamic(per="row", weights=QSpec(bits=4)),
    "row, asymmetric": Dynamic(activations=UNSIGNED.replace(bits=5), per="row"),
}


@pytest.mark.parametrize("activations", [QSpec(bits=8), ASYMMETRIC], ids=["symmetric", "asymmetric"])
@pytest.mark.sampled(1)
def test_groups_of_weights(activations: QSpec) -> None:
    setting = Dynamic(weights=QSpec(bits=4, axis=-1, group_size=4), activations=activations, per="row")
    qmodel, graph = agree(Linear(), Recipe(overrides={"fc": setting}), X)
    kernel = np.asarray(qmodel.model.fc.kernel[...])
    np.testing.assert_array_equal(graph(X), reference_groups(X, kernel, setting))
    np.testing.assert_array_equal(nnx.jit(qjax.exact(qmodel, X))(qmodel, X), graph(X))
    np.testing.assert_array_equal(graph(X[:2]), graph(X)[:2])
    assert str(setting) == "w4 in groups of 4 a8 per row"
    # straight through: the gradient is that of the product of the dequantized tensors
    grads = nnx.grad(lambda m: jnp.sum(m(X)))(qmodel)["model"]["fc"]
    codes, scale, _ = reference_codes(X, activations, (1,))
    np.testing.assert_allclose(grads["kernel"][...][:, 0], (codes * scale).sum(0), rtol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_linear(setting: Dynamic, tmp_path: Any) -> None:
    model, bias = Linear(), normal(5, seed=6)
    nnx.update(model, {"fc": {"bias": jnp.asarray(bias)}})
    qmodel, graph = agree(model, Recipe(overrides={"fc": setting}), X)
    kernel = np.asarray(model.fc.kernel[...])
    np.testing.assert_array_equal(graph(X), reference_linear(X, kernel, setting) + bias)
    exact = qjax.exact(qmodel, X)
    np.testing.assert_array_equal(nnx.jit(exact)(qmodel, X), graph(X))
    if setting == Dynamic():
        # operation by operation as well
        np.testing.assert_array_equal(qmodel(X), graph(X))
        np.testing.assert_array_equal(exact(qmodel, X), graph(X))
    # the weight is in the graph as codes, and as nothing else
    assert ("int8", (8, 5)) in kinds(graph)
    assert ("float32", (8, 5)) not in kinds(graph)
    if setting.per == "row":
        np.testing.assert_array_equal(graph(X[:2]), graph(X)[:2])
    # the program does not know which batch it was made from, be it one example
    assert qjax.convert(qmodel, X[:1]).ir.nodes[0].attributes == graph.ir.nodes[0].attributes
    graph.save(tmp_path / "model.qjax")
    np.testing.assert_array_equal(qjax.load(tmp_path / "model.qjax")(X), graph(X))


@pytest.mark.exhaustive
def test_a_row_is_what_a_dot_sums_over_wherever_the_weight_stands() -> None:
    x, w = normal(2, 3, 4, 5, seed=7), normal(3, 5, 6, seed=8)
    operands = jnp.asarray(x), jnp.asarray(w)
    setting = Dynamic(per="row", activations=ASYMMETRIC)
    products = {
        "bhtk,hkn->bhtn": lambda x, w: lax.dot_general(x, w, (((3,), (1,)), ((1,), (0,)))),
        "weight first": lambda x, w: lax.dot_general(w, x, (((1,), (3,)), ((0,), (1,)))),
    }
    codes, scale, _ = reference_codes(x, activations_of(setting), (3,))
    w_codes, w_scale = reference_weight(w, weights_of(setting), (1,))
    for name, function in products.items():
        (eqn,) = from_jaxpr(jax.make_jaxpr(function)(x, w)).equations
        product = DynamicProduct(eqn, 0 if name == "weight first" else 1, setting)
        (y,) = product(*operands, *product.coding(operands[0]), *product.weight_parts(operands[1]))
        order = "hnbt" if name == "weight first" else "hbtn"
        sums = np.einsum(f"bhtk,hkn->{order}", codes, w_codes).astype(F32)
        scales = np.einsum(f"bhtk,hkn->{order}", scale, w_scale).astype(F32)
        np.testing.assert_array_equal(y, sums * scales)


@pytest.mark.exhaustive
@pytest.mark.parametrize("groups", [1, 2, 4], ids=["dense", "grouped", "depthwise"])
def test_conv(groups: int) -> None:
    setting, x = Dynamic(activations=ASYMMETRIC), normal(2, 6, 6, 4, seed=9) + F32(2)
    model = Conv(feature_group_count=groups)
    qmodel, graph = agree(model, Recipe(overrides={nnx.Conv: setting}), x)
    if groups == 1:
        np.testing.assert_array_equal(nnx.jit(qjax.exact(qmodel, x))(qmodel, x), graph(x))
    kernel = np.asarray(model.conv.kernel[...])
    codes, scale, _ = reference_codes(x, activations_of(setting), (0, 1, 2, 3))
    w_codes, w_scale = reference_weight(kernel, weights_of(setting), (0, 1, 2))
    acc = np.zeros((2, 3, 3, 8), np.int64)
    # padding is with the code of 0.0, which is 0 here; stride 2 on 6 pads behind
    around, width, features = np.pad(codes, ((0, 0), (0, 1), (0, 1), (0, 0))), 4 // groups, 8 // groups
    for i, j, f in np.ndindex(3, 3, 8):
        group = f // features
        part = around[:, i : i + 5 : 2, j : j + 5 : 2, group * width : (group + 1) * width]
        acc[..., f] += part @ w_codes[i, j, :, f]
    np.testing.assert_array_equal(graph(x), acc.astype(F32) * (scale * w_scale).reshape(1, 1, 1, 8))
    assert ("int8", (3, 3, 4 // groups, 8)) in kinds(graph)


def test_one_layer_of_several() -> None:
    qmodel, graph = agree(MLP(), Recipe(overrides={"first": Dynamic(per="row")}), X)
    report = qjax.verify(graph, qmodel, [X])
    assert report.exact
    assert report.compared == 6 * (16 + 4 + 16)
    assert [node.op for node in graph.ir.nodes] == ["island", "clamp", "dot"]
    explained = {row.module: row for row in qjax.explain(qmodel, X).rows if row.primitive == "dot_general"}
    assert (explained["first"].form, explained["last"].form) == ("dynamic", "integer")
    assert explained["first"].operation == "w8 a8 per row"


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:quantize. parts under qjax.Dynamic stay in float")
def test_a_block_of_a_transformer(tmp_path: Any) -> None:
    x = normal(2, 5, 8, seed=10)
    qmodel, graph = agree(Stack(), Recipe(overrides={"block/mlp": Dynamic(per="row")}), x)
    assert [node.op for node in graph.ir.nodes] == ["dot", "normalize", "island", "add"]
    assert qjax.verify(graph, qmodel, [x]).exact
    assert [dtype for dtype, shape in kinds(graph) if shape in ((8, 16), (16, 8))] == ["int8", "int8"]
    graph.emit("stablehlo", tmp_path / "model.stablehlo")
    exported = jax.export.deserialize(bytearray((tmp_path / "model.stablehlo").read_bytes()))
    codes = graph.quantize(x)
    np.testing.assert_array_equal(exported.call(codes), graph.run(codes))
    with pytest.raises(ValueError, match=r"Of qjax.Dynamic, LiteRT has rows with 8-bit codes: use qjax.Dynamic"):
        graph.retarget("tflite_micro").emit("tflite", tmp_path / "model")
    # GELU stands between the products
    for kind in ("c", "onnx"):
        with pytest.raises(
            ValueError, match=r"a float part with the function .* Give qjax.Dynamic to the products alone"
        ):
            graph.emit(kind, tmp_path / "model")


def test_a_norm_may_stand_inside() -> None:
    with pytest.warns(UserWarning, match="'block/norm' .the function"):
        model = qjax.quantize(Stack(), Recipe(overrides={"block": Dynamic()}), X)
    assert [node.op for node in qjax.convert(model, X).ir.nodes] == ["dot", "island"]


@pytest.mark.exhaustive
def test_linen() -> None:
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return linen.Dense(4, name="head")(x)

    net = Net()
    model = qjax.from_linen(net, net.init(jax.random.key(0), X))
    _, graph = agree(model, Recipe(overrides={linen.Dense: Dynamic()}), X)
    assert ("int8", (8, 4)) in kinds(graph)


def test_layers_of_a_scan_have_weights_of_their_own() -> None:
    class Scanned(nnx.Module):
        def __init__(self) -> None:
            self.kernels = nnx.Param(jnp.asarray(normal(2, 8, 8)))

        def __call__(self, x: jax.Array) -> jax.Array:
            return lax.scan(lambda x, w: (nnx.relu(x @ w), None), x, self.kernels[...])[0]

    _, graph = agree(Scanned(), Recipe(overrides={".*": Dynamic(per="row")}), X)
    assert kinds(graph).count(("int8", (8, 8))) == 2


def test_a_later_override_of_a_part_wins() -> None:
    qmodel = qjax.quantize(MLP(), Recipe(overrides={"first|last": Dynamic(), "last": qjax.FLOAT}), X)
    forms = {row.module: row.form for row in qjax.explain(qmodel, X).rows if row.primitive == "dot_general"}
    assert forms == {"first": "dynamic", "last": "float"}


class Heads(nnx.Module):
    def __init__(self) -> None:
        self.a, self.b, self.c = (nnx.Linear(8, 4, use_bias=False, rngs=nnx.Rngs(seed)) for seed in range(3))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.concatenate([self.a(x), self.b(x), self.c(x)], axis=-1)


# XLA rounds a product and a sum once in places
@pytest.mark.exhaustive
@pytest.mark.compiled
@pytest.mark.parametrize(
    ("last", "times"), [(Dynamic(), 1), (Dynamic(per="row"), 2), (Dynamic(activations=UNSIGNED), 2)]
)
def test_products_of_one_tensor_share_its_codes(last: Dynamic, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    plain = DynamicCodes.__call__
    qmodel, _ = agree(Heads(), Recipe(overrides={".*": Dynamic(), "c": last}), X)
    monkeypatch.setattr(DynamicCodes, "__call__", lambda self, x: made.append(x) or plain(self, x))
    with jax.disable_jit():  # a compiled call sees no number
        y = qmodel(X)
    # traced ones are asked for their shapes
    assert sum(isinstance(x, jax.Array) and not isinstance(x, Tracer) for x in made) == times
    settings = {"a": Dynamic(), "b": Dynamic(), "c": last}
    expected = [
        reference_linear(X, np.asarray(getattr(Heads(), name).kernel[...]), how) for name, how in settings.items()
    ]
    np.testing.assert_array_equal(y, np.concatenate(expected, axis=-1))
    rows = [row for row in qjax.explain(qmodel, X).rows if row.form == "dynamic"]
    assert [row.module for row in rows] == ["a", "b", "c"]
