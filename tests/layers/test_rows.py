"""Softmax, normalisations, quotients and attention in models: the whole path, as people and layers write them."""

# what models and grids are made of has no static type here
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportReturnType=false

# flax annotates what its constructors make as optional or as a bare Module
# pyright: reportOptionalMemberAccess=false, reportAttributeAccessIssue=false

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import qjax
from tests.layers.round_trip import assert_verified, check, data, doubled
from tests.layers.test_glue import Glue, names

CAUSAL = np.tril(np.ones((1, 3, 6), bool))
VECTOR = jnp.linspace(-1.0, 2.0, 6)
GAMMA = VECTOR.reshape(1, 1, 6)


def by_hand(x):
    top = x.max(-1, keepdims=True)
    return jnp.exp(x - top) / jnp.exp(x - top).sum(-1, keepdims=True)


def times_inverse(x):
    e = jnp.exp(x - jnp.max(x, 1, keepdims=True))
    return e * (1 / e.sum(1, keepdims=True))


SOFTMAX = {
    "jax": jax.nn.softmax,
    "axes": lambda x: jax.nn.softmax(x, axis=(1, 2)),
    "hand": by_hand,
    "inverse": times_inverse,
    "where": lambda x: jax.nn.softmax(x, where=jnp.arange(6).reshape(1, 1, 6) < 4),
    "filled": lambda x: jax.nn.softmax(jnp.where(CAUSAL, x, -1e9)),
    "hidden": lambda x: jax.nn.softmax(jnp.where(jnp.logical_not(CAUSAL), -jnp.inf, x)),
    "added": lambda x: jax.nn.softmax(x + jnp.where(CAUSAL, 0.0, -1e9)),
    "factor": lambda x: jax.nn.softmax(x / 2.0 + (1 - jnp.asarray(CAUSAL, jnp.float32)) * -1e9),
    "vmap": jax.vmap(jax.nn.softmax, in_axes=2, out_axes=1),
}


def log_by_hand(x):
    shifted = x - x.max((1, 2), keepdims=True)
    return shifted - jnp.log(jnp.exp(shifted).sum((1, 2), keepdims=True))


LOG_SOFTMAX = {
    "jax": jax.nn.log_softmax,
    "axes": lambda x: jax.nn.log_softmax(x, axis=(1, 2)),
    "nnx": lambda x: nnx.log_softmax(x, axis=1),
    "hand": log_by_hand,
    "difference": lambda x: x - jax.nn.logsumexp(x, -1, keepdims=True),
    "direct": lambda x: x - jnp.log(jnp.exp(x).sum(1, keepdims=True)),
    "spread": lambda x: x - jax.scipy.special.logsumexp(x, -1)[..., None],
    "vmap": jax.vmap(jax.nn.log_softmax, in_axes=2, out_axes=1),
}

LOGSUMEXP = {
    "jax": lambda x: jax.nn.logsumexp(x, -1),
    "scipy": lambda x: jax.scipy.special.logsumexp(x, axis=(1, 2), keepdims=True),
    "first": lambda x: jax.nn.logsumexp(x, 1) * 0.5 - 1.0,
    "hand": lambda x: jnp.log(jnp.sum(jnp.exp(x), -1)),
    "top": lambda x: jnp.max(x, 1) + jnp.log(jnp.sum(jnp.exp(x - jnp.max(x, 1, keepdims=True)), 1)),
    "bounded": lambda x: jax.nn.relu(jax.nn.logsumexp(x, -1, keepdims=True)),
}


def variance(x):
    return jnp.mean((x - jnp.mean(x, -1, keepdims=True)) ** 2, -1, keepdims=True)


def fast(x):
    mean = jnp.mean(x, -1, keepdims=True)
    spread = jnp.maximum(0, jnp.mean(x * x, -1, keepdims=True) - mean**2)
    return GAMMA * (x - mean) * jax.lax.rsqrt(spread + 1e-5)


def half(x):
    wide = x.astype(jnp.bfloat16).astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + 1e-6)).astype(x.dtype)


NORMALIZE = {
    "layer": lambda x: (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5) * GAMMA + 0.5,
    "square": lambda x: (x - jnp.mean(x, -1, keepdims=True)) * jax.lax.rsqrt(variance(x) + 1e-5),
    "fast": fast,
    "unbiased": lambda x: (x - x.mean(1, keepdims=True)) / jnp.maximum(x.std(1, keepdims=True, ddof=1), 1e-3),
    "rms": lambda x: nnx.relu(x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * GAMMA),
    "factor": lambda x: x * (GAMMA * (1 / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6))),
    "half": half,
    "norm": lambda x: x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-6),
    "l2": lambda x: x * jax.lax.rsqrt((x * x).sum((1, 2), keepdims=True) + 1e-12),
    "linen": lambda x: linen.LayerNorm().apply({"params": {"scale": VECTOR, "bias": VECTOR}}, x),
    "linen_group": lambda x: linen.GroupNorm(num_groups=2).apply({"params": {"scale": VECTOR, "bias": VECTOR}}, x),
    "linen_slow_group": lambda x: linen.GroupNorm(3, use_fast_variance=False, use_bias=False, use_scale=False).apply(
        {}, x
    ),
    "linen_one_group": lambda x: linen.GroupNorm(1, use_bias=False, use_scale=False).apply({}, x),
    "linen_instance": lambda x: linen.InstanceNorm(use_bias=False, use_scale=False).apply({}, x),
    "linen_rms": lambda x: linen.RMSNorm(reduction_axes=(1, 2)).apply({"params": {"scale": VECTOR}}, x),
}


def converted(model, x):
    """Quantized, converted and verified: `check` without training and the exact forward, whose compilation is slow."""
    qmodel = qjax.quantize(model, qjax.Recipe(), x)
    graph = qjax.convert(qmodel, x)
    assert_verified(qjax.verify(graph, qmodel, [doubled(x)]))
    return graph


_AROUND = {"softmax": {"transpose", "rescale"}, "log_softmax": {"transpose"}}
"""What some of the functions put around the operation."""


@pytest.mark.parametrize(
    ("functions", "op"),
    [
        (SOFTMAX, "softmax"),
        (LOG_SOFTMAX, "log_softmax"),
        (LOGSUMEXP, "logsumexp"),
        (NORMALIZE, "normalize"),
    ],
)
@pytest.mark.sampled(1)
def test_every_way_to_write_it(functions, op):
    branches = {name: lambda y, x, f=f: f(y) for name, f in functions.items()}
    graph = converted(Glue(branches), data(2, 3, 6))
    assert set(names(graph)) == {"dot", op} | _AROUND.get(op, set())
    assert names(graph).count(op) == len(functions)


class Layers(nnx.Module):
    """The layers of flax, with parameters that are not those of a start, and steps behind one."""

    def __init__(self):
        rngs = nnx.Rngs(1)
        random = {"scale_init": nnx.initializers.normal(1.0), "bias_init": nnx.initializers.normal(1.0), "rngs": rngs}
        self.dense = nnx.Linear(6, 8, rngs=rngs)
        self.layer = nnx.LayerNorm(8, **random)
        self.plain = nnx.LayerNorm(8, use_bias=False, use_scale=False, use_fast_variance=False, rngs=rngs)
        self.both = nnx.LayerNorm(8, reduction_axes=(-2, -1), feature_axes=-1, **random)
        self.rms = nnx.RMSNorm(8, rngs=rngs)
        self.group = nnx.GroupNorm(8, num_groups=2, **random)
        self.instance = nnx.InstanceNorm(8, **random)

    def __call__(self, x):
        y = nnx.relu(self.dense(x))
        plain = nnx.relu(self.plain(y) * 0.5 + 0.25)
        return self.layer(y), plain, self.both(y), self.rms(y), self.group(y), self.instance(y)


def test_layers():
    graph = converted(Layers(), data(2, 3, 6))
    assert names(graph) == ["dot", *["normalize"] * 6]
    assert graph.ir.outputs[0] == "layer/normalize"


class Block(nnx.Module):
    """A layer before a masked attention."""

    def __init__(self):
        self.norm = nnx.LayerNorm(4, rngs=nnx.Rngs(0))
        self.multi = nnx.MultiHeadAttention(2, 4, decode=False, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.multi(self.norm(x), mask=nnx.make_causal_mask(x[..., 0]))


@pytest.mark.exhaustive
def test_training_and_the_exact_forward():
    _, graph = check(Block(), data(2, 3, 4))
    assert names(graph).count("softmax") == names(graph).count("normalize") == 1


def test_statistics_over_the_batch_are_refused():
    def function(y, x):
        return (y - y.mean(0, keepdims=True)) * jax.lax.rsqrt(y.var(0, keepdims=True) + 1e-5)

    model = Glue({"a": function})
    qmodel = qjax.quantize(model, qjax.Recipe(), data(4, 6))
    with pytest.raises(ValueError, match="mix the examples of a batch"):
        qjax.convert(qmodel, data(4, 6))


class Attention(nnx.Module):
    """A layer of flax, `jax.nn`, and by hand; causal or not."""

    def __init__(self):
        rngs = nnx.Rngs(2)
        self.multi = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.qkv = nnx.LinearGeneral(8, (3, 2, 4), rngs=rngs)

    def __call__(self, x):
        first = self.multi(x)
        second = self.multi(x, mask=nnx.make_causal_mask(x[..., 0]))
        q, k, v = (self.qkv(x)[:, :, i] for i in range(3))
        return (
            first,
            second,
            jax.nn.dot_product_attention(q, k, v),
            jax.nn.dot_product_attention(q, k, v, is_causal=True),
            by_einsum(q, k, v),
        )


def by_einsum(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(jnp.float32(q.shape[-1]))
    causal = jnp.tril(jnp.ones((1, 1, *scores.shape[-2:]), bool))
    scores = jnp.where(causal, scores, jnp.finfo(jnp.float32).min)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), v)


@pytest.mark.exhaustive
def test_attention():
    graph = converted(Attention(), data(2, 5, 8))
    softmax = [node for node in graph.ir.nodes if node.op == "softmax"]
    assert [len(node.inputs) for node in softmax] == [1, 2, 1, 2, 2]
    # no mask holds the batch
    masks = [graph.ir.tensors[node.inputs[1]] for node in softmax if len(node.inputs) > 1]
    assert all(mask.dtype == "bool" and int(np.prod(mask.shape)) == 25 for mask in masks)


def test_a_deviation_beside_its_epsilon_is_a_quotient():
    """std + epsilon is no root of a sum: the steps are nodes of their own."""
    function = lambda x: (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + 1e-3)  # noqa: E731
    graph = converted(Glue({"a": lambda y, x: function(y)}), data(4, 6))
    assert "divide" in names(graph)
    assert "island" not in names(graph)


class Quotient(nnx.Module):
    def __init__(self):
        self.a, self.b = (nnx.Linear(6, 6, rngs=nnx.Rngs(i)) for i in range(2))

    def __call__(self, x):
        return self.a(x) / (nnx.sigmoid(self.b(x)) + 0.5) * 3.0


@pytest.mark.exhaustive
def test_quotient():
    assert "divide" in names(converted(Quotient(), data(4, 6)))
