"""Training with stochastic rounding: unbiased, keyed, differentiable, and nowhere but where it was asked for."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qjax
from qjax.training import stochastic_forward


class Dense(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(6, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.head = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(nnx.relu(self.norm(self.first(x))))


class Stack(nnx.Module):
    """Three equal layers in a scan, which all read the same tensor."""

    def __init__(self) -> None:
        self.kernels = nnx.Param(jnp.tile(jax.random.normal(jax.random.key(7), (1, 6, 6)), (3, 1, 1)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, kernel: (x, x @ kernel), x, self.kernels[...])[1]


X = jax.random.normal(jax.random.key(0), (32, 6))
RECIPE = qjax.Recipe(
    weights=qjax.QSpec(bits=3, axis=-1), activations=qjax.QSpec(bits=3, symmetric=False), method="static",
    weight_method="static", output_bits=16,
)  # fmt: skip


@nnx.jit(static_argnames=("weights", "activations"))
def drawn(qmodel: Any, key: jax.Array, weights: bool = True, activations: bool = True) -> Any:
    return stochastic_forward(qmodel, key, X, weights=weights, activations=activations)


@pytest.fixture(scope="module")
def qmodel() -> qjax.QuantizedModel:
    made = qjax.quantize(Dense(nnx.Rngs(0)), RECIPE, X)
    made.eval()
    return made


@pytest.mark.exhaustive
def test_same_key_same_bits_and_another_key_others(qmodel: Any) -> None:
    first = drawn(qmodel, jax.random.key(1))
    assert jnp.array_equal(first, drawn(qmodel, jax.random.key(1)))
    assert float(jnp.mean(first != drawn(qmodel, jax.random.key(2)))) > 0.5


@pytest.mark.exhaustive
def test_the_model_itself_its_graph_and_its_exact_forward_round_to_nearest(qmodel: Any) -> None:
    before, graph = qmodel(X), qjax.convert(qmodel, X)
    drawn(qmodel, jax.random.key(1))
    assert jnp.array_equal(qmodel(X), before)
    after = qjax.convert(qmodel, X)
    assert jnp.array_equal(after(X), graph(X))
    assert jnp.array_equal(qjax.exact(qmodel, X)(qmodel, X), graph(X))


class Halves(nnx.Module):
    """A tensor between two quantizers of one grid."""

    def __init__(self) -> None:
        self.kernel = nnx.Param(jnp.eye(1))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.kernel


def test_an_input_is_rounded_up_as_often_as_its_fraction_says() -> None:
    x = jnp.linspace(-1, 1, 2**16)[:, None]
    spec = qjax.QSpec(bits=4)
    model = qjax.quantize(
        Halves(), qjax.Recipe(activations=spec, method="static", observer="minmax", output_bits=16), x
    )
    model.eval()
    (scale,) = [p.scale for n, p in model.qparams().items() if p.spec.bits == 4]
    rounded = np.asarray(stochastic_forward(model, jax.random.key(0), x, weights=False))[:, 0]
    steps, exact = rounded / float(scale), np.asarray(x)[:, 0] / float(scale)
    codes = np.rint(steps)
    # a 16-bit output holds the 15 codes of the input all but exactly
    assert np.abs(steps - codes).max() < 1e-3
    fraction = exact - np.floor(exact)
    assert np.all((codes == np.floor(exact)) | (codes == np.ceil(exact)) | (np.abs(exact - np.rint(exact)) < 1e-4))
    spread = np.sqrt((fraction * (1 - fraction)).sum()) / exact.size
    assert abs((codes - exact).mean()) < 5 * spread
    # E[min(f, 1 - f)] = 1/4 of the codes are not the nearest
    assert abs((codes != np.rint(exact)).mean() - 0.25) < 0.01


@pytest.mark.parametrize("kind", ["weights", "activations"])
def test_only_what_is_named_is_drawn(qmodel: Any, kind: str) -> None:
    other = "activations" if kind == "weights" else "weights"
    alone = drawn(qmodel, jax.random.key(3), **{other: False})
    assert not jnp.array_equal(alone, qmodel(X))
    assert not jnp.array_equal(alone, drawn(qmodel, jax.random.key(3)))


def test_neither_is_an_error(qmodel: Any) -> None:
    with pytest.raises(ValueError, match="got neither"):
        stochastic_forward(qmodel, jax.random.key(0), X, weights=False, activations=False)


@pytest.mark.exhaustive
def test_gradients_and_statistics_move_in_training() -> None:
    qmodel: Any = qjax.quantize(Dense(nnx.Rngs(0)), qjax.Recipe(weights=qjax.QSpec(bits=3, axis=-1)), X)
    qmodel.train()
    before = np.asarray(qmodel.model.norm.mean[...])

    @nnx.jit
    def gradient(qmodel: Any, key: jax.Array) -> Any:
        return nnx.grad(lambda m: jnp.sum(stochastic_forward(m, key, X) ** 2))(qmodel)

    leaves = jax.tree.leaves(gradient(qmodel, jax.random.key(0)))
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in leaves)
    assert sum(float(jnp.abs(leaf).sum()) > 0 for leaf in leaves) >= 6
    assert not np.array_equal(np.asarray(qmodel.model.norm.mean[...]), before)


@pytest.mark.exhaustive
def test_layers_of_a_scan_draw_apart() -> None:
    qmodel = qjax.quantize(Stack(), RECIPE, X)
    qmodel.eval()
    nearest, layers = qmodel(X), drawn(qmodel, jax.random.key(1), activations=False)
    assert jnp.array_equal(nearest[0], nearest[1])
    assert not jnp.array_equal(layers[0], layers[1])
    assert not jnp.array_equal(layers[1], layers[2])
