"""What users write between layers to move, choose and compare: each line converted, and nothing off by a bit."""

# flax annotates what its constructors make as optional or as a bare Module
# pyright: reportOptionalMemberAccess=false, reportAttributeAccessIssue=false

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import qjax
from tests.layers import round_trip
from tests.layers.round_trip import assert_same, data

SHAPE = (2, 4, 6)
MASK = np.random.default_rng(1).integers(0, 2, (4, 6)).astype(bool)


class Between(nnx.Module):
    """Functions of a dense layer's output (and of integers that come in); each into an output of its own."""

    def __init__(self, functions: dict[str, Any]):
        self.dense = nnx.Linear(6, 6, rngs=nnx.Rngs(0))
        self.token = nnx.Param(jnp.asarray(np.random.default_rng(2).normal(size=(1, 1, 6)).astype(np.float32)))
        self.functions = functions

    def __call__(self, x, *integers):
        y = self.dense(x)
        arguments = (*integers, self.token[...]) if integers else ()
        return {name: function(y, *arguments) for name, function in self.functions.items()}


def converted(functions: dict[str, Any], *integers: np.ndarray) -> tuple[Any, qjax.IntegerGraph]:
    """Convert all of them at once; the fake-quantized and the integer forward give the same bits, and the exact one."""
    model, x = Between(functions), data(*SHAPE)
    qmodel = qjax.quantize(model, qjax.Recipe(), (x, *integers))
    qmodel.eval()
    graph = qjax.convert(qmodel, (x, *integers))
    more = (jnp.concatenate([x, x[::-1] * 2, x[:1] * 0.3]), *(np.concatenate([i, i[::-1], i[:1]]) for i in integers))
    expected = graph(*more)
    if round_trip.always_compiled:
        assert_same(nnx.jit(qjax.exact(qmodel, (x, *integers)))(qmodel, *more), expected)
    assert_same(nnx.jit(lambda m, *a: m(*a))(qmodel, *more), expected)
    return qmodel, graph


def grids(graph: qjax.IntegerGraph) -> set[float]:
    tensors = graph.ir.tensors
    found = (tensors[name].quantization for name in graph.ir.outputs)
    return {float(np.asarray(q.scale)) for q in found if q is not None}


@jax.custom_vjp
def backwards(x):
    """Itself, with the gradient reversed."""
    return x


backwards.defvjp(lambda x: (x, None), lambda _, g: (-g,))


@jax.custom_vjp
def twice(x, y):
    return jnp.maximum(x, y) * 2.0


twice.defvjp(lambda x, y: (twice(x, y), (x, y)), lambda _, g: (g, g))

MOVES = {
    "repeat": lambda y: jnp.repeat(y, 2, axis=1),
    "tile": lambda y: jnp.tile(y, (1, 2, 1)),
    "roll": lambda y: jnp.roll(y, 1, axis=1),
    "stack": lambda y: jnp.stack([y, jnp.flip(y, 1)], axis=1),
    "edge": lambda y: jnp.pad(y, ((0, 0), (1, 2), (0, 0)), mode="edge"),
    "reflect": lambda y: jnp.pad(y, ((0, 0), (1, 2), (2, 0)), mode="reflect"),
    "wrap": lambda y: jnp.pad(y, ((0, 0), (1, 2), (2, 0)), mode="wrap"),
    "depth to space": lambda y: y.reshape(-1, 2, 2, 2, 3).transpose(0, 1, 3, 2, 4).reshape(-1, 4, 6),
    "another order": lambda y: lax.reshape(y, (y.shape[0], 6, 4), (0, 2, 1)),
    "swap": lambda y: jnp.moveaxis(y, 1, 2)[..., None].squeeze(-1),
    "strided": lambda y: y[:, ::2, 1::3],
    "backwards": lambda y: y[:, ::-2],
    "last": lambda y: y[:, -1],
    "dynamic slice": lambda y: lax.dynamic_slice_in_dim(y, 3, 2, axis=1),
    "dynamic index": lambda y: lax.dynamic_index_in_dim(y, 2, axis=1, keepdims=False),
    "rows": lambda y: y[:, jnp.array([0, 2, 1, 2])],
    "numpy rows": lambda y: y[:, np.array([3, -1])],
    "take": lambda y: jnp.take(y, jnp.array([[0, 2], [5, 5]]), axis=2),
    "clipped": lambda y: jnp.take(y, jnp.array([-3, 9]), axis=1, mode="clip"),
    "nearest": lambda y: jax.image.resize(y, (y.shape[0], 8, 3), "nearest"),
    "greatest": lambda y: jnp.max(y, axis=1),
    "first": lambda y: y.at[:, 0].set(y[:, 1]),
    "updated": lambda y: lax.dynamic_update_slice_in_dim(y, y[:, :2], 1, axis=1),
    "rows written": lambda y: y.at[:, np.array([0, 2])].set(y[:, 1:3]),
    "diagonal": lambda y: jnp.diagonal(y, axis1=1, axis2=2),
    "pairs": lambda y: y[:, np.array([0, 3]), np.array([1, -1])],
    "unstacked": lambda y: jnp.unstack(y, axis=1)[1],
    "least in windows": lambda y: lax.reduce_window(y, np.float32(np.inf), lax.min, (1, 2, 3), (1, 1, 2), "SAME"),
    "placed": lambda y: checkpoint_name(jax.device_put(y, jax.devices()[0]), "y"),
    "branch": lambda y: lax.cond(True, lambda a: a, lambda a: -a, y),
    "reversed gradient": lambda y: backwards(y),
    "least": lambda y: jnp.min(y, axis=(1, 2)),
    "cummax": lambda y: lax.cummax(y, 1),
    "cummin": lambda y: lax.cummin(y, 2, reverse=True),
    "stopped": lambda y: lax.optimization_barrier(jnp.copy(lax.stop_gradient(y))),
    "vmap": lambda y: jax.vmap(lambda row: row[::2])(y),
}
"""Functions that keep the grid: nothing may be quantized anew."""


def test_moves_keep_the_grid():
    qmodel, graph = converted(MOVES)
    assert set(qmodel.qparams()) == {"input", "dense/kernel", "dense"}
    assert grids(graph) == {float(qmodel.qparams()["dense"].scale)}


CHOICES = {
    "constant": lambda y: jnp.pad(y, ((0, 0), (1, 2), (0, 1)), constant_values=0.4),
    "beyond": lambda y: jnp.pad(y, ((0, 0), (1, 0), (0, 0)), constant_values=1e9),
    "mask": lambda y: jnp.where(MASK[None], y, jnp.flip(y, 1)),
    "fill": lambda y: jnp.where(MASK[None], y, -0.3),
    "fill where not": lambda y: jnp.where(MASK[None], 0.2, y),
    "infinite": lambda y: jnp.where(MASK[None], y, -jnp.inf),
    "triangle": lambda y: jnp.tril(y),
    "written": lambda y: y.at[:, np.array([0, 2]), 1].set(0.5),
    "one number": lambda y: y.at[:, -1, 2].set(0.5),
    "by value": lambda y: jnp.where(y > jnp.flip(y, 1), y, 0.0),
    "by row": lambda y: jnp.where(jnp.max(y, axis=2, keepdims=True) > 0.5, y, 0.0),
    "both": lambda y: jnp.where((y > 0.2) & ~(jnp.flip(y, 2) <= 0.1), y, 0.0),
    "maximum": lambda y: jnp.maximum(y, jnp.flip(y, 1)),
    "minimum": lambda y: jnp.minimum(y, y[:, :1]),
    "clip": lambda y: jnp.clip(y, jnp.linspace(-1, 0, 6)[None, None], jnp.linspace(0.1, 9, 6)[None, None]),
    "greater": lambda y: y > 0.1,
    "equal": lambda y: y == 0.0,
    "compared": lambda y: y <= jnp.flip(y, 1),
    "where": lambda y: jnp.argmax(y, axis=-1),
    "where least": lambda y: jnp.argmin(y.reshape(y.shape[0], -1), axis=-1),
    "several": lambda y: lax.top_k(y, 3),
    "sorted": lambda y: jnp.sort(y, axis=1),
    "sorted downwards": lambda y: jnp.sort(y, axis=-1, descending=True),
    "any": lambda y: jnp.any(y > 0.5, axis=-1),
    "all": lambda y: jnp.all(y > -0.5, axis=1),
    "count": lambda y: jnp.sum(y > 0.1, axis=-1),
}


@pytest.mark.filterwarnings("ignore:.*puts -?(inf|1e.09) among")
def test_choices_and_comparisons():
    _, graph = converted(CHOICES)
    assert {"select", "compare", "logic", "extremum", "argument", "top_k", "sort"} <= {
        node.op for node in graph.ir.nodes
    }


NUMBERS = {
    "added": lambda y: y.at[:, 0].add(1.0),
    "logarithm": lambda y: jnp.log2(jnp.abs(y) + 1.0),
    "own derivative": lambda y: twice(y, jnp.flip(y, 1)),
    "steps": lambda y: lax.fori_loop(0, 2, lambda _, c: c * 0.5 + 1.0, y),
    "cumsum": lambda y: jnp.cumsum(y, axis=1),
    "as number": lambda y: (y > jnp.flip(y, 1)).astype(jnp.float32) * y,
    "of two": lambda y: jnp.where(y > jnp.flip(y, 1), 2.0, -1.0),
    "one hot": lambda y: jax.nn.one_hot(jnp.argmax(y, -1), 6),
    "position": lambda y: jnp.argmax(y, -1).astype(jnp.float32) * 0.5,
    "bilinear": lambda y: jax.image.resize(y, (y.shape[0], 8, 12), "bilinear"),
    "bicubic": lambda y: jax.image.resize(y, (y.shape[0], 2, 9), "cubic"),
    "trace": lambda y: jnp.einsum("bii->bi", y[:, :, :4]),
    "outer": lambda y: jnp.einsum("bi,bj->bij", y[:, 0], y[:, 1]),
    "zeros": lambda y: jnp.concatenate([y, jnp.zeros_like(y)], axis=1),
    "spread": lambda y: jnp.max(y, -1) - jnp.min(y, -1),
}


@pytest.mark.exhaustive
def test_what_is_quantized_anew():
    converted(NUMBERS)


TOKENS = np.array([[1, 2, 0, 0], [3, 1, 5, 0]], np.int32)
PLACES = np.array([2, -3], np.int32)

INTEGERS = {
    "padding": lambda y, ids, at, t: jnp.where((ids != 0)[..., None], y, 0.0),
    "other": lambda y, ids, at, t: jnp.where((ids == 1)[..., None], t, y),
    "causal": lambda y, ids, at, t: jnp.where(
        (ids != 0)[:, None, :] & jnp.tril(jnp.ones((1, 4, 4), bool)), jnp.swapaxes(y, 1, 2)[:, :4], 0.1
    ),
    "lengths": lambda y, ids, at, t: jnp.where(
        (jnp.arange(4)[None] < jnp.sum(ids != 0, -1)[:, None])[..., None], y, 0.0
    ),
    "class token": lambda y, ids, at, t: jnp.concatenate([jnp.tile(t, (y.shape[0], 1, 1)), y], axis=1),
    "mask token": lambda y, ids, at, t: jnp.where(
        (ids == 3)[..., None], jnp.broadcast_to(t, y.shape), jnp.concatenate([y[:, 1:], y[:, :1]], 1)
    ),
    "one place": lambda y, ids, at, t: jnp.take_along_axis(y, at[:, None, None], axis=1),
    "moved ids": lambda y, ids, at, t: jnp.flip(jnp.concatenate([ids[:, 1:], ids[:, :1] * 2 - 1], axis=1), 1),
    "embedded beside": lambda y, ids, at, t: jnp.concatenate(
        [jnp.take(t[0] * jnp.arange(1.0, 7.0)[:, None], ids, axis=0), y], axis=1
    ),
    "rows of a table": lambda y, ids, at, t: jnp.take(t[0] * jnp.arange(1.0, 7.0)[:, None], ids, axis=0) + y,
}


def test_integers_that_come_in():
    converted(INTEGERS, TOKENS, PLACES)


def test_products_along_axes():
    """Of two and of three elements, which are one operation."""
    shapes = {"area": lambda y: jnp.prod(y[..., :2], axis=-1), "three": lambda y: jnp.prod(y[..., :3], -1) * 0.5}
    converted(shapes)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("function", "cure"),
    [
        (lambda y: jax.lax.sort((y, -y), num_keys=2)[1], "sorts by one key"),
        (lambda y: y.at[:, jnp.argmax(y[0], axis=-1)[:1] + jnp.arange(33)].set(0.0), "a few per example"),
        (lambda y: jax.lax.cumlogsumexp(y, axis=1), "the logits"),
        (lambda y: jnp.take(y, jnp.array([0, 7]), axis=1, mode="fill"), 'mode="clip"'),
    ],
)
@pytest.mark.filterwarnings("ignore:quantize. the model trains, but convert will refuse it")
def test_what_has_no_integer_form_says_the_cure(function, cure):
    qmodel = qjax.quantize(Between({"y": function}), qjax.Recipe(), data(*SHAPE))
    with pytest.raises(qjax.ConversionError, match=cure):
        qjax.convert(qmodel, data(*SHAPE))


def test_a_function_keeps_its_own_gradient():
    for function, sign in ((backwards, -1.0), (lambda y: y, 1.0)):
        qmodel = qjax.quantize(Between({"y": function}), qjax.Recipe(), data(*SHAPE))
        gradient = nnx.grad(lambda m: jnp.sum(m(data(*SHAPE))["y"]))(qmodel)["model"]["dense"]["bias"][...]
        assert np.array_equal(np.sign(gradient), np.full(6, sign, np.float32))
