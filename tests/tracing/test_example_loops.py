"""Loops over the examples of a batch, which are computed for all of them at once."""

# what models are made of has no static type here
# pyright: reportAttributeAccessIssue=false

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import qjax
from qjax.layers import instrument, trace
from tests.layers.round_trip import check, data

BATCH, LENGTH, WIDTH = 4, 5, 6
X = data(BATCH, LENGTH, WIDTH)


class Of(nnx.Module):
    def __init__(self, function):
        self.function = function
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
        self.norm = nnx.LayerNorm(WIDTH, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.function(self, x)


def one(model, row):
    return nnx.relu(model.norm(model.first(row)))


def attention(row):
    return jax.nn.softmax(row @ row.T, axis=-1) @ row


def twice(model, x):
    """One function in two loops, which JAX traces once."""
    function = jax.jit(lambda rows: jax.lax.map(attention, rows))
    return function(function(model.first(x)))


def nested(model, x):
    """For every example, for every row."""
    return jax.lax.map(lambda rows: jax.lax.map(lambda row: jnp.tanh(model.first(row)), rows), x)


def of_heads(model, x):
    """The rows of the loop are heads of examples, each with two of the six channels."""
    heads = jnp.moveaxis(model.first(x).reshape(len(x), LENGTH, 3, 2), 2, 1).reshape(len(x) * 3, LENGTH, 2)
    mixed = jax.lax.map(attention, heads)
    return jnp.moveaxis(mixed.reshape(len(x), 3, LENGTH, 2), 1, 2).reshape(x.shape)


def first_axis(model, x):
    """An index in front of an axis that is not the first."""
    y = jnp.swapaxes(model.first(x), 0, 1)
    return jax.lax.map(lambda i: jnp.tanh(y[:, i]), jnp.arange(len(x)))


LOOPS = {
    "rows": lambda model, x: jax.lax.map(lambda row: one(model, row), x),
    "indices": lambda model, x: jax.lax.map(lambda i: one(model, x[i]), jnp.arange(len(x))),
    "indices behind an axis": first_axis,
    "counted from the end": lambda model, x: jax.lax.map(lambda i: one(model, x[i - len(x)]), jnp.arange(len(x))),
    "reversed": lambda model, x: jax.lax.scan(lambda c, row: (c, one(model, row)), None, x, reverse=True)[1],
    "several": lambda model, x: jax.lax.map(lambda pair: pair[0] @ pair[1].T, (model.first(x), x)),
    "heads": of_heads,
    "twice": twice,
    "nested": nested,
    "remat": lambda model, x: jax.lax.map(jax.checkpoint(lambda row: one(model, row)), x),
}


def primitives(function, x):
    return [eqn.primitive for eqn in trace(instrument(Of(function)), (x,), {}).program.walk()]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", LOOPS)
def test_all_examples_at_once(name):
    check(Of(LOOPS[name]), X)


@pytest.mark.parametrize("name", LOOPS)
def test_it_is_no_loop(name):
    scans = primitives(LOOPS[name], X).count("scan")
    # the inner loop does not follow the batch
    assert scans == (1 if name == "nested" else 0)


@pytest.mark.exhaustive
def test_the_codes_are_those_of_all_examples_at_once():
    graphs = []
    for function in (LOOPS["rows"], one):
        qmodel = qjax.quantize(Of(function), qjax.Recipe(), X)
        qjax.calibrate(qmodel, [X], progress=False)
        qmodel.eval()
        graphs.append(qjax.convert(qmodel, X))
    np.testing.assert_array_equal(graphs[0](X), graphs[1](X))


def test_a_loop_over_another_axis_stays():
    assert "scan" in primitives(lambda model, x: jax.lax.map(model.first, jnp.swapaxes(x, 0, 1)), X)


def test_a_loop_that_carries_something_stays():
    def function(model, x):
        return jax.lax.scan(lambda total, row: (total + row, one(model, row)), jnp.zeros(X.shape[1:]), x)[1]

    assert "scan" in primitives(function, X)


def test_a_model_that_takes_one_size_of_batch():
    """No other size can be traced, so nothing follows the batch."""

    def function(model, x):
        return jax.lax.map(lambda row: one(model, row), x.reshape(BATCH, LENGTH, WIDTH))

    assert "scan" in primitives(function, X)


def test_a_model_that_refuses_another_batch():
    """Whatever it raises: here an AssertionError."""

    def function(model, x):
        assert len(x) == BATCH
        return jax.lax.map(lambda row: one(model, row), x)

    assert "scan" in primitives(function, X)


@pytest.mark.exhaustive
def test_a_loop_in_linen():
    class Rows(linen.Module):
        @linen.compact
        def __call__(self, x):
            layer = linen.Dense(WIDTH)
            layer(x[0])  # makes the parameters outside of the loop
            variables = layer.variables
            return jax.lax.map(lambda row: linen.Dense(WIDTH, parent=None).apply(variables, row), x)

    module = Rows()
    check(qjax.from_linen(module, module.init(jax.random.key(0), X)), X)


@pytest.mark.exhaustive
def test_a_batch_of_one():
    check(Of(LOOPS["indices"]), X[:1])


def loop_of_python(model, x):
    return jnp.stack([one(model, row) for row in x])


@pytest.mark.exhaustive
def test_a_loop_of_python_names_what_takes_any_batch():
    qmodel = qjax.quantize(Of(loop_of_python), qjax.Recipe(), X)
    with pytest.raises(ValueError, match=r"test_example_loops.*jax.vmap and jax.lax.map accept any") as raised:
        qjax.calibrate(qmodel, [jnp.concatenate([X, X])], progress=False)
    assert len(str(raised.value)) < 1000


def test_a_weight_that_holds_the_batch_names_its_line():
    a, x = jnp.eye(2) * 2.0 + 0.1, X[:, :2]

    def function(model, x):
        return jnp.linalg.inv(jnp.broadcast_to(a, (len(x), *a.shape))) @ model.first(x)

    qmodel = qjax.quantize(Of(function), qjax.Recipe(), x)
    with pytest.raises(
        ValueError, match=r"test_example_loops.*computed from parameters, but its shape depends on the batch"
    ):
        qjax.calibrate(qmodel, [jnp.concatenate([x, x])], progress=False)
