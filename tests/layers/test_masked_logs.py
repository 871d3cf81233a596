"""Masks in front of a log-softmax and a logsumexp: hidden numbers take no part, and widen no grid."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax
from tests.layers.round_trip import assert_same, data

X = data(5, 12, 8)
MASK = jnp.asarray(np.random.default_rng(0).random((5, 12, 1)) < 0.6).at[:, 3].set(True)
TRIL = np.tril(np.ones((12, 8), bool))[None]
Function = Callable[[jax.Array, jax.Array], Any]

FORMS: dict[str, tuple[Function, Function]] = {
    "log_softmax": (
        lambda h, m: jax.nn.log_softmax(jnp.where(m, h, -1e9), axis=1),
        lambda h, m: jnp.where(m, 1.0, 0.0) + 0 * h,
    ),
    "two masks": (
        lambda h, m: jax.nn.log_softmax(jnp.where(m & TRIL, h, jnp.finfo(jnp.float32).min), axis=1),
        lambda h, m: jnp.where(m & TRIL, 1.0, 0.0) + 0 * h,
    ),
    "behind a bias": (
        lambda h, m: jax.nn.log_softmax(h + (0.5 + jnp.where(m, 0.0, -1e9)), axis=1),
        lambda h, m: jnp.where(m, 1.0, 0.0) + 0 * h,
    ),
    "logsumexp": (lambda h, m: jax.nn.logsumexp(jnp.where(m, h, -1e9), axis=1), lambda h, m: 1.0),
    "by hand": (
        lambda h, m: jnp.log(jnp.sum(jnp.exp(h - jnp.where(m, 0.0, 1e9)), axis=1, keepdims=True)),
        lambda h, m: 1.0,
    ),
}
"""The function, and 1 where its numbers are those of visible elements."""
SHOWN = ("log_softmax", "two masks", "behind a bias")
"""The forms whose results hold the hidden elements too."""


class Net(nnx.Module):
    def __init__(self, function: Function) -> None:
        self.dense = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        self.function = function

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        return self.function(self.dense(x), mask)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.sampled(2)
def test_hidden_numbers_take_no_part(name: str) -> None:
    function, visible = FORMS[name]
    model = Net(function)
    # a log-probability of -1e9 that the result itself shows is on no grid, and says so
    shows = pytest.warns(UserWarning, match="puts -1e.09 among numbers") if name in SHOWN else nullcontext()
    with shows:
        qmodel = qjax.quantize(model, qjax.Recipe(activations=qjax.QSpec(bits=10)), (X, MASK))
    qmodel.eval()
    assert max(float(np.max(q.scale)) for q in qmodel.qparams().values()) < 0.05
    graph = qjax.convert(qmodel, (X, MASK))
    shown = np.asarray(visible(model.dense(X), MASK)) > 0
    found, expected = np.asarray(graph(X, MASK)), np.asarray(model(X, MASK))
    assert np.max(np.abs(found - expected) * shown) < 0.05
    # what is hidden has the lowest code
    if shown.ndim:
        assert np.unique(found[~shown]).size == 1
        assert found[~shown][0] <= found[shown].min()
    report = qjax.verify(graph, qmodel, [(X, MASK)])
    assert report.local <= report.compared / 1000
    # to the bit: visible results do not depend on what is hidden
    other = X + 5 * jnp.logical_not(MASK).astype(jnp.float32)
    again = np.asarray(graph(other, MASK))
    assert np.array_equal(found[shown] if shown.ndim else found, again[shown] if shown.ndim else again)


@pytest.mark.exhaustive
def test_the_exact_forward_with_masks_is_the_graph() -> None:
    def both(h: jax.Array, m: jax.Array) -> Any:
        return FORMS["two masks"][0](h, m), FORMS["logsumexp"][0](h, m)

    with pytest.warns(UserWarning, match="puts -1e.09 among numbers"):
        qmodel = qjax.quantize(Net(both), qjax.Recipe(), (X, MASK))
    qmodel.eval()
    expected = qjax.convert(qmodel, (X, MASK))(X, MASK)
    assert_same(nnx.jit(qjax.exact(qmodel, (X, MASK)))(qmodel, X, MASK), expected)


def test_a_row_in_which_nothing_takes_part_counts_as_if_everything_did() -> None:
    function = FORMS["logsumexp"][0]
    qmodel = qjax.quantize(Net(function), qjax.Recipe(), (X, MASK))
    qmodel.eval()
    graph = qjax.convert(qmodel, (X, MASK))
    nothing, everything = jnp.zeros_like(MASK), jnp.ones_like(MASK)
    assert np.array_equal(np.asarray(graph(X, nothing)), np.asarray(graph(X, everything)))
    assert qjax.verify(graph, qmodel, [(X, nothing)]).local == 0


def test_a_number_that_only_lowers_is_no_mask() -> None:
    model = Net(lambda h, m: jax.nn.log_softmax(jnp.where(m, h, -3.0), axis=1))
    qmodel = qjax.quantize(model, qjax.Recipe(activations=qjax.QSpec(bits=10)), (X, MASK))
    qmodel.eval()
    found = np.asarray(qjax.convert(qmodel, (X, MASK))(X, MASK))
    assert np.max(np.abs(found - np.asarray(model(X, MASK)))) < 0.05
