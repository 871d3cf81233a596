"""Masks of numbers, `scores - 1e30 * (1 - mask)`: DistilBERT's, with and without a table of relative positions."""

# flax annotates what its constructors make as optional
# pyright: reportOptionalMemberAccess=false

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax
from tests.layers.round_trip import assert_same, data

LENGTH, WIDTH = 6, 8
X = data(3, LENGTH, WIDTH)
MASK = jnp.asarray(np.arange(LENGTH) < np.array([6, 4, 1])[:, None], jnp.int32)
Hide = Callable[[Any, jax.Array, jax.Array], jax.Array]


class Attention(nnx.Module):
    def __init__(self, hide: Hide) -> None:
        rngs = nnx.Rngs(0)
        self.q, self.k, self.v = (nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(3))
        self.bias = nnx.Param(jax.random.normal(jax.random.key(1), (LENGTH, LENGTH)))
        self.hide = hide

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        scores = jnp.einsum("bqd,bkd->bqk", self.q(x), self.k(x))
        return jax.nn.softmax(self.hide(self, scores, mask), axis=-1) @ self.v(x)


def wide(mask: jax.Array) -> jax.Array:
    return jnp.reshape(mask, (mask.shape[0], 1, LENGTH)).astype(jnp.float32)


FORMS: dict[str, Hide] = {
    "subtracted": lambda m, s, mask: s - 1e30 * (1.0 - wide(mask)),
    "added": lambda m, s, mask: s + (1.0 - wide(mask)) * -1e9,
    "added before the scores": lambda m, s, mask: -1e9 * (1.0 - wide(mask)) + s,
    "behind a bias": lambda m, s, mask: s + (m.bias[...][None] - 1e30 * (1.0 - wide(mask))),
    "bias behind it": lambda m, s, mask: s - 1e30 * (1.0 - wide(mask)) + m.bias[...][None],
    "of pairs": lambda m, s, mask: s + (1.0 - (mask[:, None] * mask[:, :, None]).astype(jnp.float32)) * -1e9,
    "of pairs, moved": lambda m, s, mask: (
        s + ((1 - jnp.minimum(mask[:, None], mask[:, :, None])[:, None].astype(jnp.float32)) * -1e9)[:, 0]
    ),
    "turned": lambda m, s, mask: s + (wide(mask) - 1.0) * 1e9,
    "turned, from truth values": lambda m, s, mask: s + ((mask[:, None] > 0).astype(jnp.float32) - 1.0) * 1e9,
    "from truth values": lambda m, s, mask: s - jnp.where(mask[:, None] > 0, 0.0, 1e30),
}


SELDOM = [pytest.param(name, marks=[] if name == "added" else [pytest.mark.exhaustive]) for name in FORMS]


@pytest.mark.parametrize("name", SELDOM)
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float32])
@pytest.mark.filterwarnings("ignore:.*a single number")
@pytest.mark.sampled(1)
def test_a_mask_of_0_and_1_hides(dtype: Any, name: str) -> None:
    model, mask = Attention(FORMS[name]), MASK.astype(dtype)
    # the sample hides nothing
    qmodel = qjax.quantize(model, qjax.Recipe(), (X, jnp.ones_like(mask)))
    qmodel.eval()
    assert max(float(np.max(q.scale)) for q in qmodel.qparams().values()) < 1
    graph = qjax.convert(qmodel, (X, mask))
    found, expected = np.asarray(graph(X, mask), np.float64), np.asarray(model(X, mask), np.float64)
    assert np.sum(found * expected) > 0.999 * np.linalg.norm(found) * np.linalg.norm(expected)
    report = qjax.verify(graph, qmodel, [(X, mask)])
    assert report.local == 0
    # hidden elements count for nothing, to the bit
    other = X + 3 * (1 - mask[..., None]).astype(jnp.float32)
    rows = np.asarray(mask, bool)
    assert np.array_equal(np.asarray(graph(other, mask))[rows], np.asarray(graph(X, mask))[rows])


@pytest.mark.exhaustive
def test_the_exact_forward_with_an_integer_mask_is_the_graph() -> None:
    qmodel = qjax.quantize(Attention(FORMS["behind a bias"]), qjax.Recipe(), (X, MASK))
    qmodel.eval()
    graph = qjax.convert(qmodel, (X, MASK))
    assert_same(nnx.jit(qjax.exact(qmodel, (X, MASK)))(qmodel, X, MASK), graph(X, MASK))


def test_other_integers_than_0_and_1_are_no_mask() -> None:
    qmodel = qjax.quantize(Attention(FORMS["subtracted"]), qjax.Recipe(), (X, MASK))
    qmodel.eval()
    graph = qjax.convert(qmodel, (X, MASK))
    message = r"expected integers from 0 to 1, got 0 to 2. A mask must consist of 0 and 1"
    for function in (qmodel, graph):
        with pytest.raises(ValueError, match=message):
            function(X, 2 * MASK)
    recipe = qjax.Recipe(integers=(qjax.integers("mask", 0, 5),))
    with pytest.raises(ValueError, match="integers 'input/1' are a mask of 0 and 1"):
        qjax.quantize(Attention(FORMS["subtracted"]), recipe, (X, MASK))


@pytest.mark.parametrize("wrong", [0.5, 2.0, jnp.nan])
@pytest.mark.sampled(1)
def test_other_floats_than_0_and_1_are_no_mask(wrong: float) -> None:
    mask = MASK.astype(jnp.float32)
    qmodel = qjax.quantize(Attention(FORMS["added"]), qjax.Recipe(), (X, mask))
    qmodel.eval()
    graph, other = qjax.convert(qmodel, (X, mask)), mask.at[1, 0].set(wrong)
    for function in (qmodel, graph, functools.partial(qjax.exact(qmodel, (X, mask)), qmodel)):
        for given in (other, other.astype(jnp.bfloat16)):
            message = f"'input/1': expected a mask of 0 and 1, got {wrong} among 1 other values of 18"
            with pytest.raises(ValueError, match=message):
                function(X, given)
    with pytest.raises(ValueError, match=f"'input/1': expected a mask of 0 and 1, got {wrong}"):
        qjax.quantize(Attention(FORMS["added"]), qjax.Recipe(), (X, other))


def test_a_wide_range_in_front_of_a_softmax_warns() -> None:
    """Numbers that the caller adds, which no one can tell from scores."""
    model = Attention(lambda m, s, mask: s + mask[:, None])
    hidden = jnp.where(MASK > 0, 0.0, -1e4)
    with pytest.warns(UserWarning, match=r"Quantizer 'add' .* has steps of 39\.\d, and a softmax reads it"):
        qjax.quantize(model, qjax.Recipe(), (X, hidden))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qjax.quantize(model, qjax.Recipe(), (X, hidden / 100))
        # steps are wide here because bits are few
        qjax.quantize(model, qjax.Recipe(activations=qjax.QSpec(bits=4)), (X, hidden / 500))


def test_integers_that_the_model_computes_are_no_mask() -> None:
    """They may be 2, of which the graph would hear nothing."""
    model = Attention(lambda m, s, mask: s - 1e30 * (1.0 - wide(mask + mask)))
    with pytest.raises(ValueError, match="scale must lie in"):
        qjax.quantize(model, qjax.Recipe(), (X, MASK))


def test_a_small_factor_makes_no_mask() -> None:
    """`scores - 3 * (1 - mask)` lowers numbers, and hides none: the integers may be any."""
    model = Attention(lambda m, s, mask: s - 3.0 * (1.0 - wide(mask)))
    qmodel = qjax.quantize(model, qjax.Recipe(), (X, 2 * MASK))
    qmodel.eval()
    graph = qjax.convert(qmodel, (X, 2 * MASK))
    found, expected = np.asarray(graph(X, 2 * MASK), np.float64), np.asarray(model(X, 2 * MASK), np.float64)
    assert np.sum(found * expected) > 0.999 * np.linalg.norm(found) * np.linalg.norm(expected)
