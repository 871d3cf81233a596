"""Modules and arrays that a loop carries unchanged."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax
from tests.layers.round_trip import check, data

X = data(3, 5, 4)


class Experts(nnx.Module):
    """A loop that carries this module: its table is read at places that data choose."""

    def __init__(self, around):
        self.table = nnx.Param(jnp.asarray([1.0, -2.0, 0.5, 4.0]))
        self.dense = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        self.around = around

    def __call__(self, x):
        def body(i, carry):
            module, x, beside = carry
            weights, chosen = jax.lax.top_k(module.dense(x), 4)
            return module, jax.nn.softmax(weights) * self.around(module.table[...], chosen) + beside, beside

        _, y, beside = nnx.fori_loop(0, 2, body, (self, x, 0.5 * x))
        return y + beside


@pytest.mark.exhaustive
def test_a_module_that_is_carried():
    _, graph = check(Experts(lambda table, chosen: table[chosen]), X)
    assert [node.op for node in graph.ir.nodes].count("embed") == 2


@pytest.mark.exhaustive
def test_a_module_that_a_remat_returns_to_the_loop():
    class Rematerialized(Experts):
        def __call__(self, x):
            def step(module, x):
                weights, chosen = jax.lax.top_k(module.dense(x), 4)
                return jax.nn.softmax(weights) * module.table[...][chosen]

            def body(i, carry):
                module, x = carry
                graphdef, state = nnx.split(module)

                @jax.checkpoint
                def run(state, x):
                    return step(nnx.merge(graphdef, state), x), state

                x, state = run(state, x)
                return nnx.merge(graphdef, state), x

            return nnx.fori_loop(0, 2, body, (self, x))[1]

    _, graph = check(Rematerialized(None), X)
    assert [node.op for node in graph.ir.nodes].count("embed") == 2


@pytest.mark.exhaustive
def test_a_table_that_is_repeated_for_every_example():
    def around(table, chosen):
        return jnp.take_along_axis(jnp.broadcast_to(table, (*chosen.shape[:2], 4)), chosen, axis=-1)

    _, graph = check(Experts(around), X)
    same = check(Experts(lambda table, chosen: table[chosen]), X)[1]
    np.testing.assert_array_equal(graph(X), same(X))


@pytest.mark.exhaustive
def test_results_of_a_loop_that_changes_nothing():
    class Nothing(nnx.Module):
        def __init__(self):
            self.dense = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return jax.lax.fori_loop(0, 3, lambda i, x: x, self.dense(x))

    qmodel = qjax.quantize(Nothing(), qjax.Recipe(), X)
    assert qjax.verify(qjax.convert(qmodel, X), qmodel, [X]).exact
