"""While loops whose iterations can be counted before any input is known are scans; others are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import qjax
from qjax.tracing import from_jaxpr

X = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4)), jnp.float32)


def lengths(function, *args) -> list[int]:
    """The scans of a program; -1 for a while loop."""
    program = from_jaxpr(jax.make_jaxpr(function)(*args))
    names = {"scan": lambda eqn: eqn.params["length"], "while": lambda eqn: -1}
    return [names[eqn.primitive](eqn) for eqn in program.walk() if eqn.primitive in names]


def loop(test, move, start):
    """Counts by `move` from `start` while `test`, and doubles x."""
    return lambda x: lax.while_loop(lambda s: test(s[0]), lambda s: (move(s[0]), s[1] * 2), (start, x))[1]


COUNTED = {
    "up": (loop(lambda i: i < 6, lambda i: i + 1, 0), 6),
    "down by two": (loop(lambda i: i > 0, lambda i: i - 2, 7), 4),
    "floats": (loop(lambda t: t < 1.0, lambda t: t * 2, 0.125), 3),
    "never": (loop(lambda i: i < 0, lambda i: i + 1, 0), None),
    "two numbers": (
        loop(lambda s: (s[0] < 20) & (s[1] > 0), lambda s: (s[0] + s[1], s[1] - 1), (jnp.int32(0), jnp.int32(9))),
        3,
    ),
    "a bound in the state": (loop(lambda s: s[0] < s[1], lambda s: (s[0] + 1, s[1]), (0, 5)), 5),
}
DATA = {
    "the input": lambda x: lax.while_loop(lambda y: jnp.sum(y) < 100, lambda y: y * 2 + 1, x),
    "a bound of the input": lambda x: lax.fori_loop(0, jnp.sum(x > 0), lambda i, y: y * 2, x),
    "a counter that data move": lambda x: lax.while_loop(
        lambda s: s[0] < 5, lambda s: (s[0] + jnp.where(s[1][0, 0] > 0, 1, 2), s[1]), (0, x)
    )[1],
    "too many": loop(lambda i: i < 5000, lambda i: i + 1, 0),
}


@pytest.mark.parametrize("name", COUNTED)
def test_loops_that_count_are_scans_of_that_length(name: str) -> None:
    function, length = COUNTED[name]
    assert lengths(function, X) == ([] if length is None else [length])
    program = from_jaxpr(jax.make_jaxpr(function)(X))
    assert [tuple(value.shape) for value in program.outputs] == [X.shape]


@pytest.mark.parametrize("name", DATA)
@pytest.mark.sampled(2)
def test_loops_that_data_end_stay_loops(name: str) -> None:
    assert lengths(DATA[name], X) == [-1]


class Net(nnx.Module):
    def __init__(self, function) -> None:
        self.dense, self.function = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), function

    def __call__(self, x):
        return self.function(self.dense, x)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_counted_loop_has_integers_and_a_gradient() -> None:
    def counted(dense, x):
        return lax.while_loop(lambda s: s[0] < 5, lambda s: (s[0] + 1, jnp.tanh(dense(s[1]))), (0, x))[1]

    def scanned(dense, x):
        return lax.scan(lambda carry, _: (jnp.tanh(dense(carry)), None), x, None, length=5)[0]

    def calibrated(function):
        qmodel = qjax.quantize(Net(function), qjax.Recipe(), X)
        qjax.calibrate(qmodel, [X])
        qmodel.eval()
        return qmodel

    qmodel = calibrated(counted)
    graph = qjax.convert(qmodel, X)
    assert qjax.verify(graph, qmodel, [X]).exact
    np.testing.assert_array_equal(graph(X), qjax.convert(calibrated(scanned), X)(X))
    grads = nnx.grad(lambda m: jnp.sum(m(X) ** 2))(qmodel)
    assert all(bool(jnp.any(g != 0)) for g in jax.tree.leaves(nnx.to_pure_dict(grads)["model"]["dense"]["kernel"]))


def test_a_loop_of_unknown_length_says_what_counts() -> None:
    def until(dense, x):
        return lax.while_loop(lambda y: jnp.sum(y) < 100, lambda y: y * 2 + 1, dense(x))

    with pytest.warns(UserWarning, match="its condition must count from a constant to a constant"):
        qmodel = qjax.quantize(Net(until), qjax.Recipe(), X)
    with pytest.raises(qjax.ConversionError, match="A loop of unknown length cannot become a graph"):
        qjax.convert(qmodel, X)
