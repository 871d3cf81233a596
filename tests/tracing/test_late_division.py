"""Attention that divides by the sum of its exponentials after the product with the values, and masks of two numbers."""

# what models are made of has no static type here
# pyright: reportAttributeAccessIssue=false

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax
from qjax.layers import instrument, trace
from qjax.tracing import Annotation, Evaluation
from tests.layers.round_trip import check, data

BATCH, LENGTH, GROUPS, HEADS, WIDTH = 2, 6, 2, 3, 4
X = data(BATCH, LENGTH, 3 * GROUPS * HEADS * WIDTH)
LEAST = -0.7 * float(jnp.finfo(jnp.float32).max)


class Of(nnx.Module):
    def __init__(self, function):
        self.function = function

    def __call__(self, x):
        return self.function(x)


def heads(x):
    return jnp.split(x.reshape(*x.shape[:2], GROUPS, HEADS, 3 * WIDTH), 3, axis=-1)


def exponentials(x, causal=True):
    """exp(scores - max) of (batch, group, head, query, key)."""
    q, k, _ = heads(x)
    scores = jnp.einsum("btghd,bsghd->bghts", q, k) * (1.0 / WIDTH)
    if causal:
        numbers = jnp.where(jnp.tri(x.shape[1], dtype=bool)[None, None, None], 0.0, LEAST)
        scores = jnp.where(numbers >= 0.5 * LEAST, scores, LEAST)
    return jnp.exp(scores - scores.max(-1, keepdims=True))


def merged(x, causal=True):
    """Both sides go their own way to (batch, query, heads, width)."""
    e = exponentials(x, causal)
    total = jnp.moveaxis(e.sum(-1, keepdims=True), -2, 1).reshape(*x.shape[:2], GROUPS * HEADS, 1)
    return jnp.einsum("bghts,bsghd->btghd", e, heads(x)[2]).reshape(*total.shape[:3], WIDTH) / total


def repeated(x):
    """The divisor is repeated along the values, and all heads become one axis."""
    e = exponentials(x)
    total = jnp.repeat(jnp.moveaxis(e.sum(-1), -1, 1)[..., None], WIDTH, axis=-1).reshape(*x.shape[:2], -1)
    return jnp.einsum("bghts,bsghd->btghd", e, heads(x)[2]).reshape(total.shape) * (1.0 / total)


def first(x):
    """The exponentials are the left operand of the product, and in another order."""
    e, v = exponentials(x), heads(x)[2]
    product = jnp.einsum("btghs,bsghd->btghd", jnp.moveaxis(e, 3, 1), v)
    return product / jnp.moveaxis(e.sum(-1), -1, 1)[..., None]


def taken_apart(x):
    """The heads are one axis of the exponentials, and two of the product."""
    q, k, v = heads(x)
    scores = jnp.einsum("btghd,bsghd->bghts", q, k).reshape(len(x), GROUPS * HEADS, LENGTH, LENGTH)
    e = jnp.exp(scores - scores.max(-1, keepdims=True))
    product = jnp.einsum("bghts,bsghd->btghd", e.reshape(len(x), GROUPS, HEADS, LENGTH, LENGTH), v)
    return product.reshape(len(x), LENGTH, GROUPS * HEADS, WIDTH) / jnp.swapaxes(e.sum(-1, keepdims=True), 1, 2)


def with_a_sink(x):
    """A number of each head, beside the scores, takes part in the sum alone."""
    q, k, v = heads(x)
    scores = jnp.einsum("btghd,bsghd->bghts", q, k)
    sinks = jnp.broadcast_to(jnp.asarray([[0.5, -1.0, 2.0]] * GROUPS)[None, :, :, None, None], (*scores.shape[:4], 1))
    scores = jnp.concatenate([scores, sinks], axis=-1)
    e = jnp.exp(scores - scores.max(-1, keepdims=True))
    return jnp.einsum("bghts,bsghd->bghtd", e[..., :LENGTH], v) / e.sum(-1, keepdims=True)


def another_axis(x):
    """The sum is over the queries."""
    e = exponentials(x, causal=False)
    product = jnp.einsum("bghts,bsghd->bghtd", e, heads(x)[2])
    return product / e.sum(-2)[..., None]


def another_head(x):
    """Each head is divided by the sum of its neighbour."""
    e = exponentials(x)
    return jnp.einsum("bghts,bsghd->bghtd", e, heads(x)[2]) / e.sum(-1, keepdims=True)[:, :, ::-1]


def only_some_queries(x):
    """The divisor is that of the first queries, of which the product has as many."""
    q, k, v = heads(x)
    scores = jnp.einsum("btghd,bsghd->bghts", q, k[:, :3])
    e = jnp.exp(scores - scores.max(-1, keepdims=True))
    return jnp.einsum("bghts,bsghd->bghtd", e[..., 3:, :], v[:, :3]) / e.sum(-1, keepdims=True)[..., :3, :]


def a_slice_taken_apart(x):
    """The keys that remain are two axes of the product."""
    q, k, v = heads(x)
    scores = jnp.einsum("btghd,bsghd->bghts", q, k)
    e = jnp.exp(scores - scores.max(-1, keepdims=True))
    some, values = e[..., :4].reshape(*e.shape[:4], 2, 2), v[:, :4].reshape(len(x), 2, 2, *v.shape[2:])
    return jnp.einsum("bghtsu,bsughd->bghtd", some, values) / e.sum(-1, keepdims=True)


def read_twice(x):
    e = exponentials(x)
    product = jnp.einsum("bghts,bsghd->bghtd", e, heads(x)[2])
    return product / e.sum(-1, keepdims=True), product


def traced(function):
    """The primitives of the program, and how far its outputs are from the function's, of their size."""
    found = trace(instrument(Of(function)), (X,), {})
    values, _ = Evaluation(Annotation(), None).run(found.program, found.args, {})
    pairs = zip(jax.tree.leaves(found.outputs(values)), jax.tree.leaves(function(X)), strict=True)
    far = max(float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in pairs)
    return [eqn.primitive for eqn in found.program.equations], far


@pytest.mark.parametrize("function", [merged, repeated, first, taken_apart, with_a_sink])
def test_it_is_a_softmax(function):
    primitives, far = traced(function)
    assert primitives.count("softmax") == 1
    assert not {"exp", "div", "select_n"} & {*primitives}
    assert far < 1e-6


@pytest.mark.parametrize("function", [another_axis, another_head, only_some_queries, a_slice_taken_apart, read_twice])
def test_another_quotient_stays(function):
    primitives, far = traced(function)
    assert "softmax" not in primitives
    assert far < 1e-6


def test_it_is_the_graph_of_the_softmax():
    """As `jax.nn.softmax` before the product, code for code."""

    def usual(x):
        q, k, v = heads(x)
        scores = jnp.einsum("btghd,bsghd->bghts", q, k) * (1.0 / WIDTH)
        weights = jax.nn.softmax(scores, where=jnp.tri(x.shape[1], dtype=bool)[None, None, None], axis=-1)
        return jnp.einsum("bghts,bsghd->btghd", weights, v).reshape(*x.shape[:2], GROUPS * HEADS, WIDTH)

    graphs = []
    for function in (merged, usual):
        qmodel = qjax.quantize(Of(function), qjax.Recipe(), X)
        qjax.calibrate(qmodel, [X], progress=False)
        qmodel.eval()
        graphs.append(qjax.convert(qmodel, X))
    np.testing.assert_array_equal(graphs[0](X), graphs[1](X))


@pytest.mark.exhaustive
def test_trained_and_converted():
    check(Of(merged), X)


TWO = {
    "at least half of it": (lambda m: m >= 0.5 * LEAST, True),
    "not below": (lambda m: jnp.logical_not(m < -1.0), True),
    "is zero": (lambda m: m == 0.0, True),
    "moved": (lambda m: jnp.swapaxes(m[:, None], 1, 2)[:, :, 0] > LEAST, True),
    "is hidden": (lambda m: m < -1.0, False),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", TWO)
def test_a_mask_of_two_numbers_that_is_compared(name):
    """What is chosen by it is chosen by the truth value, and the numbers get no quantizer."""
    compare, kept = TWO[name]

    def function(x):
        numbers = jnp.where(x[..., :3] > 0.25, 0.0, LEAST)
        yes, no = x[..., 3:6], x[..., 6:9]
        return jnp.where(compare(numbers), yes, no)

    qmodel = qjax.quantize(Of(function), qjax.Recipe(), X)
    qjax.calibrate(qmodel, [X], progress=False)
    qmodel.eval()
    graph = qjax.convert(qmodel, X)
    np.testing.assert_array_equal(graph(X), qmodel(X))
    chosen = jnp.where((x := X)[..., :3] > 0.25, x[..., 3:6], x[..., 6:9])
    other = jnp.where(x[..., :3] > 0.25, x[..., 6:9], x[..., 3:6])
    assert np.abs(graph(X) - (chosen if kept else other)).max() < 0.05


@pytest.mark.exhaustive
def test_a_mask_of_two_numbers_beside_a_larger_tensor():
    """The comparison repeats the mask: what it says is repeated, too."""

    def function(x):
        numbers = jnp.where(x[..., :1] > 0.25, 0.0, LEAST)
        return jnp.where(numbers >= jnp.full((1, 1, 3), -1.0), x[..., 3:6], x[..., 6:9])

    qmodel = qjax.quantize(Of(function), qjax.Recipe(), X)
    graph = qjax.convert(qmodel, X)
    np.testing.assert_array_equal(graph(X), qmodel(X))
    assert np.abs(graph(X) - function(X)).max() < 0.1


@pytest.mark.exhaustive
def test_a_mask_of_two_numbers_that_is_read_otherwise_keeps_its_numbers():
    def function(x):
        numbers = jnp.where(x[..., :3] > 0.25, 1.5, -0.5)
        return jnp.where(numbers > 0.0, x[..., 3:6], numbers)

    qmodel = qjax.quantize(Of(function), qjax.Recipe(), X)
    qjax.calibrate(qmodel, [X], progress=False)
    qmodel.eval()
    graph = qjax.convert(qmodel, X)
    np.testing.assert_array_equal(graph(X), qmodel(X))
    assert np.abs(graph(X) - function(X)).max() < 0.05
