"""Float islands: what the recipe leaves in reals runs between a dequantizer and a quantizer, in the graph itself."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax
from qjax.export.artifact import from_bytes, to_bytes
from qjax.export.integer_graph import IntegerGraph
from qjax.ops import float_programs


class Spectrum(nnx.Module):
    """Nothing in here has an integer form."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.inner = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jnp.sort(jax.nn.silu(self.inner(x)), axis=-1)
        return jnp.fft.rfft(y, n=8).real[:, :4]


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(8, 8, rngs=rngs)
        self.spectrum = Spectrum(rngs)
        self.last = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> Any:
        y = self.spectrum(nnx.relu(self.first(x)))
        return self.last(y), jnp.argmax(y, axis=-1)


PLACES = {"inside": ["spectrum"], "at the input": ["first", "spectrum"], "at the output": ["spectrum", "last"]}
X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)


@pytest.fixture(scope="module", params=PLACES)
def made(request: pytest.FixtureRequest) -> tuple[list[str], Any, IntegerGraph]:
    paths = PLACES[request.param]
    recipe = qjax.Recipe(overrides=dict.fromkeys(paths, qjax.FLOAT))
    qmodel = qjax.quantize(Model(nnx.Rngs(0)), recipe, X)
    return paths, qmodel, qjax.convert(qmodel, X)


@pytest.mark.exhaustive
def test_an_island_is_one_node_between_integers(made: Any) -> None:
    paths, _, graph = made
    assert sum(node.op == "island" for node in graph.ir.nodes) == len(paths)
    assert sum(node.op == "dot" for node in graph.ir.nodes) == 3 - len(paths)


@pytest.mark.sampled(1)
def test_the_graph_is_the_exact_forward_and_the_trained_one(made: Any) -> None:
    _, qmodel, graph = made
    for a, b, c in zip(graph(X), qjax.exact(qmodel, X)(qmodel, X), qmodel(X), strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c)
    assert qjax.verify(graph, qmodel, [X]).exact


def test_any_batch_after_a_round_trip_through_bytes(made: Any) -> None:
    _, _, graph = made
    again = IntegerGraph(from_bytes(to_bytes(graph.ir)))
    for whole, part in zip(graph(X), again(X[:3]), strict=True):
        np.testing.assert_array_equal(whole[:3], part)


@pytest.mark.exhaustive
def test_formats_without_its_functions_refuse_it(made: Any, tmp_path: Any) -> None:
    _, _, graph = made
    messages = {
        "tflite": "its runtime would not compute the codes of the target 'nearest_even'",
        "c": r"Node '.*' \(island\) .*: a float part with .*, so C files have no certain bits for it.* drop qjax.FLOAT",
        "onnx": r"Node '.*' \(island\) .*: a float part with .*, so onnx files have no certain bits for it",
    }
    for kind, message in messages.items():
        with pytest.raises(ValueError, match=message):
            graph.emit(kind, tmp_path / "model")
        assert not (tmp_path / "model").exists()
    graph.emit("stablehlo", tmp_path / "model.mlir")


def test_what_has_no_step_is_an_error_that_says_where() -> None:
    class Called(nnx.Module):
        def __call__(self, x: jax.Array) -> jax.Array:
            return jax.pure_callback(lambda v: np.asarray(v), jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    class Outer(nnx.Module):
        def __init__(self) -> None:
            self.first, self.called = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), Called()

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.called(self.first(x))

    qmodel = qjax.quantize(Outer(), qjax.Recipe(overrides={"called": qjax.FLOAT}), X)
    with pytest.raises(
        qjax.ConversionError, match=r"test_islands.py:\d+ .*'pure_callback' has no form in a float island"
    ):
        qjax.convert(qmodel, X)


def test_parts_of_a_tensor_in_reals() -> None:
    class Parts(nnx.Module):
        def __call__(self, x: jax.Array) -> jax.Array:
            a, b = jnp.split(x, 2, axis=-1)
            c, d = jnp.unstack(a, axis=-1)
            own = jax.lax.dynamic_slice_in_dim(b, jnp.int32(x.shape[-1] - 3), 1, axis=-1)
            return jnp.concatenate([jnp.stack([jnp.exp(d), c], axis=-1), b, own], axis=-1)

    class Model(nnx.Module):
        def __init__(self) -> None:
            self.dense, self.parts = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), Parts()

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.parts(self.dense(x))

    x = jax.random.normal(jax.random.key(0), (3, 4))
    qmodel = qjax.quantize(Model(), qjax.Recipe(overrides={"parts": qjax.FLOAT}), x)
    graph = qjax.convert(qmodel, x)
    assert np.array_equal(graph(x), qmodel(x))
    assert np.array_equal(graph(x[:2]), graph(x)[:2])


def test_the_error_of_an_island_names_the_line_of_the_step() -> None:
    class Later(nnx.Module):
        def __call__(self, x: jax.Array) -> jax.Array:
            y = jax.lax.while_loop(lambda y: jnp.max(y) > 1, lambda y: y * 0.5, x)  # here
            return jnp.exp(y) + 1

    class Model(nnx.Module):
        def __init__(self) -> None:
            self.dense, self.later = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), Later()

        def __call__(self, x: jax.Array) -> jax.Array:
            return jnp.tanh(self.later(self.dense(x)))

    lines = Path(__file__).read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if text.endswith("# here"))
    x = jnp.ones((2, 4))
    qmodel = qjax.quantize(Model(), qjax.Recipe(overrides={"later": qjax.FLOAT}), x)
    with pytest.raises(qjax.ConversionError, match=rf"test_islands.py:{line} in module 'later': 'while' has no form"):
        qjax.convert(qmodel, x)


def test_a_program_holds_known_steps_only() -> None:
    with pytest.raises(ValueError, match=r"the unknown step 'eval'\. Known steps: abs"):
        float_programs.run([["eval", [], []]], [0], [], {}, 1)


def test_verify_compares_outputs_that_are_real_numbers() -> None:
    recipe = qjax.Recipe(overrides={"spectrum": qjax.FLOAT, "last": qjax.FLOAT})
    qmodel = qjax.quantize(Model(nnx.Rngs(0)), recipe, X)
    graph = qjax.convert(qmodel, X)
    report = qjax.verify(graph, qmodel, [X, X])
    assert [(real.compared, real.differ, real.by_at_most) for real in report.reals] == [(2 * 16 * 3, 0, 0.0)]
    assert report.exact
    model: Any = qmodel.model
    model.last.bias[...] += 0.5
    moved = qjax.verify(graph, qmodel, [X])
    assert [(real.compared, real.differ) for real in moved.reals] == [(16 * 3, 16 * 3)]
    assert not moved.exact
    assert "48 of 48 numbers differ, by at most 0.5" in str(moved)


class Of(nnx.Module):
    def __init__(self, function: Any) -> None:
        self.w = nnx.Param(jax.random.normal(jax.random.key(3), (8, 4)))
        self.function = function

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.function(x, self.w[...]).astype(jnp.float32)


def _codes(x: jax.Array) -> jax.Array:
    return jnp.round(20 * x).astype(jnp.int8)


SETTINGS = {
    "another order": lambda x, w: jax.lax.reshape(x @ w, (4, x.shape[0]), (1, 0)).T,
    "a number in place of what is not there": lambda x, w: jnp.take(
        x @ w, jnp.asarray([1, 9]), axis=1, mode="fill", fill_value=3.5
    ),
    "wide sums": lambda x, w: jax.lax.dot(
        x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), preferred_element_type=jnp.float32
    ),
    "sums that wrap": lambda x, w: jax.lax.dot(_codes(x), _codes(w)),
    "sums that do not": lambda x, w: jax.lax.dot(_codes(x), _codes(w), preferred_element_type=jnp.int32),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_what_a_model_sets_is_what_a_float_part_computes(name: str) -> None:
    model = Of(SETTINGS[name])
    graph = qjax.convert(qjax.quantize(model, qjax.Recipe(overrides={".*": qjax.FLOAT}), X), X)
    again = IntegerGraph(from_bytes(to_bytes(graph.ir)))
    np.testing.assert_array_equal(again(X), graph(X))
    np.testing.assert_allclose(again(X), model(jnp.asarray(X)), rtol=1e-6, atol=1e-6)


def test_a_setting_that_a_step_does_not_store_is_refused() -> None:
    assert float_programs.encode("reshape", {"new_sizes": (2, 3), "dimensions": None, "sharding": None}) is not None
    assert float_programs.encode("reshape", {"new_sizes": (2, 3), "dimensions": (1, 0), "sharding": None}) is None
