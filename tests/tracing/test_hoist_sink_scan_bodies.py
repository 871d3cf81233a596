"""Scans and remats over layers: positions whose sines they take, and additive masks that they are handed."""

# flax annotates what its constructors make as optional
# pyright: reportOptionalMemberAccess=false

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax
from qjax.layers import instrument, trace
from tests.layers.round_trip import assert_same, data

LENGTH, WIDTH = 6, 8
X = data(3, LENGTH, WIDTH)
MASK = jnp.asarray(np.arange(LENGTH) < np.array([6, 4, 1])[:, None], jnp.int32)
POSITIONS = jnp.broadcast_to(jnp.arange(LENGTH) * 37, (3, LENGTH))
PERIODS = jnp.asarray(10000.0 ** (np.arange(WIDTH // 2) * 2.0 / WIDTH), jnp.float32)[None, None]


class Attention(nnx.Module):
    """With rotary positions where they are given as integers, with a bias where that is added to the scores."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.q, self.k, self.v = (nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(3))

    def __call__(self, x: jax.Array, given: jax.Array) -> jax.Array:
        q, k, bias = self.q(x), self.k(x), given
        if given.dtype == jnp.int32:
            angle = given[..., None].astype(jnp.float32) / PERIODS
            q, k, bias = (*(self.turned(y, jnp.sin(angle), jnp.cos(angle)) for y in (q, k)), jnp.zeros((1, 1, 1)))
        return x + jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k) + bias, axis=-1) @ self.v(x)

    def turned(self, y: jax.Array, sin: jax.Array, cos: jax.Array) -> jax.Array:
        a, b = jnp.split(y, 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


class Scanned(nnx.Module):
    def __init__(self) -> None:
        self.layers = nnx.vmap(Attention)(nnx.Rngs(params=jax.random.split(jax.random.key(0), 2)))

    def __call__(self, x: jax.Array, given: jax.Array) -> jax.Array:
        layer = nnx.scan(lambda x, layer, given: layer(x, given), in_axes=(nnx.Carry, 0, None), out_axes=nnx.Carry)
        return layer(x, self.layers, given)


class Recomputed(nnx.Module):
    def __init__(self) -> None:
        self.first, self.second = Attention(nnx.Rngs(0)), Attention(nnx.Rngs(1))

    def __call__(self, x: jax.Array, given: jax.Array) -> jax.Array:
        layer = nnx.remat(lambda layer, x, given: layer(x, given))
        return layer(self.second, layer(self.first, x, given), given)


class Masked(nnx.Module):
    """The mask is made once, outside."""

    def __init__(self, inner: nnx.Module, bias: Any) -> None:
        self.inner, self.bias = inner, bias

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        return self.inner(x, self.bias(mask[:, None, :]))  # pyright: ignore[reportCallIssue]


MODELS: dict[str, tuple[Any, jax.Array]] = {
    "rotary, scan": (Scanned, POSITIONS),
    "rotary, remat": (Recomputed, POSITIONS),
    "mask, scan": (lambda: Masked(Scanned(), lambda m: (1.0 - m.astype(jnp.float32)) * -1e9), MASK),
    "mask, remat": (lambda: Masked(Recomputed(), lambda m: jnp.where(m > 0, 0.0, -1e9)), MASK),
}


EACH_TIME = ("rotary, scan", "mask, remat")


@pytest.mark.parametrize(
    "name", [name if name in EACH_TIME else pytest.param(name, marks=pytest.mark.exhaustive) for name in MODELS]
)
def test_what_every_layer_is_given_stands_where_it_belongs(name: str) -> None:
    build, given = MODELS[name]
    model = build()
    with jax.numpy_dtype_promotion("standard"):
        qmodel = qjax.quantize(model, qjax.Recipe(), (X, given))
        qmodel.eval()
        graph = qjax.convert(qmodel, (X, given))
        found, expected = np.asarray(graph(X, given), np.float64), np.asarray(model(X, given), np.float64)
        assert np.sum(found * expected) > 0.999 * np.linalg.norm(found) * np.linalg.norm(expected)
        assert qjax.verify(graph, qmodel, [(X, given)]).local == 0
    if name == "rotary, scan":
        # the table's range is known outside of the scan, and checked there
        with pytest.raises(ValueError, match="expected integers from 0 to 185, got 0 to 190"):
            graph(X, POSITIONS.at[0, 5].set(190))


@pytest.mark.exhaustive
def test_the_exact_forward_of_a_scan_with_rotary_positions_is_the_graph() -> None:
    with jax.numpy_dtype_promotion("standard"):
        qmodel = qjax.quantize(Scanned(), qjax.Recipe(), (X, POSITIONS))
        qmodel.eval()
        expected = qjax.convert(qmodel, (X, POSITIONS))(X, POSITIONS)
        assert_same(nnx.jit(qjax.exact(qmodel, (X, POSITIONS)))(qmodel, X, POSITIONS), expected)


def primitives(function: Any, *args: Any) -> tuple[list[str], list[str]]:
    """Outside of the body of the one remat, and inside."""

    class Model(nnx.Module):
        def __call__(self, *args: Any) -> Any:
            return jax.checkpoint(function)(*args)

    program = trace(instrument(Model()), args, {}).program
    (body,) = [eqn.body for eqn in program.equations if eqn.body is not None]
    return [e.primitive for e in program.equations if e.body is None], [e.primitive for e in body.equations]


def test_what_stays_inside() -> None:
    ids = jnp.arange(3)
    # an affine function of integers is its own accumulator there; a bias that hides nothing is a tensor like others
    outside, inside = primitives(lambda x, m: jnp.tanh(x) * m.astype(jnp.float32), jnp.ones(3), ids)
    assert "convert_element_type" in inside
    assert not outside
    outside, inside = primitives(lambda x, b: jnp.tanh(x + b), jnp.ones(3), jnp.where(ids > 1, 0.0, -5.0))
    assert "select_n" not in inside
    # what is multiplied with the function, if it is data
    outside, inside = primitives(lambda x, m: jnp.tanh(x * jnp.sin(m.astype(jnp.float32))), jnp.ones(3), ids)
    assert "mul" in inside
    assert "mul" not in outside
    assert outside == ["integer_function"]
    # a function of reals
    outside, inside = primitives(lambda x, y: x * jnp.sin(y), jnp.ones(3), jnp.ones(3))
    assert not outside


class PartlyTurned(nnx.Module):
    """Each layer turns half of the pairs: the others have an infinite period. A loss beside it has the batch's size."""

    def __init__(self) -> None:
        self.kernels = nnx.Param(jax.random.normal(jax.random.key(0), (2, WIDTH, WIDTH)) / 3)

    def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        def layer(x, kernel):
            periods = jnp.pad(10000.0 ** (jnp.arange(2.0) * 2.0 / WIDTH), (0, 2), constant_values=jnp.inf)
            angle = positions[..., None].astype(jnp.float32) / periods[None, None]
            y = x @ kernel
            a, b = jnp.split(y, 2, -1)
            turned = jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), b], -1)
            return x + turned, jnp.sum(turned.mean(0))

        return jax.lax.scan(layer, x, self.kernels[...])[0]


def test_periods_without_end_and_a_loss_beside():
    qmodel = qjax.quantize(PartlyTurned(), qjax.Recipe(), (X, POSITIONS))
    qjax.calibrate(qmodel, [(X, POSITIONS)], progress=False)
    qmodel.eval()
    graph = qjax.convert(qmodel, (X, POSITIONS))
    assert qjax.verify(graph, qmodel, [(X, POSITIONS)]).local == 0
    assert np.abs(graph(X, POSITIONS) - PartlyTurned()(X, POSITIONS)).max() < 0.2
