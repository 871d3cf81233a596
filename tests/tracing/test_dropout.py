"""Dropout written out is the operation that `nnx.Dropout` is: training has the tensors of evaluation."""

# what models and grids are made of has no static type here
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportReturnType=false

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax
from qjax.tracing.program import from_jaxpr
from qjax.tracing.rewrites import rewrite

KEEP = 0.75
Written = Callable[[jax.Array, jax.Array], jax.Array]


def _cast(x: jax.Array, mask: jax.Array) -> jax.Array:
    return jnp.broadcast_to(mask.astype(x.dtype), x.shape)


WRITTEN: dict[str, Written] = {
    "where": lambda x, k: jnp.where(jax.random.bernoulli(k, KEEP, x.shape), x / KEEP, 0.0),
    "where the other way": lambda x, k: jnp.where(jax.random.bernoulli(k, 1 - KEEP, x.shape), 0.0, x) / KEEP,
    "product": lambda x, k: x * _cast(x, jax.random.bernoulli(k, KEEP, x.shape)) / KEEP,
    "product after": lambda x, k: (x / KEEP) * _cast(x, jax.random.bernoulli(k, KEEP, x.shape)),
    "enlarged mask": lambda x, k: x * (_cast(x, jax.random.bernoulli(k, KEEP, x.shape)) / KEEP),
    "uniform": lambda x, k: _cast(x, jax.random.uniform(k, x.shape) > 1 - KEEP) * x * (1 / KEEP),
    "drop path": lambda x, k: x / KEEP * _cast(x, jax.random.bernoulli(k, KEEP, (x.shape[0], 1))),
    "not": lambda x, k: jnp.where(~jax.random.bernoulli(k, 1 - KEEP, x.shape), x / KEEP, jnp.zeros_like(x)),
}


class Net(nnx.Module):
    def __init__(self, written: Written) -> None:
        rngs = nnx.Rngs(0)
        self.fc1, self.fc2, self.rngs = nnx.Linear(4, 16, rngs=rngs), nnx.Linear(16, 3, rngs=rngs), nnx.Rngs(1)
        self.written, self.deterministic = written, False

    def set_view(self, deterministic: bool | None = None, **kwargs: object) -> dict[str, object]:
        if deterministic is not None:
            self.deterministic = deterministic
        return kwargs

    def __call__(self, x: jax.Array) -> jax.Array:
        y = nnx.relu(self.fc1(x))
        return self.fc2(y if self.deterministic else self.written(y, self.rngs.default()))


@pytest.mark.parametrize("name", WRITTEN)
def test_is_read(name: str) -> None:
    x, key = jnp.linspace(-1.0, 1.0, 64).reshape(8, 8), jax.random.key(3)
    closed = jax.make_jaxpr(WRITTEN[name])(x, key)
    (eqn,) = [e for e in rewrite(from_jaxpr(closed)).equations if e.primitive == "dropout"]
    assert eqn.params["factor"] == pytest.approx(1 / KEEP)
    assert eqn.inputs[0].shape == x.shape
    assert eqn.out_shapes[0] == x.shape
    (mask,) = eqn.inputs[1:]
    assert str(mask.dtype) == "bool"


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["where", "enlarged mask"])
def test_training_has_the_tensors_of_evaluation(name: str) -> None:
    x = jax.random.normal(jax.random.key(0), (6, 4))
    qmodel = qjax.quantize(Net(WRITTEN[name]), qjax.Recipe(), x)
    qmodel.train()
    before = nnx.clone(qmodel)
    (_, codes), twin = qmodel.codes(x), nnx.clone(before)
    twin.model.written = lambda y, key: nnx.Dropout(1 - KEEP, deterministic=False)(y, rngs=key)
    (_, wanted) = twin.codes(x)
    assert codes.keys() == wanted.keys()
    for label in codes:
        np.testing.assert_array_equal(codes[label], wanted[label])
    gradient = nnx.jit(nnx.grad(lambda m: jnp.sum(jnp.square(m(x)))))(qmodel)
    assert all(bool(jnp.isfinite(g).all()) for g in jax.tree.leaves(gradient))
    qmodel.eval()
    graph = qjax.convert(qmodel, x)
    assert [node.op for node in graph.ir.nodes] == ["dot", "dot"]


@pytest.mark.exhaustive
def test_attention_drops_its_weights() -> None:
    class Block(nnx.Module):
        def __init__(self) -> None:
            self.attention = nnx.MultiHeadAttention(2, 4, dropout_rate=0.5, decode=False, rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.attention(x)

    x = jax.random.normal(jax.random.key(0), (2, 3, 4))
    qmodel = qjax.quantize(Block(), qjax.Recipe(), x)
    qmodel.eval()
    _, wanted = qmodel.codes(x)
    qmodel.train()
    first, codes = qmodel.codes(x)
    assert codes.keys() == wanted.keys()
    assert np.array_equal(first, qmodel(x))
    assert not np.array_equal(first, qmodel(x))


def test_a_mask_that_is_not_random_is_arithmetic() -> None:
    program = from_jaxpr(jax.make_jaxpr(lambda x, m, k: jnp.where(m, x, 0.0) + jax.random.normal(k))(
        jnp.ones((2, 2)), jnp.ones((2, 2), bool), jax.random.key(0)
    ))  # fmt: skip
    assert all(eqn.primitive != "dropout" for eqn in rewrite(program).equations)
