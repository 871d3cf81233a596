"""Triangular systems of equations as products of matrices."""

# what models are made of has no static type here
# pyright: reportAttributeAccessIssue=false

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import qjax
from qjax.layers import instrument, trace
from qjax.tracing import Annotation, Evaluation
from tests.layers.round_trip import check, data

BATCH, LENGTH, WIDTH = 2, 12, 4
X = data(BATCH, LENGTH, 4 * WIDTH)


class Of(nnx.Module):
    def __init__(self, function):
        self.function = function

    def __call__(self, x):
        return self.function(x)


def evaluated(function, x=X):
    """The primitives of the program, and its output in float."""
    found = trace(instrument(Of(function)), (x,), {})
    values, _ = Evaluation(Annotation(), None).run(found.program, found.args, {})
    return [eqn.primitive for eqn in found.program.equations], found.outputs(values)


def matrix(x, size=LENGTH):
    """A matrix of data for each example, with a diagonal that is far from 0; both triangles have numbers."""
    product = x[:, :size, :WIDTH] @ jnp.swapaxes(x[:, :size, WIDTH : 2 * WIDTH], 1, 2)
    return product * 0.1 + 1.5 * jnp.eye(size)[None]


FORMS = list(itertools.product([True, False], repeat=4))


@pytest.mark.parametrize(("left", "lower", "transpose", "unit"), FORMS)
@pytest.mark.sampled(2)
def test_it_is_the_solution(left, lower, transpose, unit):
    def function(x):
        right = x[..., 2 * WIDTH :] if left else jnp.swapaxes(x[..., 2 * WIDTH :], 1, 2)
        return lax.linalg.triangular_solve(
            matrix(x), right, left_side=left, lower=lower, transpose_a=transpose, unit_diagonal=unit
        )

    primitives, found = evaluated(function)
    assert "triangular_solve" not in primitives
    expected = function(X)
    assert float(jnp.abs(found - expected).max() / jnp.abs(expected).max()) < 1e-5


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 9])
@pytest.mark.sampled(2)
def test_the_inverse_of_any_size(size):
    def function(x):
        a = matrix(x, size)
        identity = jnp.broadcast_to(jnp.eye(size), a.shape)
        return jax.scipy.linalg.solve_triangular(a, identity, lower=True, unit_diagonal=True)

    primitives, found = evaluated(function)
    expected = function(X)
    assert float(jnp.abs(found - expected).max() / jnp.abs(expected).max()) < 1e-5
    # the first factor is the matrix itself
    assert primitives.count("dot_general") == 1 + 2 * max(0, (size - 1).bit_length() - 1)


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.sampled(1)
def test_a_matrix_of_numbers_is_inverted_once(left):
    a = np.tril(np.asarray(data(LENGTH, LENGTH, seed=1)) * 0.1) + np.eye(LENGTH, dtype=np.float32)

    def function(x):
        right = x if left else jnp.swapaxes(x, 1, 2)
        every = jnp.broadcast_to(a, (len(x), *a.shape))
        return lax.linalg.triangular_solve(every, right, left_side=left, lower=True)

    primitives, found = evaluated(function)
    expected = function(X)
    assert float(jnp.abs(found - expected).max() / jnp.abs(expected).max()) < 1e-5
    assert primitives.count("dot_general") == 1
    check(Of(function), X)


def test_a_matrix_that_holds_the_batch_is_an_error():
    x = X[:, :3]
    a = np.eye(3, dtype=np.float32) + np.asarray(data(3, 3, seed=1)) * 0.1
    qmodel = qjax.quantize(Of(lambda x: jnp.linalg.inv(jnp.broadcast_to(a, (len(x), *a.shape))) @ x), qjax.Recipe(), x)
    with pytest.raises(
        qjax.ConversionError, match=r"test_triangular_solve.py.*its shape depends on the batch.*jnp.broadcast_to"
    ):
        qjax.convert(qmodel, x)


def test_too_many_rows_are_an_error():
    x = data(1, 130, 4 * WIDTH)

    def function(x):
        return lax.linalg.triangular_solve(matrix(x, 130), x, left_side=True, lower=True)

    with pytest.warns(UserWarning, match="convert will refuse it"):
        qmodel = qjax.quantize(Of(function), qjax.Recipe(), x)
    with pytest.raises(qjax.ConversionError, match=r"'triangular_solve' on 1x130x130.*Up to 128 rows have one"):
        qjax.convert(qmodel, x)


def delta_rule(x):
    """Chunks of linear attention by the delta rule, as Yang et al. (2024, arXiv:2406.06484) write them."""
    chunk = 4
    q, k, v, gate = jnp.split(x.reshape(len(x), -1, chunk, 4 * WIDTH), 4, axis=-1)
    k = k * lax.rsqrt(jnp.sum(jnp.square(k), -1, keepdims=True) + 1e-6)
    beta = jax.nn.sigmoid(gate[..., :1])
    scores = jnp.einsum("bnik,bnjk->bnij", k * beta, k)
    strict = jnp.where(jnp.tri(chunk, k=-1, dtype=bool), scores, 0.0)
    identity = jnp.broadcast_to(jnp.eye(chunk), strict.shape)
    inverse = jax.scipy.linalg.solve_triangular(identity + strict, identity, lower=True, unit_diagonal=True)
    u, w = inverse @ (v * beta), inverse @ (k * beta)

    def step(state, parts):
        q, k, u, w = parts
        new = u - w @ state
        causal = jnp.where(jnp.tri(chunk, dtype=bool), q @ jnp.swapaxes(k, 1, 2), 0.0)
        return state + jnp.swapaxes(k, 1, 2) @ new, q @ state + causal @ new

    parts = jax.tree.map(lambda t: jnp.moveaxis(t, 1, 0), (q, k, u, w))
    _, y = lax.scan(step, jnp.zeros((len(x), WIDTH, WIDTH)), parts)
    return jnp.moveaxis(y, 0, 1).reshape(len(x), -1, WIDTH)


@pytest.mark.exhaustive
def test_attention_by_the_delta_rule():
    check(Of(delta_rule), X)
    qmodel = qjax.quantize(Of(delta_rule), qjax.Recipe(), X)
    qjax.calibrate(qmodel, [X], progress=False)
    qmodel.eval()
    graph, expected = qjax.convert(qmodel, X), np.asarray(delta_rule(X))
    assert np.abs(graph(X) - expected).max() < 0.05 * np.abs(expected).max()
