"""`qjax.WeightFormat`: weights in formats of floats within a model, and ternary and binary weights as integers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax
from qjax import Dynamic, Override, QSpec, Recipe, WeightFormat
from qjax.export.integer_graph import IntegerGraph
from qjax.numerics.weight_formats import decode, encode
from qjax.runtimes.comparing import against_runtimes
from tests.layers.dynamic_models import F32, Conv, normal

X = normal(6, 64) * F32(3) + F32(1)
FORMATS = ["nf4", "fp8_e4m3", "fp8_e5m2", "mxfp4", "mxfp8_e4m3", "mxfp8_e5m2", "nvfp4", "ternary", "binary"]


class Net(nnx.Module):
    def __init__(self) -> None:
        self.first, self.last = nnx.Linear(64, 32, rngs=nnx.Rngs(0)), nnx.Linear(32, 4, rngs=nnx.Rngs(1))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(nnx.relu(self.first(x)))


def agree(model: nnx.Module, recipe: Recipe, x: np.ndarray) -> tuple[Any, IntegerGraph]:
    """The quantized model and its graph, which equals the exact forward."""
    qmodel = qjax.quantize(model, recipe, x)
    graph = qjax.convert(qmodel, x)
    np.testing.assert_array_equal(nnx.jit(qjax.exact(qmodel, x))(qmodel, x), graph(x))
    return qmodel, graph


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.sampled(1)
def test_a_layer_multiplies_by_the_dequantized_weight(name: str, tmp_path: Any) -> None:
    format = WeightFormat(name)
    qmodel, graph = agree(Net(), Recipe(overrides={"first": format}), X)
    kernel = qmodel.model.first.kernel[...]
    codes, scales = encode(kernel.T, format)
    expected = X @ np.asarray(decode((codes, scales), format)).T + np.asarray(qmodel.model.first.bias[...])
    node = next(node for node in graph.ir.nodes if node.op == "island")
    # codes and scales are in the graph, the float weight is not
    stored = {(t.dtype, tuple(t.shape)) for t in graph.ir.constants()}
    assert ("int8" if format.is_integer else "uint8", (32, 64)) in stored
    assert not {("float32", (64, 32)), ("float32", (32, 64))} & stored
    output = graph.ir.tensors[node.output].quantization
    assert output is not None
    hidden = nnx.relu(jnp.asarray(expected))
    assert np.corrcoef(np.ravel(qmodel.model.last(hidden)), np.ravel(graph(X)))[0, 1] > 0.99
    graph.save(tmp_path / "model.qjax")
    np.testing.assert_array_equal(qjax.load(tmp_path / "model.qjax")(X), graph(X))
    with pytest.raises(ValueError, match="a sum of floats"):
        graph.emit("c", tmp_path / "c")


@pytest.mark.parametrize("name", ["nf4", "mxfp4"])
def test_the_gradient_goes_straight_through(name: str) -> None:
    model = Linear64()
    qmodel = qjax.quantize(model, Recipe(overrides={"fc": Override(weights=WeightFormat(name))}), X)

    def loss(m: Any) -> jax.Array:
        return jnp.sum(m(X))

    grads = nnx.grad(loss)(qmodel)["model"]["fc"]["kernel"][...]
    np.testing.assert_allclose(grads, np.repeat(X.sum(0)[:, None], 8, 1), rtol=1e-5)
    explained = {row.module: (row.form, row.operation) for row in qjax.explain(qmodel, X).rows if row.module == "fc"}
    assert explained["fc"][0] == "float"


class Linear64(nnx.Module):
    def __init__(self) -> None:
        self.fc = nnx.Linear(64, 8, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc(x)


@pytest.mark.exhaustive
def test_convolutions_and_heads_sum_over_several_axes() -> None:
    x = normal(2, 6, 6, 4)
    agree(Conv(), Recipe(overrides={"conv": WeightFormat("nf4", group_size=12)}), x)

    class Heads(nnx.Module):
        def __init__(self) -> None:
            self.out = nnx.LinearGeneral((4, 8), 6, axis=(-2, -1), rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.out(x)

    agree(Heads(), Recipe(overrides={"out": WeightFormat("mxfp8_e4m3")}), normal(3, 4, 8))


@pytest.mark.parametrize("name", ["ternary", "binary"])
@pytest.mark.sampled(1)
def test_int8_rows_and_integer_weights_are_sums_of_integers(name: str) -> None:
    setting = Dynamic(weights=WeightFormat(name), per="row")
    qmodel, graph = agree(Net(), Recipe(overrides={".*": setting}), X)
    assert str(setting) == f"{name} a8 per row"
    codes, scale = encode(qmodel.model.first.kernel[...], WeightFormat(name))
    steps = np.abs(X).max(1, keepdims=True) / F32(127)
    acc = np.rint(X / steps).astype(np.int64) @ np.asarray(codes, np.int64)
    first = acc.astype(F32) * (steps * np.asarray(scale)).astype(F32)
    one = qjax.convert(qjax.quantize(qmodel.model.first, Recipe(overrides={".*": setting}), X), X)
    np.testing.assert_array_equal(one(X), first)
    results = against_runtimes(graph, [[np.asarray(graph.quantize(X))]], {"c": {}, "onnxruntime": {}})
    assert [result.differ for result in results] == [0, 0]


def test_ternary_weights_convert_to_integers() -> None:
    override = Override(weights=QSpec(bits=2), method="absmean")
    qmodel, graph = agree(Net(), Recipe(overrides={"first/kernel": override}), X)
    kernel = np.asarray(qmodel.model.first.kernel[...])
    codes = np.asarray(encode(jnp.asarray(kernel), WeightFormat("ternary"))[0])
    (dot, *_) = (node for node in graph.ir.nodes if node.op == "dot")
    stored = np.asarray(graph.ir.constant(dot, "kernel"))
    # the formula of QSpec multiplies by the reciprocal of the scale, so only ties could differ
    np.testing.assert_array_equal(stored, codes)
    assert qjax.verify(graph, qmodel, [X]).exact


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (
            {"first": WeightFormat("mxfp4", 48)},
            ValueError,
            "can have groups of 48.*'first/kernel' .dot. per channel, groups of 32",
        ),
        ({"second": WeightFormat("nf4")}, ValueError, "override 'second' matches nothing"),
        ({"first/kernel": Override(weights=QSpec(bits=4), method="absmean")}, ValueError, "is for ternary weights"),
    ],
)
def test_recipes_that_fit_no_model(overrides: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        qjax.quantize(Net(), Recipe(overrides=overrides), X)


def test_invalid_settings() -> None:
    with pytest.raises(ValueError, match="expected neither activations nor a method"):
        Override(weights=WeightFormat("nf4"), method="lsq")
    with pytest.raises(TypeError, match=r"nf4 has values that are no integers.* Use ternary, .* or a QSpec"):
        Dynamic(weights=WeightFormat("nf4"))  # pyright: ignore[reportArgumentType]
