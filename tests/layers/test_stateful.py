"""A cache that the module holds, as an argument and a result: `nnx.MultiHeadAttention(decode=True)` token by token."""

# flax annotates what its constructors make as optional or as a bare Module
# pyright: reportOptionalMemberAccess=false, reportAttributeAccessIssue=false

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax

N, SIZE, WIDTH = 2, 5, 8


class Decoder(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.attention = nnx.MultiHeadAttention(2, WIDTH, decode=True, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 6, rngs=rngs)

    def __call__(self, x):
        return self.head(x + self.attention(x))


def net(n=N):
    made = Decoder()
    made.attention.init_cache((n, SIZE, WIDTH))
    return made


def steps(n, seed=0):
    return jnp.moveaxis(jax.random.normal(jax.random.key(seed), (n, SIZE, 1, WIDTH)), 1, 0)


@pytest.mark.exhaustive
def test_a_cache_goes_in_and_out():
    model = qjax.stateful(net(), nnx.Cache)
    assert jax.tree.map(np.shape, model.state()) == {
        "attention": {"cache_index": (), "cached_key": (N, SIZE, 2, 4), "cached_value": (N, SIZE, 2, 4)}
    }
    state, own = qjax.stateful(net(16), nnx.Cache).state(), net(16)
    filled = []
    for x in steps(16):
        filled.append((state, x))
        output, state = model(state, x)
        np.testing.assert_array_equal(output, own(x))
    # the module's own variables are as before
    assert int(model.state()["attention"]["cache_index"]) == 0
    sample = jax.tree.map(lambda a: a[:N] if a.ndim else a, filled[2])
    qmodel = qjax.quantize(model, qjax.Recipe(), sample)
    qjax.calibrate(qmodel, filled)
    qmodel.eval()
    graph = qjax.convert(qmodel, sample)
    other, state = net(4), qjax.stateful(net(4), nnx.Cache).state()
    for x in steps(4, seed=1):
        found, after = graph(state, x)
        wanted, _ = qmodel(state, x)
        np.testing.assert_array_equal(found, wanted)
        a, b = np.ravel(found), np.ravel(other(x))
        assert a @ b > 0.99 * np.linalg.norm(a) * np.linalg.norm(b)
        state = after
    assert int(state["attention"]["cache_index"]) == SIZE


def test_mistakes_say_what_was_expected():
    with pytest.raises(ValueError, match=r"expected variables of type Cache, found none in Linear.*init_cache"):
        qjax.stateful(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.Cache)
    with pytest.raises(TypeError, match=r"expected types of variables, such as nnx.Cache, got \(\)"):
        qjax.stateful(net())
    with pytest.raises(TypeError, match=r"expected a flax nnx.Module, got dict"):
        qjax.stateful({}, nnx.Cache)  # pyright: ignore[reportArgumentType]
    model = qjax.stateful(net(), nnx.Cache)
    state = model.state()["attention"]
    x = steps(N)[0]
    with pytest.raises(TypeError, match=r"a nested dict of arrays, as model.state\(\) is, got list"):
        model([state], x)
    with pytest.raises(ValueError, match="part 'attention/cache_index' is missing"):
        model({"attention": {name: state[name] for name in ("cached_key", "cached_value")}}, x)
    with pytest.raises(ValueError, match=r"'attention/cached_key': expected float32 of shape \(batch, 5, 2, 4\), got"):
        model({"attention": {**state, "cached_key": state["cached_key"][:, :3]}}, x)
