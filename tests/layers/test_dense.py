"""Layers that multiply matrices: Linear, LinearGeneral, Einsum, and products that the user writes."""

# flax annotates what its constructors make as optional or as a bare Module
# pyright: reportOptionalSubscript=false, reportAttributeAccessIssue=false

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax
from tests.layers.round_trip import check, data


@pytest.mark.exhaustive
@pytest.mark.parametrize("shape", [(4, 6), (4, 3, 6)], ids=["2d", "3d"])
def test_linear(shape):
    _, graph = check(nnx.Linear(6, 5, rngs=nnx.Rngs(0)), data(*shape), compiled=True)
    assert [node.op for node in graph.ir.nodes] == ["dot"]


@pytest.mark.exhaustive
def test_linear_without_bias():
    check(nnx.Linear(6, 5, use_bias=False, rngs=nnx.Rngs(0)), data(4, 6))


@pytest.mark.exhaustive
def test_linear_general_over_several_axes():
    qmodel, _ = check(nnx.LinearGeneral((3, 4), (5, 2), axis=(-2, -1), rngs=nnx.Rngs(0)), data(4, 3, 4))
    assert qmodel.qparams()["kernel"].scale.size == 10


class Projection(nnx.Module):
    def __init__(self, formula, kernel, bias):
        self.proj = nnx.Einsum(formula, kernel, bias, rngs=nnx.Rngs(0))
        self.proj.bias[...] = data(*bias, seed=1)

    def __call__(self, x):
        return self.proj(x)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("formula", "kernel", "bias", "x"),
    [
        ("btd,dnh->btnh", (6, 2, 3), (2, 3), (4, 3, 6)),
        ("bgd,gdh->bgh", (3, 6, 2), (3, 2), (4, 3, 6)),
    ],
    ids=["two output axes", "batch axis"],
)
def test_einsum(formula, kernel, bias, x):
    qmodel, _ = check(Projection(formula, kernel, bias), data(*x))
    assert qmodel.qparams()["proj/kernel"].scale.size == np.prod(bias)


class WeightOnTheLeft(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(data(6, 2, 3, seed=1))

    def __call__(self, x):
        return jnp.einsum("dnh,btd->nbth", self.w[...], x).transpose(1, 2, 0, 3)


@pytest.mark.exhaustive
def test_einsum_with_the_weight_on_the_left():
    qmodel, _ = check(WeightOnTheLeft(), data(4, 3, 6))
    assert qmodel.qparams()["w"].scale.size == 6


class Handmade(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(data(6, 5, seed=1))
        self.b = nnx.Param(data(5, seed=2))

    def __call__(self, x):
        return x @ self.w[...] + self.b[...].reshape(1, -1)


@pytest.mark.exhaustive
def test_products_that_the_user_writes():
    qmodel, _ = check(Handmade(), data(4, 6))
    assert set(qmodel.qparams()) == {"input", "w", "dot"}


class Scores(nnx.Module):
    def __init__(self):
        self.query = nnx.LinearGeneral(6, (2, 3), rngs=nnx.Rngs(0))
        self.key = nnx.LinearGeneral(6, (2, 3), rngs=nnx.Rngs(1))

    def __call__(self, x):
        q, k = self.query(x), self.key(x)
        return jnp.einsum("bqhd,bkhd->bhqk", q / np.float32(np.sqrt(3)), k)


@pytest.mark.exhaustive
def test_products_of_activations():
    _, graph = check(Scores(), data(4, 3, 6))
    assert [node.op for node in graph.ir.nodes].count("dot") == 3


class Embedded(nnx.Module):
    def __init__(self):
        self.embed = nnx.Embed(11, 6, rngs=nnx.Rngs(0))
        self.drop = nnx.Dropout(0.25, rngs=nnx.Rngs(1))
        self.head = nnx.Linear(6, 3, rngs=nnx.Rngs(2))

    def __call__(self, tokens):
        return self.head(self.drop(self.embed(tokens)))


@pytest.mark.exhaustive
def test_embedding_and_dropout():
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 11, (4, 5)), jnp.int32)
    qmodel, graph = check(Embedded(), tokens)
    # rows of the table are codes already: no second quantizer in front of the head
    assert set(qmodel.qparams()) == {"embed/embedding", "head/kernel", "head"}
    assert graph.ir.tensors[graph.ir.inputs[0]].dtype == "int32"


def test_dropout_drops_in_training_only():
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 11, (4, 5)), jnp.int32)
    qmodel = qjax.quantize(Embedded(), qjax.Recipe(), tokens)
    qmodel.train()
    first, second = qmodel(tokens), qmodel(tokens)
    assert not np.array_equal(first, second)
    qmodel.eval()
    assert np.array_equal(qmodel(tokens), qmodel(tokens))
    # the same elements as flax drops: a model of the same seed, on reals
    embedded = Embedded()
    embedded.train()
    ones = jnp.ones((4, 5, 6))
    dropped = embedded.drop(ones)
    qmodel.train()
    again = qjax.quantize(Embedded(), qjax.Recipe(), tokens)
    again.train()
    assert np.array_equal(again.model.drop(ones), dropped)
    assert jax.tree.structure(nnx.state(again)) == jax.tree.structure(nnx.state(qmodel))


@pytest.mark.parametrize(("bits", "fits"), [(15, True), (16, False)])
@pytest.mark.filterwarnings("ignore:quantize. the model trains")
def test_asymmetric_weights_of_16_bits_are_refused(bits, fits):
    x = data(2, 3)
    recipe = qjax.Recipe(weights=qjax.QSpec(bits=bits, symmetric=False), activations=qjax.QSpec(bits=8))
    qmodel = qjax.quantize(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), recipe, x)
    qmodel.eval()
    if fits:
        assert qjax.convert(qmodel, x)(x).shape == (2, 2)
    else:
        with pytest.raises(ValueError, match=r"asymmetric codes of 16 bits.*at most 15 bits"):
            qjax.convert(qmodel, x)
