"""Compiled graphs: the codes of `graph.run`, from several threads too, and errors that say what was expected."""

from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from flax import nnx

import qjax


@pytest.fixture(scope="module")
def graph():
    x = jax.random.normal(jax.random.key(0), (4, 8, 8, 3))
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Conv(3, 20, (3, 3), rngs=rngs), nnx.relu, nnx.Conv(20, 5, (1, 1), rngs=rngs))
    qmodel = qjax.quantize(model, qjax.Recipe(target="tflite_micro"), x)
    qjax.calibrate(qmodel, [x])
    qmodel.eval()
    return qjax.convert(qmodel, x)


def codes(batch: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-128, 128, (batch, 8, 8, 3), dtype=np.int8)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("batch", "threads"), [(1, 1), (3, 1), (40, 3)])
def test_it_is_the_graph(graph, batch, threads):
    native = graph.native(batch, threads=threads)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda seed: native.run(codes(batch, seed)), range(8)))
    for seed, got in enumerate(found):
        want = np.asarray(graph.run(codes(batch, seed)))
        assert got.dtype == want.dtype
        assert np.array_equal(got, want)
    assert repr(native) == f"<Native: {len(graph.ir.nodes)} nodes, batch {batch}, threads {threads}>"


def test_a_forked_process_says_that_it_has_no_threads(graph, monkeypatch):
    """Without that it would wait for ever."""
    one, two = graph.native(40), graph.native(40, threads=2)
    want = two.run(codes(40))
    assert np.array_equal(one.run(codes(40)), want)
    monkeypatch.setattr("os.getpid", lambda: -1)
    with pytest.raises(RuntimeError, match="forked after a call on several threads"):
        two.run(codes(40))
    assert np.array_equal(one.run(codes(40)), want)


@pytest.mark.exhaustive
def test_tables_of_truth_values():
    """What JAX's remainder compares: of a constant divisor, all are alike."""

    class Rows(nnx.Module):
        def __init__(self) -> None:
            self.table = nnx.Param(jax.random.normal(jax.random.key(0), (6, 4)))

        def __call__(self, i: jax.Array) -> jax.Array:
            return self.table[...][(i * 5 + 1) % 6]

    i = jax.random.randint(jax.random.key(9), (4, 5), 0, 6)
    qmodel = qjax.quantize(Rows(), qjax.Recipe(), i)
    qmodel.eval()
    graph = qjax.convert(qmodel, i)
    assert np.array_equal(graph.native(4).run(np.asarray(i)), np.asarray(graph.run(i)))


def test_a_state_goes_in_and_out():
    class Sum(nnx.Module):
        def __call__(self, state: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            state = state + x
            return state * 0.5, state

    sample = np.zeros((1, 4), np.float32), np.ones((1, 4), np.float32)
    qmodel = qjax.quantize(Sum(), qjax.Recipe(), sample)
    qjax.calibrate(qmodel, [tuple(np.random.default_rng(0).normal(size=(1, 4)).astype(np.float32) for _ in "ab")])
    qmodel.eval()
    graph = qjax.convert(qmodel, sample, state=(0, 1))
    given = [np.random.default_rng(i).integers(-128, 128, (1, 4), dtype=np.int8) for i in range(2)]
    got, want = graph.native().run(*given), graph.run(*given)
    assert isinstance(got, tuple)
    assert all(np.array_equal(a, np.asarray(b)) for a, b in zip(got, want, strict=True))


def test_errors_say_what_was_expected(graph, monkeypatch):
    native = graph.native(2)
    with pytest.raises(ValueError, match=r"\(2, 8, 8, 3\)"):
        native.run(codes(3))
    with pytest.raises(TypeError, match="expected codes of dtype int8"):
        native.run(codes(2).astype(np.int32))
    with pytest.raises(ValueError, match="expected a batch of at least 1"):
        graph.native(0)
    with pytest.raises(ValueError, match="expected threads to be a whole number of at least 1, got 0"):
        graph.native(threads=0)
    monkeypatch.setenv("CC", "false")
    with pytest.raises(RuntimeError, match=r"false -std=c99 .* failed"):
        graph.native()
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(FileNotFoundError, match="no C compiler"):
        graph.native()
