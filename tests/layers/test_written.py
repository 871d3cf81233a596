"""Models as their users write them: dict arguments, grouped weights, transposed convolutions, tied weights."""

# what models and grids are made of has no static type here
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportReturnType=false

# flax annotates what its constructors make as optional or as a bare Module
# pyright: reportOptionalMemberAccess=false, reportAttributeAccessIssue=false

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import qjax
from tests.layers.round_trip import assert_same, assert_verified, data, doubled

X = data(2, 3, 4)


def converted(model, *args, recipe=None):
    """Quantize and convert; the training forward and the graph agree node by node and in what they return."""
    qmodel = qjax.quantize(model, recipe or qjax.Recipe(), args)
    qmodel.eval()
    graph = qjax.convert(qmodel, args)
    more = jax.tree.map(lambda a: a if isinstance(a, bool) else doubled(a), args)
    assert_verified(qjax.verify(graph, qmodel, [more]))
    assert_same(graph(*more), qmodel(*more))
    return qmodel, graph


class Structured(nnx.Module):
    """A dict with a tuple in it, an argument that may be absent, and a Python flag."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed, self.dense = nnx.Embed(5, 3, rngs=rngs), nnx.Linear(3, 4, rngs=rngs)
        self.towers = nnx.Param(data(2, 3, 4))

    def __call__(self, batch, scale=None, flag=True):
        x = self.embed(batch["tokens"]) + batch["parts"][0]
        y = self.dense(x) if flag else x
        z = jax.vmap(lambda w: x @ w)(self.towers[...])
        return {"y": y if scale is None else y * scale, "z": [nnx.relu(z)]}


def test_arguments_of_any_structure(tmp_path):
    batch = {"tokens": jnp.array([1, 2], jnp.int32), "parts": (data(2, 3), data(2, 9))}
    _, graph = converted(Structured(), batch, None, True)
    graph.save(tmp_path / "m.qjax")
    loaded = qjax.load(tmp_path / "m.qjax")
    assert_same(loaded(batch, None, True), graph(batch, None, True))
    for wrong in [({"tokens": batch["tokens"]},), (batch["tokens"],), ()]:
        with pytest.raises(TypeError):
            graph(*wrong)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.exhaustive
def test_weights_in_groups(symmetric):
    class Net(nnx.Module):
        def __init__(self):
            self.a, self.b = nnx.Linear(16, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 3, rngs=nnx.Rngs(1))

        def __call__(self, x):
            return self.b(nnx.relu(self.a(x))) * 0.5 + 1.0

    axis = -1 if symmetric else None
    recipe = qjax.Recipe(weights=qjax.QSpec(bits=4, axis=axis, group_size=4, symmetric=symmetric))
    _, graph = converted(Net(), data(2, 3, 16), recipe=recipe)
    assert [node.op for node in graph.ir.nodes] == ["grouped_dot", "grouped_dot"]


def test_weights_in_groups_whose_scales_follow_them():
    """The batch of the second trace has other numbers of examples, not other weights."""
    spec = qjax.QSpec(bits=4, axis=-1, group_size=4)
    recipe = qjax.Recipe(weights=spec, weight_method="dynamic")
    qmodel = qjax.quantize(nnx.Linear(8, 3, rngs=nnx.Rngs(0)), recipe, data(2, 8))
    qmodel.eval()
    graph = qjax.convert(qmodel, data(2, 8))
    assert [node.op for node in graph.ir.nodes] == ["grouped_dot"]
    assert qjax.verify(graph, qmodel, [data(5, 8)]).exact


@pytest.mark.exhaustive
def test_a_batch_norm_over_one_of_several_channel_axes():
    """One scale for the whole kernel becomes one for each channel of the norm, not for each head."""

    class Net(nnx.Module):
        def __init__(self):
            self.heads = nnx.LinearGeneral(4, (3, 2), use_bias=False, rngs=nnx.Rngs(0))
            self.norm = nnx.BatchNorm(2, scale_init=nnx.initializers.normal(), rngs=nnx.Rngs(1))

        def __call__(self, x):
            return self.norm(self.heads(x))

    qmodel = qjax.quantize(Net(), qjax.Recipe(weights=qjax.QSpec(bits=8)), data(5, 4))
    qmodel.eval()
    graph = qjax.convert(qmodel, data(5, 4))
    (kernel,) = [t.quantization for t in graph.ir.tensors.values() if t.shape == (4, 3, 2)]
    assert kernel is not None
    assert (kernel.axes, kernel.scale.shape) == ((2,), (2,))
    assert qjax.verify(graph, qmodel, [data(5, 4)]).exact


@pytest.mark.exhaustive
def test_transposed_convolutions():
    class Net(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.same = nnx.ConvTranspose(2, 3, (3, 3), strides=(2, 2), rngs=rngs)
            self.valid = nnx.ConvTranspose(2, 3, (2, 2), strides=(2, 2), padding="VALID", rngs=rngs)
            padding = ((1, 2), (0, 1))
            self.odd = nnx.ConvTranspose(
                2, 3, (3, 2), strides=(1, 2), padding=padding, kernel_dilation=(2, 1), rngs=rngs
            )

        def __call__(self, x):
            return self.same(x), nnx.relu(self.valid(x)), self.odd(x)

    _, graph = converted(Net(), data(2, 3, 4, 2))
    assert {node.op for node in graph.ir.nodes} == {"conv"}


class Tied(nnx.Module):
    """Tokens in and out through one table; a slope that is learned."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed, self.dense, self.act = nnx.Embed(6, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs), nnx.PReLU()

    def __call__(self, tokens):
        return self.embed.attend(self.act(self.dense(self.embed(tokens))))


@pytest.mark.exhaustive
def test_a_tied_embedding_and_a_learned_slope():
    _, graph = converted(Tied(), jnp.array([[1, 2, 0], [5, 4, 3]], jnp.int32))
    assert [node.op for node in graph.ir.nodes][-2:] == ["table", "dot"]


@pytest.mark.exhaustive
def test_towers_over_their_own_data():
    class Net(nnx.Module):
        def __init__(self):
            make = nnx.split_rngs(splits=3)(nnx.vmap(lambda rngs: nnx.Linear(4, 3, rngs=rngs)))
            self.towers = make(nnx.Rngs(0))

        def __call__(self, x):
            return nnx.vmap(lambda tower, x: nnx.relu(tower(x)), in_axes=(0, 1), out_axes=1)(self.towers, x)

    qmodel, _ = converted(Net(), X)
    assert qmodel.qparams()["towers/kernel"].scale.size in (3, 9)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        x = x + nn.MultiHeadDotProductAttention(num_heads=2)(nn.LayerNorm()(x))
        return x + nn.Dense(4)(nn.gelu(nn.Dense(6)(nn.LayerNorm()(x)))), None


class Encoder(nn.Module):
    @nn.compact
    def __call__(self, x):
        options = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 2}
        x, _ = nn.scan(nn.remat(Layer, prevent_cse=False), **options)(name="layers")(x, None)
        return nn.Dense(2)(nn.LayerNorm()(x))


class Time(nn.Module):
    """A loop over time, and towers that share their input."""

    @nn.compact
    def __call__(self, x):
        h = nn.RNN(nn.SimpleCell(features=3))(x)
        towers = nn.vmap(nn.Dense, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=None, axis_size=2)
        return towers(3)(h)


@pytest.mark.exhaustive
@pytest.mark.parametrize("module", [Encoder(), Time()], ids=["encoder", "time"])
def test_lifted_linen(module):
    converted(qjax.from_linen(module, module.init(jax.random.key(0), X)), X)


class Copied(nnx.Module):
    """Its arguments may be lists or arrays, so it makes arrays of them."""

    def __init__(self):
        self.embed = nnx.Embed(7, 4, rngs=nnx.Rngs(0))

    def __call__(self, ids, mask):
        x = self.embed(jnp.array(ids, dtype="i4"))
        return jnp.where(jnp.array(mask)[..., None], x, 0.0)


def test_copies_of_integers_are_the_integers():
    ids = np.array([[1, 2, 6], [0, 3, 3]], np.int32)
    converted(Copied(), ids, ids > 1)


@pytest.mark.exhaustive
def test_lengths_of_sequences():
    class Net(nnx.Module):
        def __init__(self):
            self.rnn = nnx.RNN(nnx.SimpleCell(4, 3, rngs=nnx.Rngs(0)))

        def __call__(self, x, lengths):
            return self.rnn(x, seq_lengths=lengths, return_carry=True)

    # the last carry of each example lies at a place of its own, of two axes at once
    converted(Net(), X, np.array([3, 2], np.int32))
