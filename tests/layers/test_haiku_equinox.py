"""Models of Haiku and Equinox: batch norm with moving averages, dropout, overrides by path and by type."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax
from tests.layers.round_trip import assert_same, check, data

IMAGES, ROWS = data(4, 5, 5, 2), data(4, 6)


def network(x, is_training):
    x = hk.Conv2D(4, 3, name="conv")(x)
    x = jax.nn.relu(hk.BatchNorm(True, True, 0.9)(x, is_training))
    rate, key = (0.2, hk.next_rng_key()) if is_training else (None, None)
    return hk.nets.MLP([5, 3], name="mlp")(hk.Flatten()(x), rate, key)


NET = hk.transform_with_state(network)
MODES = {"training": {"is_training": True}, "evaluation": {"is_training": False}}


@pytest.fixture(autouse=True)
def default_promotion():
    """Haiku's dropout multiplies booleans and floats."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def apply(params, state, x, key, is_training):
    return NET.apply(params, state, key, x, is_training)


@pytest.mark.exhaustive
def test_haiku_trains_and_converts():
    params, state = NET.init(jax.random.key(0), IMAGES, True)
    rngs = nnx.Rngs(key=5)
    model = qjax.from_function(apply, params, state=state, rngs=rngs, **MODES)
    key = nnx.Rngs(key=5).key()
    wanted, moved = NET.apply(params, state, key, IMAGES, True)
    found = model(IMAGES)
    assert_same(found, wanted)
    assert_same(model.pytrees(), (params, moved))
    model.eval()
    assert_same(model(IMAGES), NET.apply(params, moved, None, IMAGES, False)[0])
    recipe = qjax.Recipe(overrides={"mlp/linear_0": qjax.QSpec(bits=4, axis=-1)})
    qmodel, graph = check(model, IMAGES, recipe)
    assert [node.name for node in graph.ir.nodes] == ["conv", "flatten/reshape", "mlp/linear_0", "mlp/linear_1"]
    assert qmodel.qparams()["mlp/linear_0/w"].spec.bits == 4
    trained, averages = qmodel.model.pytrees()
    assert_same(jax.tree.map(jnp.shape, (trained, averages)), jax.tree.map(jnp.shape, (params, state)))
    assert not np.array_equal(averages["batch_norm/~/mean_ema"]["hidden"], moved["batch_norm/~/mean_ema"]["hidden"])


@pytest.mark.exhaustive
def test_equinox_trains_and_converts():
    net = eqx.nn.MLP(6, 3, 5, 2, key=jax.random.key(0))
    params, static = eqx.partition(net, eqx.is_array)
    model = qjax.from_function(lambda params, x: jax.vmap(eqx.combine(params, static))(x), params)
    recipe = qjax.Recipe(
        overrides={eqx.nn.Linear: qjax.QSpec(bits=6, axis=-1), "layers/2": qjax.QSpec(bits=4, axis=-1)}
    )
    qmodel, graph = check(model, ROWS, recipe)
    assert [node.name for node in graph.ir.nodes] == ["layers/0", "layers/1", "layers/2"]
    weights = {name: q.spec.bits for name, q in qmodel.qparams().items() if name.endswith("weight")}
    assert weights == {"layers/0/weight": 6, "layers/1/weight": 6, "layers/2/weight": 4}
    trained = eqx.combine(qmodel.model.pytrees()[0], static)
    assert isinstance(trained, eqx.nn.MLP)
    assert_same(jax.vmap(trained)(ROWS), qmodel.model(ROWS))
