"""`convert(batch="fixed")`: models that take one batch only, for a state of their own or for what they compute."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax
from qjax.runtimes.comparing import against_runtimes

N, WIDTH = 3, 8
X = np.random.default_rng(0).normal(size=(N, 5, WIDTH)).astype(np.float32)


class Memory(nnx.Module):
    """Attends to keys that it holds itself, one set for each example."""

    def __init__(self) -> None:
        self.query = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
        self.keys, self.values = (nnx.Cache(jax.random.normal(jax.random.key(k), (N, 6, WIDTH))) for k in (1, 2))

    def __call__(self, x: jax.Array) -> jax.Array:
        scores = jax.nn.softmax(jnp.einsum("btd,bsd->bts", self.query(x), self.keys[...]) / 4, axis=-1)
        return jnp.einsum("bts,bsd->btd", scores, self.values[...])


class Neighbours(nnx.Module):
    """Reads the example before each one, so its batch has an order."""

    def __init__(self) -> None:
        self.dense = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.relu(self.dense(x))[1:]


def agrees(graph: Any, qmodel: Any, x: Any, **options: Any) -> None:
    assert graph.ir.metadata["batch"] == "fixed"
    assert "fixed batch" in str(graph)
    assert all(None not in tensor.shape for tensor in graph.ir.tensors.values())
    assert qjax.verify(graph, qmodel, [x]).exact
    np.testing.assert_array_equal(nnx.jit(qjax.exact(qmodel, x, **options))(qmodel, x), graph(x))


def test_a_state_in_the_model_fixes_the_batch(tmp_path: Any) -> None:
    qmodel = qjax.quantize(Memory(), qjax.Recipe(), X)
    graph = qjax.convert(qmodel, X)
    agrees(graph, qmodel, X)
    graph.save(tmp_path / "model.qjax")
    again = qjax.load(tmp_path / "model.qjax")
    assert again.ir.metadata["batch"] == "fixed"
    np.testing.assert_array_equal(again(X), graph(X))
    with pytest.raises(ValueError, match=r"expected shape \(3, 5, 8\), got \(2, 5, 8\)"):
        graph(X[:2])
    results = against_runtimes(graph, [[np.asarray(graph.quantize(X))]], {"c": {}, "onnxruntime": {}})
    assert [result.differ for result in results] == [0, 0]
    with pytest.raises((TypeError, ValueError)):
        qjax.convert(qmodel, X, batch="free")


@pytest.mark.exhaustive
def test_it_can_be_asked_for() -> None:
    qmodel = qjax.quantize(Neighbours(), qjax.Recipe(), X)
    with pytest.raises(qjax.ConversionError, match=r'convert\(..., batch="fixed"\)'):
        qjax.convert(qmodel, X)
    agrees(qjax.convert(qmodel, X, batch="fixed"), qmodel, X, batch="fixed")


def test_a_model_for_any_batch_stays_free() -> None:
    qmodel = qjax.quantize(nnx.Linear(WIDTH, 4, rngs=nnx.Rngs(0)), qjax.Recipe(), X)
    assert "batch" not in qjax.convert(qmodel, X).ir.metadata
    with pytest.raises(ValueError, match='expected batch="free", batch="fixed" or None, got \'any\''):
        qjax.convert(qmodel, X, batch="any")  # pyright: ignore[reportArgumentType]
