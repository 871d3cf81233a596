"""Functions of parameters in plain JAX: paths, scopes, modes, keys, and state in and out."""

# what models are made of has no static type here
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax
from tests.layers.round_trip import assert_same, check, data

X = data(4, 3)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    w: jax.Array
    b: jax.Array


PARAMS = {"enc": [Layer(data(3, 5), data(5)), Layer(data(5, 4), data(4))], "out": data(4, 2), "mask": jnp.arange(2)}


def mlp(params, x):
    with jax.named_scope("encoder"):
        for index, layer in enumerate(params["enc"]):
            with jax.named_scope(f"block{index}"):
                x = jax.nn.relu(x @ layer.w + jnp.broadcast_to(layer.b, (x.shape[0], layer.b.size)))
    with jax.named_scope("head"):
        return jax.vmap(lambda row: row @ params["out"])(x)


def bits(qmodel):
    return {name: q.spec.bits for name, q in qmodel.qparams().items()}


@pytest.mark.exhaustive
def test_paths_scopes_and_the_way_back():
    model = qjax.from_function(mlp, PARAMS)
    assert_same(model(X), mlp(PARAMS, X))
    assert_same(model.pytrees(), (PARAMS, None))
    assert isinstance(getattr(model.enc, "1").w, nnx.Param)
    assert type(model.mask) is nnx.Variable
    qmodel, graph = check(model, X)
    assert [node.name for node in graph.ir.nodes] == ["enc/0", "enc/1", "head"]
    trained, _ = qmodel.model.pytrees()
    assert jax.tree.structure(trained) == jax.tree.structure(PARAMS)
    assert not np.array_equal(trained["enc"][0].w, PARAMS["enc"][0].w)
    assert_same(qmodel.model(X), mlp(trained, X))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("key", "changed"),
    [("enc/1", {"enc/1/w"}), (Layer, {"enc/0/w", "enc/1/w"}), ("head", {"out"}), ("out", {"out"})],
)
def test_overrides_by_path_type_and_scope(key, changed):
    qmodel = qjax.quantize(
        qjax.from_function(mlp, PARAMS), qjax.Recipe(overrides={key: qjax.QSpec(bits=4, axis=-1)}), X
    )
    assert {name for name, width in bits(qmodel).items() if width == 4} == changed


def test_a_scope_in_reals_and_a_wrong_name():
    model = qjax.from_function(mlp, PARAMS)
    qmodel = qjax.quantize(model, qjax.Recipe(overrides={"head": qjax.FLOAT}), X)
    assert "out" not in qmodel.qparams()
    assert qjax.convert(qmodel, X).ir.nodes
    with pytest.raises(ValueError, match=r"'enkoder/block1' matches nothing.*Did you mean 'encoder/block1'"):
        qjax.quantize(model, qjax.Recipe(overrides={"enkoder/block1": qjax.FLOAT}), X)


@pytest.mark.exhaustive
def test_inside_of_a_module_and_within_loops():
    class Outer(nnx.Module):
        def __init__(self):
            self.net = qjax.from_function(scanned, {"layers": {"w": data(2, 3, 3)}, "train": data(3, 2)})

        def __call__(self, x):
            return self.net(x)

    def scanned(params, x):
        def step(x, w):
            with jax.named_scope("deep"):
                return jax.checkpoint(lambda x: x + jnp.tanh(x @ w))(x), None

        return jax.lax.scan(step, x, params["layers"]["w"])[0] @ params["train"]

    qmodel, graph = check(Outer(), X)
    assert {"net/layers/w", "net/train_"} <= qmodel.qparams().keys(), sorted(qmodel.qparams())
    assert any(name.startswith("net/deep") for name in qmodel.qparams())
    assert any(node.name.startswith("net/deep/") for node in graph.ir.nodes), [node.name for node in graph.ir.nodes]


def noisy(params, state, x, key, train):
    h = x @ params["w"]
    if train:
        h = jnp.where(jax.random.bernoulli(key, 0.5, h.shape), h / 0.5, 0.0)
        state = {"steps": state["steps"] + 1}
    return h, state


def test_modes_keys_and_state():
    model = qjax.from_function(
        noisy,
        {"w": data(3, 2)},
        state={"steps": jnp.zeros((), jnp.int32)},
        training={"train": True},
        evaluation={"train": False},
        rngs={"key": jax.random.key(3)},
    )
    assert not np.array_equal(model(X), model(X))
    assert int(model.pytrees()[1]["steps"]) == 2
    qmodel, _ = check(model, X)
    assert int(qmodel.model.pytrees()[1]["steps"]) == 3
    model.eval()
    assert_same(model(X), X @ model.w[...])


def recurrent(params, state, x):
    h = jnp.tanh(x @ params["w"] + state["h"] @ params["u"])
    return h @ params["w"].T, {"h": h}


def test_state_in_and_out_of_a_graph():
    model = qjax.from_function(recurrent, {"w": data(3, 4), "u": data(4, 4)}, state={"h": jnp.zeros((4, 4))})
    with pytest.raises(qjax.ConversionError, match=r"writes the variable 'h' .*qjax\.stateful"):
        qjax.convert(qjax.quantize(model, qjax.Recipe(), X), X)
    stateful = qjax.stateful(model, nnx.BatchStat)
    sample = ({"h": data(4, 4, seed=1)}, X)
    qmodel = qjax.quantize(stateful, qjax.Recipe(), sample)
    qmodel.eval()
    graph = qjax.convert(qmodel, sample)
    y, state = graph(*sample)
    assert y.shape == (4, 3)
    assert state["h"].shape == (4, 4)
    assert np.array_equal(graph(state, X)[0], qmodel(state, X)[0])


def test_paths_that_are_taken_keep_apart():
    trees = {"eval": {"w": data(3, 3)}, "a/b": data(3, 3), "a": {"~/b": data(3, 3)}, "deterministic": data(3, 1)}

    def apply(params, x):
        return x @ params["eval"]["w"] @ params["a/b"] @ params["a"]["~/b"] @ params["deterministic"]

    model = qjax.from_function(apply, trees)
    assert_same(model.pytrees()[0], trees)
    assert_same(model(X), apply(trees, X))
    model.eval()
    alone = qjax.from_function(lambda w, x: x @ w, data(3, 2))
    assert_same(alone(X), X @ data(3, 2))
    assert "params" in qjax.quantize(alone, qjax.Recipe(), X).qparams()


def test_mistakes_say_what_was_expected():
    with pytest.raises(TypeError, match=r"expected a function apply\(params, \*inputs\), got \{'w'.*The order is"):
        qjax.from_function({"w": X}, mlp)
    with pytest.raises(TypeError, match=r"got relu at 'act'.*eqx\.partition\(model, eqx\.is_array\)|got .* at 'act'"):
        qjax.from_function(mlp, {"act": jax.nn.relu, "w": X})
    with pytest.raises(TypeError, match=r"params: expected a pytree of arrays, got 3 at 'n'"):
        qjax.from_function(mlp, {"n": 3})
    with pytest.raises(TypeError, match=r"expected params as a pytree of arrays, got \{\} without any"):
        qjax.from_function(mlp, {})
    model = qjax.from_function(noisy, {"w": data(3, 2)}, state={"steps": X}, rngs={"key": jax.random.key(0)})
    with pytest.raises(TypeError, match=r"missing a required argument: 'train'.*Pass a flag such as .* for each mode"):
        model(X)
    with pytest.raises(TypeError, match=r"apply must return \(output, new state\), got float32\[4,2\]"):
        qjax.from_function(lambda p, s, x: x @ p, data(3, 2), state=X)(X)
    with pytest.raises(ValueError, match="expected apply to return a state of the structure that it takes"):
        qjax.from_function(lambda p, s, x: (x, {"a": s}), data(3, 2), state=X)(X)
