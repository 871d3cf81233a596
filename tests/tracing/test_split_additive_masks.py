"""Additive masks that meet a bias before the softmax: ordinary numbers and a mask, wherever they were put together.

And masks that hide nothing.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax

LEAST = float(jnp.finfo(jnp.float32).min)
TABLE = np.where(np.tri(6, dtype=bool), -0.25 * np.abs(np.arange(6)[:, None] - np.arange(6)), LEAST).astype(np.float32)[
    None
]
"""ALiBi and a causal mask in one table."""


class Masked(nnx.Module):
    """function(scores, bias, which keys count) of (batch, 6, 6) scores, a learned bias and (batch, 6) integers."""

    def __init__(self, function):
        self.function = function
        self.bias = nnx.Param(jax.random.normal(jax.random.key(0), (1, 6, 6)))

    def __call__(self, scores, keys):
        return self.function(scores, self.bias[...], keys)


def additive(keys, least=LEAST):
    return jnp.where(keys[:, None, :] > 0, 0.0, least)


def two_biases(scores, bias, keys):
    masked = bias + additive(keys)
    masked = masked + jnp.where(jnp.tri(6, dtype=bool), 0.0, -1e9)[None]
    return jax.nn.softmax(scores + masked), jax.nn.softmax(0.5 * scores + masked)


def moved(scores, bias, keys):
    masked = jnp.swapaxes(scores, 1, 2) + jnp.broadcast_to(additive(keys, -1e10), (keys.shape[0], 6, 6))
    wide = jnp.concatenate([jnp.swapaxes(masked, 1, 2), masked], axis=-1)
    return jax.nn.softmax(jnp.concatenate([scores, scores], axis=-1) + wide[..., ::-1])


def chosen(scores, bias, keys):
    masked = jnp.where(keys[:, :, None] > 0, bias + additive(keys), bias)
    return jax.nn.softmax(scores + masked)


MASKS = {
    "T5": lambda scores, bias, keys: jax.nn.softmax(scores + (bias + additive(keys))),
    "a product": lambda scores, bias, keys: jax.nn.softmax(
        scores + (bias + (1.0 - (keys > 0)[:, None, :].astype(jnp.float32)) * LEAST)
    ),
    "a table": lambda scores, bias, keys: jax.nn.softmax(scores + (bias + TABLE)),
    "clipped": lambda scores, bias, keys: jax.nn.softmax(
        scores + jnp.maximum(bias + -1e8 * (keys < 1)[:, None].astype(jnp.float32), LEAST)
    ),
    "the greater": lambda scores, bias, keys: jax.nn.softmax(jnp.maximum(scores + (bias + additive(keys)), TABLE)),
    "the lesser": lambda scores, bias, keys: jax.nn.softmax(scores + jnp.minimum(bias + additive(keys), TABLE)),
    "two biases": two_biases,
    "moved": moved,
    "chosen": chosen,
}
KEYS = np.array([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1], [1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0]], np.int32)


def inputs(batch=4):
    return jax.random.normal(jax.random.key(1), (batch, 6, 6)), jnp.asarray(KEYS[:batch])


@pytest.mark.exhaustive
def test_the_rest_of_a_masked_bias_is_quantized_and_what_is_hidden_counts_nothing():
    model = Masked(lambda *given: {name: function(*given) for name, function in MASKS.items()})
    sample = inputs()
    qmodel = qjax.quantize(model, qjax.Recipe(), sample)
    assert all(float(np.max(q.scale)) < 0.1 for q in qmodel.qparams().values()), "an observer met a hidden number"
    graph, forward = qjax.convert(qmodel, sample), qjax.exact(qmodel, sample)
    found = graph(*sample)
    for (path, got), exact, real in zip(
        *map(jax.tree.leaves_with_path, [found]),
        *map(jax.tree.leaves, (forward(qmodel, *sample), model(*sample))),
        strict=True,
    ):
        name = jax.tree_util.keystr(path)
        np.testing.assert_array_equal(got, exact, err_msg=name)
        np.testing.assert_array_equal(np.asarray(got)[np.asarray(real) == 0], 0, err_msg=name)
        assert np.abs(got - real).max() < 0.05, name
    for whole, first in zip(*map(jax.tree.leaves, (found, graph(*inputs(1)))), strict=True):
        np.testing.assert_array_equal(whole[:1], first)


def test_numbers_that_hide_nothing_from_a_softmax_are_no_mask():
    """A great positive number beside a bias, and a hidden number that reaches something else than a softmax."""

    def positive(scores, bias, keys):
        return jax.nn.softmax(scores + (bias + jnp.where(keys[:, None, :] > 0, 0.0, -LEAST)))

    def left(scores, bias, keys):
        return jnp.tanh(scores + (bias + additive(keys)))

    for function in (positive, left):
        with pytest.raises(ValueError, match=r"range beyond 2\^100"):
            qjax.quantize(Masked(function), qjax.Recipe(), inputs())


def ones(x):
    return jnp.ones(x.shape[:2], bool)


EMPTY = {
    "attention": lambda x: jax.nn.dot_product_attention(
        x[:, :, None], x[:, :, None], x[:, :, None], mask=ones(x)[:, None, None]
    ),
    "integers": lambda x: jax.nn.softmax(
        x + jax.lax.select(jnp.ones(x.shape, jnp.int32) > 0, jnp.zeros(x.shape), jnp.full(x.shape, -1e9))
    ),
    "a product of two": lambda x: nnx.dot_product_attention(
        x[:, :, None], x[:, :, None], x[:, :, None], mask=nnx.make_attention_mask(ones(x), ones(x))
    ),
    "all but none": lambda x: jax.nn.softmax(
        jnp.where(jnp.logical_or(~ones(x), jnp.full(x.shape[:2], 2).astype(bool))[:, None], x, LEAST)
    ),
    "a cast": lambda x: jax.nn.softmax(jnp.where(jnp.full((6,), 0.5).astype(jnp.int32) == 0, x, -jnp.inf)),
    "numbers": lambda x: jax.nn.softmax(jnp.where((jnp.ones((6,)) != 0) & (jnp.zeros((6,)) <= 0), x, -jnp.inf)),
}


class Function(nnx.Module):
    def __init__(self, function):
        self.function = function

    def __call__(self, x):
        return self.function(x)


def softmax_of(function, x):
    """Its node under the target `onnxruntime`."""
    qmodel = qjax.quantize(Function(function), qjax.Recipe(target="onnxruntime"), x)
    (node,) = [node for node in qjax.convert(qmodel, x).ir.nodes if node.op == "softmax"]
    return node


@pytest.mark.parametrize("name", EMPTY)
@pytest.mark.sampled(3)
def test_a_mask_that_hides_nothing_is_no_mask(name):
    """So the runtime's own softmax computes it."""
    x = jax.random.normal(jax.random.key(2), (2, 6, 6))
    assert len(softmax_of(EMPTY[name], x).inputs) == 1


def test_a_mask_that_may_hide_something_stays():
    x = jax.random.normal(jax.random.key(3), (2, 6, 6))
    keys = softmax_of(lambda x: jax.nn.softmax(jnp.where(jnp.arange(6) < 6, x, LEAST)), x)
    assert len(keys.inputs) == 2
    # equal in float32, and not in float64
    third = softmax_of(lambda x: jax.nn.softmax(jnp.where(jnp.full((6,), 0.1) + 0.2 == 0.3, x, LEAST)), x)
    assert len(third.inputs) == 2
    with pytest.raises(ValueError, match="differs from example to example"):
        softmax_of(lambda x: jax.nn.softmax(jnp.where(jnp.arange(x.shape[0])[:, None, None] < 2, x, LEAST)), x)
