"""Float islands in ONNX and C files: `qjax.Dynamic` with the bits of the graph, and a clear no for what has none."""

import subprocess
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax
from qjax import Dynamic, QSpec, Recipe
from qjax.export.integer_graph import IntegerGraph
from qjax.runtimes.comparing import against_runtimes
from tests.layers.dynamic_models import ASYMMETRIC, F32, MLP, X

FOUR = QSpec(bits=4, axis=-1, group_size=4)
SETTINGS = {
    "row": Dynamic(per="row"),
    "row, asymmetric": Dynamic(per="row", activations=ASYMMETRIC),
    "8da4w": Dynamic(per="row", activations=ASYMMETRIC, weights=FOUR),
    "tensor": Dynamic(activations=QSpec(bits=8, symmetric=False, signed=False)),
}


def rows() -> np.ndarray:
    """Rows of very different size, and numbers at which runtimes part: zeros, NaN, infinities, subnormal ones."""
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(96, 8)) * np.exp(3 * rng.normal(size=(96, 1)))).astype(F32)
    x[:5] = [[0.0], [np.nan], [1e-39], [3e38], [-np.inf]]
    x[5, 2], x[6, 3], x[7, 4] = np.nan, np.inf, -np.inf
    return x


def converted(setting: Any, paths: str, **recipe: Any) -> IntegerGraph:
    qmodel = qjax.quantize(MLP(), Recipe(overrides={paths: setting}, **recipe), X)
    return qjax.convert(qmodel, X)


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("paths", ["first", "last", ".*"])
@pytest.mark.sampled(1)
def test_files_have_the_codes_of_the_graph(setting: Dynamic, paths: str) -> None:
    graph = converted(setting, paths)
    codes = np.asarray(graph.quantize(X if setting.per == "tensor" or paths == "last" else rows()))
    # an output of floats may hold NaN, which is different from itself
    results = against_runtimes(graph, [[codes]], {"c": {}, "onnxruntime": {}})
    expected = (
        0 if graph.ir.tensors[graph.ir.outputs[0]].quantization is not None else int(np.isnan(graph.run(codes)).sum())
    )
    assert [result.differ for result in results] == [expected, expected]


@pytest.mark.exhaustive
def test_a_file_takes_any_batch_and_is_read_back(tmp_path: Any) -> None:
    graph = converted(SETTINGS["8da4w"], "first", target="onnxruntime")
    graph.emit("onnx", tmp_path / "model.onnx", style="integer")
    again = qjax.read(tmp_path / "model.onnx")
    for x in (rows(), rows()[:3]):
        np.testing.assert_array_equal(again.run(x), graph.run(x))


def test_the_c_file_tests_itself_and_refuses_fast_math(tmp_path: Any) -> None:
    graph = converted(SETTINGS["row"], ".*")
    graph.emit("c", tmp_path, batch=3)
    subprocess.run(["make", "-C", tmp_path, "test"], check=True, capture_output=True)
    done = subprocess.run(["cc", "-ffast-math", "-c", "model.c"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode
    assert "the float parts need IEEE 754 arithmetic" in done.stderr


class Part(nnx.Module):
    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.function(x)


class Model(nnx.Module):
    def __init__(self, function: Any) -> None:
        self.first, self.part = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), Part(function)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.part(self.first(x))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("function", "why"),
    [
        (jax.nn.silu, "the function 'logistic', which each machine rounds in its own way"),
        (lambda x: x / jnp.sum(x, -1, keepdims=True), "a sum of floats .'reduce_sum'."),
        (lambda x: x * x + x, "a sum of a product, which some compilers round once"),
        (lambda x: x / jnp.float32(3), "a division that XLA may replace by a product with the reciprocal"),
        (lambda x: x.astype(jnp.bfloat16) * 3, "numbers of bfloat16, whose arithmetic differs by machine|bfloat16"),
    ],
)
def test_steps_without_certain_bits(function: Any, why: str, tmp_path: Any) -> None:
    qmodel = qjax.quantize(Model(function), Recipe(overrides={"part": qjax.FLOAT}), X)
    graph = qjax.convert(qmodel, X)
    for kind in ("c", "onnx"):
        with pytest.raises(ValueError, match=rf"a float part with .*({why}).* or emit stablehlo"):
            graph.emit(kind, tmp_path / "model")


def test_parts_in_float_that_are_rounded_exactly() -> None:
    def part(x: jax.Array) -> jax.Array:
        y = jnp.concatenate([jnp.floor(x), jnp.ceil(x), jnp.round(x), jnp.sign(x), jnp.abs(x) - 1, -x], axis=-1)
        return jnp.where(y > jnp.min(y, -1, keepdims=True), jnp.maximum(y, x[:, :1]), jnp.minimum(y, 0.5))

    qmodel = qjax.quantize(Model(part), Recipe(overrides={"part": qjax.FLOAT}), X)
    graph = qjax.convert(qmodel, X)
    codes = np.asarray(graph.quantize(X * 2))
    results = against_runtimes(graph, [[codes]], {"c": {}, "onnxruntime": {}})
    assert [result.differ for result in results] == [0, 0]


def test_numbers_that_are_not_finite_are_saved(tmp_path: Any) -> None:
    class Masked(nnx.Module):
        def __init__(self) -> None:
            self.table = nnx.Param(jnp.arange(12.0).reshape(4, 3))

        def __call__(self, indices: jax.Array) -> jax.Array:
            rows = jnp.take(self.table[...], indices, axis=0)  # NaN outside of the table
            return jax.nn.softmax(jnp.where(rows > 4, rows, -jnp.inf), axis=-1)

    indices = np.array([[2, 3], [3, 2]], np.int32)
    qmodel = qjax.quantize(Masked(), Recipe(overrides={".*": qjax.FLOAT}), indices)
    graph = qjax.convert(qmodel, indices)
    graph.save(tmp_path / "model.qjax")
    np.testing.assert_array_equal(
        qjax.load(tmp_path / "model.qjax")(indices), nnx.jit(lambda m, x: m(x))(qmodel, indices)
    )
