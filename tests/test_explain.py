"""`qjax.explain` shows the whole of a model at once, and traces say what depends on data."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax

X = np.zeros((2, 8), np.float32)


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, middle: Any) -> None:
        self.first = nnx.Linear(8, 8, rngs=rngs)
        self.last = nnx.Linear(8, 4, rngs=rngs)
        self.middle = middle

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.softmax(self.last(self.middle(nnx.gelu(self.first(x)))))


def test_everything_without_a_form_is_listed_with_its_line_and_two_cures() -> None:
    def middle(x: jax.Array) -> jax.Array:
        x = jax.lax.cumlogsumexp(x, axis=1)
        x = x * jax.lax.lgamma(x)
        return jax.pure_callback(lambda v: np.asarray(v), jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    found = qjax.explain(Model(nnx.Rngs(0), middle), X)
    assert not found.convertible
    assert [row.primitive for row in found.unsupported][:1] == ["cumlogsumexp"]
    assert {"lgamma", "pure_callback"} <= {row.primitive for row in found.unsupported}
    for row in found.unsupported:
        assert row.location is not None
        assert "test_explain.py:" in row.location
        assert row.location in row.problem
        assert len(set(row.cures)) == 2
    assert {(row.primitive, row.form) for row in found.rows} >= {
        ("dot_general", "integer"),
        ("table", "table"),
        ("softmax", "integer"),
        ("add", "folded"),
    }
    text = str(found)
    assert "cumlogsumexp" in text
    assert "cure 2" in text
    assert sum(found.counts().values()) == sum(row.equations for row in found.rows)


def test_a_model_of_integers_has_nothing_in_its_way() -> None:
    found = qjax.explain(Model(nnx.Rngs(0), nnx.relu), X)
    assert found.convertible
    assert found.counts().get("float") is None


def test_what_the_recipe_leaves_in_reals_is_told_apart_from_what_cannot_be() -> None:
    model = Model(nnx.Rngs(0), nnx.relu)
    recipe = qjax.Recipe(overrides={"last": qjax.FLOAT})
    for found in (qjax.explain(model, X, recipe), qjax.explain(qjax.quantize(model, recipe, X), X)):
        assert found.convertible
        assert {row.module for row in found.rows if row.form == "float"} == {"last"}
    with pytest.raises(ValueError, match="no recipe for a quantized model"):
        qjax.explain(qjax.quantize(model, recipe, X), X, recipe)


def test_nothing_that_no_output_needs_is_in_the_way() -> None:
    def middle(x: jax.Array) -> jax.Array:
        jnp.sort(x)
        return x

    assert qjax.explain(Model(nnx.Rngs(0), middle), X).convertible


@pytest.mark.parametrize(
    ("middle", "what"),
    [
        (lambda x: x[x > 0], "an index by a boolean mask"),
        (lambda x: x if x.sum() > 0 else -x, "a Python branch"),
        (lambda x: jnp.asarray(np.asarray(x)), "a call of numpy"),
        (lambda x: jnp.arange(x.sum()), "a shape"),
        (lambda x: x[: x.argmax().item()], "a shape"),
        (lambda x: x * x.sum().item(), r"a shape or a Python number \(float\(x\), x.item\(\)\)"),
    ],
)
def test_a_structure_that_depends_on_data_is_named_with_its_line(middle: Any, what: str) -> None:
    model = Model(nnx.Rngs(0), middle)
    for call in (qjax.explain, lambda m, x: qjax.quantize(m, qjax.Recipe(), x)):
        with pytest.raises(qjax.TraceError, match=rf"test_explain.py:\d+: {what}.*jnp.where"):
            call(model, X)


EDGES = np.linspace(-1, 1, 5, dtype=np.float32)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("function", "name", "cure"),
    [
        (lambda x: jnp.interp(x, x[0, :5], EDGES**2), "interp", r"jnp\.where\(x < knot"),
        (lambda x: jnp.digitize(x, x[0]), "digitize", r"jnp\.sum\(x\[\.\.\., None\] >= edges"),
        (lambda x: jnp.searchsorted(x[0], x), "searchsorted", r"jnp\.sum\(x\[\.\.\., None\] >= edges"),
        (lambda x: jax.nn.log_softmax(x, where=x > -9), "log_softmax", "the logits"),
    ],
)
@pytest.mark.filterwarnings("ignore:quantize. the model trains, but convert will refuse it")
def test_functions_of_jax_are_named_as_they_are_called(function: Any, name: str, cure: str) -> None:
    found = qjax.explain(Searching(function), X)
    (row,) = [row for row in found.unsupported if name in row.problem][:1]
    assert row.location is not None
    assert "test_explain.py:" in row.location
    assert f"'{name}' on" in row.problem
    assert "call_hi_primitive" not in str(found)
    assert len(set(row.cures)) == 2
    with pytest.raises(ValueError, match=rf"test_explain.py:\d+.*'{name}' on.*{cure}"):
        qjax.convert(qjax.quantize(Searching(function), qjax.Recipe(), X), X)


class Searching(nnx.Module):
    def __init__(self, function: Any) -> None:
        self.first = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        self.function = function

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.function(self.first(x))


@pytest.mark.exhaustive
def test_the_cures_of_a_search_convert() -> None:
    def pieces(x: jax.Array) -> jax.Array:
        y = jnp.full_like(x, 1.0)
        for knot, value, slope in ((-1.0, 1.0, -2.0), (0.0, -1.0, 0.5), (1.0, -0.5, 0.0)):
            y = jnp.where(x < knot, y, value + slope * (x - knot))
        return y

    def edges(x: jax.Array) -> jax.Array:
        return jnp.sum(x[..., None] >= EDGES.reshape(1, 1, 5), axis=-1)

    x = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    for function, op in ((pieces, "table"), (edges, "compare")):
        qmodel = qjax.quantize(Searching(function), qjax.Recipe(), x)
        graph = qjax.convert(qmodel, x)
        assert qjax.verify(graph, qmodel, [x]).local == 0
        assert op in [node.op for node in graph.ir.nodes]


@pytest.mark.filterwarnings("ignore:quantize. the model trains, but convert will refuse it")
@pytest.mark.parametrize(
    ("function", "what"),
    [
        (lambda x: jnp.abs(jnp.tanh(jnp.fft.fft(x))), "'tanh' on .*pairs of real.*jnp.real"),
        (lambda x: jnp.abs(jnp.fft.fft(jnp.tile(x, (1, 1024)))), "'fft' on .*above 4096"),
    ],
)
def test_complex_numbers_without_a_form_are_named(function: Any, what: str) -> None:
    qmodel = qjax.quantize(Model(nnx.Rngs(0), lambda x: function(x)[:, :8]), qjax.Recipe(), X)
    with pytest.raises(qjax.ConversionError, match=rf"test_explain.py:\d+.*{what}"):
        qjax.convert(qmodel, X)


@pytest.mark.filterwarnings("ignore:quantize. the model trains, but convert will refuse it")
def test_a_float_that_becomes_an_integer_is_a_count_of_edges() -> None:
    x = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    qmodel = qjax.quantize(Searching(lambda x: jnp.floor(x * 4).astype(jnp.int32)), qjax.Recipe(), x)
    with pytest.raises(qjax.ConversionError, match=r"no cast makes it an integer. .* count of edges: jnp.sum\(x"):
        qjax.convert(qmodel, x)
